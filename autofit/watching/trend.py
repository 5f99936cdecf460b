"""Bytes held between steps that grow without end: a leak, told apart from noise and from memory that fills up once."""

import numpy as np
import numpy.typing as npt

_WINDOW = 64  # steps that are looked at; a longer window is thinned to every second step
_LEAST = 24  # steps before a trend can be told
_EVERY = 8  # steps between two looks
_SURE = 3.29  # normal quantile of one false alarm in 2,000 looks, for the rank test of Mann and Kendall


class Trend:
    """The bytes held at the end of each step, and the step at which a steady growth of them crosses a limit."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._bytes: list[int] = []
        self._every = 1
        self._count = 0

    def add(self, step: int, held_bytes: int) -> None:
        """What was held after `step`."""
        self._count += 1
        if self._count % self._every:
            return
        self._steps.append(step)
        self._bytes.append(held_bytes)
        if len(self._steps) > _WINDOW:
            self._steps, self._bytes, self._every = self._steps[1::2], self._bytes[1::2], 2 * self._every

    @property
    def is_due(self) -> bool:
        """Whether enough is new since the last look."""
        return len(self._steps) >= _LEAST and self._count % (_EVERY * self._every) == 0

    def growth(self) -> float | None:
        """Bytes a step by which what is held grows; None where it does not, or not for sure.

        The median slope (Theil and Sen), and of both halves of the steps by themselves: the least of the three, so
        memory that grows and then stays counts as none.
        """
        steps, held = np.array(self._steps, dtype=float), np.array(self._bytes, dtype=float)
        if len(steps) < _LEAST or _rank_test(held) < _SURE:
            return None
        half = len(steps) // 2
        slopes = [_median_slope(steps[part], held[part]) for part in (slice(None), slice(half), slice(half, None))]
        least = min(slopes)
        return least if least > 0 else None


def _median_slope(steps: npt.NDArray[np.float64], held: npt.NDArray[np.float64]) -> float:
    first, second = np.triu_indices(len(steps), 1)
    return float(np.median((held[second] - held[first]) / (steps[second] - steps[first])))


def _rank_test(held: npt.NDArray[np.float64]) -> float:
    """The statistic of Mann and Kendall: 0 for no trend, a normal quantile; above 0 for growth."""
    count = len(held)
    first, second = np.triu_indices(count, 1)
    score = float(np.sign(held[second] - held[first]).sum())
    variance = count * (count - 1) * (2 * count + 5) / 18
    return float((score - np.sign(score)) / np.sqrt(variance))
