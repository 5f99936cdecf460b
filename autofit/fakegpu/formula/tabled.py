"""Products and attention of any configuration: their sizes as polynomials, their seconds from the card's tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autofit.fakegpu.formula.polynomials import Basis, Kind, Polynomial, Symbols
from autofit.fakegpu.rates.kernels import Family, KernelSeconds, places, sizes

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
