"""Seconds of any configuration: polynomials of sizes, FLOPs, bytes and count for each kind of kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from autofit.fakegpu.formula.order import Order, at_depth
from autofit.fakegpu.formula.polynomials import (
    COLLECTIVES,
    COPIES,
    Basis,
    Exponents,
    Kind,
    Polynomial,
    Symbols,
    phase_of,
)
from autofit.fakegpu.rates.collectives import CollectiveSeconds
from autofit.fakegpu.rates.kernels import Family, KernelSeconds, family, places, sizes

if TYPE_CHECKING:
    from autofit.fakegpu.formula.kernel_log import KernelKinds


# Products and attention of any configuration: their sizes as polynomials, their seconds from the card's tables.

Floats = npt.NDArray[np.float64]
ROLES = 6  # the most sizes of which a kernel's seconds are a function


class Sort(NamedTuple):
    """Kernels that one call of the table tells."""

    family: Family
    name: str
    rate: float
    item_bytes: int
    causal: bool


def size_polynomials(name: str, kind: Kind, symbols: Symbols) -> list[Polynomial]:
    """The sizes of a product or of attention, `ROLES` of them; those beyond its own are 1."""
    at_base = sizes(name, kind.shapes)
    factors = symbols.factors.get(kind)
    told = []
    for place, size in zip(places(name), at_base, strict=True):
        mine = factors[place[0]][place[1]] if factors and place is not None else ()
        told.append(symbols.product(float(size), mine))
    return told + [symbols.product(1.0, ())] * (ROLES - len(told))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TabledRows:
    """Rows of coefficients of the sizes of some kernels: (kernels, ROLES, monomials), and what else tells seconds."""

    numbers: tuple[int, ...]  # of the kernels, among all of a `KernelRows`
    sorts: tuple[Sort, ...]
    rows: Floats

    @classmethod
    def of(
        cls, numbers: Sequence[int], sorts: Sequence[Sort], told: Sequence[Sequence[Polynomial]], basis: Basis
    ) -> TabledRows:
        rows = np.array([basis.rows(each) for each in told]).reshape(len(numbers), ROLES, len(basis.exponents))
        return cls(numbers=tuple(numbers), sorts=tuple(sorts), rows=rows)

    def renumbered(self, kept: npt.NDArray[np.bool_]) -> TabledRows:
        """The same kernels where only those `kept` are left of all; all of these are."""
        new = np.cumsum(kept) - 1
        return TabledRows(numbers=tuple(int(new[i]) for i in self.numbers), sorts=self.sorts, rows=self.rows)

    def seconds(self, x: Floats, used: npt.NDArray[np.intp], chosen: npt.NDArray[np.bool_], kernels: KernelSeconds,
                ) -> list[tuple[int, Floats]]:  # fmt: skip
        """(number, seconds at each point) of the `chosen` kernels; `x` holds the monomials `used`, (points, used)."""
        by_sort: dict[Sort, list[int]] = {}
        for row, (number, sort) in enumerate(zip(self.numbers, self.sorts, strict=True)):
            if chosen[number]:
                by_sort.setdefault(sort, []).append(row)
        told = []
        for sort, rows in by_sort.items():
            of = np.rint(np.tensordot(self.rows[rows][:, :, used], x, (2, 1)))  # (kernels, roles, points)
            flat = of.transpose(1, 0, 2).reshape(ROLES, -1)
            distinct, back = _distinct(flat)
            each = kernels.measured(
                sort.family, sort.name, distinct, rate=sort.rate, item_bytes=sort.item_bytes, causal=sort.causal
            )[back].reshape(len(rows), -1)
            told += [(self.numbers[row], seconds) for row, seconds in zip(rows, each, strict=True)]
        return told

    def to_json(self) -> dict[str, object]:
        return {"numbers": self.numbers, "sorts": self.sorts, "rows": self.rows.tolist()}

    @classmethod
    def from_json(cls, kept: dict[str, list[object]], monomials: int) -> TabledRows:
        rows = np.array(kept["rows"], float).reshape(-1, ROLES, monomials)
        sorts = tuple(Sort(*each) for each in kept["sorts"])  # type: ignore[misc]
        return cls(numbers=tuple(kept["numbers"]), sorts=sorts, rows=rows)  # type: ignore[arg-type]


def _distinct(columns: Floats) -> tuple[Floats, npt.NDArray[np.intp]]:
    """The distinct columns, and for each column the number of its equal. Candidates share most of their sizes."""
    key = np.zeros(columns.shape[1])
    for row in columns:
        _, number = np.unique(row, return_inverse=True)
        key = key * (number.max(initial=0) + 1) + number
    _, first, back = np.unique(key, return_index=True, return_inverse=True)
    return columns[:, first], back


DECODE = "decode"  # the segment of one decode step; every other segment has the name of its phase
REPEATED = "*"  # suffix of a segment's part that runs once per micro-batch of a rollout
# Gauss-Legendre nodes (as fractions of a rollout's length) and weights for the decode steps.
_NODES = ((0.5 - 15**0.5 / 10, 5 / 18), (0.5, 4 / 9), (0.5 + 15**0.5 / 10, 5 / 18))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KernelRows:
    """Kernels as rows of coefficients (kernels, monomials), at `layers` layers; the last variable is the decode step.

    A segment's time is the maximum of its host launches and its GPU kernels, and what the host does alone. A phase with
    copies or collectives beside its kernels is played step by step (`orders`, at two depths): they wait for kernels,
    which wait for them. Where its steps are not known, the maximum has the copies and collectives too.
    Products and attention (`tabled`) take what the card's tables say of their sizes; another kernel is a short one and
    bound by FLOPs or bytes.
    `sums` holds the summed seconds of those others whose bound is the same at all sample points.
    """

    layers: int
    exponents: tuple[Exponents, ...]
    flop_s: Floats
    move_s: Floats
    counts: Floats
    count_slopes: Floats  # counts for each further layer
    segments: tuple[str, ...]
    host: Mapping[str, tuple[float, float]]  # host seconds of each segment: at `layers`, and per further layer
    alone: Mapping[str, tuple[float, float]]  # those in which the card has nothing to do, likewise, beside `host`
    kernels: KernelSeconds
    tabled: TabledRows
    orders: Mapping[str, tuple[Order, Order]] = field(default_factory=dict)
    sums: Mapping[str, tuple[Floats, Floats]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, low: KernelKinds, high: KernelKinds, symbols: Symbols, *, layers: tuple[int, int], kernels: KernelSeconds
    ) -> KernelRows:  # fmt: skip
        """Rows from the kernels at the base point at two depths, `low` and `high`."""
        costs = kernels.costs
        kinds = list({**low.counts, **high.counts})
        infos = {**high.infos, **low.infos}
        families = [family(infos[k].name, k.shapes) for k in kinds]
        numbers = [i for i, of in enumerate(families) if of != "others"]
        flops = [
            infos[k].flop_seconds(k, symbols, kernels.flops_frac) if of == "others" else {}
            for k, of in zip(kinds, families, strict=True)
        ]
        moves = [
            infos[k].move_seconds(k, symbols, kernels.bandwidth(infos[k].work.pattern)) if of != "attention" else {}
            for k, of in zip(kinds, families, strict=True)
        ]
        told = [size_polynomials(infos[kinds[i]].name, kinds[i], symbols) for i in numbers]
        sorts = [Sort(families[i], *infos[kinds[i]].sort) for i in numbers]
        step = max(1, layers[1] - layers[0])
        counts, slopes = [], []
        for kind in kinds:
            parts = symbols.parts if kind in symbols.repeated else 1.0
            a, b = low.count_per_segment(kind) / parts, high.count_per_segment(kind) / parts
            factors = symbols.counts.get(kind, ())
            counts.append(symbols.product(a, factors))
            slopes.append(symbols.product((b - a) / step, factors))
        basis = Basis.of([*flops, *moves, *counts, *slopes, symbols.product(1.0, ()), *(p for ps in told for p in ps)])
        segments = [low.segment(k) + REPEATED if k in symbols.repeated else low.segment(k) for k in kinds]
        host = {}
        for name in set(segments):
            plain = name.removesuffix(REPEATED)
            mine = sum(low.counts.get(k, 0) for k, s in zip(kinds, segments, strict=True) if s == name)
            share = mine / max(1, sum(n for k, n in low.counts.items() if low.segment(k) == plain))
            share /= symbols.parts if name != plain else 1.0
            seconds, deeper = low.host_seconds(plain, costs) * share, high.host_seconds(plain, costs) * share
            host[name] = (seconds, (deeper - seconds) / step)
        alone = {}
        for name in {name.removesuffix(REPEATED) for name in segments}:
            seconds, deeper = low.alone_seconds(name, costs), high.alone_seconds(name, costs)
            alone[name] = (seconds, (deeper - seconds) / step)
        number_of = {kind: i for i, kind in enumerate(kinds)}
        low_orders, high_orders = (
            {phase: Order.of(steps, number_of, costs, layers=depth, passes=max(1, of.repeats.get(phase, 1)))
             for phase, steps in of.orders.items()}
            for of, depth in zip((low, high), layers, strict=True)
        )  # fmt: skip
        return cls(
            layers=layers[0], exponents=basis.exponents, flop_s=basis.rows(flops), move_s=basis.rows(moves),
            counts=basis.rows(counts), count_slopes=basis.rows(slopes), segments=tuple(segments),
            host=host, alone=alone, kernels=kernels, tabled=TabledRows.of(numbers, sorts, told, basis),
            orders={phase: (low_orders[phase], high_orders[phase]) for phase in low_orders if phase in high_orders},
        )  # fmt: skip

    @property
    def left_frac(self) -> float:
        """The part of their speed that kernels have beside a collective."""
        return CollectiveSeconds(self.kernels.spec).left_frac

    @property
    def _shortest_s(self) -> Floats:
        """Seconds that each kernel takes beside its FLOPs or bytes; 0 for copies over a link, which move none."""
        return np.where(self.move_s.any(axis=1), self.kernels.shortest_s, 0.0)

    @property
    def _constant(self) -> int:
        return self.exponents.index((0,) * len(self.exponents[0]))

    def folded(self, sample: Floats) -> KernelRows:
        """The same rows, with kernels summed whose bound is the same at every point of `sample`.

        Only kernels with a constant count are summed, since the sum of their seconds is one polynomial.
        """
        x = Basis(self.exponents).at(sample)
        flop, cold = x @ self.flop_s.T, x @ self.move_s.T
        move, fastest = self.kernels.warm(cold), self.kernels.cached_factor
        top = np.maximum(flop, move) * (1 - 1e-9)
        one = self._constant
        fixed = ~np.delete(self.counts, one, axis=1).any(axis=1)
        shortest = np.zeros_like(self.flop_s)
        shortest[:, one] = self._shortest_s
        names = np.asarray(self.segments)
        in_order = [number for orders in self.orders.values() for order in orders for number in order.kernels]
        alone = np.isin(np.arange(len(names)), [*self.tabled.numbers, *in_order])
        left = ~alone
        sums: dict[str, tuple[Floats, Floats]] = {}
        linear = np.where(move >= 0.999 * cold, cold, 0.0)  # what the cache shortens in part is no polynomial
        cached = np.where(move <= 1.001 * cold / fastest, move, 0.0)
        for seconds, bound in ((flop, self.flop_s), (linear, self.move_s), (cached, self.move_s / fastest)):
            rows = bound + shortest
            mine = left & fixed & (seconds >= top).all(axis=0)
            left &= ~mine
            for segment in np.unique(names[mine]):
                chosen = mine & (names == segment)
                now = (self.counts[chosen, one, None] * rows[chosen]).sum(axis=0)
                slope = (self.count_slopes[chosen, one, None] * rows[chosen]).sum(axis=0)
                before = sums.get(str(segment), (np.zeros_like(now), np.zeros_like(now)))
                sums[str(segment)] = (before[0] + now, before[1] + slope)
        left |= alone
        new = (np.cumsum(left) - 1).tolist()
        return replace(
            self, flop_s=self.flop_s[left], move_s=self.move_s[left], counts=self.counts[left],
            count_slopes=self.count_slopes[left], segments=tuple(names[left].tolist()), sums=sums,
            tabled=self.tabled.renumbered(left),
            orders={p: (low.renumbered(new), high.renumbered(new)) for p, (low, high) in self.orders.items()},
        )  # fmt: skip

    def seconds(self, values: Floats, layers: int, decode_steps: Floats) -> dict[str, Floats]:
        """Seconds of each segment at each row of `values` (points, variables without the decode step).

        `decode` is the sum over `decode_steps` steps.
        """
        every = dict.fromkeys((*self.segments, *self.sums, *self.host, *self.alone))
        names = [name for name in every if phase_of(name) not in self.orders]

        def at(step: Floats) -> Floats:
            return np.concatenate([values, step[:, None]], axis=1)

        steps = [name for name in names if phase_of(name) == DECODE]
        out = {s: self._segment(s, at(np.zeros(len(values))), layers) for s in names if s not in steps}
        for name in steps:
            nodes = [w * self._segment(name, at(share * decode_steps), layers) for share, w in _NODES]
            out[name] = decode_steps * np.sum(nodes, axis=0)
        for name in [name for name in out if COLLECTIVES in name]:
            beside, phase = out.pop(name), phase_of(name)
            alone = out.get(phase, np.zeros_like(beside))
            overlap = np.minimum(beside, alone / self.left_frac)
            out[phase] = np.maximum(alone + (1.0 - self.left_frac) * overlap, beside)
        for name in [name for name in out if COPIES in name]:
            copies, phase = out.pop(name), phase_of(name)
            out[phase] = np.maximum(out.get(phase, copies), copies)
        return out | {phase: self._played(phase, at(np.zeros(len(values))), layers) for phase in self.orders}

    def _played(self, phase: str, table: Floats, layers: int) -> Floats:
        """The seconds of a phase that is played in its order, at each distinct row of `table` once."""
        points, back = np.unique(table, axis=0, return_inverse=True)
        told = []
        for order in self.orders[phase]:
            numbers = order.kernels
            mine = np.isin(np.arange(len(self.segments)), numbers)
            each = self._kernels(mine, points, order.layers)
            told.append(order.seconds(dict(zip(numbers, each.T, strict=True)), len(points), left_frac=self.left_frac))
        low, high = self.orders[phase]
        return at_depth(low, high, layers, told)[back]

    def _segment(self, name: str, table: Floats, layers: int) -> Floats:
        further = layers - self.layers
        none = np.zeros(len(self.exponents))
        now, slope = self.sums.get(name, (none, none))
        added = now + further * slope
        used = np.flatnonzero(added)
        summed = Basis(tuple(self.exponents[i] for i in used)).at(table) @ added[used]
        each = self._kernels(np.asarray(self.segments, dtype=str) == name, table, layers)
        host, host_slope = self.host.get(name, (0.0, 0.0))
        busy = np.maximum(each.sum(axis=1) + summed, host + further * host_slope)
        alone, alone_slope = self.alone.get(name, (0.0, 0.0))
        return np.asarray(busy + alone + further * alone_slope)

    def _kernels(self, mine: npt.NDArray[np.bool_], table: Floats, layers: int) -> Floats:
        """Seconds of all launches of each of the kernels `mine` in a pass, (points, kernels)."""
        counts = (self.counts + (layers - self.layers) * self.count_slopes)[mine]
        sized = self.tabled.rows.any(axis=(0, 1))
        used = np.flatnonzero(counts.any(axis=0) | (self.flop_s + self.move_s)[mine].any(axis=0) | sized)
        x = Basis(tuple(self.exponents[i] for i in used)).at(table)
        each = np.maximum(x @ self.flop_s[mine][:, used].T, self.kernels.warm(x @ self.move_s[mine][:, used].T))
        each += self._shortest_s[mine]
        places = np.cumsum(mine) - 1
        for number, seconds in self.tabled.seconds(x, used, mine, self.kernels):
            move = x @ self.move_s[number][used]
            each[:, places[number]] = np.maximum(seconds, move)
        one = self._constant
        varying = np.flatnonzero(np.delete(counts, one, axis=1).any(axis=1))
        each[:, varying] *= x @ counts[varying][:, used].T
        often = np.where(np.isin(np.arange(len(counts)), varying), 1.0, counts[:, one])
        return np.asarray(each * often)
