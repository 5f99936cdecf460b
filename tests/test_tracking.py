"""MLflow's mirror: equal to the study, however often and in however many pieces it is made."""

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import lawful
import pytest
from at_once import AtOnce
from optuna.study import Study
from optuna.trial import FrozenTrial
from search_driver import plan

from autofit.files import write_json
from autofit.tracking import follower
from autofit.tracking.follower import following, keep_mirrored, told_of
from autofit.tracking.front_plot import write_step
from autofit.tracking.runs import client, experiment_id
from autofit.tracking.study_mirror import _sync, sync
from autofit.tuning.record import record_of
from autofit.tuning.search import Search, open_study
from autofit.tuning.study import load_study, trials_of

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished study of 8 trials."""
    folder = tmp_path_factory.mktemp("studies")
    wanted = plan(folder, 8)
    Search(wanted, open_study(wanted), server_socket=None, launcher=AtOnce(lawful.at_once)).run()
    return folder


def runs_of(folder: Path) -> dict[str, Any]:
    api = client(folder)
    runs = api.search_runs([experiment_id(api, folder, "law")], max_results=1000)
    found = [r for r in runs if "autofit.trial" in r.data.tags]
    assert len({r.data.tags["autofit.trial"] for r in found}) == len(found)
    return {r.data.tags["autofit.trial"]: r for r in found}


def assert_equal_to_optuna(folder: Path) -> None:
    study = load_study(folder, "law")
    runs = runs_of(folder)
    assert set(runs) == {str(t.number) for t in study.trials}
    for frozen, trial in zip(study.trials, trials_of(study), strict=True):
        run = runs[str(frozen.number)]
        assert run.data.tags["autofit.study"] == "law"
        assert run.data.tags["autofit.status"] == trial.status
        assert run.info.status == ("FINISHED" if trial.fits else "FAILED")
        assert "mlflow.parentRunId" not in run.data.tags
        if trial.fits:
            assert [run.data.metrics["step_s"], run.data.metrics["device_used_bytes"]] == frozen.values
        for key, value in trial.params.items():
            if not key.startswith("env."):
                assert run.data.params[key] == str(trial.changes.get(key, value))


def test_every_trial_is_a_top_level_run_equal_to_optunas_and_the_summary_has_artifacts(folder: Path) -> None:
    assert sync(folder, "law") == 8
    assert_equal_to_optuna(folder)
    api = client(folder)
    summary = [r for r in api.search_runs([experiment_id(api, folder, "law")]) if "autofit.trial" not in r.data.tags]
    assert len(summary) == 1
    names = {a.path for a in api.list_artifacts(summary[0].info.run_id)}
    assert names == {"front.png", "step.png", "step.svg", "summary.json", "summary.md"}


def test_a_step_is_drawn_as_it_came_and_went_where_its_probe_told_it_and_by_its_peaks_where_not(
    folder: Path, tmp_path: Path
) -> None:
    study = load_study(folder, "law")
    trial = next(t for t in trials_of(study) if t.fits)
    assert trial.result is not None
    drawn = {}
    for name, course in (("told", {"live": {"weights": [90.0, 95.0]}, "phases": [["update", 0, 1.0]]}), ("not", {})):
        probe = tmp_path / name / f"trial-{trial.number:04d}-1"
        answer = replace(trial.result, course=course, categories={"update": {"weights": 10**8}} if course else {})
        write_json(probe / "answer.json", answer.to_json())
        (tmp_path / f"{name}-files").mkdir()
        files = write_step(trial, record_of(study), probes=tmp_path / name, into=tmp_path / f"{name}-files")
        assert [path.name for path in files] == ["step.png", "step.svg"]
        drawn[name] = files[1].read_text("utf-8")
    assert "allocations and frees of one step" in drawn["told"]
    assert "GB allocated at the peak of a phase" in drawn["not"]
    unknown = replace(trial, result=replace(trial.result, phases=()))
    assert write_step(unknown, record_of(study), probes=tmp_path, into=tmp_path) == []


def test_mirrored_again_or_after_a_kill_in_the_middle_nothing_is_doubled(folder: Path) -> None:
    sync(folder, "law")
    before = {number: run.info.run_id for number, run in runs_of(folder).items()}
    api = client(folder)
    api.delete_run(before["3"])
    half = api.create_run(experiment_id(api, folder, "law"), tags={"autofit.study": "law", "autofit.trial": "3",
                                                                 "autofit.kind": "trial"})  # fmt: skip
    sync(folder, "law")
    sync(folder, "law")
    after = {number: run.info.run_id for number, run in runs_of(folder).items()}
    assert after == {**before, "3": half.info.run_id}
    assert_equal_to_optuna(folder)


def test_a_run_whose_tags_were_deleted_is_passed_over_and_its_trial_is_copied_anew(
    folder: Path, tmp_path: Path
) -> None:  # fmt: skip
    shutil.copy(folder / "studies.db", tmp_path)
    sync(tmp_path, "law")
    api = client(tmp_path)
    marked = [run for run in runs_of(tmp_path).values() if "autofit.role" in run.data.tags]
    api.delete_tag(marked[0].info.run_id, "autofit.kind")
    api.delete_tag(marked[1].info.run_id, "autofit.trial")
    for run in api.search_runs([experiment_id(api, tmp_path, "law")], "tags.`autofit.kind` = 'study'"):
        api.delete_tag(run.info.run_id, "autofit.trials")  # else there is nothing new to look at
    assert sync(tmp_path, "law") == 8
    api.delete_run(marked[0].info.run_id)
    assert_equal_to_optuna(tmp_path)


class Growing:
    """A study in which one more trial is finished each time that it is read."""

    def __init__(self, study: Study, first: int) -> None:
        self._study, self._read = study, first
        self.study_name, self.user_attrs = study.study_name, study.user_attrs

    def get_trials(self, deepcopy: bool = True) -> list[FrozenTrial]:
        self._read += 1
        return self._study.get_trials(deepcopy=deepcopy)[: self._read - 1]


@pytest.mark.slow
def test_trials_that_finish_while_a_search_is_followed_are_mirrored_once(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "studies.db", tmp_path)
    growing = Growing(load_study(tmp_path, "law"), 4)
    mirrored: set[tuple[object, ...]] = set()
    assert [_sync(tmp_path, growing, mirrored) for _ in range(3)] == [4, 5, 6]
    sync(tmp_path, "law")  # by hand, while the follower is at work
    assert [_sync(tmp_path, growing, mirrored) for _ in range(3)] == [7, 8, 8]
    assert_equal_to_optuna(tmp_path)


@pytest.mark.slow
def test_rebuilt_from_nothing_it_is_the_same(folder: Path, tmp_path: Path) -> None:
    sync(folder, "law")
    sync(folder, "law", rebuild=True)
    assert_equal_to_optuna(folder)
    shutil.copy(folder / "studies.db", tmp_path)
    sync(tmp_path, "law")
    assert_equal_to_optuna(tmp_path)


@pytest.mark.slow
def test_mlflow_being_down_costs_a_search_nothing(folder: Path, tmp_path: Path) -> None:
    """The follower of a search meets a tracking server that refuses connections, and is told to end."""
    env = {**os.environ, "MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
    follower = subprocess.Popen([sys.executable, "-m", "autofit.tracking.study_mirror", str(folder), "law"], env=env,
                                stdin=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
    assert follower.stderr is not None
    said = [follower.stderr.readline()]
    while not said[-1].startswith(b"MLflow:"):
        assert said[-1]
        said.append(follower.stderr.readline())
    _, errors = follower.communicate(b"", timeout=500)
    assert follower.returncode == 0
    assert b"Traceback" not in b"".join(said) + errors


@pytest.fixture
def mirrors(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The command of each mirror that is started, in place of which a process that only ends is."""
    started: list[list[str]] = []
    popen = subprocess.Popen

    def ends(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        started.append(command)
        return popen([sys.executable, "-c", "import sys; sys.stdin.read()"], **options)

    monkeypatch.setattr(subprocess, "Popen", ends)
    return started


def test_a_search_that_mlflow_shows_already_starts_no_mirror(
    folder: Path, tmp_path: Path, mirrors: list[list[str]]
) -> None:
    shutil.copy(folder / "studies.db", tmp_path)
    (tmp_path / "probes" / "law").mkdir(parents=True)
    study, database = load_study(tmp_path, "law"), tmp_path / "mlflow.db"
    database.write_text("as the mirror left it")
    with following(tmp_path, study):
        pass
    assert len(mirrors) == 1  # nothing says that it is shown
    keep_mirrored(tmp_path, "law", told_of(study))
    with following(tmp_path, study):
        pass
    assert len(mirrors) == 1
    database.write_text("as somebody changed it since")
    with following(tmp_path, study):
        pass
    assert len(mirrors) == 2
    keep_mirrored(tmp_path, "law", told_of(study)[:-1])  # a trial was told since
    with following(tmp_path, study):
        pass
    assert len(mirrors) == 3


def test_a_mirror_is_started_once_and_where_the_search_fails_too(
    folder: Path, tmp_path: Path, mirrors: list[list[str]]
) -> None:
    study = load_study(folder, "law")
    with following(tmp_path, study) as followed:
        assert mirrors == []
        followed.begin()
        followed.begin()
    assert len(mirrors) == 1
    with pytest.raises(KeyError), following(tmp_path, study):
        raise KeyError
    assert len(mirrors) == 2


@pytest.mark.slow
def test_the_last_look_of_a_mirror_is_noted(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "studies.db", tmp_path)
    (tmp_path / "probes" / "law").mkdir(parents=True)
    study = load_study(tmp_path, "law")
    follow = (
        "import functools, os, pathlib, sys; from autofit.tracking import study_mirror as mirror; os.nice = int; "
        "mirror.told_to_end = functools.partial(mirror.told_to_end, within_s=400); "
        "mirror.follow(pathlib.Path(sys.argv[1]), 'law')"
    )  # a busy machine starves a nice process
    command = [sys.executable, "-c", follow, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as mirror:
        assert mirror.stdin is not None
        mirror.stdin.close()
        assert mirror.wait(timeout=400) == 0
    assert follower.is_mirrored(tmp_path, study)
    assert_equal_to_optuna(tmp_path)
    client(tmp_path).delete_run(runs_of(tmp_path)["3"].info.run_id)
    assert not follower.is_mirrored(tmp_path, study)


def test_a_mirror_whose_starter_is_gone_is_ended_by_the_kernel_whatever_it_waits_for() -> None:
    hangs = "import time; told_to_end(within_s=1); print(flush=True); time.sleep(600)"
    command = [sys.executable, "-c", f"from autofit.tracking.follower import told_to_end; {hangs}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as mirror:
        assert mirror.stdin is not None
        assert mirror.stdout is not None
        mirror.stdout.readline()
        assert mirror.poll() is None
        mirror.stdin.close()
        assert mirror.wait(timeout=60) == -signal.SIGALRM


@pytest.mark.slow
@pytest.mark.parametrize("of", ["run", pytest.param("study", marks=pytest.mark.thorough)])
def test_a_mirror_ends_with_its_last_look_and_unloads_nothing(of: str, tmp_path: Path) -> None:
    """To unload MLflow takes far longer than the look, and the training or the search waits for it."""
    write_json(tmp_path / "request.json", {"study_folder": str(tmp_path), "folder": "", "study": "law", "trial": 0})
    asked = [str(tmp_path / "request.json")] if of == "run" else [str(tmp_path), "law"]
    begin = "runpy.run_module('autofit.tracking.study_mirror', run_name='__main__')"
    # As without others at work: a busy machine would not let a nice process come to its end in time.
    program = f"import atexit, os, runpy; os.nice = int; atexit.register(print, 'unloads'); {begin}"
    done = subprocess.run([sys.executable, "-c", program, *asked], stdin=subprocess.DEVNULL, capture_output=True,
                          text=True, check=True)  # fmt: skip
    assert "there are no studies in" in done.stderr
    assert done.stdout == ""


def test_many_runs_at_once_are_those_that_mlflows_client_makes_one_by_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for name, few in (("at once", 3), ("one by one", 50)):
        shutil.copytree(folder, tmp_path / name, ignore=shutil.ignore_patterns("mlflow.db*", "mlartifacts", "locks"))
        monkeypatch.setattr("autofit.tracking.study_mirror._FEW", few)
        assert sync(tmp_path / name, "law") == 8
        assert sync(tmp_path / name, "law") == 8
        assert_equal_to_optuna(tmp_path / name)
        found.append({number: _content(run, tmp_path / name) for number, run in runs_of(tmp_path / name).items()})
    assert found[0] == found[1]
    api = client(tmp_path / "at once")  # MLflow goes on with them as with its own
    run = runs_of(tmp_path / "at once")["0"].info.run_id
    api.log_metric(run, "step_s", 7.0, step=1)
    assert api.get_run(run).data.metrics["step_s"] == 7.0
    assert len(api.get_metric_history(run, "step_s")) == 2


def _content(run: Any, home: Path) -> dict[str, Any]:
    """What is shown of a run, without what differs from one to the next."""
    own = run.to_dictionary()
    info = {k: v for k, v in own["info"].items() if k not in ("run_id", "run_uuid", "experiment_id")}
    place = str(info.pop("artifact_uri")).replace(run.info.run_id, "RUN").replace(home.as_uri(), "HOME")
    return {"info": info, "place": place, "data": own["data"]}
