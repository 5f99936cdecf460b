"""The simulated card: its memory, its clock, and the results of a run, by category and phase."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from autofit.fakegpu.allocator import MIN_BLOCK_BYTES, UNLIMITED, AllocatorSettings, CachingAllocator
from autofit.fakegpu.clock import Clock, in_backward
from autofit.fakegpu.depth.layers import LayerClock, LayerRecorder
from autofit.fakegpu.kernels import blas_workspace_bytes
from autofit.fakegpu.memory import Allocation, HostTensors, SimulatedMemory
from autofit.fakegpu.rates.collectives import nccl_bytes, nccl_note
from autofit.fakegpu.rates.kernels import stand_in
from autofit.fakegpu.replay import EventLog, least_capacity
from autofit.fakegpu.specs import CARDS_OF_A_MACHINE, NETWORK_GBIT, GpuSpec, HostCosts
from autofit.fakegpu.tracer import Tracer

# -- live bytes by category and phase, and the tensors alive at the peak ----------------------------------------------

CATEGORIES = (
    "weights", "gradients", "optimizer", "activations", "logits", "KV cache", "temporaries", "workspace", "vLLM",
)  # fmt: skip
GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePeak:
    """Peak live bytes of one phase, and their categories at that moment."""

    name: str
    peak_allocated_bytes: int
    categories: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakItem:
    """Storages of one category, operation and dtype, alive at the peak and allocated by the same line of code."""

    category: str
    place: str
    op: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakReport:
    """The storages alive at the peak, largest first; `str()` of it is a table."""

    allocated_bytes: int
    phase: str
    items: tuple[PeakItem, ...]

    def __str__(self) -> str:
        head = f"peak {self.allocated_bytes / GIB:.3f} GiB allocated, in phase {self.phase!r}"
        rows = [
            f"{item.nbytes / GIB:9.3f} GiB  {item.count:5d} x {item.category:11s} {item.op:28s} "
            f"{item.dtype.removeprefix('torch.')}{list(item.shape)}  {item.place}"
            for item in self.items
        ]
        return "\n".join([head, *rows])


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """`live_bytes[category][i]`: bytes of that category alive after event i (512 B granules, before segment slack)."""

    live_bytes: Mapping[str, npt.NDArray[np.int64]]
    phases: tuple[LivePeak, ...]

    @property
    def total_bytes(self) -> npt.NDArray[np.int64]:
        return _total(self.live_bytes)

    def highest(self, cuts: Sequence[int]) -> dict[str, list[int]]:
        """Bytes of each category at the moment of the highest total between two neighbours of `cuts`, one a pair.

        `cuts` are places of events in order, each above the one before it. Categories without bytes are left out.
        """
        first = cuts[0]
        total = _total({name: values[first : cuts[-1]] for name, values in self.live_bytes.items()})
        moments = [start + int(total[start - first : end - first].argmax()) for start, end in pairwise(cuts)]
        found = {name: values[moments].tolist() for name, values in self.live_bytes.items()}
        return {name: values for name, values in found.items() if any(values)}

    @property
    def at_peak(self) -> dict[str, int]:
        """Bytes of each category at the moment of the highest total."""
        if not len(self.total_bytes):
            return dict.fromkeys(CATEGORIES, 0)
        moment = int(self.total_bytes.argmax())
        return {name: int(values[moment]) for name, values in self.live_bytes.items()}


def _final_categories(allocations: Sequence[Allocation], backward_starts: Sequence[int]) -> list[str]:
    """Each allocation's category; an activation that is dead before any later backward pass is a temporary."""
    starts = np.asarray(backward_starts, np.int64)
    end = np.iinfo(np.int64).max
    names = []
    for allocation in allocations:
        name = allocation.category
        if name == "recomputed":  # by activation checkpointing, during backward
            name = "activations"
        elif name == "activations":
            died = end if allocation.died is None else allocation.died
            first = int(np.searchsorted(starts, allocation.born, side="right"))
            if first == len(starts) or starts[first] > died:
                name = "temporaries"
        names.append(name)
    return names


def timeline_of(
    nbytes: npt.NDArray[np.int64], categories: npt.NDArray[np.int64], phase_marks: Sequence[tuple[int, str]]
) -> Timeline:
    """The timeline and the peak of each phase, from the size and the category number of each event."""
    live = _live(nbytes, categories)
    return Timeline(live_bytes=live, phases=_phase_peaks(live, phase_marks, len(nbytes)))


def _live(nbytes: npt.NDArray[np.int64], categories: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[np.int64]]:
    granules = _granules(nbytes)
    return {name: np.cumsum(np.where(categories == i, granules, 0)) for i, name in enumerate(CATEGORIES)}


def _phase_peaks(
    live: Mapping[str, npt.NDArray[np.int64]], marks: Sequence[tuple[int, str]], count: int
) -> tuple[LivePeak, ...]:
    total = _total(live)
    moments: dict[str, int] = {}
    for (start, name), (end, _) in zip(marks, [*marks[1:], (count, "")], strict=True):
        if end <= start:
            continue
        moment = start + int(total[start:end].argmax())
        if name not in moments or total[moment] > total[moments[name]]:
            moments[name] = moment
    return tuple(
        LivePeak(
            name=name,
            peak_allocated_bytes=int(total[moment]),
            categories={key: int(values[moment]) for key, values in live.items()},
        )
        for name, moment in moments.items()
    )


def _peak_report(
    log: EventLog, allocations: Sequence[Allocation], *, backward_starts: Sequence[int], limit: int
) -> PeakReport:
    total = np.cumsum(_granules(np.asarray(log.nbytes, np.int64)))
    if not len(total):
        return PeakReport(allocated_bytes=0, phase="start", items=())
    moment = int(total.argmax())
    names = _final_categories(allocations, backward_starts)
    groups: dict[tuple[str, str, str, str], list[Allocation]] = defaultdict(list)
    for allocation, name in zip(allocations, names, strict=True):
        if allocation.born <= moment and (allocation.died is None or allocation.died > moment):
            groups[name, allocation.place, allocation.op, allocation.dtype].append(allocation)
    items = [
        PeakItem(
            category=name, place=place, op=op, shape=max(members, key=lambda a: a.nbytes).shape, dtype=dtype,
            nbytes=sum(a.nbytes for a in members), count=len(members),
        )
        for (name, place, op, dtype), members in groups.items()
    ]  # fmt: skip
    items.sort(key=lambda item: -item.nbytes)
    phase = allocations[int(log.ids[moment])].phase
    return PeakReport(allocated_bytes=int(total[moment]), phase=phase, items=tuple(items[:limit]))


def _total(live: Mapping[str, npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    first, *others = live.values()
    total = first.copy()
    for each in others:
        total += each  # a run has 10^6 events: all categories in one array take four times as long
    return total


def _granules(nbytes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Round away from zero to a multiple of 512 B, as the allocator does."""
    rounded = -(-np.abs(nbytes) // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
    return np.asarray(np.sign(nbytes) * rounded, np.int64)


# -- the card ---------------------------------------------------------------------------------------------------------

Mode = Literal["cuda", "cpu"]


def world_size() -> int:
    """The number of ranks of this job, one a card."""
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


class FakeGpu:
    """One simulated card, readable during and after the block. Byte counts are those torch reports on such a card."""

    def __init__(
        self, spec: GpuSpec, *, mode: Mode, enforce_capacity: bool = True, occupied_bytes: int = 0,
        settings: AllocatorSettings | None = None, host_costs: HostCosts | None = None, record_places: bool = True,
        follow_layers: bool = False, expert_imbalance: float = 1.0,
    ) -> None:  # fmt: skip
        self.spec = spec
        self.mode: Mode = mode
        self.settings = settings or AllocatorSettings.from_environment()
        self.notes: list[str] = []
        self.only_last_decode_steps = False  # of a rollout: exact for its peak, not for fragmentation
        self.skips_rollouts = False  # a rollout only returns tokens: nothing of it is traced
        self.plays_micro_batches = False  # of a rollout, where one is like another before it; nobody reads its metrics
        self.attention_kernels: dict[str, int] = {}
        self.occupied_bytes = occupied_bytes
        self._world = nccl_bytes(spec, world_size())  # of the group of all ranks, which is there from the start
        room = spec.allocatable_bytes - occupied_bytes - self._world
        self.allocatable_bytes = room if enforce_capacity else UNLIMITED
        allocator = CachingAllocator(capacity_bytes=self.allocatable_bytes, settings=self.settings)
        self.memory = SimulatedMemory(spec, allocator, device_type=mode, record_places=record_places)
        self.memory.classify = self._classify
        self.layers = LayerRecorder(self.memory) if follow_layers else None
        self.clock = Clock(spec, host_costs or HostCosts())
        if self.layers is not None:
            self.clock = self.layers.clock = LayerClock(spec, host_costs or HostCosts(), self.layers)
            self.memory.layer_at_work = self.layers.code
        self.clock.collectives.per_machine = int(os.environ.get("LOCAL_WORLD_SIZE", CARDS_OF_A_MACHINE))
        self.clock.collectives.network_gbit = int(os.environ.get(NETWORK_GBIT, 0))
        if unmeasured := stand_in(spec):
            self.note(unmeasured)
        if self._world:
            self.note(nccl_note(spec, world_size()))
        workspace = blas_workspace_bytes(spec.compute_capability)
        self.tracer = Tracer(self.memory, self.clock, blas_workspace_bytes=workspace, note=self.note)
        self.tracer.layers = self.layers
        self.tracer.shadows.expert_imbalance = expert_imbalance
        self.tracer.shadows.routed = self._note_routing
        self._peaks = (0, 0, 0)
        self.backward_starts: list[int] = []
        self._was_in_backward = False
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # torch swaps no referred tensor

    @contextlib.contextmanager
    def standing_for(self, times: int) -> Iterator[None]:
        """Context whose content happens `times` times in a row, and is traced once.

        It must leave the memory as it finds it. The host waits for the card at its begin and at its end.
        """
        clock = self.clock
        clock.synchronize()
        first = clock.cut() if isinstance(clock, LayerClock) else 0
        began_s, before = clock.now_s, clock.traced_s
        yield
        clock.synchronize()
        if times < 2:
            return
        last = clock.cut() if isinstance(clock, LayerClock) else 0
        like = {part: max(0.0, seconds - before.get(part, 0.0)) for part, seconds in clock.traced_s.items()}
        clock.advance((clock.now_s - began_s) * (times - 1), like=like)
        if isinstance(clock, LayerClock):
            clock.repeat(first, last, times - 1)

    # ------------------------------------------------------------------ results
    @property
    def fidelity(self) -> str:
        """Description of the mode that produced the results; cpu mode is less faithful than cuda mode."""
        if self.mode == "cuda":
            return "cuda: fake CUDA tensors, CUDA dispatch and kernels"
        return "cpu: fake CPU tensors; what CUDA does differently (attention kernel, fused loss, workspaces) is missing"

    @property
    def peak_allocated_bytes(self) -> int:
        """Peak bytes of live tensors over the whole block (an unreset torch.cuda.max_memory_allocated)."""
        return max(self._peaks[0], self.memory.allocator.peak_allocated_bytes)

    @property
    def peak_reserved_bytes(self) -> int:
        """Peak bytes held by the caching allocator."""
        return max(self._peaks[1], self.memory.allocator.peak_reserved_bytes)

    @property
    def peak_requested_bytes(self) -> int:
        """Peak bytes requested, before rounding."""
        return max(self._peaks[2], self.memory.allocator.peak_requested_bytes)

    @property
    def communicator_bytes(self) -> int:
        """NCCL's buffers on this card, of all groups of ranks that it communicates with; part of `outside_bytes`."""
        return max(self._world, sum(nccl_bytes(self.spec, ranks) for ranks in self.tracer.groups.values()))

    @property
    def outside_bytes(self) -> int:
        """Device-used bytes outside torch's allocator: CUDA context, NCCL's buffers and other processes."""
        return self.spec.context_bytes + self.communicator_bytes + self.occupied_bytes

    @property
    def device_used_bytes(self) -> int:
        """Peak device-used bytes as the driver reports them: those outside the allocator and its reserved bytes."""
        return self.outside_bytes + self.peak_reserved_bytes

    @property
    def least_capacity_bytes(self) -> int:
        """Capacity of the smallest card (as its driver reports it) that completes this run, to within 16 MiB above."""
        count = len(self.memory.log)
        if self._least is None or self._least[0] != count:
            self._least = (count, least_capacity(self.memory.log, settings=self.settings))
        least = self.outside_bytes + self._least[1]
        return min(least, self.device_used_bytes)  # used bytes are always sufficient; the search has a tolerance

    _least: tuple[int, int] | None = None

    @property
    def elapsed_s(self) -> float:
        """Simulated seconds until all work launched so far has finished."""
        return self.clock.now_s

    @property
    def timeline(self) -> Timeline:
        log, numbers = self.memory.log, self.category_numbers()
        ids = np.asarray(log.ids, np.int64)
        return timeline_of(
            np.asarray(log.nbytes, np.int64), numbers[ids] if len(ids) else ids, self.memory.phase_marks
        )  # fmt: skip

    def category_numbers(self) -> npt.NDArray[np.int64]:
        """Each allocation's category as an index of `CATEGORIES`."""
        self._mark_gradients()
        number = {name: i for i, name in enumerate(CATEGORIES)}
        names = _final_categories(self.memory.allocations, self.backward_starts)
        return np.asarray([number.get(name, number["temporaries"]) for name in names], np.int64)

    def why_peak(self, limit: int = 20) -> PeakReport:
        """The tensors alive at the peak and the code that allocated them, largest first."""
        self._mark_gradients()
        return _peak_report(self.memory.log, self.memory.allocations, backward_starts=self.backward_starts, limit=limit)

    # ------------------------------------------------------------------ during the block
    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name the phase of the code inside, for the timeline."""
        before = self.memory.phase
        self.memory.enter_phase(name)
        try:
            yield
        finally:
            self.memory.enter_phase(before)

    def note(self, text: str) -> None:
        """Record a difference between the simulation and a real card (once per text)."""
        if text not in self.notes:
            self.notes.append(text)

    def _note_routing(self) -> None:
        most = self.tracer.shadows.expert_imbalance
        self.note(
            "the routers of mixtures of experts were taken as balanced: each token has its k experts in turn"
            + (f", and one expert {most:g} times its share" if most != 1.0 else "")
            + "; see expert_imbalance of fake_gpu"
        )

    def follow_host(self) -> HostTensors:
        """Follow the tensors in the memory of the host from here on."""
        host = self.tracer.host = HostTensors()
        if self.layers is not None:
            self.layers.host, host.layer_at_work = host, self.layers.code
        return host

    def reset_peaks(self) -> None:
        """torch.cuda.reset_peak_memory_stats; the peaks of this object are kept."""
        self._peaks = (self.peak_allocated_bytes, self.peak_reserved_bytes, self.peak_requested_bytes)
        self.memory.allocator.reset_peaks()

    # ------------------------------------------------------------------ categories
    def _classify(self, tensor: torch.Tensor) -> str:
        backward = in_backward()
        if backward and not self._was_in_backward:
            self.backward_starts.append(len(self.memory.log))
        self._was_in_backward = backward
        shape = tensor.shape
        if len(shape) >= 2 and shape[-1] in self.tracer.vocabulary_sizes and tensor.dtype.is_floating_point:
            return "logits"
        if not torch.is_grad_enabled():
            return "temporaries"
        return "recomputed" if backward else "activations"

    def parameter_registered(self, module: torch.nn.Module, name: str, value: torch.Tensor | None) -> None:
        if value is not None:
            self.memory.mark(value, "weights")
            if self.layers is not None:
                self.layers.weight_registered(module, value)

    def before_step(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        self._optimizers.add(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:  # accelerate casts those of FSDP1 once sharded
                self.memory.mark(parameter, "weights")
        self._mark_gradients()

    def after_step(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        states = [
            (parameter, value)
            for parameter, state in optimizer.state.items()
            for value in (state.values() if isinstance(state, dict) else ())
            if isinstance(value, torch.Tensor)
        ]
        for _, value in states:
            self.memory.mark(value, "optimizer")
        if self.layers is not None:
            self.layers.own_states(states)

    def _mark_gradients(self) -> None:
        for optimizer in self._optimizers:
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                if parameter.grad is not None:
                    self.memory.mark(parameter.grad, "gradients")
