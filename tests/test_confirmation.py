"""The finalist is probed once more; lawful probes that behave otherwise the second time."""

import json
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import lawful
import pytest
from at_once import AtOnce
from busy import Machine, search_on
from search_driver import plan

from autofit.api.results import SearchResult
from autofit.errors import ConfigError
from autofit.probing.launch import Launcher
from autofit.probing.result import Fidelity, ProbeRequest, ProbeResult, ProbeStatus
from autofit.promotion.promotion import choose
from autofit.tracking.runs import client, experiment_id
from autofit.tracking.study_mirror import sync
from autofit.tuning import search
from autofit.tuning.frontier import Goal, Rule, Trial, pareto_front, winner
from autofit.tuning.record import StudyRecord, keep_confirmation
from autofit.tuning.search import Plan, Search, confirm, open_study
from autofit.tuning.sentences import confirmation_note, why
from autofit.tuning.study import load_study, trials_of

pytestmark = pytest.mark.filterwarnings("ignore")
RULE: Rule = {"goal": "speed", "target_bytes": 150 * lawful.MB}


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished search that was not confirmed."""
    folder = tmp_path_factory.mktemp("searched")
    search_in(folder)
    return folder


@pytest.fixture
def folder(searched: Path, tmp_path: Path) -> Path:
    shutil.copytree(searched, tmp_path / "studies")
    return tmp_path / "studies"


def result_of(trials: list[Trial]) -> SearchResult:
    return SearchResult.of(trials, StudyRecord(target_bytes=RULE["target_bytes"]), study="law", folder=Path())


def search_in(folder: Path) -> Plan:
    wanted = plan(folder, 8)
    Search(wanted, open_study(wanted), server_socket=None, launcher=AtOnce(lawful.at_once)).run()
    return wanted


def confirmed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, goal: Goal = "speed", /, **does: object
) -> tuple[list[Trial], list[str]]:
    """The trials after a confirmation in which each trial `tN` does as told, and what was said."""
    monkeypatch.setenv("UNSTEADY", json.dumps({name[1:]: what for name, what in does.items()}))
    wanted, said = replace(plan(folder, 8), goal=goal), list[str]()
    confirm(wanted, open_study(wanted), server_socket=None, launcher=AtOnce(lawful.unsteady), say=said.append)
    return trials_of(load_study(folder, "law")), said


def ranked(folder: Path) -> list[Trial]:
    """The trials that fit, as the search ranks them."""
    return sorted((t for t in trials_of(load_study(folder, "law")) if t.fits), key=lambda t: t.step_s or 0)


def test_the_winner_is_probed_longer_under_the_same_cap_and_only_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = ranked(folder)[0]
    trials, _ = confirmed(folder, monkeypatch)
    assert [t.number for t in trials if t.confirmed is not None] == [0, best.number]
    assert [t.number for t in trials if t.comparison is not None] == [best.number]
    probes = folder / "probes" / "law"
    assert len(list(probes.glob("confirm-*"))) == 6
    request = ProbeRequest.read(probes / f"confirm-{best.number:04d}-with-0000-01-1" / "request.json")
    against = ProbeRequest.read(probes / f"confirm-0000-with-{best.number:04d}-01-1" / "request.json")
    assert (against.measured_steps, against.limit_bytes) == (5, 150 * lawful.MB)
    assert (request.measured_steps, request.limit_bytes) == (5, 150 * lawful.MB)
    assert request.values["per_device_train_batch_size"] == best.changes["per_device_train_batch_size"]
    assert f"trial {best.number} is confirmed" in confirmation_note(trials, RULE)
    _, said = confirmed(folder, monkeypatch)
    assert said == []


class Slow(AtOnce):
    """Has no answer the first time that it is asked for one."""

    poll_s = 0.0

    def result(self, folder: Path) -> ProbeResult | None:
        asked = folder / "asked"
        if asked.exists():
            return super().result(folder)
        asked.touch()
        return None


def test_a_confirmation_that_takes_long_says_what_is_probed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_EVERY_S", 0.0)
    monkeypatch.setenv("UNSTEADY", "{}")
    best, wanted, said = ranked(folder)[0], plan(folder, 8), list[str]()
    confirm(wanted, open_study(wanted), server_socket=None, launcher=Slow(lawful.unsteady), say=said.append)
    waits = [line.partition(", for ")[0] for line in said if line.startswith("still")]
    assert waits[:2] == [
        "still probing the recipe as it is for pair 1", f"still probing trial {best.number} for pair 1"
    ]  # fmt: skip


def test_a_finalist_that_falls_gives_way_to_the_next_and_the_output_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = ranked(folder)[:2]
    trials, said = confirmed(folder, monkeypatch, **{f"t{first.number}": "oom"})
    best = winner(trials, **RULE)
    assert best is not None
    assert best.number == second.number
    assert best.confirmed is not None
    assert first.number not in [t.number for t in pareto_front(trials)]
    assert any(f"trial {first.number} failed its confirmation run: out of memory" in line for line in said)
    content = result_of(trials).to_dict()
    assert content["winner"]["trial"] == second.number  # type: ignore[index]
    assert content["confirmation"]["status"] == "confirmed"  # type: ignore[index]
    assert [f["trial"] for f in content["confirmation"]["fallen"]] == [first.number]  # type: ignore[index]
    assert choose(trials, "best", RULE).number == second.number
    with pytest.raises(ConfigError, match="failed its confirmation run"):
        choose(trials, str(first.number), RULE)


def test_slower_than_the_baseline_in_turns_it_gives_way_to_the_next_and_the_numbers_are_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = ranked(folder)[:2]
    trials, _ = confirmed(folder, monkeypatch, **{f"t{first.number}": 2.0})
    best = winner(trials, **RULE)
    assert best is not None
    assert best.number == second.number
    slower = trials[first.number].comparison
    assert slower is not None
    assert slower.high < 1
    note = confirmation_note(trials, RULE)
    assert f"trial {first.number} had {slower.speedup:.2f}x the baseline's speed (" in note
    assert "in 2 pairs): not clearly faster" in note
    assert [f["trial"] for f in result_of(trials).to_dict()["confirmation"]["fallen"]] == [first.number]  # type: ignore[index]


def test_where_nothing_is_faster_in_turns_the_recipe_stays_as_it_is_whoever_asks(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials, said = confirmed(folder, monkeypatch, **{f"t{t.number}": 9.0 for t in ranked(folder) if t.changes})
    best = winner(trials, **RULE)
    assert best is not None
    assert not best.changes
    assert choose(trials, "best", RULE) == best
    found = result_of(trials)
    assert found.winner is not None
    assert (found.winner.number, found.winner.speedup) == (best.number, 1.0)
    assert f"{best.number} *" in list(found.table().columns[0].cells)
    assert why(trials, {}, None, RULE).startswith(f"trial {best.number} wins: the recipe as it is, at ")
    assert ". No other trial that was compared with it in turns (" in why(trials, {}, None, RULE)
    content = found.to_dict()["confirmation"]
    assert content["status"] == "baseline"  # type: ignore[index]
    assert all(f["comparison"]["faster"] is False for f in content["fallen"])  # type: ignore[index]
    assert sum("not clearly faster" in line for line in said) == len(content["fallen"])  # type: ignore[index]


def test_on_a_machine_that_became_slower_the_winner_stays_and_so_does_its_speed_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, base = ranked(folder)[0], trials_of(load_study(folder, "law"))[0]
    trials, _ = confirmed(folder, monkeypatch, **{f"t{t.number}": 3.0 for t in ranked(folder)})
    assert [t.number for t in trials if t.comparison is not None] == [first.number]
    best = winner(trials, **RULE)
    assert best is not None
    assert best.number == first.number
    assert best.step_s == pytest.approx(3.0 * (first.step_s or 0.0))
    assert best.speedup(trials[0]) == pytest.approx(first.speedup(base))
    assert f", {best.speedup(trials[0]):.2f}x the baseline's samples/s (" in why(trials, {}, None, RULE)


def test_a_baseline_that_runs_out_of_memory_in_its_turn_is_nothing_to_compare_with(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ranked(folder)[0]
    trials, said = confirmed(folder, monkeypatch, t0="oom")
    best = winner(trials, **RULE)
    assert best is not None
    assert (best.number, best.comparison) == (first.number, None)
    assert best.confirmed is not None
    assert any("trial 0 failed its confirmation run: out of memory" in line for line in said)
    assert "(the recipe as it is does not fit), and " in why(trials, {}, None, RULE)


def test_with_another_goal_than_speed_the_finalist_is_probed_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials, _ = confirmed(folder, monkeypatch, "memory")
    assert not any(t.comparison for t in trials)
    assert [t for t in trials if t.confirmed] == [winner(trials, goal="memory", target_bytes=RULE["target_bytes"])]


def test_the_recipe_as_it_is_has_a_confirmation_of_its_own_where_it_was_the_fastest(tmp_path: Path) -> None:
    trials, probes = search_on(Machine(0, stretch_s=10.0, slowdown=1.0), tmp_path, [0.7, 0.8, 0.9])
    assert [t.number for t in trials if t.confirmed is not None] == [0]
    assert probes == 1
    assert "trial 0 is confirmed: 5 steps" in confirmation_note(trials, RULE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stretch_s", "found"),
    [(2.0, 23), *(pytest.param(*case, marks=pytest.mark.thorough) for case in [(10.0, 21), (100.0, 21)])],
)
def test_on_a_machine_that_is_busy_half_of_the_time_no_winner_is_slower_and_a_faster_trial_is_found(
    tmp_path: Path, stretch_s: float, found: int
) -> None:
    def winners(third_s: float) -> list[int | None]:
        steps_s, best = [0.7, 0.72, third_s, 0.8, 0.91], []
        for seed in range(24):
            folder = tmp_path / f"{third_s}-{seed}"
            best.append(winner(search_on(Machine(seed, stretch_s=stretch_s), folder, steps_s)[0]))
        return [None if b is None else b.number for b in best]

    assert set(winners(third_s=0.75)) == {0}
    assert winners(third_s=0.5).count(2) >= found  # of 24


def test_a_confirmation_killed_twice_is_no_verdict_and_is_repeated_by_the_next_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = ranked(folder)[0]
    trials, said = confirmed(folder, monkeypatch, **{f"t{best.number}": "kill"})
    assert all(t.confirmed is None for t in trials)
    assert "was killed; run the same command again" in said[-1]
    assert "is not confirmed" in confirmation_note(trials, RULE)
    trials, _ = confirmed(folder, monkeypatch)
    assert trials[best.number].confirmed is not None


@pytest.mark.parametrize("ending", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.thorough)])
def test_ended_during_the_confirmation_the_next_run_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, ending: signal.Signals
) -> None:
    best = ranked(folder)[0]
    monkeypatch.setenv("UNSTEADY", json.dumps({str(best.number): "wait"}))
    monkeypatch.setenv("LAWFUL_S", "1.0")
    driver = subprocess.Popen([sys.executable, __file__, str(folder)], stderr=subprocess.DEVNULL)
    probe = folder / "probes" / "law" / f"confirm-{best.number:04d}-with-0000-01-1"
    deadline = time.monotonic() + 300
    while not (probe / "job.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    driver.send_signal(ending)
    driver.wait(timeout=300)
    trials, _ = confirmed(folder, monkeypatch)
    assert trials[best.number].confirmed is not None
    attempts = 1 if ending is signal.SIGKILL else 2  # the job outlives a kill; Ctrl-C stops it
    assert len(list(probe.parent.glob("confirm-*"))) == 5 + attempts  # six probes, none of them twice


def test_a_simulated_card_and_the_recipe_as_it_is_are_not_asked_again() -> None:
    result = ProbeResult(status=ProbeStatus.FIT, device="sim:t4", fidelity=Fidelity.PREDICTED, step_s=(1.0,),
                         device_used_bytes=5)  # fmt: skip
    asis = Trial(number=0, tier="neutral", changes={}, params={}, result=replace(result, step_s=(2.0,)))
    better = Trial(number=1, tier="neutral", changes={"a": 1}, params={}, result=result)
    assert "is predicted, not confirmed" in confirmation_note([asis, better], RULE)
    measured = replace(asis, result=replace(result, fidelity=Fidelity.MEASURED))
    assert confirmation_note([measured], RULE) == "the winner is the recipe as it is"


@pytest.mark.slow
def test_mlflow_has_the_confirmation_whenever_it_comes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    sync(folder, "law")
    best = ranked(folder)[0]
    assert best.result is not None
    keep_confirmation(load_study(folder, "law"), best.number, replace(best.result, step_s=(0.9, 0.9)))
    sync(folder, "law")
    api = client(folder)
    runs = api.search_runs([experiment_id(api, folder, "law")])
    run = next(r for r in runs if r.data.tags.get("autofit.trial") == str(best.number))
    assert run.data.tags["autofit.confirmation"].startswith(f"trial {best.number} is confirmed: 2 steps")
    assert run.data.metrics["confirmed_step_s"] == 0.9
    assert run.data.metrics["step_s"] == best.step_s
    summary = next(r for r in runs if r.data.tags.get("autofit.kind") == "study")
    assert "is confirmed: 2 steps" in summary.data.tags["mlflow.note.content"]
    monkeypatch.setenv("UNSTEADY", json.dumps({str(t.number): 9.0 for t in ranked(folder) if t.changes}))
    wanted = plan(folder, 8)
    confirm(wanted, open_study(wanted), server_socket=None, launcher=AtOnce(lawful.unsteady))
    sync(folder, "law")
    runs = api.search_runs([experiment_id(api, folder, "law")])
    run = next(r for r in runs if r.data.tags.get("autofit.trial") == str(best.number))
    assert "not clearly faster" in run.data.tags["autofit.confirmation"]
    assert run.data.metrics["confirmed_speedup"] < 1
    summary = next(r for r in runs if r.data.tags.get("autofit.kind") == "study")
    assert summary.data.tags["autofit.winner"] == "0"
    assert "**trial 0 wins: the recipe as it is" in summary.data.tags["mlflow.note.content"]


if __name__ == "__main__":
    wanted = plan(Path(sys.argv[1]), 8)
    confirm(wanted, open_study(wanted), server_socket=None, launcher=Launcher(lawful.unsteady))
