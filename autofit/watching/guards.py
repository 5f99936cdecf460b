"""The guards of a run: an event when a metric leaves its band, with the step it began, and one when it is back."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import accumulate
from math import isfinite
from statistics import fmean, median

from autofit.watching.contract import Watched, Watcher
from autofit.watching.events import EventKind, RunEvent
from autofit.watching.progress import Trend, memory, shift, trend
from autofit.watching.thresholds import Guard, GuardCheck

Points = Sequence[tuple[int, float]]  # (step, value), oldest first

_TREND_POINTS = 50  # points of a trend: 50 take 0.3 ms
_FALLS = 4.5  # deviations of noise from which a level counts as worse: that of the worst of all splits
_DRIFTS = 3.0
_WIDE = 3.0  # times the way from the median to the highest tenth: beyond it lies 1 of 50 values of a skewed loss
_HINT, _CLEAR = 1.0, 2.0  # a hint of a trend is enough for no alarm; to end one, it must stand out
_EARLY = 4  # the first fourth of a window is the level that a run began with


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault of a metric."""

    value: float  # its level
    since: int  # the step from which on it was so
    text: str
    slides: bool = False  # `since` is the begin of the window that was looked at, which moves on


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """Facts for a check in addition to the last points."""

    early: Points  # the first window of the run
    alarmed: bool = False


def fault_of(guard: Guard, points: Points, past: Past) -> Fault | None:
    """Fault of the metric at the last of `points`, after its `past`, if there is one."""
    return _CHECKS[guard.check](guard, points, past)


def keeps(guard: Guard) -> int:
    """Number of points that `fault_of` looks at, at most."""
    return 2 * guard.window + guard.patience


def every(guard: Guard) -> int:
    """Logged steps between two looks: a trend of many steps is dear, and changes slowly."""
    return max(1, guard.window // 10) if guard.check in (GuardCheck.STUCK, GuardCheck.DRIFTS) else 1


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
    """The level of `values`, and the upper bound of usual ones: more if one in ten of them is far above the level."""
    level, high = median(values), sorted(values)[9 * len(values) // 10]
    return level, max(times * level, level + _WIDE * (high - level))


def _stuck(guard: Guard, points: Points, past: Past) -> Fault | None:
    """A missing trend in the wanted direction, at the level of the start or worse; or a clear trend back."""
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
    """Index that splits `points` into the two parts whose means differ most for their sizes; both are non-empty."""
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


_CHECKS: Mapping[GuardCheck, Callable[[Guard, Points, Past], Fault | None]] = {
    GuardCheck.BAND: _band, GuardCheck.FINITE: _finite, GuardCheck.FALLS: _falls, GuardCheck.SPIKES: _spikes,
    GuardCheck.STUCK: _stuck, GuardCheck.DRIFTS: _drifts,
}  # fmt: skip


TAG = "autofit.guard"
_QUIET = 10  # healthy logged steps in a row that end an alarm, at least: one that comes and goes is one alarm


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmChange:
    """An alarm begins, or has ended: `until` is the last unhealthy step."""

    fault: Fault
    until: int | None = None


class Track:
    """One guard over one metric: whether it is in alarm, and since when."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self._points: deque[tuple[int, float]] = deque(maxlen=keeps(guard))
        self._early: list[tuple[int, float]] = []
        self._seen = self._streak = self._until = 0
        self._alarm: Fault | None = None
        self._first: Fault | None = None  # of the faults in a row

    def add(self, step: int, value: float) -> AlarmChange | None:
        """Look at the value of a step that is logged; the change of the alarm, if it changes."""
        if step <= self.guard.warmup or not (isfinite(value) or self.guard.check is GuardCheck.FINITE):
            return None
        self._points.append((step, value))
        if len(self._early) < self.guard.window:
            self._early.append((step, value))
        self._seen += 1
        if self._seen % every(self.guard):
            return None
        return self._judge(step)

    def _judge(self, step: int) -> AlarmChange | None:
        found = fault_of(self.guard, list(self._points), Past(early=self._early, alarmed=self._alarm is not None))
        fault = self._since_first(found)
        self._until = self._until if fault is None else step
        alarm = self._alarm
        self._streak = self._streak + every(self.guard) if (fault is None) == (alarm is not None) else 0
        if self._streak < (self.guard.patience if alarm is None else max(self.guard.patience, _QUIET)):
            return None
        self._streak, self._alarm = 0, fault
        if fault is not None:
            return AlarmChange(fault=fault)
        assert alarm is not None
        return AlarmChange(fault=alarm, until=self._until)

    def _since_first(self, fault: Fault | None) -> Fault | None:
        """A fault of a moving window began with the first of its kind in a row."""
        if fault is not None and self._first is not None and fault.slides and self._first.slides:
            return replace(fault, since=self._first.since)
        self._first = fault
        return fault


class GuardWatcher(Watcher):
    """Looks at every logged metric that a guard names; an alarm is told once when it begins and once when it ends."""

    def __init__(self, guards: Sequence[Guard]) -> None:
        self._guards = tuple(guards)
        self._tracks: dict[str, list[Track]] = {}  # by metric

    def begins(self, run: Watched) -> Iterable[RunEvent]:
        self._guards = tuple(guard for guard in self._guards if guard.generates in (None, run.generates))
        for line in run.lines:  # an earlier start reported their alarms
            self._changes(line)
        return ()

    def logs(self, line: Mapping[str, object]) -> Iterable[RunEvent]:
        return [_event(track.guard, metric, change, line) for track, metric, change in self._changes(line)]

    def _changes(self, line: Mapping[str, object]) -> list[tuple[Track, str, AlarmChange]]:
        step = int(str(line["step"]))
        tracks = [(track, metric, value) for metric, value in _numbers(line) for track in self._of(metric, line)]
        seen = [(track, metric, track.add(step, value)) for track, metric, value in tracks]
        return [(track, metric, change) for track, metric, change in seen if change is not None]

    def _of(self, metric: str, line: Mapping[str, object]) -> Iterator[Track]:
        """The tracks of a metric whose objective, if they have one, was rewarded in this line."""
        if metric not in self._tracks:
            self._tracks[metric] = [Track(guard) for guard in self._guards if guard.looks_at(metric)]
        return (track for track in self._tracks[metric] if _rewarded(track.guard.objective, line))


def _rewarded(objective: str | None, line: Mapping[str, object]) -> bool:
    return objective is None or any(fnmatchcase(key, f"rewards/{objective}/mean") for key in line)


def _numbers(line: Mapping[str, object]) -> list[tuple[str, float]]:
    return [(key, float(value)) for key, value in line.items() if isinstance(value, int | float)]


def _event(guard: Guard, metric: str, change: AlarmChange, line: Mapping[str, object]) -> RunEvent:
    step, fault = int(str(line["step"])), change.fault
    value = fault.value if isfinite(fault.value) else None  # JSON has no NaN
    data: dict[str, object] = {"guard": guard.name, "metric": metric, "since": fault.since, "value": value}
    data |= {"state": "begins" if change.until is None else "ends", "tag": f"{TAG}.{guard.name}"}
    if change.until is not None:
        text = f"guard {guard.name}: {metric} is healthy again; it was not from step {fault.since} to {change.until}"
        data |= {"until": change.until, "tag_value": f"steps {fault.since} to {change.until}"}
        return RunEvent(step=step, kind=EventKind.GUARD, text=text, data=data)
    stopping = "; the run saves a checkpoint and stops" if guard.stops else ""
    advice = f"; {guard.advice}" if guard.advice else ""
    text = f"guard {guard.name}, since step {fault.since}: {_said(guard, metric, fault, line)}{advice}{stopping}"
    data["tag_value"] = f"since step {fault.since}"
    return RunEvent(step=step, kind=EventKind.GUARD, text=text, stop=guard.stops, data=data)


def _said(guard: Guard, metric: str, fault: Fault, line: Mapping[str, object]) -> str:
    """The alarm in the guard's own words with the limit, or in those of its check."""
    seconds = line.get(metric.removesuffix("_frac"), 0.0)
    whole = float(seconds) / max(fault.value, 1e-9) if isinstance(seconds, int | float) else 0.0
    own = guard.words(metric, fault.value, seconds=fault.value * whole, of_seconds=whole)
    return f"{metric} {fault.text}" if own is None else f"{own} ({metric} {fault.text})"
