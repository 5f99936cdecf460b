"""Levels and trends of a noisy series that a few wild values do not move."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt

_LEAST_POINTS = 8  # below it, even a perfectly rising series is little evidence
_SURE = 2.0  # standard deviations of Kendall's S: about 1 in 20 for noise


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """The direction of a series of points (x, y)."""

    slope: float  # y per unit of x: the median slope of all pairs (Theil and Sen)
    z: float  # Kendall's S over its standard deviation under pure noise; its sign is the direction

    @property
    def rises(self) -> bool:
        return self.z > _SURE

    @property
    def falls(self) -> bool:
        return self.z < -_SURE

    @property
    def is_flat(self) -> bool:
        """Whether noise alone could look like this."""
        return not (self.rises or self.falls)


def trend(points: Sequence[tuple[float, float]]) -> Trend | None:
    """The trend of `points`, in the order of x; None for fewer than 8. The time grows with the square of the points."""
    n = len(points)
    if n < _LEAST_POINTS:
        return None
    import numpy as np  # ten times as fast here, and 0.1 s to load, which a command that shows no trend does not pay

    x, y = np.array(points, dtype=float).T
    first, second = np.triu_indices(n, 1)
    rises, runs = y[second] - y[first], x[second] - x[first]
    apart = runs != 0
    if not apart.any():  # the same step, logged again and again
        return None
    slope, s = float(np.median(rises[apart] / runs[apart])), int(np.sign(rises).sum())
    return Trend(slope=slope, z=s / sqrt(n * (n - 1) * (2 * n + 5) / 18))


def shift(before: Sequence[float], after: Sequence[float]) -> float:
    """How surely `after` is higher than `before`, in standard deviations of pure noise (Mann and Whitney's U)."""
    m, n, ordered = len(before), len(after), sorted(before)
    u = sum((bisect_left(ordered, a) + bisect_right(ordered, a)) / 2 for a in after)
    return (u - m * n / 2) / sqrt(m * n * (m + n + 1) / 12)


def memory(noise: Sequence[float]) -> float:
    """How much wider a mean of `noise` scatters because each value resembles the one before: 1 where none does.

    From the correlation r of neighbours: sqrt((1 + r) / (1 - r)), as for noise of first order.
    """
    power = sum(value * value for value in noise)
    if power == 0:
        return 1.0
    r = min(0.9, max(0.0, sum(a * b for a, b in pairwise(noise)) / power))
    return sqrt((1 + r) / (1 - r))
