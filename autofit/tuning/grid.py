"""Candidates as a matrix of integers, so that 10^5 candidates are compared in one numpy operation."""

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autofit.recipe.keys import TIERS, Tier
from autofit.space.space import Candidate, Space, Value

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


class Grid:
    """The candidates of a search: `codes[i, k]` is the index of candidate i's value in `choices[k]`.

    Candidate 0 is the baseline. `tiers[i]` is the index of candidate i's tier in TIERS. The constructor takes plain
    tuples; `Grid.of` takes a space, with the memory order that the space declares.
    """

    def __init__(
        self, names: Sequence[str], choices: Sequence[Sequence[Value]], candidates: Sequence[Candidate], *,
        tiers: Sequence[Tier] | None = None, ascending: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.names = tuple(names)
        self.choices = tuple(tuple(values) for values in choices)
        self.candidates = tuple(candidates)
        self.codes = _coded(self.choices, self.candidates)
        ranks = {tier: rank for rank, tier in enumerate(TIERS)}
        self.tiers = np.array([ranks[t] for t in tiers] if tiers else [0] * len(self.candidates), dtype=np.int64)
        rising = [name in ascending for name in self.names]
        self._rising, self._equal = self.codes[:, rising], self.codes[:, [not r for r in rising]]
        self.derived: tuple[Floats, ...] = ()  # further axes of distance between candidates, in octaves (log2)

    @classmethod
    def of(cls, space: Space) -> "Grid":
        """The allowed candidates of `space`, baseline first."""
        names = [knob.name for knob in space.knobs]
        tiers = space.tiers
        grid = cls(names, _with_own(space), tuple(tiers), tiers=tuple(tiers.values()))
        batch = (space.keys.micro_batch, space.keys.rollout)
        solved = set(batch) & set(names)
        rising = [k.memory_ascending and k.name not in solved for k in space.knobs]
        equal = [not k.memory_ascending and k.name not in solved for k in space.knobs]
        grid._rising, grid._equal = grid.codes[:, rising], grid.codes[:, equal]
        if solved:  # memory grows with the micro-batch and with the completions of a rollout: Space.needs_no_less
            places = [names.index(name) for name in batch if name is not None and name in names]
            seen: dict[tuple[int, ...], tuple[int, int]] = {}
            pairs = []
            for row, candidate in zip(grid.codes[:, places].tolist(), grid.candidates, strict=True):
                if (key := tuple(row)) not in seen:
                    micro, _, chunk, _ = space.split(candidate)
                    seen[key] = (micro, micro * chunk)
                pairs.append(seen[key])
            sizes = np.array(pairs, dtype=np.int64)
            grid._rising = np.column_stack([grid._rising, sizes])
            grid.derived = (np.log2(sizes[:, 1].astype(np.float64)),) if np.ptp(sizes[:, 1]) else ()
        return grid

    def __len__(self) -> int:
        return len(self.candidates)

    @cached_property
    def _places(self) -> dict[Candidate, int]:
        return {candidate: place for place, candidate in enumerate(self.candidates)}

    def find(self, params: Mapping[str, object]) -> int | None:
        """The index of the candidate with these {knob: value}, or None if the grid does not contain it."""
        if not set(self.names) <= set(params):
            return None
        return self._places.get(Candidate(tuple(params[name] for name in self.names)))  # type: ignore[misc]

    def params(self, place: int) -> dict[str, Value]:
        return dict(zip(self.names, self.candidates[place].values, strict=True))

    def needs_no_less(self, place: int, among: NDArray[np.intp] | None = None) -> Mask:
        """Mask of the candidates (of `among`) that need at least as much memory as candidate `place`.

        By the memory order that the space declares.
        """
        chosen = slice(None) if among is None else among
        rising = (self._rising[chosen] >= self._rising[place]).all(axis=1)
        equal = (self._equal[chosen] == self._equal[place]).all(axis=1)
        return np.asarray(rising & equal, dtype=np.bool_)

    def agrees(self, fixed: Mapping[str, object]) -> Mask:
        """Mask of the candidates that have all values of `fixed`, which names some of the knobs."""
        agree = np.ones(len(self), dtype=bool)
        for column, (name, values) in enumerate(zip(self.names, self.choices, strict=True)):
            if name in fixed:
                wanted = [place for place, value in enumerate(values) if value == fixed[name]]
                agree &= np.isin(self.codes[:, column], wanted)
        return agree

    @cached_property
    def octaves(self) -> tuple[Floats | None, ...]:
        """log2 of every choice, one array a knob; None for a knob whose choices are not all positive numbers."""
        return tuple(_octaves(values) for values in self.choices)


def _octaves(values: Sequence[Value]) -> Floats | None:
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool) and v > 0]
    return np.log2(np.array(numbers, dtype=np.float64)) if len(numbers) == len(values) else None


def _with_own(space: Space) -> list[tuple[Value, ...]]:
    """The choices of every knob, with the baseline's own value added where it is missing."""
    own = space.baseline.values
    return [values if v in values else (*values, v) for values, v in zip(space.choices, own, strict=True)]


def _coded(choices: tuple[tuple[Value, ...], ...], candidates: tuple[Candidate, ...]) -> Ints:
    tables = [{value: place for place, value in enumerate(values)} for values in choices]
    columns = zip(*(c.values for c in candidates), strict=True)
    coded = [[table[v] for v in column] for table, column in zip(tables, columns, strict=True)]
    return np.array(coded, dtype=np.int64).T.reshape(len(candidates), len(choices))
