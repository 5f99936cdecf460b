"""The advice after a search begins beside its last probes, once the winner is found."""

import argparse
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any, cast

import lawful
import pytest
from at_once import AtOnce
from rich.console import Console
from search_driver import plan

from autofit.api import searching
from autofit.api.events import Event, TrialResult
from autofit.api.lower_tiers import Outside
from autofit.api.results import read_result
from autofit.commands.common import Bar
from autofit.commands.predict import _Display
from autofit.forecast.advice import Ending
from autofit.forecast.estimate import Estimator
from autofit.tuning.frontier import Trial, winner
from autofit.tuning.record import record_of
from autofit.tuning.search import Search, open_study
from autofit.tuning.study import trials_of


def search_in(folder: Path, *, trials: int | None, at_once: int) -> tuple[Search, list[int]]:
    """A search that has ended, and how many probes were at work when it said that it had processors to spare."""
    wanted = replace(plan(folder, trials), parallel=at_once)
    search = Search(wanted, open_study(wanted), server_socket=None, launcher=AtOnce(lawful.at_once))
    spare: list[int] = []
    search.on_spare = lambda: spare.append(len(search._live))
    search.run()
    return search, spare


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Search, list[int]]:
    """A whole search with one probe at once, of which tests only read."""
    return search_in(tmp_path_factory.mktemp("ended"), trials=None, at_once=1)


def test_without_a_free_slot_no_processors_are_to_spare(ended: tuple[Search, list[int]]) -> None:
    assert ended[1] == []


@pytest.mark.parametrize(
    ("trials", "at_once", "said"),
    [(None, 2, [1]), pytest.param(None, 3, [2], marks=pytest.mark.thorough), (3, 2, [])],
    ids=str,
)
def test_processors_are_to_spare_once_the_winner_is_found_and_a_slot_is_free(
    tmp_path: Path, trials: int | None, at_once: int, said: list[int]
) -> None:
    assert search_in(tmp_path, trials=trials, at_once=at_once)[1] == said


class _Estimator:
    """Stands in for an Estimator: nothing is simulated until it is cancelled, or let go."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.cancelled = folder, threading.Event()

    def cancel(self) -> None:
        self.cancelled.set()


def outside(
    best: Trial | None, _: Sequence[Trial], estimator: Any, allow: str, *, tell: Callable[[str], None]
) -> dict[str, object]:
    assert best is not None
    tell("trying something")
    assert estimator.cancelled.wait(30)
    return {"trial": best.number, "allow": allow, "changes": []}


def test_what_was_found_ahead_is_said_for_the_winner_alone_and_ends_with_the_search(
    tmp_path: Path, ended: tuple[Search, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching, "outside", outside)
    study = ended[0].study
    best, said = winner(trials_of(study)), list[str]()
    assert best is not None
    estimator = _Estimator(tmp_path / "ahead")
    estimator.folder.mkdir()
    ahead = searching._Ahead(study, cast(Estimator, estimator))
    assert ahead.found(best, said.append) is None  # not begun
    ahead.begin()
    assert ahead.found(replace(best, number=best.number + 1), said.append) is None
    assert said == []
    estimator.cancelled.set()
    assert ahead.found(best, said.append) == {"trial": best.number, "allow": "neutral", "changes": []}
    assert said == ["trying something"]
    ahead.end()
    assert not estimator.folder.exists()


def test_advice_that_is_at_work_when_the_search_is_interrupted_is_cancelled(
    tmp_path: Path, ended: tuple[Search, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching, "outside", outside)
    estimator = _Estimator(tmp_path / "ahead")
    ahead = searching._Ahead(ended[0].study, cast(Estimator, estimator))
    ahead.begin()
    ahead.end()
    assert estimator.cancelled.is_set()
    assert ahead._made is not None
    assert ahead._made.done()


def test_ctrl_c_while_changes_are_looked_for_keeps_what_the_search_has_found(
    tmp_path: Path, ended: tuple[Search, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def pressed(_: float, work: Callable[[], Any], *, cancel: Callable[[Ending], None]) -> tuple[Any, Ending]:
        cancel(Ending.INTERRUPT)
        return work(), Ending.INTERRUPT

    monkeypatch.setattr(searching, "outside", outside)
    monkeypatch.setattr(searching, "within", pressed)
    estimator, heard = _Estimator(tmp_path / "advice"), list[Event]()
    monkeypatch.setattr(searching._Run, "_estimator", lambda *_: estimator)
    search = ended[0]
    run = searching._Run(cast(Any, None), cast(Any, None), heard.append, None, None, None)
    assert not run._keep_outside(search.plan, search.study, None)
    assert [event.text for event in heard if event.interrupted] == ["stopping the simulations at work"]
    assert record_of(search.study).outside is None  # for the next time


def options(**others: object) -> argparse.Namespace:
    return argparse.Namespace(**{"stream": False, "json": False, "no_mlflow": False, "dir": Path("s"), **others})


def test_the_verdict_is_on_the_screen_before_changes_are_looked_for_and_all_before_mlflow_has_it(
    ended: tuple[Search, list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    happened: list[str] = []

    class Heard(Bar):
        def begin(self, words: str, *, most_s: float | None = None) -> None:
            happened.append(f"{capsys.readouterr().out}[{words}]")

    found = read_result(ended[0].plan.folder, ended[0].study.study_name)
    change = Outside(
        changes={"optim": "adamw_8bit"}, options="--set optim=adamw_8bit", tier="approximate", device_used_bytes=10**9,
        step_s=1.0, speedup=1.1,
    )  # fmt: skip
    search = _Display(options(), Heard("search", "r.yaml"), live=True)
    search.on_result(found)
    search.on_advice(None)
    search.on_result(replace(found, outside=(change,)))
    reading, looking, copying = happened
    assert reading == "[reading the recipe]"
    assert "wins with" in looking
    assert "Next:" not in looking
    assert looking.endswith("[looking for changes]")
    assert copying.startswith("Faster on top of the winner, but outside the neutral tier")
    assert "\nNext: autofit promote best" in copying
    assert copying.endswith("[copying the trials to MLflow]")


def test_a_trial_on_the_terminal_keeps_numbers_with_their_units_and_is_indented(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    search = _Display(options(), Bar("search", "r.yaml", shown=False), live=True)
    shown = StringIO()
    search._console = Console(file=shown, force_terminal=True, width=80)
    row = TrialResult.of(Trial(number=0, tier="neutral", params={}, changes={}), None)
    text = "trial 0 [neutral] the recipe as it is: fit, 4.00 GB (3.84 GB free), 30.8 ms, 3.08 s a step"
    search.on_event(Event(text=text, trial=row))
    assert shown.getvalue().splitlines() == [
        "trial 0 [neutral] the recipe as it is: fit, 4.00 GB (3.84 GB free), 30.8 ms,",
        "  3.08 s a step",
    ]
