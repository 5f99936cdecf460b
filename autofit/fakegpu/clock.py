"""The simulated clock: a host that launches kernels, a GPU that runs them in order, and copies to and from the host.

Products and attention take the time that was measured on the card (`rates`), other kernels their bytes at the measured
bandwidth. The host runs ahead until an operation waits for the GPU (`.item()`, `synchronize`, a copy to the host).
Copies between the card and pinned memory of the host on a stream of their own overlap with the kernels, and so do
collectives with other cards (`Lane`), beside which kernels have the multiprocessors that NCCL leaves; streams wait for
each other as the program asks. Kernels of all streams are in the default one's lane, copies of all others in one lane.
Collectives are in one of two lanes, those that reduce in the second; they never overlap with each other, for one
communicator works them off in order.
So a rollout of small kernels is host-bound and an update is GPU-bound, as on a card. The host's costs and their sources
are in `HostCosts`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import torch
from torch._ops import OpOverload

from autofit.fakegpu.engines.forward import PagedBatching
from autofit.fakegpu.engines.vllm import VllmEngine
from autofit.fakegpu.kernels import Call, Times, flops, kernel_of, traffic
from autofit.fakegpu.rates.collectives import COLLECTIVES, HOST, CollectiveSeconds
from autofit.fakegpu.rates.kernels import Family, KernelSeconds, Work, family, matrices
from autofit.fakegpu.specs import GpuSpec, HostCosts, LaunchOrigin

# Which part of a training pass runs in this thread.


def in_backward() -> bool:
    """True if autograd's engine runs a backward pass."""
    return torch._C._current_graph_task_id() != -1


def launch() -> LaunchOrigin:
    """Present origin of launches: in backward autograd's engine, unless a layer's forward runs once more."""
    if torch.is_grad_enabled():
        return LaunchOrigin.RECORDED
    return LaunchOrigin.AUTOGRAD if in_backward() else LaunchOrigin.PLAIN


aten = torch.ops.aten

NO_KERNEL = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "set_", "resize_",
    "device", "is_pinned", "lift_fresh", "record_stream", "_local_scalar_dense",
}  # fmt: skip
MAIN = 0  # the default stream


class Lane(IntEnum):
    """Times that advance on their own: the host, kernels, copies over the host link, and collectives."""

    HOST = 0
    GPU = 1
    COPIES = 2
    GATHERS = 3
    REDUCTIONS = 4


def lane_of(call: Call) -> Lane:
    """The lane of a collective."""
    return Lane.REDUCTIONS if call.kind in ("all_reduce", "reduce_scatter") else Lane.GATHERS


Row = tuple[float, float, float, float, float]  # one number a lane
_TIMES = ("host_s", "gpu_s", "copies_s", "gathers_s", "reductions_s")


class Moment(NamedTuple):
    """The end of the work that a stream had when an event was recorded; `LayerClock` adds its place in a segment."""

    lanes: tuple[Lane, ...]
    seconds: float
    segment: int = -1
    row: Row | None = None
    number: int = -1  # that a listener of the clock gave it


class _Cost(NamedTuple):
    """One kernel's work, the reads or writes of each of its tensors, its seconds, and the family of their rates."""

    work: Work
    times: Times
    seconds: float
    family: Family
    by_shapes: bool  # whether all operations on inputs of these shapes cost the same


KnownCosts = dict[tuple[object, ...] | None, _Cost | None]  # by operation and inputs; None: a view
_UNKNOWN = _Cost(Work("", (), 0.0, 0, False, 0, 0), None, 0.0, "others", False)


class OperationLog(Protocol):
    """A listener of the clock: every operation on the GPU, the decode steps of a rollout, and its engine."""

    aside: bool  # whether the kernel to come is a copy or a collective that overlaps with the others
    lanes: Sequence[int]  # of the kernel to come: that in which it runs, and those whose work it comes after
    of_step: bool  # True if the next kernels are a whole step's, though they come with the last micro-batch

    def view(self) -> None: ...

    def host_work(self, launches: float, *, alone: bool) -> None: ...

    def kernel(
        self, func: OpOverload, args: Sequence[object], out: object, *, work: Work, times: Times, by: LaunchOrigin
    ) -> None: ...

    def moment(self, lanes: Sequence[int]) -> int: ...

    def wait(self, lanes: Sequence[int], number: int) -> None: ...

    def decode_step(self, number: int) -> None: ...

    def decode_end(self) -> None: ...

    def engine(self, law: VllmEngine | PagedBatching) -> None: ...

    def place(self) -> object: ...

    def counted(self) -> Any: ...

    def again(self, begin: Any, end: Any) -> None: ...


class Clock:
    """Monotonic times: `host_s`; `gpu_s`, the end of the last kernel launched so far; `copies_s`, that of copies.

    `gathers_s` and `reductions_s` are the ends of the last collectives. `exposed_s` is how long kernels or the host
    had to wait for collectives.
    """

    def __init__(self, spec: GpuSpec, costs: HostCosts) -> None:
        self.spec = spec
        self.costs = costs
        self.host_s = 0.0
        self.gpu_s = 0.0
        self.copies_s = 0.0
        self.gathers_s = 0.0
        self.reductions_s = 0.0
        self.exposed_s = 0.0
        self.collectives = CollectiveSeconds(spec)
        self.ranks = 1  # of the largest group that had a collective
        self._collecting: deque[tuple[float, float]] = deque()  # times of collectives that kernels may run beside
        self.known: KnownCosts = {}  # may be shared by clocks of one card and host, one after another
        self._lanes: dict[int, tuple[Lane, ...]] = {MAIN: (Lane.GPU,)}  # the lanes that a stream keeps in order
        self.flops = 0
        self.bytes_moved = 0
        self.kernel_count = 0
        self.kernels = KernelSeconds(spec, costs)
        self.busy_s: dict[Family, float] = dict.fromkeys(("products", "attention", "others"), 0.0)
        self.skipped_s = 0.0
        self.log: OperationLog | None = None
        self.asleep = False  # True: operations take no time

    @property
    def now_s(self) -> float:
        return max(self.host_s, self.gpu_s, self.copies_s, self.gathers_s, self.reductions_s)

    @property
    def run_s(self) -> float:
        """The end of all that was launched on the default stream."""
        return max(self.host_s, self.gpu_s)

    @property
    def traced_s(self) -> dict[str, float]:
        """Seconds of each family of kernels so far, of waits for collectives, and of the host while the GPU is idle.

        Steps that were skipped are left out.
        """
        parts = {str(family): s for family, s in self.busy_s.items()}
        if self.ranks > 1:
            parts[COLLECTIVES] = self.exposed_s
        return {**parts, HOST: max(0.0, self.now_s - self.skipped_s - sum(parts.values()))}

    def synchronize(self) -> None:
        """Let the host wait for the default stream."""
        self.host_s = self.run_s
        self._host_waits(Lane.GPU)

    def _host_waits(self, lane: Lane) -> None:
        """Tell the listener that the host waits for all that a lane has."""
        if self.log is not None:
            self.log.wait((Lane.HOST,), self.log.moment((lane,)))

    def advance(self, seconds: float, *, like: Mapping[str, float] | None = None) -> None:
        """Add time outside traced kernels (the skipped part of a rollout), whose parts are `like` those of a step."""
        if like is None:
            self.skipped_s += seconds
        else:
            whole = max(sum(like.values()), 1e-12)
            for family in self.busy_s:
                self.busy_s[family] += seconds * like[family] / whole
            self.exposed_s += seconds * like.get(COLLECTIVES, 0.0) / whole
        self.host_s += seconds
        self.gpu_s += seconds

    def host_work(self, launches: float, *, deep: float | None = None, alone: bool = False) -> None:
        """Charge the host with Python code, free of launches, that takes as long as `launches` of them.

        `deep` are those of a run with all layers, where that is more. `alone`: the card has nothing to do meanwhile.
        """
        if self.asleep:
            return
        self.host_s += launches * self.costs.launch_s
        if self.log is not None:
            self.log.host_work(launches, alone=alone)

    def copy_to_host(self, nbytes: int) -> None:
        self.gpu_s = self.run_s + self.link_s(nbytes)
        self.synchronize()

    def link_s(self, nbytes: int) -> float:
        return nbytes / self.spec.host_link_bytes_per_s

    def link(
        self, func: OpOverload, args: Sequence[object], out: object, *, nbytes: int, stream: int, waits: bool
    ) -> None:
        """Charge a copy between the card and pinned host memory on `stream`, for whose end the host may wait."""
        seconds = self.link_s(nbytes)
        self.host_s += self.costs.launch_s
        if stream == MAIN:
            self.gpu_s = max(self.gpu_s, self.host_s) + seconds
        else:
            self.copies_s = max(self._end(self._copying(stream)), self.host_s) + seconds
        if waits:
            self.host_s = self.gpu_s if stream == MAIN else self.copies_s
        if self.log is not None:
            rate = self.spec.host_link_bytes_per_s / self.kernels.flops_frac
            work = Work("copy_", _shapes((out,)), rate, _dtype(out).itemsize, False, nbytes, 0)
            self.log.aside = stream != MAIN
            self.log.lanes = (Lane.GPU,) if stream == MAIN else (Lane.COPIES, *self._copying(stream))
            self.log.kernel(func, (), out, work=work, times=(0,), by=LaunchOrigin.PLAIN)
            self.log.aside, self.log.lanes = False, (Lane.GPU,)
            if waits:
                self._host_waits(Lane.GPU if stream == MAIN else Lane.COPIES)

    # ------------------------------------------------------------------ streams
    def collective(self, func: OpOverload, call: Call, *, stream: int) -> None:
        """Charge a collective that is called on `stream`.

        It starts after all that the stream has to do now, and after the collectives before it.
        """
        if self.asleep:
            return
        self.ranks = max(self.ranks, call.ranks)
        self.host_s += self.costs.launch_s
        lane = lane_of(call)
        before = self._communicating(stream, lane) if call.waits else self.lanes(stream)
        ready_s = max(self.host_s, self._end(before))
        seconds = self.collective_s(call)
        end_s = max(ready_s, self.gathers_s, self.reductions_s) + seconds
        setattr(self, _TIMES[lane], end_s)
        self._collecting.append((end_s - seconds, end_s))
        blocks = call.waits and stream == MAIN
        if blocks:
            self.exposed_s += end_s - ready_s
            self.gpu_s = end_s
        if self.log is not None:
            item_bytes = call.tensors[0].element_size() if call.tensors else 1
            rate = call.nbytes / seconds / self.kernels.flops_frac
            work = Work(call.kind, _shapes(call.tensors), rate, item_bytes, False, call.nbytes, 0)
            self.log.aside, self.log.lanes = not blocks, (lane, Lane.GATHERS, Lane.REDUCTIONS, *before)
            self.log.kernel(func, (), call.tensors, work=work, times=(0,) * len(call.tensors), by=LaunchOrigin.PLAIN)
            self.log.aside, self.log.lanes = False, (Lane.GPU,)
            if blocks:
                self.log.wait((Lane.GPU,), self.log.moment((lane,)))

    def collective_s(self, call: Call) -> float:
        """Seconds of a collective by itself."""
        return self.collectives.seconds(call.kind, call.nbytes, call.ranks)

    def lanes(self, stream: int) -> tuple[Lane, ...]:
        """The lanes of all that a stream did so far."""
        return self._lanes.get(stream, (Lane.COPIES,))

    def _copying(self, stream: int) -> tuple[Lane, ...]:
        """The lanes of a stream that copies over the host link now."""
        known = self._lanes.setdefault(stream, (Lane.COPIES,))
        if Lane.COPIES not in known:
            known = self._lanes[stream] = (*known, Lane.COPIES)
        return known

    def _communicating(self, stream: int, lane: Lane) -> tuple[Lane, ...]:
        """The lanes of a stream before the collective in `lane` that it has now."""
        before = self.lanes(stream)
        if stream != MAIN:
            known = self._lanes.get(stream, ())
            self._lanes[stream] = known if lane in known else (*known, lane)
        return before

    def _end(self, lanes: Sequence[Lane]) -> float:
        return max(float(getattr(self, _TIMES[lane])) for lane in lanes)

    def moment(self, stream: int) -> Moment:
        """The end of the work that `stream` has now, as an event records it."""
        return self._moment(self.lanes(stream))

    def communicated(self) -> Moment:
        """The end of all collectives so far."""
        return self._moment((Lane.GATHERS, Lane.REDUCTIONS))

    def _moment(self, lanes: tuple[Lane, ...]) -> Moment:
        number = -1 if self.log is None else self.log.moment(lanes)
        return Moment(lanes, max(self.host_s, self._end(lanes)), number=number)

    def wait(self, stream: int | None, moment: Moment) -> None:
        """Let a stream, or with None the host, wait for `moment`."""
        lanes = (Lane.HOST,) if stream is None else self.lanes(stream)
        if moment.lanes[0] >= Lane.GATHERS and lanes[0] <= Lane.GPU:
            self.exposed_s += max(0.0, moment.seconds - self.run_s)
        for lane in lanes:
            setattr(self, _TIMES[lane], max(getattr(self, _TIMES[lane]), moment.seconds))
        if self.log is not None:
            self.log.wait(lanes, moment.number)

    def operation(
        self, func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], out: object,
        key: tuple[object, ...] | None = None,
    ) -> None:  # fmt: skip
        """Charge one GPU operation: a view costs host time, a kernel costs host and GPU time.

        Operations of one `key` have inputs of the same shapes, strides, types and devices.
        """
        if self.asleep:
            return
        cost = self.known.get(key, _UNKNOWN)
        if cost is _UNKNOWN:
            cost = self._cost(func, args, kwargs, out)
            if key is not None and (cost is None or cost.by_shapes):
                self.known[key] = cost
        if cost is None:
            Clock.view(self)
            return
        by = launch()
        if self.log is not None:
            self.log.kernel(func, args, out, work=cost.work, times=cost.times, by=by)
        self._run(cost, by)

    def view(self) -> None:
        """Charge the host with an operation that makes a view."""
        if self.asleep:
            return
        self.host_s += self.costs.view_s
        if self.log is not None:
            self.log.view()

    def _cost(
        self, func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], out: object
    ) -> _Cost | None:
        """Cost of one operation; None for a view."""
        name = func._schema.name[6:]
        if func.is_view or name in NO_KERNEL:
            return None
        work_flops = flops(func, args, kwargs, out)
        shapes = _shapes(args)
        kind = family(name, shapes)
        dtype = _multiplied(name, args, out) if kind == "products" else _dtype(out)
        causal = kind == "attention" and _is_causal(func, args, kwargs)
        if kernel_of(func).int8:
            rate = 2 * self.spec.half_flops_per_s
        else:
            rate = self._rate(dtype, by_tensor_cores=bool(work_flops))
        moved = traffic(func, args, out)
        work = Work(name, shapes, rate, dtype.itemsize, causal, work_flops, moved.nbytes, moved.pattern)
        values_matter = kernel_of(func).flops is not None  # such as the lengths of sequences in one row
        by_shapes = not values_matter and not (work_flops and dtype is torch.float32)  # TF32 may be switched on later
        return _Cost(work, moved.times, *self.kernels.seconds(work), by_shapes)

    def kernel(self, *, flops: int, nbytes: int, rate: float) -> None:
        """Charge a kernel outside torch's operators."""
        work = Work("", (), rate, 0, False, flops, nbytes)
        self._run(_Cost(work, None, *self.kernels.seconds(work), True), launch())

    def _run(self, cost: _Cost, by: LaunchOrigin) -> None:
        work = cost.work
        self.host_s += self.costs.of(by)
        start_s = max(self.gpu_s, self.host_s)
        self.gpu_s = self._beside_collectives(start_s, cost.seconds)
        self.busy_s[cost.family] += self.gpu_s - start_s
        self.flops += work.flops
        self.bytes_moved += work.nbytes
        self.kernel_count += 1

    def _beside_collectives(self, start_s: float, seconds: float) -> float:
        """The end of a kernel that takes `seconds` alone: beside a collective it has a part of the card."""
        while self._collecting and self._collecting[0][1] <= start_s:
            self._collecting.popleft()
        left_frac = self.collectives.left_frac
        for begins_s, ends_s in self._collecting:
            if begins_s >= start_s + seconds:
                break
            alone_s = max(0.0, begins_s - start_s)
            start_s, seconds = start_s + alone_s, seconds - alone_s
            if seconds / left_frac <= ends_s - start_s:
                return start_s + seconds / left_frac
            seconds -= (ends_s - start_s) * left_frac
            start_s = ends_s
        return start_s + seconds

    def _rate(self, dtype: torch.dtype, *, by_tensor_cores: bool) -> float:
        """FLOP/s of the data sheet. Kernels with FLOPs are products, convolutions and attention, on tensor cores."""
        if not by_tensor_cores:
            return self.spec.fp32_flops_per_s
        if dtype is torch.float16:
            return self.spec.half_flops_per_s
        if dtype is torch.bfloat16:
            native = self.spec.compute_capability >= (8, 0)
            return self.spec.half_flops_per_s if native else self.spec.fp32_flops_per_s
        tf32 = self.spec.compute_capability >= (8, 0) and torch.backends.cuda.matmul.fp32_precision == "tf32"
        return self.spec.tf32_flops_per_s if tf32 else self.spec.fp32_flops_per_s


def _shapes(args: Sequence[object]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(a.shape) for a in args if isinstance(a, torch.Tensor))


def _dtype(value: object) -> torch.dtype:
    """The dtype of the first tensor of an output."""
    if isinstance(value, (list, tuple)):
        value = next((v for v in value if isinstance(v, torch.Tensor)), None)
    return value.dtype if isinstance(value, torch.Tensor) else torch.float32


def _multiplied(name: str, args: Sequence[object], out: object) -> torch.dtype:
    """The dtype in which a product is multiplied: its matrices', whose sum may have another (`out_dtype`)."""
    dtype = matrices(name, [a for a in args if isinstance(a, torch.Tensor)])[1].dtype
    return dtype if dtype in (torch.float16, torch.bfloat16, torch.float32) else _dtype(out)


def _is_causal(func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """The argument `is_causal` of attention, whose default is False."""
    at = [argument.name for argument in func._schema.arguments].index("is_causal")
    return bool(args[at] if at < len(args) else kwargs.get("is_causal", False))
