"""The state of each candidate: tried, pending, ruled out, measured. Every finished trial is read once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import cast

import numpy as np
from optuna.trial import FrozenTrial, TrialState

from autofit.probing.result import ProbeResult, ProbeStatus
from autofit.tuning.grid import Grid, Mask


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
        """The candidates that may be proposed: neither tried, nor pending, nor ruled out."""
        free = ~(self._tried | self._ruled_out)
        free[list(self.pending)] = False
        return free

    @property
    def untried(self) -> Mask:
        """The candidates that were never proposed, ruled out or not."""
        untried = ~self._tried
        untried[list(self.pending)] = False
        return untried

    @property
    def screened(self) -> int:
        """How many candidates are ruled out without a probe."""
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
    """The part of `step_s` (the median of `steps`) before the update; None if the probe did not report it."""
    if not steps or len(steps) != len(rollouts):
        return None
    return (median(steps) if step_s is None else step_s) * sum(rollouts) / sum(steps)
