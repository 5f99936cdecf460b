"""Optuna's storage as its only writer sees it: what this process did not write since its last look is not read again.

Optuna reads each unfinished trial anew at each look, and a search with N probes in flight looks several times a trial.
"""

import contextlib
import copy
from collections.abc import Container, Iterator, Sequence
from typing import Any

from optuna.distributions import BaseDistribution
from optuna.storages import RDBStorage, _CachedStorage
from optuna.trial import FrozenTrial, TrialState


class SoleWriter(_CachedStorage):
    """The cache that Optuna puts before a database; within `alone` it reads only what was written through it.

    A write is noted before it is tried: one that failed, or that was interrupted, is read again too.
    """

    def __init__(self, backend: RDBStorage) -> None:
        super().__init__(backend)
        self._alone = False
        self._written: dict[int, set[int]] = {}  # study read since `alone` began -> trials written since they were read
        self._attributes: dict[int, dict[str, Any]] = {}  # study -> its user attributes
        self._ordered: dict[int, list[FrozenTrial]] = {}  # study -> its trials by number, as far as they were read

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Be the only one that writes trials and attributes of a study, which its lock must ensure."""
        self._forget()
        self._alone = True
        try:
            yield
        finally:
            self._alone = False
            self._forget()

    def _forget(self) -> None:
        self._written.clear()
        self._attributes.clear()
        self._ordered.clear()

    # -- reading ----------------------------------------------------------------------------------------------------

    def get_study_user_attrs(self, study_id: int) -> dict[str, Any]:
        """The study's attributes; within `alone` one object for all callers, which they must not change."""
        if not self._alone:
            return super().get_study_user_attrs(study_id)
        if study_id not in self._attributes:
            self._attributes[study_id] = super().get_study_user_attrs(study_id)
        return self._attributes[study_id]

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        if deepcopy or not self._alone:
            return super().get_all_trials(study_id, deepcopy, states)
        self._read_trials_from_remote_storage(study_id)
        ordered = self._ordered.setdefault(study_id, [])
        trials = self._studies[study_id].trials
        ordered += [trials[number] for number in range(len(ordered), len(trials))]
        return list(ordered) if states is None else [trial for trial in ordered if trial.state in states]

    def get_trial(self, trial_id: int) -> FrozenTrial:
        place = self._trial_id_to_study_id_and_number.get(trial_id)
        if not self._alone or place is None:
            return super().get_trial(trial_id)
        study_id, number = place
        self._read_trials_from_remote_storage(study_id)
        trial = self._studies[study_id].trials[number]
        return trial if trial.state.is_finished() else copy.deepcopy(trial)  # Optuna's Trial changes its own

    def _add_trials_to_cache(self, study_id: int, trials: list[FrozenTrial]) -> None:
        super()._add_trials_to_cache(study_id, trials)
        ordered = self._ordered.get(study_id, [])
        for trial in trials:
            if trial.number < len(ordered):
                ordered[trial.number] = trial

    def _read_trials_from_remote_storage(self, study_id: int) -> None:
        written = self._written.get(study_id)
        if written is not None:
            if not written:
                return
            trials = self._studies[study_id].trials
            newest = trials[max(trials)]._trial_id if trials else -1
            found = self._backend._get_trials(study_id, None, written, newest)
            with self._lock:
                self._add_trials_to_cache(study_id, found)
            if len(trials) == 1 + max(trials, default=-1):
                written.clear()
                return  # else a trial was made twice, for the first answer was lost: it is older than the newest
        super()._read_trials_from_remote_storage(study_id)
        if self._alone:
            self._written[study_id] = set()

    # -- writing ----------------------------------------------------------------------------------------------------

    def _note(self, trial_id: int) -> None:
        place = self._trial_id_to_study_id_and_number.get(trial_id)
        if place is not None and place[0] in self._written:
            self._written[place[0]].add(trial_id)

    def create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> int:
        written = self._written.get(study_id)
        if written is None:
            return super().create_new_trial(study_id, template_trial)
        written.add(-1)  # a trial whose number is not known yet
        made = super().create_new_trial(study_id, template_trial)
        if len(self._studies[study_id].trials) == 1 + self._trial_id_to_study_id_and_number[made][1]:
            written.discard(-1)  # else one before it was made, whose answer was lost
        return made

    def set_trial_param(
        self, trial_id: int, param_name: str, param_value_internal: float, distribution: BaseDistribution
    ) -> None:
        self._note(trial_id)
        super().set_trial_param(trial_id, param_name, param_value_internal, distribution)

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Sequence[float] | None = None) -> bool:
        self._note(trial_id)
        return super().set_trial_state_values(trial_id, state, values)

    def set_trial_user_attr(self, trial_id: int, key: str, value: Any) -> None:
        self._note(trial_id)
        super().set_trial_user_attr(trial_id, key, value)

    def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> None:
        self._note(trial_id)
        super().set_trial_system_attr(trial_id, key, value)

    def set_trial_intermediate_value(self, trial_id: int, step: int, intermediate_value: float) -> None:
        self._note(trial_id)
        super().set_trial_intermediate_value(trial_id, step, intermediate_value)

    def set_study_user_attr(self, study_id: int, key: str, value: Any) -> None:
        self._attributes.pop(study_id, None)
        super().set_study_user_attr(study_id, key, value)
