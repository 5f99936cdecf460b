"""Optuna's storage as its only writer sees it: what it shows is what the database holds, and it reads little for it."""

from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import lawful
import optuna
import pytest
from at_once import AtOnce
from optuna.distributions import CategoricalDistribution
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState
from search_driver import plan

from autofit.tuning.frontier import Trial
from autofit.tuning.search import Search, open_study
from autofit.tuning.study import SoleWriter, load_study

T = TypeVar("T")


class Watched(RDBStorage):
    """A database that counts the trials read from it, and that may fail after a write."""

    rows = 0
    fails = False
    makes_twice = False

    def _get_trials(self, *args: Any, **kwargs: Any) -> list[FrozenTrial]:
        found = super()._get_trials(*args, **kwargs)
        self.rows += len(found)
        return found

    def _create_new_trial(self, *args: Any) -> FrozenTrial:
        if self.makes_twice:  # as where the server went away between the commit and the answer
            super()._create_new_trial(*args)
        return self._after(super()._create_new_trial(*args))

    def set_trial_user_attr(self, trial_id: int, key: str, value: Any) -> None:
        super().set_trial_user_attr(trial_id, key, value)
        self._after(None)

    def set_study_user_attr(self, study_id: int, key: str, value: Any) -> None:
        super().set_study_user_attr(study_id, key, value)
        self._after(None)

    def _after(self, answer: T) -> T:
        if self.fails:
            self.fails = False
            raise InterruptedError("after the commit")
        return answer


@pytest.fixture
def database(tmp_path: Path) -> Watched:
    return Watched(f"sqlite:///{tmp_path}/studies.db")


@pytest.fixture
def storage(database: Watched) -> SoleWriter:
    return SoleWriter(database)


@pytest.fixture
def study(storage: SoleWriter) -> optuna.Study:
    return optuna.create_study(storage=storage, study_name="law", directions=["minimize", "minimize"])


def same(study: optuna.Study, database: RDBStorage) -> bool:
    """Whether the study's trials and attributes are those of the database."""
    fresh = optuna.load_study(study_name=study.study_name, storage=database)
    return study.trials == fresh.trials and study.user_attrs == fresh.user_attrs


def test_every_write_is_seen_at_the_next_look(study: optuna.Study, storage: SoleWriter, database: Watched) -> None:
    with storage.alone():
        for number in range(3):
            trial = study.ask({"a": CategoricalDistribution([1, None, "x"])})
            assert same(study, database)
            trial.set_user_attr("result", {"steps": (1.0, 2.0), 3: None})
            study.set_user_attr(f"repeat {number}", (1, 2))
            assert same(study, database)
            trial.set_constraint("bytes", -1.0)
            study._storage.set_trial_state_values(trial._trial_id, TrialState.WAITING)
            assert same(study, database)
            again = study.ask({"a": CategoricalDistribution([1, None, "x"])})
            assert again.number == number
            study.tell(number, [1.0, float(number)])
            assert same(study, database)
        study.ask()
        assert same(study, database)
    assert same(study, database)


def test_what_nobody_wrote_is_not_read_again(study: optuna.Study, storage: SoleWriter, database: Watched) -> None:
    with storage.alone():
        trials = [study.ask() for _ in range(20)]
        study.get_trials(deepcopy=False)
        database.rows = 0
        for _ in range(10):
            study.get_trials(deepcopy=False)
        assert database.rows == 0
        trials[7].set_user_attr("status", "fit")
        study.get_trials(deepcopy=False)
        assert database.rows == 1


def test_a_look_is_not_changed_by_a_later_write(study: optuna.Study, storage: SoleWriter) -> None:
    with storage.alone():
        trial = study.ask()
        before = study.get_trials(deepcopy=False)[0]
        trial.set_user_attr("status", "fit")
        assert before.user_attrs == {}
        assert study.get_trials(deepcopy=False)[0].user_attrs == {"status": "fit"}


@pytest.mark.parametrize("of_study", [True, False])
def test_a_write_that_failed_after_its_commit_is_seen(
    study: optuna.Study, storage: SoleWriter, database: Watched, of_study: bool
) -> None:
    with storage.alone():
        trial = study.ask()
        assert same(study, database)
        database.fails = True
        with pytest.raises(InterruptedError):
            (study if of_study else trial).set_user_attr("status", "fit")
        assert same(study, database)
        assert (study if of_study else study.trials[0]).user_attrs == {"status": "fit"}


@pytest.mark.parametrize("known", [0, 2])
def test_a_trial_that_was_made_twice_is_seen(
    study: optuna.Study, storage: SoleWriter, database: Watched, known: int
) -> None:
    with storage.alone():
        for _ in range(known):
            study.ask()
        study.get_trials(deepcopy=False)
        database.fails = True
        with pytest.raises(InterruptedError):
            study.ask()
        study.ask()  # as a caller that asks again after a lost answer, before any look
        assert len(study.trials) == known + 2
        assert same(study, database)


def test_a_trial_that_the_database_made_twice_is_seen_at_once(
    study: optuna.Study, storage: SoleWriter, database: Watched
) -> None:
    with storage.alone():
        study.ask()
        study.get_trials(deepcopy=False)
        database.makes_twice = True
        assert study.ask().number == 2
        assert [t.number for t in study.get_trials(deepcopy=False)] == [0, 1, 2]
        assert same(study, database)


def test_what_another_process_writes_is_seen_when_it_is_not_alone(
    study: optuna.Study, storage: SoleWriter, database: Watched
) -> None:
    other = optuna.load_study(study_name="law", storage=database)
    with storage.alone():
        trial = study.ask()
        study.get_trials()
    optuna.trial.Trial(other, trial._trial_id).set_user_attr("status", "fit")
    other.set_user_attr("note", "seen")
    other.ask()
    assert same(study, database)
    with storage.alone():
        assert same(study, database)


def test_a_search_sees_at_each_look_what_the_database_holds(tmp_path: Path) -> None:
    wanted = replace(plan(tmp_path, 8), parallel=3)
    study = open_study(wanted)
    assert isinstance(study._storage, SoleWriter)
    search = Search(wanted, study, server_socket=None, launcher=AtOnce(lawful.at_once))
    looks = []

    def look(_: Trial) -> None:
        fresh = load_study(tmp_path, wanted.name)
        looks.append((study.trials, study.user_attrs) == (fresh.trials, fresh.user_attrs))

    search.on_told = look
    search.run()
    assert looks == [True] * len(study.trials)
