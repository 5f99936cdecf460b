import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import lawful
import numpy as np
import optuna
import psutil
import pytest
import tiny
from at_once import AtOnce
from optuna.storages import RDBStorage
from optuna.trial import TrialState
from search_driver import plan

import autofit.tuning.search
from autofit.api.tables import trial_line
from autofit.errors import ConfigError, EnvironmentFault
from autofit.files import write_json
from autofit.forecast.predictions import Predictions
from autofit.probing.fork_server import ForkServer
from autofit.probing.launch import Launcher, is_alive
from autofit.probing.prepare import prepare
from autofit.probing.result import Cause, ProbeRequest, ProbeResult, ProbeStatus
from autofit.recipe.recipe import TrainerName
from autofit.space.knob import load_space
from autofit.space.space import Space
from autofit.tuning.frontier import Rule, pareto_front, winner
from autofit.tuning.record import Stop, StopKind, record_of
from autofit.tuning.sampler import SAMPLERS, CandidateSampler, SamplerName
from autofit.tuning.search import Plan, Search, open_study
from autofit.tuning.sentences import predicted_note
from autofit.tuning.study import load_study, tell, trials_of


def search_in(folder: Path, trials: int | None, target_bytes: int = 150 * lawful.MB) -> tuple[Search, Stop]:
    """A search without jobs, and its end; a job takes half a second of imports."""
    wanted = plan(folder, trials, target_bytes)
    search = Search(wanted, open_study(wanted), server_socket=None, launcher=AtOnce(lawful.at_once))
    return search, search.run()


def test_the_search_finds_the_fastest_candidate_that_fits_and_tells_oom_as_infeasible(tmp_path: Path) -> None:
    search, stop = search_in(tmp_path, None)
    assert stop.kind is StopKind.EXHAUSTED
    trials = trials_of(search.study)
    space = search.plan.space
    truth = {c: lawful.law({**search.plan.recipe.resolved, **space.changes(c)}) for c in space.allowed()}
    fastest = min(seconds for used, seconds in truth.values() if used <= 150 * lawful.MB)
    best = winner(trials)
    assert best is not None
    assert best.step_s == pytest.approx(fastest)
    assert trials[0].changes == {}
    ooms = [t for t in search.study.trials if t.user_attrs["status"] == "oom"]
    assert ooms
    assert all(t.state is TrialState.COMPLETE and t.constraints["bytes_over_target"] > 0 for t in ooms)
    assert all(t.user_attrs["shown_as"] == "pruned" for t in ooms)
    points = {(t.step_s, t.device_used_bytes) for t in pareto_front(trials)}
    assert points == {(t.values[0], int(t.values[1])) for t in search.study.best_trials}
    assert len(trials) + record_of(search.study).screened == len(space.allowed())


@pytest.mark.parametrize(
    ("trainer", "own", "neutral"),
    [("sft", {}, 32), pytest.param("dpo", {"loss_type": ["aot"]}, 12, marks=pytest.mark.thorough),
     pytest.param("dpo", {"sync_ref_model": True, "use_peft": False}, 16, marks=pytest.mark.slow),
     pytest.param("reward", {}, 32, marks=pytest.mark.thorough)],
)  # fmt: skip
def test_another_trainers_recipe_is_searched_at_the_same_effective_batch(
    tmp_path: Path, tiny_model: Path, fork_server: ForkServer, trainer: TrainerName, own: dict[str, object],
    neutral: int, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    path = tiny.write_offline_recipe(trainer, tmp_path, tiny_model, **own)
    inspection = tmp_path / "i"
    recipe = prepare(path, trainer=trainer, device="cpu", folder=inspection, server=fork_server)
    space = Space.of(recipe, load_space(None, trainer=trainer))
    assert len(space.allowed()) == neutral
    wanted = Plan(recipe=recipe, space=space, folder=tmp_path, device="cpu", target_bytes=10**9, max_trials=2)
    wanted.probes_folder.mkdir(parents=True)
    for name in ("worst_row", "worst_case.json"):
        (inspection / name).rename(wanted.probes_folder / name)
    study = open_study(wanted)
    Search(wanted, study, server_socket=fork_server.socket_path).run()
    trials = trials_of(study)
    assert [t.status for t in trials] == [ProbeStatus.FIT] * 2, trials
    assert {micro * accumulation for micro, accumulation, *_ in map(space.split, space.allowed())} == {8}
    assert "samples/s" in trial_line(trials[1], recipe.resolved)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_where_nothing_is_predicted_to_fit_no_trial_is_asked_for(tmp_path: Path, sampler: SamplerName) -> None:
    wanted = plan(tmp_path, None)
    candidates = tuple(wanted.space.allowed())
    over = np.full(len(candidates), 200.0 * lawful.MB)
    predictions = Predictions(candidates=candidates, floor_bytes=over, device_used_bytes=over, step_s=over)
    wanted = replace(wanted, sampler=sampler, predictions=predictions)
    search = Search(wanted, open_study(wanted), server_socket=None, launcher=Launcher(lawful.run))
    assert search.run().kind is StopKind.EXHAUSTED
    assert not search.study.trials
    record = record_of(search.study)
    assert record.screened == len(candidates)
    assert "predicted to need 0.20 GB or more" in predicted_note([], record)


def test_run_again_a_finished_search_asks_for_nothing(tmp_path: Path) -> None:
    search_in(tmp_path, 4)
    search, stop = search_in(tmp_path, 4)
    assert stop == Stop(StopKind.TRIALS, "4 of 4 trials are done")
    assert len(search.study.trials) == 4
    assert len(list(search.plan.probes_folder.iterdir())) == 4


@pytest.mark.slow
def test_the_plateau_stops_a_search_that_no_longer_improves(tmp_path: Path) -> None:
    wanted = plan(tmp_path, None)
    wanted = replace(wanted, plateau_trials=3)
    search = Search(wanted, open_study(wanted), server_socket=None, launcher=AtOnce(lawful.at_once))
    stop = search.run()
    assert stop.kind is StopKind.PLATEAU
    assert "3 trials did not improve" in stop.words


def test_a_study_name_of_another_plan_is_refused(tmp_path: Path) -> None:
    search_in(tmp_path, 1)
    with pytest.raises(ConfigError, match=r"was made by \S+@\S+ for another recipe"):
        open_study(plan(tmp_path, 1, target_bytes=200 * lawful.MB))


@pytest.mark.slow
def test_nothing_fits_is_an_answer_with_what_to_relax(tmp_path: Path) -> None:
    from autofit.tuning.sentences import why

    search, _ = search_in(tmp_path, 6, target_bytes=50 * lawful.MB)
    trials = trials_of(search.study)
    assert winner(trials) is None
    assert "nothing fits in 50.0 MB" in why(trials, {}, 50 * lawful.MB)
    rule: Rule = {"goal": "speed", "target_bytes": 49 * lawful.MB}  # a trial between the two would be told as enough
    assert "nothing fits in 50.0 MB less 1.0 MB of headroom: " in why(trials, {}, 50 * lawful.MB, rule)
    assert "--allow" not in why(trials, {}, 50 * lawful.MB, allow="recipe")  # there is no lower tier
    assert "held at least" in why(trials, {}, 50 * lawful.MB)
    assert "--allow approximate" in why(trials, {}, 50 * lawful.MB)
    ooms = [replace(t, result=replace(t.result, least_capacity_bytes=t.device_used_bytes)) for t in trials if t.result]
    assert " needs " in why(ooms, {}, 50 * lawful.MB)


@pytest.mark.slow
def test_a_probe_killed_twice_is_told_as_lost_and_the_search_goes_on(tmp_path: Path) -> None:
    wanted = plan(tmp_path, 3)
    search = Search(wanted, open_study(wanted), server_socket=None, launcher=Launcher(_kill_trial_1))
    search.run()
    first, second, third = (t.status for t in trials_of(search.study))
    assert (first, second) == (ProbeStatus.FIT, ProbeStatus.LOST)
    assert third in (ProbeStatus.FIT, ProbeStatus.OOM)
    assert [t.state for t in search.study.trials].count(TrialState.FAIL) == 1
    assert (wanted.probes_folder / "trial-0001-2").exists()


def _kill_trial_1(request_path: str) -> None:
    if "trial-0001" in request_path:
        os.kill(os.getpid(), signal.SIGKILL)
    lawful.run(request_path)


class Lost(Launcher):
    """Every probe after the baseline's is lost of `cause`, which its reason says in any words."""

    def __init__(self, cause: Cause, words: str) -> None:
        super().__init__(lawful.at_once)
        self._cause, self._words = cause, words

    def submit(self, request: ProbeRequest) -> None:
        write_json(request.request_path, request.to_json())
        answer = lawful.result_of(request)
        if not request.folder.name.startswith("trial-0000"):
            answer = ProbeResult(
                status=ProbeStatus.LOST, device="cpu", reason=self._words, cause=self._cause, wall_s=0.1
            )
        write_json(request.answer_path, answer.to_json())


WORDS = ("the deadline of 9 s passed", "no space left", "the probe was killed", "")
CAUSES = ((Cause.KILLED, 2), (Cause.HOST_OOM, 2), (Cause.DEADLINE, 1))


@pytest.mark.parametrize(  # the default tests have each cause with the words of another, and one without words
    ("cause", "attempts", "words"),
    [pytest.param(cause, attempts, words, marks=() if place in (number, number + 3) else pytest.mark.slow)
     for number, (cause, attempts) in enumerate(CAUSES) for place, words in enumerate(WORDS)],
)  # fmt: skip
def test_a_lost_probe_is_repeated_for_its_cause_and_whatever_its_reason_says(
    tmp_path: Path, cause: Cause, attempts: int, words: str
) -> None:
    wanted = plan(tmp_path, 2)
    search = Search(wanted, open_study(wanted), server_socket=None, launcher=Lost(cause, words))
    assert search.run().kind is StopKind.TRIALS
    lost = trials_of(search.study)[1].result
    assert lost is not None
    assert (lost.status, lost.cause, lost.reason) == (ProbeStatus.LOST, cause, words)
    assert len(list(wanted.probes_folder.glob("trial-0001-*"))) == attempts


def test_a_full_disk_ends_the_search_and_its_trial_waits_for_the_next_run(tmp_path: Path) -> None:
    wanted = plan(tmp_path, 2)
    search = Search(wanted, open_study(wanted), server_socket=None, launcher=Lost(Cause.NO_SPACE, "as it is"))
    with pytest.raises(EnvironmentFault, match=r"no space left in .*trial-0001-1; free some"):
        search.run()
    assert [t.state for t in search.study.trials] == [TrialState.COMPLETE, TrialState.WAITING]
    assert search_in(tmp_path, 2)[1].kind is StopKind.TRIALS
    assert all(t.state is TrialState.COMPLETE for t in search.study.trials)


@pytest.mark.thorough
def test_killed_at_24_random_moments_and_run_again_it_has_12_distinct_trials_and_none_running(tmp_path: Path) -> None:
    chance = random.Random(4)
    kills = 0
    while kills < 24:
        driver = _driver(tmp_path)
        time.sleep(chance.uniform(0.6, 2.2))
        victim = chance.choice(["driver", "driver", "interrupt", "job"])
        if victim == "job":
            jobs = [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])
                    and "submitit" in " ".join(p.info["cmdline"] or [])]  # fmt: skip
            for job in jobs:
                job.kill()
            kills += bool(jobs)
        elif driver.poll() is None:
            driver.send_signal(signal.SIGINT if victim == "interrupt" else signal.SIGKILL)
            kills += 1
        if victim != "job":
            driver.wait(timeout=300)  # a deadline for a busy machine, not a claim
        else:
            driver.kill()
            driver.wait()
        if len(load_or_none(tmp_path)) >= 12 and kills < 24:
            _grow(tmp_path)
    assert _driver(tmp_path).wait(timeout=300) == 0
    study = load_study(tmp_path, "law")
    assert len(study.trials) >= 12
    assert all(t.state.is_finished() for t in study.trials), [t.state for t in study.trials]
    assert len({tuple(sorted(t.params.items(), key=str)) for t in study.trials}) == len(study.trials)
    assert study.trials[0].user_attrs["changes"] == {}
    assert not [f for f in (tmp_path / "probes" / "law").iterdir() if is_alive(f)]


@pytest.mark.parametrize("told", [False, True])
def test_ctrl_c_while_an_answer_is_told_loses_no_answer(
    told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(study: optuna.Study, number: int, result: ProbeResult, *, target_bytes: int | None) -> None:
        monkeypatch.setattr(autofit.tuning.search, "tell", tell)
        if told:
            tell(study, number, result, target_bytes=target_bytes)
        raise KeyboardInterrupt

    monkeypatch.setattr(autofit.tuning.search, "tell", interrupted)
    search = Search(plan(tmp_path, 2), open_study(plan(tmp_path, 2)), server_socket=None, launcher=Launcher(lawful.run))
    with pytest.raises(KeyboardInterrupt):
        search.run()
    search.interrupt()
    assert [t.state for t in search.study.trials] == [TrialState.COMPLETE]
    assert search_in(tmp_path, 2)[1].kind is StopKind.TRIALS
    assert {f.name for f in search.plan.probes_folder.iterdir()} == {"trial-0000-1", "trial-0001-1"}


_TRIALS = {"wanted": 12}


def _grow(folder: Path) -> None:
    """More trials to kill, as long as the space has them."""
    _TRIALS["wanted"] = min(20, len(load_or_none(folder)) + 1)


def load_or_none(folder: Path) -> list[optuna.trial.FrozenTrial]:
    try:
        return load_study(folder, "law").trials
    except (ConfigError, EnvironmentFault):
        return []


def _driver(folder: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, str(Path(__file__).parent / "search_driver.py"), str(folder), str(_TRIALS["wanted"])]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def test_two_searches_on_one_study_at_once_are_refused(tmp_path: Path) -> None:
    from autofit.tuning.locks import exclusive

    with (
        exclusive(tmp_path, "s"),
        pytest.raises(ConfigError, match="another autofit process"),
        exclusive(tmp_path, "s"),
    ):
        pass


def test_an_unreadable_database_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "studies.db").write_bytes(b"no database" * 100)
    with pytest.raises(EnvironmentFault, match="cannot be used as a database"):
        load_study(tmp_path, None)


def test_the_study_used_last_is_found_without_reading_a_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b", "a", "b"):
        open_study(replace(plan(tmp_path, 1), study_name=name))
    monkeypatch.setattr(RDBStorage, "get_all_trials", None)
    assert load_study(tmp_path, None).study_name == "b"


def test_telling_twice_after_a_crash_in_between_changes_nothing(tmp_path: Path) -> None:
    wanted = plan(tmp_path, 1)
    study = open_study(wanted)
    sampler = study.sampler
    assert isinstance(sampler, CandidateSampler)
    trial = study.ask(sampler.distributions())
    trial.set_user_attr("status", "oom")
    trial.set_constraint("bytes_over_target", 5.0)
    result = ProbeResult(status=ProbeStatus.OOM, device="cpu", device_used_bytes=10, limit_bytes=5)
    tell(study, 0, result, target_bytes=5)
    assert study.trials[0].constraints == {"bytes_over_target": 5.0}
    assert study.trials[0].state is TrialState.COMPLETE


@pytest.mark.slow
def test_a_study_of_nothing_but_failures_ends_early_and_begins_anew_when_run_again(tmp_path: Path) -> None:
    wanted = plan(tmp_path, 4)
    search = Search(wanted, open_study(wanted), server_socket=None, launcher=AtOnce(_fail))
    assert search.run().kind is StopKind.BROKEN
    assert len(search.study.trials) == 2
    search, stop = search_in(tmp_path, 4)
    assert stop.kind is StopKind.TRIALS
    assert all(t.state is TrialState.COMPLETE for t in search.study.trials)


def _fail(request_path: str) -> None:
    request = ProbeRequest.read(Path(request_path))
    answer = ProbeResult(status=ProbeStatus.FAILED, device="cpu", reason="ValueError: as always", wall_s=0.1)
    write_json(request.answer_path, answer.to_json())


def test_names_that_differ_in_case_only_are_refused_where_they_would_share_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = replace(plan(tmp_path, 1), study_name="Law")
    wanted.probes_folder.mkdir(parents=True)
    assert open_study(wanted).study_name == "Law"
    monkeypatch.setattr("os.listdir", lambda _: ["law"])  # as a file system that ignores case says
    with pytest.raises(ConfigError, match="which ignores case, has that of 'law' there"):
        open_study(wanted)
