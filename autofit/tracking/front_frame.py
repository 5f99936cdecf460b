"""What the picture of a front shows, and how far its axes reach."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from autofit.forecast.cloud import Cloud
from autofit.probing.result import ProbeStatus
from autofit.tuning.foreseen import Foreseen

_ROOM = 1.3  # the picture ends this far above the target and the slowest probe; candidates beyond are counted
_LOG_FROM = 8.0  # ratio of the slowest to the fastest step from which the time axis is logarithmic


class Point(Protocol):
    """A trial, as far as it is drawn."""

    @property
    def number(self) -> int: ...
    @property
    def status(self) -> ProbeStatus | None: ...
    @property
    def fits(self) -> bool: ...
    @property
    def step_s(self) -> float | None: ...
    @property
    def device_used_bytes(self) -> int | None: ...
    @property
    def stopped_at_oom(self) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """What a front's picture shows."""

    trials: Sequence[Point]
    front: Sequence[Point] = ()
    foreseen: Sequence[Foreseen] = ()  # on the front too, predicted
    winner: Point | None = None
    baseline: Point | None = None
    target_bytes: int | None = None
    predicted: Cloud | None = None
    title: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The ends of the axes: all probes and the target are within; far candidates are not."""

    left_s: float
    right_s: float
    top_bytes: float
    timeless: bool  # whether no probe and no candidate has a step time
    bars: tuple[int, ...]  # the trials without a step time, which stand in a strip beside the axis

    @classmethod
    def of(cls, picture: Picture) -> "Frame":
        cloud = picture.predicted or Cloud(candidates=0, device_used_bytes=(), step_s=())
        known = [t.step_s for t in picture.trials if t.step_s is not None] or [*cloud.step_s]
        known += [one.step_s for one in picture.foreseen]
        timed = known or [1.0]
        held = [t.device_used_bytes for t in picture.trials if t.device_used_bytes] or [*cloud.device_used_bytes]
        bars = tuple(t.number for t in picture.trials if is_bar(t))
        top = max([*held, picture.target_bytes or 0])
        return cls(
            left_s=0.94 * min(timed + sorted(cloud.step_s)[:1]), right_s=_end(max(timed), cloud.step_s),
            top_bytes=_ROOM * top if bars else _end(top or 10**9, cloud.device_used_bytes), bars=bars,
            timeless=not known,
        )  # fmt: skip

    def holds(self, used_bytes: int, step_s: float) -> bool:
        return used_bytes <= self.top_bytes and step_s <= self.right_s

    @property
    def unit(self) -> str:
        return "GB" if self.top_bytes >= 10**9 else "MB"

    def amount(self, count: float | None) -> float:
        """Bytes in the picture's unit."""
        return (count or 0) / (10**9 if self.unit == "GB" else 10**6)

    def place(self, trial: Point) -> tuple[float, float]:
        """Where a trial stands: its seconds and amount, or its bar's lower end."""
        x = trial.step_s or 0.0
        if trial.number in self.bars:
            left, right = self.strip
            x = left + (right - left) * (self.bars.index(trial.number) + 0.5) / len(self.bars)
        return x, self.amount(trial.device_used_bytes)

    def places(self, trials: Sequence[Point]) -> tuple[list[float], list[float]]:
        """The same of several, as two columns."""
        return columns([self.place(t) for t in trials])

    @property
    def logarithmic(self) -> bool:
        return self.left_s > 0 and self.right_s / self.left_s > _LOG_FROM

    @property
    def strip(self) -> tuple[float, float]:
        """(left, right) of the strip for trials without a step time."""
        if self.logarithmic:
            return self.right_s, self.right_s * (self.right_s / self.left_s) ** 0.08
        return self.right_s, self.right_s + 0.08 * (self.right_s - self.left_s)

    def fit(self, axes: Any) -> None:
        if self.logarithmic:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter("{x:g}")
        if self.timeless:
            axes.set_xticks([])
        right = self.strip[1] if self.bars else self.right_s
        axes.set(xlim=(self.left_s, right), ylim=(0, self.amount(self.top_bytes)))


def _end(largest: float, predicted: Sequence[float]) -> float:
    """Where an axis ends: beyond `largest`, with candidates up to _ROOM times as far."""
    return 1.06 * max([largest, *(value for value in predicted if value <= _ROOM * largest)])


def ran_out(trial: Point) -> bool:
    return trial.status is ProbeStatus.OOM and bool(trial.device_used_bytes)


def is_bar(trial: Point) -> bool:
    return ran_out(trial) and (trial.step_s is None or trial.stopped_at_oom)


def columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
