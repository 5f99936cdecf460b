"""The guards of a run: an event when a metric leaves its band, with the step it began, and one when it is back."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import isfinite

from autofit.watching.checks import Fault, Past, every, fault_of, keeps
from autofit.watching.events import Kind, RunEvent
from autofit.watching.thresholds import Check, Guard
from autofit.watching.watcher import Watched, Watcher

TAG = "autofit.guard"
_QUIET = 10  # healthy logged steps in a row that end an alarm, at least: one that comes and goes is one alarm


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """An alarm begins, or has ended: `until` is the last step that was not healthy."""

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

    def add(self, step: int, value: float) -> Change | None:
        """Look at the value of a step that is logged; the change of the alarm, if it changes."""
        if step <= self.guard.warmup or not (isfinite(value) or self.guard.check is Check.FINITE):
            return None
        self._points.append((step, value))
        if len(self._early) < self.guard.window:
            self._early.append((step, value))
        self._seen += 1
        if self._seen % every(self.guard):
            return None
        return self._judge(step)

    def _judge(self, step: int) -> Change | None:
        found = fault_of(self.guard, list(self._points), Past(early=self._early, alarmed=self._alarm is not None))
        fault = self._since_first(found)
        self._until = self._until if fault is None else step
        alarm = self._alarm
        self._streak = self._streak + every(self.guard) if (fault is None) == (alarm is not None) else 0
        if self._streak < (self.guard.patience if alarm is None else max(self.guard.patience, _QUIET)):
            return None
        self._streak, self._alarm = 0, fault
        if fault is not None:
            return Change(fault=fault)
        assert alarm is not None
        return Change(fault=alarm, until=self._until)

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
        for line in run.lines:  # an earlier start told what they had to tell
            self._changes(line)
        return ()

    def logs(self, line: Mapping[str, object]) -> Iterable[RunEvent]:
        return [_event(track.guard, metric, change, line) for track, metric, change in self._changes(line)]

    def _changes(self, line: Mapping[str, object]) -> list[tuple[Track, str, Change]]:
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


def _event(guard: Guard, metric: str, change: Change, line: Mapping[str, object]) -> RunEvent:
    step, fault = int(str(line["step"])), change.fault
    value = fault.value if isfinite(fault.value) else None  # JSON has no NaN
    data: dict[str, object] = {"guard": guard.name, "metric": metric, "since": fault.since, "value": value}
    data |= {"state": "begins" if change.until is None else "ends", "tag": f"{TAG}.{guard.name}"}
    if change.until is not None:
        text = f"guard {guard.name}: {metric} is healthy again; it was not from step {fault.since} to {change.until}"
        data |= {"until": change.until, "tag_value": f"steps {fault.since} to {change.until}"}
        return RunEvent(step=step, kind=Kind.GUARD, text=text, data=data)
    stopping = "; the run saves a checkpoint and stops" if guard.stops else ""
    advice = f"; {guard.advice}" if guard.advice else ""
    text = f"guard {guard.name}, since step {fault.since}: {_said(guard, metric, fault, line)}{advice}{stopping}"
    data["tag_value"] = f"since step {fault.since}"
    return RunEvent(step=step, kind=Kind.GUARD, text=text, stop=guard.stops, data=data)


def _said(guard: Guard, metric: str, fault: Fault, line: Mapping[str, object]) -> str:
    """The alarm in the guard's own words with the limit, or in those of its check."""
    seconds = line.get(metric.removesuffix("_frac"), 0.0)
    whole = float(seconds) / max(fault.value, 1e-9) if isinstance(seconds, int | float) else 0.0
    own = guard.words(metric, fault.value, seconds=fault.value * whole, of_seconds=whole)
    return f"{metric} {fault.text}" if own is None else f"{own} ({metric} {fault.text})"
