"""Tensor sizes as polynomials of the variables of a configuration. Needs no torch.

Dimensions of tensors in training are products with one affine factor per variable, such as B, P + C, r or B * (P + C).
So a trace at a base point, and one more per variable with only that variable changed, determine every size.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
import numpy.typing as npt

Shape = tuple[int, ...]
Exponents = tuple[int, ...]
Polynomial = dict[Exponents, float]
Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Kind:
    """Identity of an allocation or a kernel across traces of different points: its origin and its shapes."""

    origin: Hashable
    shapes: tuple[Shape, ...]


@dataclass(frozen=True, slots=True)
class Affine:
    """The factor `1 + slope * (x - base)` of a dimension for variable number `variable`, relative to the base point."""

    variable: int
    slope: float


@dataclass(frozen=True, slots=True)
class RoundedDim:
    """A dimension, `size` at the base point times `factors`, rounded up to a multiple: a variable made from others."""

    multiple: int
    size: int
    factors: tuple[Affine, ...]

    def at(self, values: Values, base: Sequence[float]) -> Values:
        """The dimension at `values`, (points, variables); shape (points,)."""
        dim = np.full(len(values), float(self.size))
        for f in self.factors:
            dim *= 1 + f.slope * (values[:, f.variable] - base[f.variable])
        return np.ceil((dim - 1e-6) / self.multiple) * self.multiple


def with_rounded(values: Values, base: Sequence[float], rounded: Sequence[RoundedDim]) -> Values:
    """`values`, (points, variables), with a column more for each rounded dimension."""
    return np.column_stack([values, *(dim.at(values, base) for dim in rounded)])


Factors = tuple[tuple[tuple[Affine, ...], ...], ...]  # for each shape, for each dimension


@dataclass(slots=True)
class Symbols:
    """The factors of the dimensions of each kind at the base point, learned one variable at a time."""

    variables: tuple[str, ...]
    base: tuple[float, ...]
    factors: dict[Kind, Factors] = field(default_factory=dict)
    counts: dict[Kind, tuple[Affine, ...]] = field(default_factory=dict)
    repeated: set[Kind] = field(default_factory=set)  # kinds with a count proportional to a variable with `instead_of`
    unmatched: dict[str, int] = field(default_factory=dict)  # variable -> number of kinds without a counterpart
    rounded: list[RoundedDim] = field(default_factory=list)  # variables beyond `variables`

    def start(self, kinds: Iterable[Kind]) -> None:
        for kind in kinds:
            self.factors[kind] = tuple(tuple(() for _ in shape) for shape in kind.shapes)

    def vary(
        self,
        name: str,
        value: float,
        base: Mapping[Kind, float],
        varied: Mapping[Kind, float],
        *,
        instead_of: str | None = None,
    ) -> None:
        """Learn the dependence on variable `name` from a trace at `value` (kinds in order, with counts).

        With `instead_of`, that other variable was varied together with `name`, and a changed dimension is attributed to
        `name` instead. A kind whose count grows in proportion is then `repeated`: once for each part of the whole.
        """
        at = self.variables.index(name)
        step = value - self.base[at]
        other = None if instead_of is None else self.variables.index(instead_of)
        for kind, match in _pairs(base, varied):
            if match is None:
                self.unmatched[name] = self.unmatched.get(name, 0) + 1
                continue
            if match.shapes != kind.shapes:
                self.factors[kind] = tuple(
                    tuple(
                        _follow(factors, Affine(at, (new - old) / old / step), other) if new != old else factors
                        for factors, old, new in zip(own, before, after, strict=True)
                    )
                    for own, before, after in zip(self.factors[kind], kind.shapes, match.shapes, strict=True)
                )
            often = varied[match] / base[kind]
            if other is not None and abs(often - value / self.base[at]) < 1e-9:
                self.repeated.add(kind)
            if often != 1 and other is None:
                slope = (often - 1) / step
                self.counts[kind] = (*self.counts.get(kind, ()), Affine(at, slope))

    def numel(self, kind: Kind, which: int = 0) -> Polynomial:
        """Number of elements of shape number `which` of `kind`, as a polynomial of the variables."""
        size = float(prod(kind.shapes[which]))
        return self.product(size, [f for dim in self.factors.get(kind, ((),) * (which + 1))[which] for f in dim])

    def rounded_numel(self, kind: Kind, which: int, multiples: Sequence[int]) -> Polynomial:
        """`numel`, with each dimension rounded up to its multiple."""
        scale, factors, powers = 1.0, list[Affine](), list[int]()
        own = self.factors.get(kind, ((),) * (which + 1))[which] or ((),) * len(multiples)
        for size, multiple, of_dim in zip(kind.shapes[which], multiples, own, strict=True):
            if multiple == 1 or not of_dim:
                scale *= -(-size // multiple) * multiple
                factors += of_dim
                continue
            dim = RoundedDim(multiple, size, of_dim)
            if dim not in self.rounded:
                self.rounded.append(dim)
            powers.append(self.rounded.index(dim))
        made = tuple(powers.count(i) for i in range(max(powers) + 1)) if powers else ()
        return {(*exponents, *made): value for exponents, value in self.product(scale, factors).items()}

    def product(self, scale: float, factors: Iterable[Affine]) -> Polynomial:
        """The product of `scale` and the affine factors, as a polynomial."""
        result: Polynomial = {(0,) * len(self.variables): scale}
        for factor in factors:
            constant = 1 - factor.slope * self.base[factor.variable]
            if abs(constant) < 1e-12:
                constant = 0.0
            result = _times(result, factor, constant)
        return result


def _follow(factors: tuple[Affine, ...], new: Affine, instead_of: int | None) -> tuple[Affine, ...]:
    return (*(f for f in factors if f.variable != instead_of), new)


def _pairs(base: Mapping[Kind, float], varied: Mapping[Kind, float]) -> Iterable[tuple[Kind, Kind | None]]:
    """Each kind at the base point with its counterpart: the same origin and the same position among its kinds."""
    theirs: dict[tuple[Hashable, tuple[int, ...]], list[Kind]] = {}
    for kind in varied:
        theirs.setdefault(_signature(kind), []).append(kind)
    ours: dict[tuple[Hashable, tuple[int, ...]], list[Kind]] = {}
    for kind in base:
        ours.setdefault(_signature(kind), []).append(kind)
    for signature, mine in ours.items():
        found = theirs.get(signature, [])
        if len(found) != len(mine):
            same = set(found)
            left = [k for k in mine if k not in same]
            rest = [k for k in found if k not in set(mine)]
            yield from ((k, k) for k in mine if k in same)
            yield from zip(left, rest if len(rest) == len(left) else [None] * len(left), strict=True)
        else:
            yield from zip(mine, found, strict=True)


def _signature(kind: Kind) -> tuple[Hashable, tuple[int, ...]]:
    return kind.origin, tuple(len(shape) for shape in kind.shapes)


def _times(polynomial: Polynomial, factor: Affine, constant: float) -> Polynomial:
    result: Polynomial = {}
    for exponents, value in polynomial.items():
        if constant:
            result[exponents] = result.get(exponents, 0.0) + value * constant
        raised = (*exponents[: factor.variable], exponents[factor.variable] + 1, *exponents[factor.variable + 1 :])
        result[raised] = result.get(raised, 0.0) + value * factor.slope
    return result


@dataclass(frozen=True, slots=True)
class Basis:
    """The monomials of a set of polynomials, so that polynomials become rows of a matrix."""

    exponents: tuple[Exponents, ...]

    @classmethod
    def of(cls, polynomials: Iterable[Polynomial]) -> Basis:
        return cls(tuple(sorted({e for p in polynomials for e in p})))

    def rows(self, polynomials: Sequence[Polynomial]) -> npt.NDArray[np.float64]:
        """Coefficients as a matrix, (polynomials, monomials)."""
        place = {e: i for i, e in enumerate(self.exponents)}
        out = np.zeros((len(polynomials), len(self.exponents)))
        for row, polynomial in enumerate(polynomials):
            for exponents, value in polynomial.items():
                out[row, place[exponents]] += value
        return out

    def at(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Values of the monomials, (points, monomials), at `values`, (points, variables)."""
        out = np.ones((len(values), len(self.exponents)))
        for column, exponents in enumerate(self.exponents):
            for variable, exponent in enumerate(exponents):
                for _ in range(exponent):
                    out[:, column] *= values[:, variable]
        return out
