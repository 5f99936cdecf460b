"""Predicted bytes and seconds of every candidate before the first probe, as plain arrays from any source."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from autofit.errors import ConfigError
from autofit.space.space import Candidate

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Predictions:
    """One entry per candidate, in the order of `candidates`.

    `floor_bytes` is a lower bound of device-used (live tensors and context): under a smaller target the candidate
    certainly does not fit, so it is never probed. `device_used_bytes` and `step_s` are the expected results of a probe;
    `step_s` is per optimizer step at the recipe's effective batch, so that candidates compare. They may be wrong: the
    search learns the error. They are NaN for a candidate without a prediction, and its floor is 0. `rollout_s` is the
    part of `step_s` before the update; with it, a probe that reports both parts corrects each part separately.
    """

    candidates: tuple[Candidate, ...]
    floor_bytes: Floats
    device_used_bytes: Floats
    step_s: Floats
    rollout_s: Floats | None = None

    def __post_init__(self) -> None:
        count = len(self.candidates)
        for field in fields(self)[1:]:
            values = getattr(self, field.name)
            if values is None:
                continue
            if values.shape != (count,):
                raise ConfigError(
                    f"predictions must have one {field.name} per candidate, shape ({count},); got shape {values.shape}"
                )
            if not field.name.startswith("floor") and not (values[~np.isnan(values)] > 0).all():
                raise ConfigError(f"predicted {field.name} must be above zero, or NaN if unknown")

    def of(self, candidates: tuple[Candidate, ...]) -> "Predictions":
        """The predictions for `candidates`, in their order; NaN for a candidate without one."""
        if candidates == self.candidates:
            return self
        known = {candidate: place for place, candidate in enumerate(self.candidates)}
        places = np.array([known.get(c, -1) for c in candidates])

        def aligned(values: Floats, unknown: float) -> Floats:
            return np.where(places >= 0, values[places], unknown)

        return Predictions(
            candidates=candidates,
            floor_bytes=aligned(self.floor_bytes, 0.0),
            device_used_bytes=aligned(self.device_used_bytes, np.nan),
            step_s=aligned(self.step_s, np.nan),
            rollout_s=None if self.rollout_s is None else aligned(self.rollout_s, np.nan),
        )


# The predictions of every candidate as points of a picture, few enough to be kept with a study.

_MOST_POINTS = 800
_CELL = 0.01  # width of a cell in log2, in which only one candidate is kept: 0.7 %; widened until few are left

Correct = Callable[[NDArray[np.intp]], tuple[Floats, Floats]]  # indices -> (seconds of a step, device-used bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cloud:
    """Predicted bytes and seconds of a study's candidates; of candidates that are nearly equal there is one."""

    candidates: int  # that have a prediction
    device_used_bytes: tuple[int, ...]
    step_s: tuple[float, ...]

    @classmethod
    def of(cls, predictions: Predictions | None, correct: Correct | None = None) -> "Cloud | None":
        """The points of `predictions`; None without any. `correct` maps indices to what probes make of the figures."""
        if predictions is None:
            return None
        used, step_s = predictions.device_used_bytes, predictions.step_s
        known = np.isfinite(used) & np.isfinite(step_s)
        if not known.any():
            return None
        points = np.column_stack([used[known], step_s[known]])
        kept = np.flatnonzero(known)[_thinned(points)]
        shown_s, shown = (step_s[kept], used[kept]) if correct is None else correct(kept)
        return cls(
            candidates=len(points), device_used_bytes=tuple(int(used) for used in shown),
            step_s=tuple(float(f"{seconds:.4g}") for seconds in shown_s),
        )  # fmt: skip

    def to_json(self) -> dict[str, object]:
        return {"candidates": self.candidates, "device_used_bytes": list(self.device_used_bytes),
                "step_s": list(self.step_s)}  # fmt: skip

    @classmethod
    def from_json(cls, content: Mapping[str, object] | None) -> "Cloud | None":
        """The cloud that a study keeps; None for a study without one."""
        if content is None:
            return None
        found = cast("Mapping[str, Any]", content)
        return cls(
            candidates=int(found["candidates"]), device_used_bytes=tuple(found["device_used_bytes"]),
            step_s=tuple(found["step_s"]),
        )  # fmt: skip


def _thinned(points: Floats) -> NDArray[np.intp]:
    """The index of one point of each cell of a logarithmic grid, with cells wide enough for at most _MOST_POINTS."""
    cell = _CELL
    while True:
        _, first = np.unique(np.floor(np.log2(points) / cell), axis=0, return_index=True)
        if len(first) <= _MOST_POINTS:
            return np.sort(first)
        cell *= 1.25
