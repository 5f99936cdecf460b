"""Tensor sizes as polynomials of the variables of a configuration. Free of torch.

Dimensions of tensors in training are products with one affine factor per variable, such as B, P + C, r or B * (P + C).
So a trace at a base point, and one more per variable with only that variable changed, determine every size.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
import numpy.typing as npt

_MULTIPLES = (8, 16, 32, 64, 128)  # to which kernels and chunked layers round a length
# Ends of the name of a segment of kernels: copies or collectives that overlap with the others of their phase.
COPIES, COLLECTIVES = "|copies", "|collectives"
HOST, COMPUTING, COPYING, GATHERING, REDUCING = LANES = range(5)  # the clock's
Shape = tuple[int, ...]
Exponents = tuple[int, ...]
Polynomial = dict[Exponents, float]
Values = npt.NDArray[np.float64]


def phase_of(segment: str) -> str:
    """The phase of a segment of kernels: its name less the overlapping suffixes."""
    return segment.removesuffix(COPIES).removesuffix(COLLECTIVES)


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
class Steps:
    """The number of multiples that hold a dimension: `size` at the base point, times the factors, rounded up.

    0 of a dimension up to `above`. A variable of a polynomial that is made from other variables.
    """

    multiple: int
    size: int
    factors: tuple[Affine, ...]
    above: int = 0

    @property
    def variable(self) -> int:
        return self.factors[0].variable

    @property
    def at_base(self) -> int:
        return -(-self.size // self.multiple)

    def at(self, values: Values, base: Sequence[float]) -> Values:
        """The number at `values`, (points, variables); shape (points,)."""
        dim = np.full(len(values), float(self.size))
        for f in self.factors:
            dim *= 1 + f.slope * (values[:, f.variable] - base[f.variable])
        return np.where(dim > self.above + 1e-6, np.ceil((dim - 1e-6) / self.multiple), 0.0)


def with_steps(values: Values, base: Sequence[float], steps: Sequence[Steps]) -> Values:
    """`values`, (points, variables), with a column more for each of `steps`."""
    return np.column_stack([values, *(each.at(values, base) for each in steps)])


Factor = Affine | Steps
Factors = tuple[tuple[tuple[Factor, ...], ...], ...]  # for each shape, for each dimension


@dataclass(slots=True)
class Symbols:
    """The factors of the dimensions of each kind at the base point, learned one variable at a time."""

    variables: tuple[str, ...]
    base: tuple[float, ...]
    factors: dict[Kind, Factors] = field(default_factory=dict)
    counts: dict[Kind, tuple[Affine, ...]] = field(default_factory=dict)
    repeated: set[Kind] = field(default_factory=set)  # kinds with a count proportional to a variable with `instead_of`
    parts: float = 1.0  # for which those run at the base: each once
    unmatched: dict[str, int] = field(default_factory=dict)  # variable -> number of kinds without a counterpart
    steps: list[Steps] = field(default_factory=list)  # variables beyond `variables`, of dimensions that are rounded up
    rounds: bool = True  # False: a dimension that is rounded up is approximated by an affine one

    def start(self, kinds: Iterable[Kind]) -> None:
        for kind in kinds:
            self.factors[kind] = tuple(tuple(() for _ in shape) for shape in kind.shapes)

    def vary(
        self, name: str, value: float, base: Mapping[Kind, float], varied: Mapping[Kind, float], *,
        instead_of: str | None = None,
    ) -> None:  # fmt: skip
        """Learn the dependence on variable `name` from a trace at `value` (kinds in order, with counts).

        With `instead_of`, that other variable was varied together with `name`, and a changed dimension is attributed to
        `name` instead. A kind whose count grows in proportion is then `repeated`: once for each part of the whole.
        """
        at = self.variables.index(name)
        step = value - self.base[at]
        other = None if instead_of is None else self.variables.index(instead_of)
        self.parts = self.parts if other is None else self.base[at] / self.base[other]
        pairs = list(_pairs(base, varied))
        changes = {
            (old, new)
            for kind, match in pairs
            if match is not None
            for before, after in zip(kind.shapes, match.shapes, strict=True)
            for old, new in zip(before, after, strict=True)
            if old != new
        }
        found = {change: self._factor(change, changes, at, step) for change in changes}
        for kind, match in pairs:
            if match is None:
                self.unmatched[name] = self.unmatched.get(name, 0) + 1
                continue
            if match.shapes != kind.shapes:
                self.factors[kind] = tuple(
                    tuple(
                        _follow(factors, found[old, new], other) if new != old else factors
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

    def _factor(self, change: tuple[int, int], others: Iterable[tuple[int, int]], at: int, step: float) -> Factor:
        """The factor of a dimension that went from `change[0]` to `change[1]` as variable `at` grew by `step`.

        A dimension grows by a whole number for each unit of a variable, or by half of one (groups of two completions).
        One that does not is another one rounded up.
        """
        old, new = change
        if not self.rounds or _is_whole(2 * (new - old) / step):
            return Affine(at, (new - old) / old / step)
        for multiple in _MULTIPLES:
            for small, large in sorted(others):
                few, many = -(-small // multiple), -(-large // multiple)
                if _is_whole((large - small) / step) and few != many and old * many == new * few:
                    return Steps(multiple, small, (Affine(at, (large - small) / small / step),))
        return Affine(at, (new - old) / old / step)

    def rounded_numel(self, kind: Kind, which: int, multiples: Sequence[int], above: int = 0) -> Polynomial:
        """`numel`, with each dimension rounded up to its multiple; 0 up to a first dimension of `above`."""
        scale, factors = 1.0, list[Factor]()
        own = self.factors.get(kind, ((),) * (which + 1))[which] or ((),) * len(multiples)
        for place, (size, multiple, of_dim) in enumerate(zip(kind.shapes[which], multiples, own, strict=True)):
            scale *= -(-size // multiple) * multiple
            plain, limit = tuple(f for f in of_dim if isinstance(f, Affine)), 0 if place else above
            if limit and not plain and size <= limit:
                return {}
            factors += [Steps(multiple, size, plain, limit)] if (multiple > 1 or limit) and plain else of_dim
        return self.product(scale, factors)

    def product(self, scale: float, factors: Iterable[Factor]) -> Polynomial:
        """The product of `scale` and the factors, as a polynomial of the variables and of `steps`."""
        result: Polynomial = {(0,) * len(self.variables): scale}
        made: list[int] = []
        for factor in factors:
            if isinstance(factor, Steps):
                if factor not in self.steps:
                    self.steps.append(factor)
                made.append(self.steps.index(factor))
                result = {e: value / factor.at_base for e, value in result.items()}
                continue
            constant = 1 - factor.slope * self.base[factor.variable]
            if abs(constant) < 1e-12:
                constant = 0.0
            result = _times(result, factor, constant)
        powers = tuple(made.count(i) for i in range(max(made, default=-1) + 1))
        return {(*exponents, *powers): value for exponents, value in result.items()}


def _is_whole(number: float) -> bool:
    return abs(number - round(number)) < 1e-9


def _follow(factors: tuple[Factor, ...], new: Factor, instead_of: int | None) -> tuple[Factor, ...]:
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
