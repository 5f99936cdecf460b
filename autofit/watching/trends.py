"""Levels and trends of a noisy series that a few wild values do not move, and growth without end: a leak."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt

_LEAST_POINTS = 8  # below it, even a perfectly rising series is little evidence
_SURE = 2.0  # standard deviations of Kendall's S: about 1 in 20 for noise
_WINDOW = 64  # steps that are looked at for growth; a longer window is thinned to every second step
_LEAST_STEPS = 24  # before growth can be told
_EVERY = 8  # steps between two looks
_SURE_GROWTH = 3.29  # normal quantile of one false alarm in 2,000 looks, for the rank test of Mann and Kendall


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
    found = _slope_and_score(points) if len(points) >= _LEAST_POINTS else None
    return None if found is None else Trend(slope=found[0], z=found[1] / _deviation(len(points)))


def _slope_and_score(points: Sequence[tuple[float, float]]) -> tuple[float, int] | None:
    """(the median slope of all pairs, Kendall's S); None where all points are of the same x."""
    import numpy as np  # ten times as fast here, and 0.1 s to load, which a command that shows no trend does not pay

    x, y = np.array(points, dtype=float).T
    first, second = np.triu_indices(len(points), 1)
    rises, runs = y[second] - y[first], x[second] - x[first]
    apart = runs != 0
    if not apart.any():  # the same step, logged again and again
        return None
    return float(np.median(rises[apart] / runs[apart])), int(np.sign(rises).sum())


def _deviation(n: int) -> float:
    """The standard deviation of Kendall's S of `n` points of pure noise."""
    return sqrt(n * (n - 1) * (2 * n + 5) / 18)


class Growth:
    """What is held at the end of each step, and its growth: told apart from noise, and from what fills up once."""

    def __init__(self) -> None:
        self._points: list[tuple[int, int]] = []  # (step, held)
        self._every = 1
        self._count = 0

    def add(self, step: int, held: int) -> None:
        """What was held after `step`, as bytes or any other amount."""
        self._count += 1
        if self._count % self._every:
            return
        self._points.append((step, held))
        if len(self._points) > _WINDOW:
            self._points, self._every = self._points[1::2], 2 * self._every

    @property
    def is_due(self) -> bool:
        """Whether enough is new since the last look."""
        return len(self._points) >= _LEAST_STEPS and self._count % (_EVERY * self._every) == 0

    def growth(self) -> float | None:
        """The amount a step by which what is held grows; None where it does not, or not for sure.

        The median slope of all steps and of both halves by themselves: the least of the three, so memory that grows
        and then stays counts as none.
        """
        count, half = len(self._points), len(self._points) // 2
        found = _slope_and_score(self._points) if count >= _LEAST_STEPS else None
        if found is None or (found[1] - 1) / _deviation(count) < _SURE_GROWTH:  # less 1: S is a whole number
            return None
        halves = (_slope_and_score(part) for part in (self._points[:half], self._points[half:]))
        least = min(found[0], *(part[0] for part in halves if part is not None))
        return least if least > 0 else None


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
