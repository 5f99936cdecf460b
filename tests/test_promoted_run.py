"""MLflow's run of a promoted trial: whatever was killed, each step is there once and its state is right."""

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import lawful
import pytest
import written_runs as written
from at_once import AtOnce
from search_driver import plan

from autofit.files import read_json, write_json
from autofit.tracking import follower
from autofit.tracking.runs import client, experiment_id, search
from autofit.tracking.study_mirror import RunMirror, sync
from autofit.tuning.search import Search, open_study
from autofit.watching.events import EventKind, RunEvent, forget_progress_after, keep_event

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def studied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished study of two trials, in MLflow."""
    folder = tmp_path_factory.mktemp("studied")
    wanted = plan(folder, 2)
    Search(wanted, open_study(wanted), server_socket=None, launcher=AtOnce(lawful.at_once)).run()
    sync(folder, "law")
    return folder


@pytest.fixture
def folder(studied: Path, tmp_path: Path) -> Path:
    """The folder of a full run of trial 0 that has logged 10 of 40 steps."""
    for name in ("studies.db", "mlflow.db"):
        shutil.copy(studied / name, tmp_path)
    folder = written.write_request(tmp_path)
    written.write_start(folder)
    written.write_steps(folder, range(1, 11))
    return folder


def mirror(folder: Path) -> RunMirror:
    request = read_json(folder / "request.json")
    assert request is not None
    return RunMirror(request)


def mirrored(folder: Path) -> Any:
    """MLflow's only run of the full run."""
    api, studies = client(folder.parents[1]), folder.parents[1]
    found = search(api, experiment_id(api, studies, "law"), "tags.`autofit.kind` = 'promoted'")
    assert len(found) == 1
    return found[0]


def assert_each_step_once(folder: Path, steps: int) -> None:
    api, run = client(folder.parents[1]), mirrored(folder)
    for name in ("loss", "step_s", "host_rss_GB"):
        history = api.get_metric_history(run.info.run_id, name)
        assert Counter(int(m.step) for m in history) == Counter(range(1, steps + 1))
    losses = {int(m.step): m.value for m in api.get_metric_history(run.info.run_id, "loss")}
    assert losses == {step: 1 / step for step in range(1, steps + 1)}


def test_a_mirror_killed_at_work_is_made_up_for_by_sync(folder: Path) -> None:
    assert mirror(folder).update(ended=False)
    assert mirrored(folder).info.status == "RUNNING"
    written.write_steps(folder, range(11, 41))
    written.write_end(folder, 40)
    sync(folder.parents[1], "law")
    run = mirrored(folder)
    assert (run.info.status, run.data.tags["autofit.status"]) == ("FINISHED", "done")
    assert_each_step_once(folder, 40)
    assert run.data.tags["autofit.trial_run"]
    sync(folder.parents[1], "law")
    assert_each_step_once(folder, 40)


def test_steps_that_a_kill_left_out_in_the_middle_are_added(folder: Path) -> None:
    lines = (folder / "progress.jsonl").read_text().splitlines(keepends=True)
    (folder / "progress.jsonl").write_text("".join(lines[:3] + lines[6:]))
    mirror(folder).update(ended=False)
    (folder / "progress.jsonl").write_text("".join(lines))
    sync(folder.parents[1], "law")
    assert_each_step_once(folder, 10)


def test_steps_that_a_resumed_run_repeats_are_there_once(folder: Path) -> None:
    live = mirror(folder)
    live.update(ended=False)
    forget_progress_after(folder, 6)
    written.write_steps(folder, range(7, 16), began=1_700_009_000.0)
    mirror(folder).update(ended=False)
    live.update(ended=True)
    assert_each_step_once(folder, 15)


def test_sync_beside_a_mirror_at_work_doubles_nothing(folder: Path) -> None:
    live = mirror(folder)
    for first in (11, 21, 31):
        live.update(ended=False)
        written.write_steps(folder, range(first, first + 5))
        sync(folder.parents[1], "law")
        written.write_steps(folder, range(first + 5, first + 10))
    live.update(ended=False)
    assert_each_step_once(folder, 40)


def test_a_run_begun_anew_is_another_run(folder: Path) -> None:
    mirror(folder).update(ended=False)
    before = mirrored(folder).info.run_id
    (folder / "progress.jsonl").unlink()  # as `promote --restart` does
    written.write_steps(folder, range(1, 4), began=1_700_009_000.0)
    mirror(folder).update(ended=True)
    assert mirrored(folder).info.run_id != before
    assert_each_step_once(folder, 3)


@pytest.mark.parametrize(
    ("files", "state", "status"),
    [((), "interrupted", "KILLED"), (("failed.json",), "failed", "FAILED"), (("final.json",), "done", "FINISHED")],
)
def test_the_state_is_that_of_the_folder(folder: Path, files: tuple[str, ...], state: str, status: str) -> None:
    for name in files:
        write_json(folder / name, {"reason": "ValueError: no"})
    sync(folder.parents[1], "law")
    run = mirrored(folder)
    assert (run.data.tags["autofit.status"], run.info.status) == (state, status)
    assert run.info.start_time == 1_700_000_001_000
    assert run.info.end_time == 1_700_000_010_000


@pytest.mark.slow
def test_a_database_that_was_lost_is_filled_again_with_all_runs(folder: Path) -> None:
    written.write_end(folder, 10)
    sync(folder.parents[1], "law")
    (folder.parents[1] / "mlflow.db").write_bytes(b"torn" * 1000)
    assert sync(folder.parents[1], "law") == 2
    assert_each_step_once(folder, 10)
    sync(folder.parents[1], "law", rebuild=True)
    assert_each_step_once(folder, 10)
    assert mirrored(folder).info.status == "FINISHED"


def test_promised_and_actual_stand_beside_each_other(folder: Path) -> None:
    sync(folder.parents[1], "law")
    run = mirrored(folder)
    metrics = run.data.metrics
    assert metrics["promised_step_s"] == 0.5
    assert metrics["promised_device_used_GB"] == 0.12
    assert metrics["limit_GB"] == 0.15
    assert metrics["actual_step_s"] == pytest.approx(0.46)
    assert run.data.tags["autofit.promise"] == "kept"
    assert "| step | 0.5 s" in run.data.tags["mlflow.note.content"]


def test_each_event_is_a_tag_a_line_of_the_note_and_an_artifact(folder: Path) -> None:
    live = mirror(folder)
    live.update(ended=False)
    rescue = "step 5: out of memory; goes on from step 4 with per_device_train_batch_size 4 -> 2"
    keep_event(folder, RunEvent(step=4, kind=EventKind.RESCUE, text=rescue))
    data = {"guard": "kl", "tag": "autofit.guard.kl", "tag_value": "since step 7"}
    keep_event(
        folder, RunEvent(step=8, kind=EventKind.GUARD, text="guard kl, since step 7: 0.3 is above 0.2", data=data)
    )
    live.update(ended=False)
    run = mirrored(folder)
    assert run.data.tags["autofit.rescue.1"] == rescue
    assert run.data.tags["autofit.guard.kl"] == "since step 7"
    assert f"step 4, rescue: {rescue}" in run.data.tags["mlflow.note.content"]
    api = client(folder.parents[1])
    kept = {artifact.path for artifact in api.list_artifacts(run.info.run_id)}
    assert kept == {"events.jsonl", "step.png", "step.svg"}


def test_secrets_of_the_recipe_do_not_reach_mlflow(folder: Path) -> None:
    sync(folder.parents[1], "law")
    assert mirrored(folder).data.params["hub_token"] == "***"
    assert b"secretsecret" not in (folder.parents[1] / "mlflow.db").read_bytes()
    assert mirrored(folder).data.params["learning_rate"] == "1e-05"


@pytest.mark.usefixtures("mirrored")
def test_promote_mends_what_a_killed_mirror_left_and_starts_no_process_otherwise(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mended_runs: list[Path] = []
    monkeypatch.setattr(follower, "_mirror_once", mended_runs.append)
    mirror(folder).update(ended=False)  # and killed before the end
    written.write_end(folder, 10)
    with follower.mended(folder):
        pass
    assert mended_runs == [folder]
    sync(folder.parents[1], "law")
    with pytest.raises(KeyError), follower.mended(folder):
        raise KeyError
    assert mended_runs == [folder]
    written.write_steps(folder, [11])
    with follower.mended(folder):
        pass
    assert mended_runs == [folder, folder]
