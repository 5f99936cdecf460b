"""The kernels that a step launches, by kind: the input of `MassModel` for its seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

from autofit.fakegpu.engines.forward import PagedBatching
from autofit.fakegpu.engines.vllm import VllmEngine
from autofit.fakegpu.formula.polynomials import (
    COLLECTIVES,
    COMPUTING,
    COPIES,
    Factor,
    Kind,
    Polynomial,
    Shape,
    Symbols,
    phase_of,
)
from autofit.fakegpu.kernels import Times, product_name
from autofit.fakegpu.rates.kernels import Work
from autofit.fakegpu.specs import HostCosts, LaunchOrigin


class Info(NamedTuple):
    """Work of one kind of kernel at the base point."""

    work: Work
    item_bytes: tuple[int, ...]  # element size of each tensor
    moved: tuple[int, ...]  # number of reads and writes of each tensor

    @property
    def name(self) -> str:
        return self.work.name

    @property
    def sort(self) -> tuple[str, float, int, bool]:
        """Properties that decide a product's or attention's seconds beside its sizes."""
        return self.work.name, self.work.rate, self.work.item_bytes, self.work.causal

    def flop_seconds(self, kind: Kind, symbols: Symbols, share: float) -> Polynomial:
        """Seconds of a kernel outside the tables: FLOPs grow with the elements of its largest tensor.

        Of several alike the last, the output; but a convolution's backward has a weight's gradient there.
        """
        dims, sizes = symbols.factors.get(kind), [prod(shape) for shape in kind.shapes]
        largest = max(range(len(sizes)), key=lambda which: (sizes[which], which), default=-1)
        factors: list[Factor] = [f for d in dims[largest] for f in d] if dims and self.work.flops else []
        return symbols.product(self.work.flops / (self.work.rate * share), factors)

    def move_seconds(self, kind: Kind, symbols: Symbols, bytes_per_s: float) -> Polynomial:
        total: Polynomial = {}
        for which, (size, times) in enumerate(zip(self.item_bytes, self.moved, strict=True)):
            for exponents, value in symbols.numel(kind, which).items() if times else ():
                total[exponents] = total.get(exponents, 0.0) + value * size * times / bytes_per_s
        return total


class HostCounts(NamedTuple):
    """Work of the host in one segment: launches, in the order of `Launch`, views, and its work `alone`.

    The last is Python that launches nothing while the card has nothing to do, in launches.
    """

    plain: float = 0
    recorded: float = 0
    autograd: float = 0
    views: float = 0
    alone: float = 0

    def seconds(self, costs: HostCosts) -> float:
        """Those beside the card's work."""
        launches = (self.plain, self.recorded, self.autograd)
        return self.views * costs.view_s + sum(n * costs.of(by) for by, n in zip(LaunchOrigin, launches, strict=True))

    def alone_s(self, costs: HostCosts) -> float:
        """Seconds of the host's work while the card is idle."""
        return self.alone * costs.launch_s


_VIEWS, _ALONE = map(HostCounts._fields.index, ("views", "alone"))


class Counted(NamedTuple):
    """Counts so far: kernels by kind, the host's work by phase, and the last rollout's decode steps."""

    kinds: Mapping[Kind, int]
    hosts: Mapping[str, HostCounts]
    steps: list[dict[Kind, int]]
    step_hosts: list[list[float]]


class Step(NamedTuple):
    """A step of a phase, in order: a kernel, copy or collective of a `kind`, a recorded moment, or a wait for one.

    `lanes` are the clock's: the one a kernel runs in, and those whose work it comes after; those whose end the moment
    is; or those that wait.
    """

    host: HostCounts  # of the phase so far
    lanes: Sequence[int] = ()
    kind: Kind | None = None
    moment: int = -1
    waits: bool = False
    share: float = 1.0  # of a kernel of that kind


@dataclass(slots=True)
class KernelKinds:
    """Kernels of the recorded steps by kind, and the launches of each segment."""

    counts: dict[Kind, float] = field(default_factory=dict)
    infos: dict[Kind, Info] = field(default_factory=dict)
    host_counts: dict[str, HostCounts] = field(default_factory=dict)
    repeats: Mapping[str, float] = field(default_factory=dict)  # number of recorded passes of each segment
    last_step: dict[Kind, int] = field(default_factory=dict)
    step_before: dict[Kind, int] = field(default_factory=dict)
    position: int = 0  # tokens generated before the last decode step seen
    engine: VllmEngine | PagedBatching | None = None  # what generates, if not the model itself
    orders: Mapping[str, Sequence[Step]] = field(default_factory=dict)  # of phases that do more than compute

    @staticmethod
    def segment(kind: Kind) -> str:
        origin = kind.origin
        assert isinstance(origin, tuple)
        return str(origin[0])

    @property
    def per_segment(self) -> dict[Kind, float]:
        """Number of kernels of each kind per pass of its segment, in order of first launch."""
        return {kind: self.count_per_segment(kind) for kind in self.counts}

    def count_per_segment(self, kind: Kind) -> float:
        return self.counts.get(kind, 0) / max(1, self.repeats.get(phase_of(self.segment(kind)), 1))

    def in_whole_tiles(self, tile: int, rest: int) -> KernelKinds:
        """These kinds, in which a kernel over the last `rest` rows of a loop is a part of one over `tile` rows.

        The number of tiles jumps as the rows grow, and so would every seconds' slope; whole tiles and the part of the
        last one are in proportion to the rows.
        """
        counts, parts = dict(self.counts), dict[Kind, Kind]()
        for kind, number in self.counts.items():
            shapes = tuple(tuple(tile if size == rest else size for size in shape) for shape in kind.shapes)
            whole = Kind(kind.origin, shapes)
            if whole != kind and whole in counts:
                del counts[kind]
                counts[whole] += number * rest / tile
                parts[kind] = whole
        orders = {
            phase: [s._replace(kind=parts[s.kind], share=rest / tile) if s.kind in parts else s for s in steps]
            for phase, steps in self.orders.items()
        }
        return replace(self, counts=counts, orders=orders)

    def host_seconds(self, segment: str, costs: HostCosts) -> float:
        seconds = self.host_counts.get(segment, HostCounts()).seconds(costs)
        return seconds / max(1, self.repeats.get(segment, 1))

    def alone_seconds(self, segment: str, costs: HostCosts) -> float:
        """Seconds of a pass of the segment in which the host works and the card is idle."""
        seconds = self.host_counts.get(segment, HostCounts()).alone_s(costs)
        return seconds / max(1, self.repeats.get(segment, 1))


class KernelLog:
    """Collects kernels while `on`. The clock reports the kernels, and a rollout the start of each decode step."""

    def __init__(self) -> None:
        self.on = False
        self.aside = self.of_step = False
        self.lanes: Sequence[int] = (COMPUTING,)
        self.phase = "load"
        self.phase_of_step = ""  # what the host does alone for a whole step counts there; "": in the phase it comes in
        self._decoding = False
        self._steps: list[dict[Kind, int]] = []
        self._step_hosts: list[list[float]] = []
        self._counts: dict[Kind, int] = {}
        self._infos: dict[Kind, Info] = {}
        self._hosts: dict[str, list[float]] = {}
        self._orders: dict[str, list[Step]] = {}
        self._moments = 0
        self._engine: VllmEngine | PagedBatching | None = None

    def restart(self, kept: str = "") -> None:
        """Forget all that was counted, but what the phase `kept` has."""
        self._counts = {kind: count for kind, count in self._counts.items() if _phase(kind) == kept}
        self._hosts = {phase: counts for phase, counts in self._hosts.items() if phase == kept}
        self._orders = {phase: steps for phase, steps in self._orders.items() if phase == kept}

    def decode_step(self, number: int) -> None:
        """Start decode step `number` of this rollout."""
        if number == 0:
            self._steps, self._step_hosts = [], []
        self._decoding = True
        self._steps.append({})
        self._step_hosts.append(list(HostCounts()))

    def decode_end(self) -> None:
        self._decoding = False

    def engine(self, law: VllmEngine | PagedBatching) -> None:
        """Note the engine that generates; the last one counts, after a synchronisation of its weights."""
        self._engine = law

    def place(self) -> object:
        """Place under which the next kernels are counted."""
        return self.on, self.phase

    def counted(self) -> Counted:
        hosts = {phase: HostCounts(*counts) for phase, counts in self._hosts.items()}
        return Counted(dict(self._counts), hosts, self._steps, self._step_hosts)

    def again(self, begin: Counted, end: Counted) -> None:
        """Count once more what was counted from `begin` to `end`: a rollout, or a micro-batch, like one before."""
        for kind, count in end.kinds.items():
            if more := count - begin.kinds.get(kind, 0):
                self._counts[kind] = self._counts.get(kind, 0) + more
        for phase, counts in end.hosts.items():
            before, now = begin.hosts.get(phase, HostCounts()), self._hosts.setdefault(phase, list(HostCounts()))
            now[:] = [n + c - b for n, c, b in zip(now, counts, before, strict=True)]
        if end.steps is not begin.steps:  # a rollout began
            self._steps, self._step_hosts = end.steps, end.step_hosts

    def moment(self, lanes: Sequence[int]) -> int:
        """The number of the moment at which `lanes` have done all that they have now."""
        self._moments += 1
        self._add_step(lanes, moment=self._moments)
        return self._moments

    def wait(self, lanes: Sequence[int], number: int) -> None:
        self._add_step(lanes, moment=number, waits=True)

    def _add_step(self, lanes: Sequence[int], **what: Any) -> None:
        if self.on and not self._decoding:
            self._orders.setdefault(self.phase, []).append(Step(HostCounts(*self._host()), lanes, **what))

    def view(self) -> None:
        if self.on:
            self._host()[_VIEWS] += 1

    def host_work(self, launches: float, *, alone: bool) -> None:
        if self.on and alone and self.of_step and self.phase_of_step:
            self._hosts.setdefault(self.phase_of_step, list(HostCounts()))[_ALONE] += launches
        elif self.on:
            self._host()[_ALONE if alone else LaunchOrigin.PLAIN] += launches

    def kernel(
        self, func: OpOverload, args: Sequence[object], out: object, *, work: Work, times: Times, by: LaunchOrigin
    ) -> None:
        if not self.on:
            return
        self._host()[by] += 1
        shapes: list[Shape] = []
        sizes: list[int] = []
        _add(args, shapes, sizes)
        _add(out, shapes, sizes)
        name = product_name(func._schema.name[6:], args)
        segment = ("decode" if self._decoding else self.phase) + self._beside(work)
        kind = Kind((segment, name, tuple(sizes), work.causal), tuple(shapes))
        counts = self._steps[-1] if self._decoding else self._counts
        counts[kind] = counts.get(kind, 0) + 1
        self._add_step(self.lanes, kind=kind)
        if kind not in self._infos:
            self._infos[kind] = Info(work, tuple(sizes), (1,) * len(shapes) if times is None else times)

    def kinds(self, repeats: Mapping[str, float]) -> KernelKinds:
        """The collected kernels; `repeats` is the number of passes of each phase."""
        steps = [s for s in self._steps if s]
        counts, hosts = dict[Kind, float](self._counts), {k: HostCounts(*v) for k, v in self._hosts.items()}
        if len(steps) >= 2:
            counts |= steps[-1]
            hosts["decode"] = HostCounts(*self._step_hosts[self._steps.index(steps[-1])])
        return KernelKinds(
            counts=counts, infos=self._infos, host_counts=hosts, repeats=repeats,
            last_step=steps[-1] if len(steps) >= 2 else {}, step_before=steps[-2] if len(steps) >= 2 else {},
            position=len(steps) - 1 if len(steps) >= 2 else 0, engine=self._engine,
            orders=self._orders_beside(hosts),
        )  # fmt: skip

    def _orders_beside(self, hosts: Mapping[str, HostCounts]) -> dict[str, list[Step]]:
        """The orders of the phases that have copies or collectives beside their kernels, with their end.

        None of a phase with a call that was played, whose kernels are in no order.
        """
        phases = {phase_of(name) for kind in self._counts if phase_of(name := KernelKinds.segment(kind)) != name}
        launched = {phase: sum(n for kind, n in self._counts.items() if _phase(kind) == phase) for phase in phases}
        return {
            phase: [*self._orders[phase], Step(hosts[phase])]
            for phase in sorted(phases)
            if launched[phase] == sum(step.kind is not None for step in self._orders[phase])
        }

    def _beside(self, work: Work) -> str:
        """Suffix of a segment's name for a kernel that overlaps with the others."""
        if not self.aside:
            return ""
        return COPIES if work.name == "copy_" else COLLECTIVES

    def _host(self) -> list[float]:
        if self._decoding:
            return self._step_hosts[-1]
        return self._hosts.setdefault(self.phase, list(HostCounts()))


def _phase(kind: Kind) -> str:
    return phase_of(KernelKinds.segment(kind))


def _add(value: object, shapes: list[Shape], sizes: list[int]) -> None:
    if isinstance(value, torch.Tensor):
        shapes.append(tuple(value.shape))
        sizes.append(value.element_size())
    elif isinstance(value, (list, tuple)):
        for item in value:
            _add(item, shapes, sizes)
