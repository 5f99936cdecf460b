"""What is known of each candidate: tried, pending, ruled out, measured. Every finished trial is read once."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import cast

import numpy as np
from optuna.trial import FrozenTrial, TrialState

from autofit.probing.result import ProbeStatus
from autofit.tuning.grid import Grid, Mask


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What the probe of a candidate said. `at_least` marks bytes of a probe that stopped when it ran out of memory.

    A probe that ran to its end without the cap (or on a simulated card) has seconds, too, though it does not fit.
    `rollout_s` is what of `step_s` passed before the update, where the probe said so.
    """

    place: int
    step_s: float | None
    device_used_bytes: float | None
    at_least: bool
    fits: bool
    rollout_s: float | None = None


class Ledger:
    """Fed with a study's trials, again and again; only what is new costs time."""

    def __init__(self, grid: Grid, *, target_bytes: int | None, cannot_fit: Mask | None = None) -> None:
        self._grid = grid
        self._target_bytes = target_bytes
        self._read: set[int] = set()
        self._tried = np.zeros(len(grid), dtype=bool)
        self._ruled_out = np.zeros(len(grid), dtype=bool) if cannot_fit is None else cannot_fit.copy()
        self.observations: list[Observation] = []
        self.pending: tuple[int, ...] = ()

    def read(self, trials: Iterable[FrozenTrial], *, but: int | None = None) -> None:
        """Take in `trials`, leaving out number `but`: the one that is being asked for."""
        pending = []
        for trial in trials:
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

    def _take(self, place: int, trial: FrozenTrial) -> None:
        self._tried[place] = True
        observation = observe(place, trial, target_bytes=self._target_bytes)
        if observation is None:
            return
        self.observations.append(observation)
        if not observation.fits:
            self._ruled_out |= self._grid.needs_no_less(place)

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
    """What a finished trial says, ours or any Optuna user's; None for a failure, which says nothing.

    A constraint above zero, or a pruned trial, is an OOM: the bytes are the target plus the constraint. Bytes of a fit
    are the second objective where there is one, else the target plus the constraint. The attribute `result` may have
    more, under the names of `ProbeResult`: an OOM's exact bytes and seconds, what of the seconds the rollout took.
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
    rollout_s = None
    if step_s is not None and steps and len(steps) == len(rollouts):
        rollout_s = step_s * sum(rollouts) / sum(steps)
    return Observation(
        place=place, step_s=step_s, device_used_bytes=held, at_least=not exact, fits=fits, rollout_s=rollout_s
    )
