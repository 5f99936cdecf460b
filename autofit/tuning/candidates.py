"""Candidates as a matrix of integers, so that 10^5 are compared in one numpy operation, and the state of each.

Every finished trial is read once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import cast

import numpy as np
from numpy.typing import NDArray
from optuna.trial import FrozenTrial, TrialState

from autofit.probing.result import ProbeResult, ProbeStatus
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
        tables = [{value: place for place, value in enumerate(values)} for values in self.choices]
        columns = zip(*(c.values for c in self.candidates), strict=True)
        coded = [[table[v] for v in column] for table, column in zip(tables, columns, strict=True)]
        self.codes = np.array(coded, dtype=np.int64).T.reshape(len(self.candidates), len(self.choices))
        ranks = {tier: rank for rank, tier in enumerate(TIERS)}
        self.tiers = np.array([ranks[t] for t in tiers] if tiers else [0] * len(self.candidates), dtype=np.int64)
        rising = [name in ascending for name in self.names]
        self._rising, self._equal = self.codes[:, rising], self.codes[:, [not r for r in rising]]
        self.unordered: Mapping[str, tuple[int, ...]] = {}  # {knob of numbers without memory order: ways to step}
        self.derived: tuple[Floats, ...] = ()  # further axes of distance between candidates, in octaves (log2)

    @classmethod
    def of(cls, space: Space) -> "Grid":
        """The allowed candidates of `space`, baseline first."""
        names = [knob.name for knob in space.knobs]
        tiers = space.tiers
        own = zip(space.choices, space.baseline.values, strict=True)
        choices = [values if value in values else (*values, value) for values, value in own]
        grid = cls(names, choices, tuple(tiers), tiers=tuple(tiers.values()))
        batch = (space.keys.micro_batch, space.keys.rollout)
        solved = set(batch) & set(names)
        rising = [k.memory_ascending and k.name not in solved for k in space.knobs]
        equal = [not k.memory_ascending and k.name not in solved for k in space.knobs]
        grid._rising, grid._equal = grid.codes[:, rising], grid.codes[:, equal]
        ways = {k.name: (1,) if k.traits.less == "lower" else (-1, 1) for k in space.knobs if not k.memory_ascending}
        grid.unordered = {name: ways[name] for name, known in zip(names, grid.octaves, strict=True)
                          if known is not None and name in ways and name not in solved}  # fmt: skip
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
        """The index of the candidate with these {knob: value}, if the grid contains it."""
        if not set(self.names) <= set(params):
            return None
        return self._places.get(Candidate(tuple(params[name] for name in self.names)))  # type: ignore[misc]

    def params(self, place: int) -> dict[str, Value]:
        return dict(zip(self.names, self.candidates[place].values, strict=True))

    def stepped(self, place: int, fits: Sequence[int], pending: Sequence[int], free: NDArray[np.intp]) -> int | None:
        """The one of `free` with the next number of a knob that lacks a memory order, unless one with it fits already.

        A share of the card steps up, as a larger one holds more completions; other numbers down, and then up.
        """
        own, allowed = self.params(place), set(free.tolist())
        seen, waits = ([self.params(at) for at in places] for places in (fits, pending))
        for name, ways in self.unordered.items():
            numbers = sorted(cast("Sequence[float]", self.choices[self.names.index(name)]))
            for way in ways:
                at = numbers.index(cast(float, own[name])) + way
                if not 0 <= at < len(numbers) or numbers[at] in [params[name] for params in seen]:
                    continue
                wanted = {**own, name: numbers[at]}
                if wanted in waits:  # its result decides whether to step the other way
                    break
                if (found := self.find(wanted)) in allowed:
                    return found
        return None

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
        """log2 of every choice, one array a knob; None for a knob with any choice but positive numbers."""
        return tuple(_octaves(values) for values in self.choices)


def _octaves(values: Sequence[Value]) -> Floats | None:
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool) and v > 0]
    return np.log2(np.array(numbers, dtype=np.float64)) if len(numbers) == len(values) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The measured values of one probe. `at_least`: the bytes are a lower bound, because memory ran out (censored).

    A probe that ran to its end without the cap (or on a simulated card) has seconds even if it does not fit.
    `rollout_s` is the part of `step_s` before the update; None if the probe did not report it.
    """

    place: int
    step_s: float | None
    device_used_bytes: float | None
    at_least: bool
    fits: bool
    rollout_s: float | None = None


class Ledger:
    """Reads a study's trials repeatedly; each call spends time on new trials only."""

    def __init__(self, grid: Grid, *, target_bytes: int | None, cannot_fit: Mask | None = None) -> None:
        self._grid = grid
        self._target_bytes = target_bytes
        self._read: set[int] = set()
        self._all_read = 0  # every trial with a lower number is read
        self._tried = np.zeros(len(grid), dtype=bool)
        self._ruled_out = np.zeros(len(grid), dtype=bool) if cannot_fit is None else cannot_fit.copy()
        self.observations: list[Observation] = []
        self._told_at: dict[int, int] = {}  # trial number -> its index in `observations`
        self._repeated: set[int] = set()
        self.pending: tuple[int, ...] = ()

    def read(self, trials: Sequence[FrozenTrial], *, but: int | None = None) -> None:
        """Read `trials`, all of a study by number, except number `but`: the trial that Optuna is asking for."""
        pending = []
        for trial in trials[self._all_read :]:
            if trial.number in self._read or trial.number == but:
                continue
            place = self._grid.find(trial.params)
            if not trial.state.is_finished():
                pending += [] if place is None else [place]
                continue
            self._read.add(trial.number)
            if place is not None:
                self._take(place, trial)
        self.pending = tuple(pending)
        while self._all_read in self._read:
            self._all_read += 1

    def _take(self, place: int, trial: FrozenTrial) -> None:
        self._tried[place] = True
        observation = observe(place, trial, target_bytes=self._target_bytes)
        if observation is None:
            return
        self._told_at[trial.number] = len(self.observations)
        self.observations.append(observation)
        if not observation.fits:
            self._ruled_out |= self._grid.needs_no_less(place)

    def repeat(self, number: int, result: ProbeResult) -> None:
        """Replace what trial `number` told by `result`: the one of its two probes that counts."""
        if number in self._repeated or number not in self._told_at:
            return
        self._repeated.add(number)
        index = self._told_at[number]
        place, fits = self.observations[index].place, result.status is ProbeStatus.FIT
        self.observations[index] = Observation(
            place=place, step_s=result.median_step_s, device_used_bytes=result.device_used_bytes, fits=fits,
            at_least=not fits and not result.is_graded, rollout_s=_rollout_s(result.step_s, result.rollout_s),
        )  # fmt: skip
        if not fits:
            self._ruled_out |= self._grid.needs_no_less(place)

    @property
    def repeated(self) -> frozenset[int]:
        """The trials that were probed twice."""
        return frozenset(self._repeated)

    def number_of(self, observation: Observation) -> int:
        """The trial that told `observation`."""
        index = next(i for i, told in enumerate(self.observations) if told is observation)
        return next(number for number, at in self._told_at.items() if at == index)

    @property
    def free(self) -> Mask:
        """The candidates that may be proposed: all but the tried, the pending and the excluded ones."""
        free = ~(self._tried | self._ruled_out)
        free[list(self.pending)] = False
        return free

    @property
    def untried(self) -> Mask:
        """The candidates that are still unproposed, ruled out or not."""
        untried = ~self._tried
        untried[list(self.pending)] = False
        return untried

    @property
    def screened(self) -> int:
        """Number of candidates that are ruled out before any probe."""
        return int(self.untried.sum() - self.free.sum())


def observe(place: int, trial: FrozenTrial, *, target_bytes: int | None) -> Observation | None:
    """The observation of a finished trial, ours or any Optuna user's; None for a failed trial.

    A constraint above zero, or a pruned trial, is an OOM: the bytes are the target plus the constraint. The bytes of a
    fit are the second objective if there is one, else the target plus the constraint. The attribute `result` may add
    values under the names of `ProbeResult`: exact bytes and seconds of an OOM, and the rollout's part of the seconds.
    """
    if trial.state is TrialState.FAIL:
        return None
    result = cast(Mapping[str, object], trial.user_attrs.get("result") or {})
    steps, rollouts = (cast(Sequence[float], result.get(name) or ()) for name in ("step_s", "rollout_s"))
    over = max(trial.constraints.values(), default=None) if trial.constraints else None
    values = trial.values or []
    bytes_told = None if over is None or target_bytes is None else target_bytes + over
    oom = trial.state is TrialState.PRUNED or trial.user_attrs.get("status") == ProbeStatus.OOM
    fits = not oom and (over is None or over <= 0)
    if fits:
        exact, step_s = True, values[0]
        held = values[1] if len(values) > 1 else bytes_told
    else:
        needed = cast("int | None", result.get("least_capacity_bytes") or result.get("uncapped_bytes"))
        exact, step_s = bool(needed), median(steps) if steps else None  # as ProbeResult.is_graded and median_step_s
        held = float(needed) if needed else bytes_told or target_bytes
    rollout_s = None if step_s is None else _rollout_s(steps, rollouts, step_s=step_s)
    return Observation(
        place=place, step_s=step_s, device_used_bytes=held, at_least=not exact, fits=fits, rollout_s=rollout_s
    )


def _rollout_s(steps: Sequence[float], rollouts: Sequence[float], *, step_s: float | None = None) -> float | None:
    """The part of `step_s` (the median of `steps`) before the update, if the probe reported it."""
    if not steps or len(steps) != len(rollouts):
        return None
    return (median(steps) if step_s is None else step_s) * sum(rollouts) / sum(steps)
