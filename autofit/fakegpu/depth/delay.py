"""Time segments as matrices of the (max, +) algebra, and a clock that records one for each segment of a layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from torch._ops import OpOverload

from autofit.fakegpu.clock import MAIN, Clock, Moment
from autofit.fakegpu.specs import GpuSpec, HostCosts

NEVER = float("-inf")
Row = tuple[float, float, float]  # the longest paths from (host, gpu, copies) time at the start of a segment
_START: tuple[Row, Row, Row] = ((0.0, NEVER, NEVER), (NEVER, 0.0, NEVER), (NEVER, NEVER, 0.0))


def _plus(row: Row, seconds: float) -> Row:
    a, b, c = row
    return a + seconds, b + seconds, c + seconds


def _later(one: Row, other: Row) -> Row:
    a, b, c = one
    x, y, z = other
    return max(a, x), max(b, y), max(c, z)


class FollowedLayers(Protocol):
    """What the clock reads of a `LayerRecorder`."""

    @property
    def last_code(self) -> int: ...
    def code(self) -> int: ...
    def growth(self, args: Sequence[object]) -> tuple[float, float]: ...


class Delay(NamedTuple):
    """The effect of a time segment on (host, gpu, copies) time, as a 3x3 matrix of the (max, +) algebra.

    Each entry is the longest path from one time to another. Launches, kernels, copies and waits only add and take
    maxima, so every segment is such a matrix, and consecutive segments are joined by the matrix product.
    """

    host_host: float = 0.0
    gpu_host: float = NEVER  # from GPU time to host time: a wait
    host_gpu: float = NEVER
    gpu_gpu: float = 0.0
    copies_host: float = NEVER
    copies_gpu: float = NEVER
    host_copies: float = NEVER
    gpu_copies: float = NEVER
    copies_copies: float = 0.0

    @classmethod
    def of(cls, host: Row, gpu: Row, copies: Row) -> Delay:
        return cls(host[0], host[1], gpu[0], gpu[1], host[2], gpu[2], *copies)

    @property
    def rows(self) -> tuple[Row, Row, Row]:
        """How late (host, gpu, copies) are at the end."""
        return (
            (self.host_host, self.gpu_host, self.copies_host),
            (self.host_gpu, self.gpu_gpu, self.copies_gpu),
            (self.host_copies, self.gpu_copies, self.copies_copies),
        )

    def then(self, later: Delay) -> Delay:
        first = self.rows

        def joined(row: Row) -> Row:
            paths = [_plus(each, step) for each, step in zip(first, row, strict=True)]
            return _later(_later(paths[0], paths[1]), paths[2])

        host, gpu, copies = later.rows
        return Delay.of(joined(host), joined(gpu), joined(copies))

    def after(self, host_s: float, gpu_s: float, copies_s: float = 0.0) -> Row:
        """(host, gpu, copies) seconds at the end of the segment, from those at its start."""
        start = host_s, gpu_s, copies_s
        host, gpu, copies = (max(s + d for s, d in zip(start, row, strict=True)) for row in self.rows)
        return host, gpu, copies

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
        return Delay(
            *(b if b == NEVER or a == NEVER else b + (b - a) * times for a, b in zip(before, self, strict=True))
        )


class Repeat(NamedTuple):
    """Segments `start` to `end`, which happen `times` times in a row."""

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
        self._host, self._gpu, self._copies = _START

    def cut(self) -> int:
        """End the current segment; returns the number of segments so far."""
        if (self._host, self._gpu, self._copies) != _START:
            self.stretches.append((self._recorder.last_code, Delay.of(self._host, self._gpu, self._copies)))
            self._host, self._gpu, self._copies = _START
            self._segment += 1
        return len(self.stretches)

    def operation(self, func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], out: object) -> None:
        host_s, gpu_s = self.host_s, self.gpu_s
        super().operation(func, args, kwargs, out)
        launch_s = self.host_s - host_s
        launches, size = self._growth(args)
        self._host = _plus(self._host, launch_s * launches)
        if self.gpu_s != gpu_s:
            kernel_s = (self.gpu_s - max(gpu_s, self.host_s)) * size
            self._gpu = _plus(_later(self._gpu, self._host), kernel_s)

    def _growth(self, args: Sequence[object]) -> tuple[float, float]:
        return (1.0, 1.0) if self._recorder.code() else self._recorder.growth(args)

    def synchronize(self) -> None:
        super().synchronize()
        self._host = _later(self._host, self._gpu)

    def copy_to_host(self, nbytes: int) -> None:
        before = self.run_s
        super().copy_to_host(nbytes)
        self._host = self._gpu = _plus(_later(self._host, self._gpu), self.gpu_s - before)

    def link(
        self, func: OpOverload, args: Sequence[object], out: object, *, nbytes: int, stream: int, waits: bool
    ) -> None:
        launches, size = self._growth(args)
        super().link(func, args, out, nbytes=nbytes, stream=stream, waits=waits)
        seconds = self.link_s(nbytes) * size
        self._host = _plus(self._host, self.costs.launch_s * launches)
        if stream == MAIN:
            self._gpu = _plus(_later(self._gpu, self._host), seconds)
        else:
            self._copies = _plus(_later(self._copies, self._host), seconds)
        if waits:
            self._host = _later(self._host, self._gpu if stream == MAIN else self._copies)

    # ------------------------------------------------------------------ streams
    def moment(self, stream: int) -> Moment:
        row = _later(self._host, self._gpu if stream == MAIN else self._copies)
        return super().moment(stream)._replace(segment=self._segment, row=row)

    def wait(self, stream: int | None, moment: Moment) -> None:
        super().wait(stream, moment)
        of = 1 if moment.stream == MAIN else 2
        row = moment.row if moment.segment == self._segment and moment.row else _START[of]
        if stream is None:
            self._host = _later(self._host, row)
        elif stream == MAIN:
            self._gpu = _later(self._gpu, row)
        else:
            self._copies = _later(self._copies, row)

    def play(self, stretches: Sequence[tuple[int, Delay]], *, times: int = 1) -> None:
        """Append segments of time without a traced kernel, which happen `times` times in a row."""
        start = self.cut()
        self.stretches += stretches
        if times > 1:
            self.repeats.append(Repeat(start, len(self.stretches), times))
