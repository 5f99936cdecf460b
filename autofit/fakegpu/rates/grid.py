"""Values on a grid whose axes are logarithmic, interpolated linearly between its points. Needs no torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """`values` at the crossings of `axes` (the logarithm of each coordinate, ascending); outside, the edge's value."""

    axes: tuple[Floats, ...]
    values: Floats

    def at(self, *coordinates: Floats) -> Floats:
        """The value at each point; a coordinate is an array with one entry a point."""
        lower, weights = [], []
        for axis, coordinate in zip(self.axes, coordinates, strict=True):
            x = np.log(coordinate)
            below = np.clip(np.searchsorted(axis, x, side="right") - 1, 0, max(0, len(axis) - 2))
            step = axis[np.minimum(below + 1, len(axis) - 1)] - axis[below]
            weights.append(np.clip((x - axis[below]) / np.where(step > 0, step, 1.0), 0.0, 1.0))
            lower.append(below)
        total = np.zeros(np.shape(lower[0]))
        for corner in itertools.product((0, 1), repeat=len(self.axes)):
            share = np.ones_like(total)
            place = []
            for axis, below, weight, up in zip(self.axes, lower, weights, corner, strict=True):
                share = share * (weight if up else 1.0 - weight)
                place.append(np.minimum(below + up, len(axis) - 1))
            total += share * self.values[tuple(place)]
        return total


def smoothed(values: Floats, axes: Sequence[Floats], widths: Sequence[float]) -> Floats:
    """Means of `values` around each point, with the weight exp(-distance / width) along each axis; nan is no value.

    Points that have none take the mean of their neighbours, however far away these are.
    """
    weights = (~np.isnan(values)).astype(float)
    sums = np.where(weights > 0, values, 0.0)
    for number, (axis, width) in enumerate(zip(axes, widths, strict=True)):
        kernel = np.exp(-np.abs(axis[:, None] - axis[None]) / width)
        sums = np.moveaxis(np.tensordot(kernel, sums, (1, number)), 0, number)
        weights = np.moveaxis(np.tensordot(kernel, weights, (1, number)), 0, number)
    return np.asarray(sums / np.maximum(weights, 1e-300))
