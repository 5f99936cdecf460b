"""Live bytes and seconds of any configuration, fitted to a few short traces and then cheap to evaluate.

The live bytes at each allocation of a training step are a polynomial of the configuration (`polynomials.py`), and
linear in the number of equal layers. The peak of a phase is the maximum over its allocations. Allocations that are
never the maximum are dropped, so one configuration costs a small matrix product. Evaluating a model needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from autofit.fakegpu.engines.forward import PagedBatching
from autofit.fakegpu.engines.vllm import VllmEngine
from autofit.fakegpu.formula.order import Order
from autofit.fakegpu.formula.polynomials import Affine, Basis, Exponents, Kind, Polynomial, Steps, Symbols, with_steps
from autofit.fakegpu.formula.seconds import KernelRows, TabledRows
from autofit.fakegpu.rates.kernels import KernelSeconds
from autofit.fakegpu.specs import GpuSpec, HostCosts

if TYPE_CHECKING:
    from autofit.fakegpu.formula.kernel_log import KernelKinds
    from autofit.fakegpu.memory import SimulatedMemory

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_POSITION = "T"  # the variable of a decode step: the number of tokens generated before it
_PRUNING_POINTS = 1500
_WORST_POINTS = 12  # configurations at which the highest moment of each kind is kept


class TracedCard(Protocol):
    """The part of a simulated card that a trace reads."""

    @property
    def memory(self) -> SimulatedMemory: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One short simulated training, reduced to the input of `MassModel.fit`. The recorder chooses the phase names.

    Stepwise scratch is left out: a formula would carry its leaps on from the small sizes of the traces.
    """

    layers: int
    kinds: tuple[Kind, ...]  # kind of each allocation
    sizes: tuple[int, ...]  # bytes of each allocation
    unit_bytes: tuple[int, ...]  # element size of each allocation
    phases: tuple[str, ...]  # phase of each allocation
    ids: npt.NDArray[np.int64]  # allocation of each event
    signs: npt.NDArray[np.int64]  # +1 allocated, -1 freed
    kernels: KernelKinds

    @classmethod
    def of(cls, gpu: TracedCard, layers: int, kernels: KernelKinds) -> Trace:
        kinds, units, phases = [], [], []
        foreseen = np.asarray([not a.is_stepwise for a in gpu.memory.allocations], bool)
        allocations = [a for a in gpu.memory.allocations if not a.is_stepwise]
        for a in allocations:
            unit = _itemsize(a.dtype)
            shape = a.shape if prod(a.shape) * unit == a.nbytes else (a.nbytes,)
            phase = a.phase.rstrip("+")
            file = a.code.co_filename if a.code else ""
            parts = tuple((part.scale, part.multiples, part.above) for part in a.parts)
            shapes = tuple(part.dims for part in a.parts) or (tuple(shape),)
            kinds.append(Kind((phase, a.op, a.dtype, file, a.line, parts), shapes))
            units.append(unit if shape is a.shape and not parts else 1)
            phases.append(a.phase)
        sizes = tuple(sum(part.nbytes for part in a.parts) if a.parts else a.nbytes for a in allocations)
        log = gpu.memory.log
        ids, nbytes = np.asarray(log.ids, np.int64), np.asarray(log.nbytes, np.int64)
        kept, numbers = foreseen[ids], np.cumsum(foreseen) - 1
        return cls(
            layers=layers, kinds=tuple(kinds), sizes=sizes, unit_bytes=tuple(units),
            phases=tuple(phases), ids=numbers[ids[kept]], signs=np.sign(nbytes[kept]), kernels=kernels,
        )  # fmt: skip

    @property
    def peaks(self) -> dict[str, int]:
        """Peak live bytes of each phase over its allocations, unrounded."""
        live = np.cumsum(self.signs * np.asarray(self.sizes)[self.ids])
        found: dict[str, int] = {}
        for event in np.flatnonzero(self.signs > 0):
            phase = self.phases[self.ids[event]]
            found[phase] = max(found.get(phase, 0), int(live[event]))
        return found

    def left_by(self, phase: str) -> int:
        """Bytes that are allocated in the first pass through `phase` and outlive it."""
        starts = np.flatnonzero(self.signs > 0)
        inside = np.asarray([self.phases[self.ids[event]] == phase for event in starts])
        begin = int(inside.argmax())
        if not inside.any() or inside[begin:].all():
            return 0
        first, end = starts[begin], starts[begin + int((~inside[begin:]).argmax())]
        ids, events = np.unique(self.ids[first:end], return_counts=True)
        return int(np.asarray(self.sizes)[ids[(events == 1) & (ids >= self.ids[first])]].sum())

    @property
    def counts(self) -> dict[Kind, int]:
        """Number of allocations of each kind, in order of first appearance."""
        found: dict[Kind, int] = {}
        for kind in self.kinds:
            found[kind] = found.get(kind, 0) + 1
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Variation:
    """A trace in which one variable differs from the base, and with it, by necessity, the variable `instead_of`."""

    variable: str
    value: float
    trace: Trace
    instead_of: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MassModel:
    """Live bytes by phase and seconds by segment, as functions of the variables and the number of layers."""

    variables: tuple[str, ...]
    layers: int  # layers of the base trace
    base: tuple[float, ...]  # the base point, the position of a decode step last
    steps: tuple[Steps, ...]
    exponents: tuple[Exponents, ...]
    rows: Floats  # bytes, (moments, monomials)
    slopes: Floats  # bytes for each further layer, (moments, monomials)
    row_phases: tuple[str, ...]
    time: KernelRows
    unmatched: Mapping[str, int] = field(default_factory=dict)
    engine: VllmEngine | PagedBatching | None = None  # of a rollout; its bytes and seconds are not among the model's
    sample_bytes: float = 0.0  # of each sample of a step, whose micro-batches are all on the card before it begins
    micro_batches: int = 1  # of a traced step

    @classmethod
    def fit(
        cls, base: Trace, variations: Sequence[Variation], *, depths: tuple[Trace, Trace], at: Mapping[str, float],
        ranges: Mapping[str, tuple[float, float]], layers: int, seconds: KernelSeconds,
    ) -> MassModel:  # fmt: skip
        """Fit a model to the trace `base` at the point `at` and to its variations; valid within `ranges`.

        `depths` are two traces at the same point with more layers, of which one has a unit more: what changes between
        them changes with every unit. If both are `base` itself, which then has all layers, nothing depends on them.
        """
        low, high = depths
        names = (*at, _POSITION)
        point = (*map(float, at.values()), float(base.kernels.position))
        sizes, kernels = Symbols(names, point), Symbols(names, point, rounds=False)
        base_sizes, base_kernels = base.counts, base.kernels.per_segment
        sizes.start({**base_sizes, **high.counts})
        kernels.start({**base_kernels, **high.kernels.counts})
        for v in variations:
            sizes.vary(v.variable, v.value, base_sizes, v.trace.counts, instead_of=v.instead_of)
            kernels.vary(v.variable, v.value, base_kernels, v.trace.kernels.per_segment, instead_of=v.instead_of)
        kernels.vary(_POSITION, base.kernels.position - 1, base.kernels.last_step, base.kernels.step_before)
        sample = _sample_points(names, {**ranges, _POSITION: (1.0, ranges.get("C", (1.0, 1.0))[1])})
        memory = _Moments.of(low, high, sizes, sample, layers)
        time = KernelRows.of(low.kernels, high.kernels, kernels, layers=(low.layers, high.layers), kernels=seconds)
        return cls(
            variables=tuple(at), layers=low.layers, base=point, steps=tuple(sizes.steps),
            exponents=memory.basis.exponents, rows=memory.rows,
            slopes=memory.slopes, row_phases=memory.phases, time=time.folded(sample), unmatched=dict(sizes.unmatched),
            engine=base.kernels.engine,
        )  # fmt: skip

    def save(self, path: Path) -> None:
        """Write the model to `path` (.npz) for `load`."""
        time = self.time
        rest = {
            "variables": self.variables, "layers": self.layers, "exponents": self.exponents, "base": self.base,
            "steps": [[each.multiple, each.size, [asdict(f) for f in each.factors], each.above] for each in self.steps],
            "row_phases": self.row_phases, "unmatched": self.unmatched, "time_layers": time.layers,
            "time_exponents": time.exponents, "segments": time.segments, "host": time.host, "alone": time.alone,
            "spec": asdict(time.kernels.spec), "costs": asdict(time.kernels.costs), "tabled": time.tabled.to_json(),
            "orders": {phase: [order.to_json() for order in orders] for phase, orders in time.orders.items()},
            "sums": {name: [list(row) for row in rows] for name, rows in time.sums.items()},
            "engine": None if self.engine is None else self.engine.to_json(),
            "sample_bytes": self.sample_bytes, "micro_batches": self.micro_batches,
        }  # fmt: skip
        np.savez(
            path, rest=np.array(json.dumps(rest)), rows=self.rows, slopes=self.slopes, flop_s=time.flop_s,
            move_s=time.move_s, counts=time.counts, count_slopes=time.count_slopes,
        )  # fmt: skip

    @classmethod
    def load(cls, path: Path) -> MassModel:
        with np.load(path) as kept:
            rest = json.loads(str(kept["rest"]))
            arrays = {name: kept[name] for name in kept.files if name != "rest"}
        time = KernelRows(
            layers=rest["time_layers"], exponents=tuple(map(tuple, rest["time_exponents"])),
            flop_s=arrays["flop_s"], move_s=arrays["move_s"], counts=arrays["counts"],
            count_slopes=arrays["count_slopes"], segments=tuple(rest["segments"]),
            host={k: (v[0], v[1]) for k, v in rest["host"].items()},
            alone={k: (v[0], v[1]) for k, v in rest["alone"].items()},
            kernels=KernelSeconds(GpuSpec.from_json(rest["spec"]), HostCosts(**rest["costs"])),
            tabled=TabledRows.from_json(rest["tabled"], len(rest["time_exponents"])),
            orders={k: (Order.from_json(v[0]), Order.from_json(v[1])) for k, v in rest["orders"].items()},
            sums={k: (np.asarray(v[0]), np.asarray(v[1])) for k, v in rest["sums"].items()},
        )  # fmt: skip
        return cls(
            variables=tuple(rest["variables"]), layers=rest["layers"], base=tuple(rest["base"]),
            steps=tuple(Steps(m, n, tuple(Affine(**f) for f in fs), above) for m, n, fs, above in rest["steps"]),
            exponents=tuple(map(tuple, rest["exponents"])),
            rows=arrays["rows"], slopes=arrays["slopes"], row_phases=tuple(rest["row_phases"]), time=time,
            unmatched=rest["unmatched"],
            engine=_engine(rest["engine"]), sample_bytes=rest["sample_bytes"], micro_batches=rest["micro_batches"],
        )  # fmt: skip

    def peaks(self, values: Mapping[str, Floats], layers: int) -> dict[str, Floats]:
        """Peak live bytes of each phase, one per configuration; `values` has an array for each variable."""
        table = self._table(values)
        table = np.concatenate([table, np.zeros((len(table), 1))], axis=1)
        x = Basis(self.exponents).at(with_steps(table, self.base, self.steps))
        matrix = self.rows + (layers - self.layers) * self.slopes
        names = np.asarray(self.row_phases)
        return {phase: (x @ matrix[names == phase].T).max(axis=1) for phase in dict.fromkeys(self.row_phases)}

    def seconds(self, values: Mapping[str, Floats], layers: int, decode_steps: Floats) -> dict[str, Floats]:
        """Seconds of one pass of each segment (phase), one per configuration; `decode` sums all `decode_steps`."""
        return self.time.seconds(self._table(values), layers, decode_steps)

    def _table(self, values: Mapping[str, Floats]) -> Floats:
        return np.stack([np.asarray(values[name], float) for name in self.variables], axis=1)


@dataclass(frozen=True, slots=True)
class _Moments:
    """The moments (allocations) that can be the peak of a phase, as rows of coefficients."""

    basis: Basis
    rows: Floats
    slopes: Floats
    phases: tuple[str, ...]

    @classmethod
    def of(cls, low: Trace, high: Trace, symbols: Symbols, sample: Floats, layers: int) -> _Moments:
        cache: dict[tuple[Kind, int], Polynomial] = {}
        for trace in (low, high):
            for kind, unit in zip(trace.kinds, trace.unit_bytes, strict=True):
                if (kind, unit) not in cache:
                    cache[kind, unit] = _bytes(kind, unit, symbols)
        basis = Basis.of(cache.values())
        order = {key: i for i, key in enumerate(cache)}
        table = basis.rows(list(cache.values()))
        x = basis.at(with_steps(sample, symbols.base, symbols.steps))
        (below, below_at), (above, above_at) = (_moments(t, table, order, x) for t in (low, high))
        keys = [k for k in below_at.keys() & above_at.keys() if below_at[k].plays_as(above_at[k])]
        rows = below[[below_at[k].event for k in keys]]
        slopes = (above[[above_at[k].event for k in keys]] - rows) / max(1, high.layers - low.layers)
        phases = np.asarray([k[0] for k in keys])
        _, first = np.unique(
            np.concatenate([np.unique(phases, return_inverse=True)[1][:, None], rows, slopes], axis=1).round(3),
            axis=0, return_index=True,
        )  # fmt: skip
        rows, slopes, phases = rows[first], slopes[first], phases[first]
        kept: set[int] = set()
        for depth in {high.layers, layers, 2 * layers}:
            heights = x @ (rows + (depth - low.layers) * slopes).T
            for phase in set(phases):
                mine = np.flatnonzero(phases == phase)
                kept |= set(mine[heights[:, mine].argmax(axis=1)])
        chosen = sorted(kept)
        return cls(basis, rows[chosen], slopes[chosen], tuple(str(phases[i]) for i in chosen))


def _bytes(kind: Kind, unit: int, symbols: Symbols) -> Polynomial:
    """The size of an allocation in bytes, as a polynomial; dimensions that are rounded up are variables of it."""
    origin = kind.origin
    assert isinstance(origin, tuple)
    if not origin[-1]:
        return {e: unit * value for e, value in symbols.numel(kind).items()}
    total: Polynomial = {}
    for which, (scale, multiples, above) in enumerate(origin[-1]):
        for exponents, value in symbols.rounded_numel(kind, which, multiples, above).items():
            total[exponents] = total.get(exponents, 0.0) + scale * value
    return total


class _AllocationMoment(NamedTuple):
    """An allocation: the number of its event, and its place among those of its kind in one pass through a phase."""

    event: int
    from_first: int
    from_last: int

    def plays_as(self, deeper: _AllocationMoment) -> bool:
        """True if both are the same one of their kind, counted from the first, from the last, or from the middle.

        The middle is where the backward pass begins, which computes a checkpointed layer's forward once more.
        """
        moved = deeper.from_first - self.from_first
        return moved == 0 or deeper.from_last == self.from_last or moved == deeper.from_last - self.from_last


def _moments(
    trace: Trace, table: Floats, order: Mapping[tuple[Kind, int], int], x: Floats
) -> tuple[Floats, dict[tuple[object, ...], _AllocationMoment]]:
    """Live-byte coefficients after each event; the first, last and highest moments of each kind."""
    of_allocation = np.asarray([order[k, u] for k, u in zip(trace.kinds, trace.unit_bytes, strict=True)])
    live = np.cumsum(trace.signs[:, None] * table[of_allocation[trace.ids]], axis=0)
    names: dict[tuple[str, int], int] = {}
    of_name = np.asarray([names.setdefault(key, len(names)) for key in zip(trace.phases, of_allocation, strict=True)])
    events = np.flatnonzero(trace.signs > 0)
    keys = of_name[trace.ids[events]]
    names_of_phases = np.asarray(trace.phases)[trace.ids[events]]
    passes = np.cumsum(np.append(0, names_of_phases[1:] != names_of_phases[:-1]))
    from_first, from_last = _places(keys + len(names) * passes)
    time = np.arange(len(events), dtype=float)
    heights = live[events] @ x[:: max(1, len(x) // _WORST_POINTS)].T
    found: dict[tuple[object, ...], _AllocationMoment] = {}
    for which, rank in enumerate([-time, time, *heights.T]):
        sorted_ = np.lexsort((rank, keys))
        last = sorted_[np.append(keys[sorted_][1:] != keys[sorted_][:-1], True)]
        for (phase, symbol), at in zip(names, last, strict=True):
            found[phase, symbol, which] = _AllocationMoment(int(events[at]), int(from_first[at]), int(from_last[at]))
    return live, found


def _places(groups: Ints) -> tuple[Ints, Ints]:
    """The number of earlier and of later elements of the same group, for each element."""
    order = np.argsort(groups, kind="stable")
    _, starts, counts = np.unique(groups[order], return_index=True, return_counts=True)
    before = np.empty(len(groups), np.int64)
    before[order] = np.arange(len(groups)) - np.repeat(starts, counts)
    total = np.empty(len(groups), np.int64)
    total[order] = np.repeat(counts, counts)
    return before, total - before - 1


def _sample_points(names: Sequence[str], ranges: Mapping[str, tuple[float, float]]) -> Floats:
    """Sample points of the box `ranges`: log-uniform, with some coordinates at an edge."""
    random = np.random.default_rng(0)
    columns = []
    for name in names:
        low, high = ranges[name]
        spread = np.exp(random.uniform(np.log(max(low, 1e-9)), np.log(max(high, 1e-9)), _PRUNING_POINTS))
        edge = random.random(_PRUNING_POINTS)
        columns.append(np.where(edge < 0.15, low, np.where(edge > 0.85, high, spread)))
    return np.stack(columns, axis=1)


def _engine(kept: dict[str, Any] | None) -> VllmEngine | PagedBatching | None:
    if kept is None:
        return None
    return PagedBatching.from_json(kept) if "continuous" in kept else VllmEngine.from_json(kept)


@cache
def _itemsize(dtype: str) -> int:
    import torch

    return int(getattr(torch, dtype.removeprefix("torch.")).itemsize)
