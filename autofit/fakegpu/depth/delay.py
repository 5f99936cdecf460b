"""Time segments as matrices of the (max, +) algebra, and a clock that records one for each segment of a layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import NamedTuple, Protocol

from torch._ops import OpOverload

from autofit.fakegpu.clock import MAIN, Clock, Lane, Moment, Row, lane_of
from autofit.fakegpu.kernels import Call
from autofit.fakegpu.specs import GpuSpec, HostCosts

NEVER = float("-inf")
_HOST, _GPU = int(Lane.HOST), int(Lane.GPU)


def _plus(row: Row, seconds: float) -> Row:
    a, b, c, d, e = row
    return a + seconds, b + seconds, c + seconds, d + seconds, e + seconds


def _later(one: Row, other: Row) -> Row:
    a, b, c, d, e = one
    v, w, x, y, z = other
    return a if a > v else v, b if b > w else w, c if c > x else x, d if d > y else y, e if e > z else z


class FollowedLayers(Protocol):
    """The part of a `LayerRecorder` that the clock reads."""

    @property
    def last_code(self) -> int: ...
    def code(self) -> int: ...
    def growth(self, args: Sequence[object]) -> tuple[float, float]: ...


class Delay(NamedTuple):
    """The effect of a time segment on the time of each lane, as a 5x5 matrix of the (max, +) algebra.

    A row has the longest paths to one lane's time at the end from each lane's time at the start. Launches, kernels,
    copies, collectives and waits only add and take maxima, so every segment is such a matrix, and consecutive segments
    are joined by the matrix product.
    """

    host: Row = (0.0, NEVER, NEVER, NEVER, NEVER)
    gpu: Row = (NEVER, 0.0, NEVER, NEVER, NEVER)
    copies: Row = (NEVER, NEVER, 0.0, NEVER, NEVER)
    gathers: Row = (NEVER, NEVER, NEVER, 0.0, NEVER)
    reductions: Row = (NEVER, NEVER, NEVER, NEVER, 0.0)

    @classmethod
    def passed(cls, seconds: float) -> Delay:
        """Time that passes for the host and for the card's kernels."""
        return cls(host=_plus(NOTHING.host, seconds), gpu=_plus(NOTHING.gpu, seconds))

    @property
    def inside_s(self) -> float:
        """Seconds of the host or of the kernels, whichever take longer, leaving out waits for each other."""
        return max(self.host[_HOST], self.gpu[_GPU])

    def then(self, later: Delay) -> Delay:
        def joined(row: Row) -> Row:
            whole = None
            for lane, seconds in enumerate(row):
                if seconds != NEVER:
                    path = _plus(self[lane], seconds)
                    whole = path if whole is None else _later(whole, path)
            return whole or row

        return Delay(*[self[i] if row == NOTHING[i] else joined(row) for i, row in enumerate(later)])

    def after(self, start: Row) -> Row:
        """Seconds of each lane at the end of the segment, from those at its start."""
        a, b, c, d, e = start
        host, gpu, copies, gathers, reductions = [
            max(a + v, b + w, c + x, d + y, e + z)
            for v, w, x, y, z in self  # a run has 10^5 of these
        ]
        return host, gpu, copies, gathers, reductions

    def repeated(self, times: int) -> Delay:
        """The segment `times` times in a row."""
        whole, power = Delay(), self
        while times:
            if times & 1:
                whole = whole.then(power)
            power, times = power.then(power), times >> 1
        return whole

    def grown(self, before: Delay, times: float) -> Delay:
        """The segment `times` steps later, by linear extrapolation from `before` (one step earlier)."""
        return Delay(*[_grown(a, b, times) for a, b in zip(before, self, strict=True)])


NOTHING = Delay()


def _grown(before: Row, now: Row, times: float) -> Row:
    grown = (b if b == NEVER or a == NEVER else b + (b - a) * times for a, b in zip(before, now, strict=True))
    host, gpu, copies, gathers, reductions = grown
    return host, gpu, copies, gathers, reductions


class Repeat(NamedTuple):
    """Segments `start` to `end`, which happen `times` times in a row; others may be inside of it."""

    start: int
    end: int
    times: int


class LayerClock(Clock):
    """Clock that also records a (max, +) delay matrix per layer segment.

    A wait for an event of an earlier segment waits for all that its stream had to do when the present one began.
    """

    def __init__(self, spec: GpuSpec, costs: HostCosts, recorder: FollowedLayers) -> None:
        super().__init__(spec, costs)
        self.stretches: list[tuple[int, Delay]] = []
        self.repeats: list[Repeat] = []
        self._recorder = recorder
        self._segment = 0
        self._rows: list[Row] = list(NOTHING)
        self._began = self._times()  # of the segment, on each lane of the traced run

    def _times(self) -> Row:
        return self.host_s, self.gpu_s, self.copies_s, self.gathers_s, self.reductions_s

    def cut(self) -> int:
        """End the current segment; returns the number of segments so far."""
        delay = Delay(*self._rows)
        if delay != NOTHING:
            self.stretches.append((self._recorder.last_code, delay))
            self._rows = list(NOTHING)
            self._segment += 1
            self._began = self._times()
        return len(self.stretches)

    def operation(
        self, func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], out: object,
        key: tuple[object, ...] | None = None,
    ) -> None:  # fmt: skip
        host_s, gpu_s = self.host_s, self.gpu_s
        super().operation(func, args, kwargs, out, key)
        launch_s = self.host_s - host_s
        launches, size = self._growth(args)
        self._launch(launch_s * launches)
        if self.gpu_s != gpu_s:
            kernel_s = (self.gpu_s - max(gpu_s, self.host_s)) * size
            self._rows[_GPU] = _plus(_later(self._rows[_GPU], self._rows[_HOST]), kernel_s)

    def view(self) -> None:
        before = self.host_s
        super().view()
        self._launch(self.host_s - before)

    def host_work(self, launches: float, *, deep: float | None = None, alone: bool = False) -> None:
        before = self.host_s
        super().host_work(launches, alone=alone)
        self._launch((self.host_s - before) * (deep or launches) / launches)

    def _launch(self, seconds: float) -> None:
        self._rows[_HOST] = _plus(self._rows[_HOST], seconds)

    def _growth(self, args: Sequence[object]) -> tuple[float, float]:
        return (1.0, 1.0) if self._recorder.code() else self._recorder.growth(args)

    def synchronize(self) -> None:
        super().synchronize()
        self._rows[_HOST] = self._latest(Lane.HOST, Lane.GPU)

    def copy_to_host(self, nbytes: int) -> None:
        before = self.run_s
        super().copy_to_host(nbytes)
        self._rows[_HOST] = self._rows[_GPU] = _plus(self._latest(Lane.HOST, Lane.GPU), self.gpu_s - before)

    def link(
        self, func: OpOverload, args: Sequence[object], out: object, *, nbytes: int, stream: int, waits: bool
    ) -> None:
        launches, size = self._growth(args)
        super().link(func, args, out, nbytes=nbytes, stream=stream, waits=waits)
        self._launch(self.costs.launch_s * launches)
        lane = Lane.GPU if stream == MAIN else Lane.COPIES
        self._rows[lane] = _plus(self._latest(Lane.HOST, *self.lanes(stream)), self.link_s(nbytes) * size)
        if waits:
            self._rows[_HOST] = self._latest(Lane.HOST, lane)

    # ------------------------------------------------------------------ streams
    def collective(self, func: OpOverload, call: Call, *, stream: int) -> None:
        before = self.lanes(stream)
        super().collective(func, call, stream=stream)
        if self.asleep:
            return
        launches, size = self._growth(call.tensors)
        self._launch(self.costs.launch_s * launches)
        start = self._latest(Lane.HOST, *before, Lane.GATHERS, Lane.REDUCTIONS)
        end = self._rows[lane_of(call)] = _plus(start, self.collective_s(call) * size)
        if call.waits and stream == MAIN:
            self._rows[_GPU] = end

    def _latest(self, *lanes: Lane) -> Row:
        return reduce(_later, [self._rows[lane] for lane in lanes])

    def _moment(self, lanes: tuple[Lane, ...]) -> Moment:
        row = self._latest(Lane.HOST, *lanes)
        return super()._moment(lanes)._replace(segment=self._segment, row=row)

    def wait(self, stream: int | None, moment: Moment) -> None:
        super().wait(stream, moment)
        row = moment.row
        if moment.segment != self._segment or row is None:
            lags = [(lane, max(0.0, self._began[lane] - moment.seconds)) for lane in moment.lanes]
            row = reduce(_later, [_plus(NOTHING[lane], -lag_s) for lane, lag_s in lags])
        for lane in (Lane.HOST,) if stream is None else self.lanes(stream):
            self._rows[lane] = _later(self._rows[lane], row)

    def play(self, stretches: Sequence[tuple[int, Delay]], *, times: int = 1) -> None:
        """Append segments of time outside traced kernels, which happen `times` times in a row."""
        start = self.cut()
        self.stretches += stretches
        if times > 1:
            self.repeats.append(Repeat(start, len(self.stretches), times))

    def repeat(self, first: int, last: int, times: int) -> None:
        """Append the segments `first` to `last` again, `times` times in a row, with the repeats inside of them."""
        later = self.cut() - first
        inside = [r for r in self.repeats if first <= r.start and r.end <= last]
        self.repeats += [r._replace(start=r.start + later, end=r.end + later) for r in inside]
        self.play(self.stretches[first:last], times=times)
