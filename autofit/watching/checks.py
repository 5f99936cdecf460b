"""The checks of guards: whether the logged values of one metric are as they should be, and since which step not."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import isfinite
from statistics import fmean, median

from autofit.watching.robust import Trend, memory, shift, trend
from autofit.watching.thresholds import Check, Guard

Points = Sequence[tuple[int, float]]  # (step, value), oldest first

_TREND_POINTS = 50  # of which a trend is made: 50 take 0.3 ms
_FALLS = 4.5  # deviations of noise from which a level is said to be worse: the worst of all splits is looked at
_DRIFTS = 3.0
_WIDE = 3.0  # times the way from the median to the highest tenth: beyond it lies 1 of 50 values of a skewed loss
_HINT, _CLEAR = 1.0, 2.0  # a hint of a trend is enough for no alarm; to end one, it must stand out
_EARLY = 4  # the first fourth of a window is the level that a run began with


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A metric is not as it should be."""

    value: float  # its level
    since: int  # the step from which on it was so
    text: str
    slides: bool = False  # `since` is the begin of the window that was looked at, which moves on


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What a check knows besides the last points."""

    early: Points  # the first window of the run
    alarmed: bool = False


def fault_of(guard: Guard, points: Points, past: Past) -> Fault | None:
    """What is wrong with the metric at the last of `points`, after its `past`; None: nothing."""
    return _CHECKS[guard.check](guard, points, past)


def keeps(guard: Guard) -> int:
    """How many points `fault_of` looks at, at most."""
    return 2 * guard.window + guard.patience


def every(guard: Guard) -> int:
    """Logged steps between two looks: a trend of many steps is dear, and does not change in one."""
    return max(1, guard.window // 10) if guard.check in (Check.STUCK, Check.DRIFTS) else 1


def _band(guard: Guard, points: Points, past: Past) -> Fault | None:
    if 2 * len(points) < guard.window:
        return None
    level = fmean(value for _, value in points[-guard.window :])
    return _outside(guard, level, points)


def _outside(guard: Guard, level: float, points: Points) -> Fault | None:
    if guard.max is not None and level > guard.max:
        bound, side, sign = guard.max, "above", 1
    elif guard.min is not None and level < guard.min:
        bound, side, sign = guard.min, "below", -1
    else:
        return None
    since = _began([(step, sign * (value - bound)) for step, value in points])
    return Fault(value=level, since=since, text=f"is {level:.3g}, {side} {bound:g}")


def _finite(guard: Guard, points: Points, past: Past) -> Fault | None:
    wrong = [step for step, value in points if not isfinite(value)]
    if not wrong or isfinite(points[-1][1]):
        return None
    good = [step for step, value in points if isfinite(value)]
    since = min(step for step in wrong if not good or step > good[-1])
    return Fault(value=points[-1][1], since=since, text=f"is {points[-1][1]}")


def _falls(guard: Guard, points: Points, past: Past) -> Fault | None:
    assert guard.share is not None
    if len(past.early) < guard.window or len(points) < guard.window:
        return None
    at_first, level = (median(v for _, v in part) for part in (past.early, points[-guard.window :]))
    least = guard.share * at_first
    if at_first <= 0 or level >= least:
        return None
    since = _began([(step, least - value) for step, value in points])
    return Fault(value=level, since=since, text=f"is {level:.3g}, below {guard.share:g} of its first {at_first:.3g}")


def _spikes(guard: Guard, points: Points, past: Past) -> Fault | None:
    assert guard.times is not None
    before, value = points[-guard.window - guard.patience : -1], points[-1][1]
    if 2 * len(before) < guard.window:
        return None
    usual, most = _usual(guard.times, [v for _, v in before])
    if usual <= 0 or value <= most:
        return None
    in_row = next((n for n, (_, v) in enumerate(reversed(points)) if v <= most), len(points))
    return Fault(value=value, since=points[-in_row][0], text=f"is {value:.3g}, usually {usual:.3g}")


def _usual(times: float, values: Sequence[float]) -> tuple[float, float]:
    """The level of `values`, and the most that is no spike: more where one in ten of them is far above the level."""
    level, high = median(values), sorted(values)[9 * len(values) // 10]
    return level, max(times * level, level + _WIDE * (high - level))


def _stuck(guard: Guard, points: Points, past: Past) -> Fault | None:
    """No trend in the wanted direction, and no better level than at first; or a clear trend back."""
    recent = points[-guard.window :]
    found = _trend(recent) if len(recent) == guard.window else None
    if found is None:
        return None
    sign = 1 if guard.direction == "up" else -1
    first = past.early[: max(1, guard.window // _EARLY)]
    turned = _turned(guard, recent)
    if turned is not None:
        return turned
    better = shift([v for _, v in first], [v for _, v in recent[guard.window // 2 :]])
    if sign * better > _CLEAR or sign * found.z > (_CLEAR if past.alarmed else _HINT):
        return None
    level, word = median(v for _, v in recent), "risen" if sign > 0 else "fallen"
    return Fault(
        value=level, since=recent[0][0], text=f"has not {word} for {guard.window} steps: {level:.3g}", slides=True
    )


def _turned(guard: Guard, recent: Points) -> Fault | None:
    """A clearly worse level since some step of `recent`."""
    at = _turn(recent)
    before, after = ([v for _, v in part] for part in (recent[:at], recent[at:]))
    now, was = fmean(after), fmean(before)
    sign, word = (1, "falls") if guard.direction == "up" else (-1, "rises")
    widening = memory([value - was for value in before] + [value - now for value in after])
    if -sign * shift(before, after) < _FALLS * widening:
        return None
    return Fault(value=now, since=recent[at][0], text=f"{word}: {now:.3g} after {was:.3g}")


def _turn(points: Points) -> int:
    """Where `points` are split into the two parts whose means differ most for their sizes: never at the ends."""
    n, sums = len(points), [*accumulate(value for _, value in points)]

    def gain(at: int) -> float:
        difference = (sums[-1] - sums[at - 1]) / (n - at) - sums[at - 1] / at
        return difference**2 * at * (n - at)

    return max(range(1, n), key=gain)


def _drifts(guard: Guard, points: Points, past: Past) -> Fault | None:
    recent = points[-guard.window :]
    level = median(v for _, v in recent[-max(1, guard.window // 5) :])
    bounds = [bound for bound in (guard.min, guard.max) if bound is not None and 2 * abs(level) >= abs(bound)]
    found = _trend(recent) if bounds and len(recent) == guard.window else None
    if found is None or abs(found.z) < _DRIFTS or found.slope == 0:
        return None
    ahead = [bound for bound in bounds if 0 < (bound - level) / found.slope <= guard.ahead]
    if not ahead:
        return None
    at = recent[-1][0] + round((ahead[0] - level) / found.slope)
    text = f"drifts: {level:.3g}, and crosses {ahead[0]:g} at about step {at} if it goes on"
    return Fault(value=level, since=recent[0][0], text=text, slides=True)


def _trend(points: Points) -> Trend | None:
    """The trend of `points`, thinned by the means of neighbours."""
    size = -(-len(points) // _TREND_POINTS)
    blocks = [points[i : i + size] for i in range(0, len(points), size)]
    return trend([(fmean(s for s, _ in block), fmean(v for _, v in block)) for block in blocks])


def _began(excess: Points) -> int:
    """The step from which on the sum of `excess` is largest: where a level rose above 0, of noisy values."""
    sums = [*accumulate(value for _, value in reversed(excess))]
    return excess[-1 - max(range(len(sums)), key=sums.__getitem__)][0]


_CHECKS: Mapping[Check, Callable[[Guard, Points, Past], Fault | None]] = {
    Check.BAND: _band, Check.FINITE: _finite, Check.FALLS: _falls, Check.SPIKES: _spikes, Check.STUCK: _stuck,
    Check.DRIFTS: _drifts,
}  # fmt: skip
