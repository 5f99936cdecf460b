"""Checkpoints are whole or passed over, a full disk stops no training, and signals end a run at a checkpoint."""

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import lawful
import pytest
import tiny
import yaml
from at_once import AtOnce
from search_driver import plan

from autofit.cli import main
from autofit.files import read_json, write_json
from autofit.plugin.protocol import own_checkpoints
from autofit.plugin.transformers_run import TransformersRun
from autofit.probing.fork_server import ForkServer
from autofit.probing.supervise import ProcessEnding
from autofit.promotion.checkpoints import PassedOver, checkpoints, last_checkpoint, prove
from autofit.promotion.reports import RunRecorder
from autofit.promotion.run_folder import ask_to_end, ending_of, write_ending
from autofit.tuning.search import Search, open_study
from autofit.watching.contract import Watched
from autofit.watching.events import EventKind, RunEvent, append_line, events_of, read_progress

FILES = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "adapter_model.safetensors", "trainer_state.json")
WAYS: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "cut at its end": lambda path: path.write_bytes(path.read_bytes()[:-2]),
}
IS_WHOLE = TransformersRun(None, phases={}, samples_per_step=1).checkpoint_is_whole


def train(folder: Path, values: dict[str, object], server: ForkServer) -> dict[str, object] | None:
    """The final summary of a promoted run in `folder`, started again where it was stopped; None if it was stopped."""
    ending = start(folder, values, server)
    assert ending.exit_code == 0, (folder / "log").read_text()
    return read_json(folder / "final.json")


def start(folder: Path, values: dict[str, object], server: ForkServer, entry: str = "run") -> ProcessEnding:
    """The end of the process of a promoted run in `folder`."""
    request = write_request(folder, values)
    return server.call(
        {"entry": f"offline_training:{entry}", "argument": str(request), "cwd": str(folder),
         "log": str(folder / "log"), "env": {}, "deadline_s": 500}
    )  # fmt: skip


def write_request(folder: Path, values: dict[str, object]) -> Path:
    """The path of the request of a promoted run in `folder`."""
    folder.mkdir(exist_ok=True)
    output = str(folder / "out")
    request = {
        "folder": str(folder), "device": "cpu", "trainer": "sft", "output_dir": output, "generates": False,
        "values": {**values, "output_dir": output, "use_cpu": True}, "cwd": str(folder), "slots": ["cpu-0"],
        "study_folder": str(folder), "study": "none", "trial": 0,
    }  # fmt: skip
    write_json(folder / "request.json", request)
    return folder / "request.json"


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, object]:
    """An SFT recipe of 6 steps that saves every second step."""
    path = tiny.write_offline_recipe("sft", tmp_path_factory.mktemp("recipe"), tiny_model, max_steps=6, save_steps=2)
    found = yaml.safe_load(path.read_text())
    assert isinstance(found, dict)
    return found


def life_of(folder: Path) -> list[RunEvent]:
    """What the run in `folder` said of checkpoints and of its starts, without what its watchers said."""
    return [event for event in events_of(folder) if event.kind in (EventKind.CHECKPOINT, EventKind.RESUME)]


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, object], fork_server: ForkServer
) -> tuple[Path, dict[str, object]]:
    """The folder of a run that was never interrupted, and its summary."""
    folder = tmp_path_factory.mktemp("trained")
    final = train(folder, values, fork_server)
    assert final is not None
    return folder, final


@pytest.fixture
def output(trained: tuple[Path, dict[str, object]], tmp_path: Path) -> Path:
    """checkpoint-2 and checkpoint-4 of that run, to be torn."""
    for name in ("checkpoint-2", "checkpoint-4"):
        shutil.copytree(trained[0] / "out" / name, tmp_path / "out" / name)
    return tmp_path / "out"


def test_the_recipes_own_checkpoints_are_all_kept_and_proven(trained: tuple[Path, dict[str, object]]) -> None:
    folder, final = trained
    assert final["steps"] == 6
    for step in (2, 4, 6):
        assert (folder / "out" / f"checkpoint-{step}" / "autofit-manifest.json").exists()
    assert not own_checkpoints(folder / "out").exists()
    assert life_of(folder) == []


@pytest.mark.parametrize("manifest", [True, False], ids=["proven", "without a manifest"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FILES)
def test_a_torn_newest_checkpoint_is_passed_over_with_a_word(output: Path, name: str, way: str, manifest: bool) -> None:
    newest, told = output / "checkpoint-4", list[PassedOver]()
    if not manifest:
        (newest / "autofit-manifest.json").unlink()
    assert last_checkpoint(output, IS_WHOLE) == newest
    WAYS[way](newest / name)
    assert last_checkpoint(output, IS_WHOLE, passes_over=told.append) == output / "checkpoint-2"
    assert [p.checkpoint for p in told] == [newest]
    assert "is torn (" in str(told[0])
    assert (not manifest and way == "missing") or name in str(told[0])
    assert not newest.exists()
    assert (output / "torn-checkpoint-4").is_dir()  # the recipe asked for it: it is not deleted


@pytest.mark.parametrize("content", ["{}", "null", "[]", '{"global_step": 3}', '{"global_step": "x"}'])
def test_a_state_that_is_not_that_of_the_step_is_passed_over(output: Path, content: str) -> None:
    (output / "checkpoint-4" / "autofit-manifest.json").unlink()
    (output / "checkpoint-4" / "trainer_state.json").write_text(content)
    assert last_checkpoint(output, IS_WHOLE) == output / "checkpoint-2"


def test_other_content_of_the_same_size_is_found(output: Path) -> None:
    path, told = output / "checkpoint-4" / "adapter_model.safetensors", list[PassedOver]()
    path.write_bytes(path.read_bytes()[:-64] + bytes(64))
    assert last_checkpoint(output, IS_WHOLE, passes_over=told.append) == output / "checkpoint-2"
    assert "adapter_model.safetensors: its content is not what was saved" in str(told[0])


@pytest.mark.parametrize("text", ["", "{", "[]", '{"files": 3}', '{"files": {"a": [1]}}', '{"files": {"a": ["x", 1]}}'])
def test_a_torn_manifest_leaves_the_files_to_be_read(output: Path, text: str) -> None:
    (output / "checkpoint-4" / "autofit-manifest.json").write_text(text)
    assert last_checkpoint(output, IS_WHOLE) == output / "checkpoint-4"
    (output / "checkpoint-4" / "optimizer.pt").write_bytes(b"")
    assert last_checkpoint(output, IS_WHOLE) == output / "checkpoint-2"


def test_autofits_own_torn_checkpoint_is_deleted(output: Path) -> None:
    own = own_checkpoints(output) / "checkpoint-5"
    shutil.copytree(output / "checkpoint-4", own)
    (own / "optimizer.pt").unlink()
    assert last_checkpoint(output, IS_WHOLE) == output / "checkpoint-4"
    assert not own.exists()
    assert not list(own.parent.glob("torn-*"))


def test_a_checkpoint_within_a_rollout_in_use_is_left_alone(output: Path) -> None:
    (output / "checkpoint-4").rename(output / "checkpoint-3")
    assert last_checkpoint(output, IS_WHOLE, steps_between=2) == output / "checkpoint-2"
    assert (output / "checkpoint-3").exists()


GARBAGE = ["garbage", "[1, 2]", '{"step": "x", "loss": 1}', '{"step": null}', '{"loss": 1}', '{"step": 1.5}', '{"step"']


@pytest.mark.parametrize("line", GARBAGE)
def test_a_garbage_line_of_the_progress_is_no_step(tmp_path: Path, line: str) -> None:
    (tmp_path / "progress.jsonl").write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    assert [row["step"] for row in read_progress(tmp_path)] == [1, 2]


def test_a_run_with_a_torn_checkpoint_ends_as_if_it_never_was(
    trained: tuple[Path, dict[str, object]], values: dict[str, object], tmp_path: Path, fork_server: ForkServer
) -> None:
    whole, expected = trained
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    (folder / "final.json").unlink()
    shutil.rmtree(folder / "out" / "checkpoint-6")
    (folder / "out" / "checkpoint-4" / "optimizer.pt").write_bytes(b"")
    with (folder / "progress.jsonl").open("a") as file:
        file.write('{"step": "garbage"}\n{')
    final = train(folder, values, fork_server)
    assert final is not None
    assert (final["steps"], final["final_loss"]) == (6, expected["final_loss"])
    same = ("step", "loss", "grad_norm", "learning_rate")
    ours, theirs = ([[line[key] for key in same] for line in read_progress(f)] for f in (folder, whole))
    assert ours == theirs
    size = (whole / "out" / "checkpoint-4" / "optimizer.pt").stat().st_size
    assert [(e.kind, e.step, e.text) for e in life_of(folder)] == [
        (EventKind.CHECKPOINT, 2, f"checkpoint-4 is torn (optimizer.pt: 0 of {size:,} bytes); goes on after step 2")
    ]


def test_a_checkpoint_that_cannot_be_loaded_is_passed_over_too(
    trained: tuple[Path, dict[str, object]], values: dict[str, object], tmp_path: Path, fork_server: ForkServer
) -> None:
    import torch

    folder = tmp_path / "run"
    shutil.copytree(trained[0], folder)
    (folder / "final.json").unlink()
    newest = folder / "out" / "checkpoint-6"
    torch.save({"state": {}, "param_groups": []}, newest / "optimizer.pt")
    prove(newest)
    final = train(folder, values, fork_server)
    assert final is not None
    assert (final["steps"], final["final_loss"]) == (6, trained[1]["final_loss"])
    assert next(e.text for e in life_of(folder)).startswith("checkpoint-6 could not be loaded (ValueError: ")
    assert newest.exists()
    assert json.loads((newest / "trainer_state.json").read_text())["global_step"] == 6


# -- signals ----------------------------------------------------------------------------------------------------------


def signalled(folder: Path, values: dict[str, object], server: ForkServer, number: signal.Signals) -> tuple[int, int]:
    """Send a signal to the training in `folder` once it has made two more steps: (its exit code, its steps)."""
    endings: list[ProcessEnding] = []
    (folder / "pid").unlink(missing_ok=True)
    before = max((int(str(line["step"])) for line in read_progress(folder)), default=0)
    thread = threading.Thread(target=lambda: endings.append(start(folder, values, server, "run_listening")))
    thread.start()
    deadline = time.monotonic() + 120
    while not any(int(str(line["step"])) >= before + 2 for line in read_progress(folder)):
        assert time.monotonic() < deadline, (folder / "log").read_text()
        time.sleep(0.01)
    os.kill(int((folder / "pid").read_text()), number)
    thread.join()
    return endings[0].exit_code, len(read_progress(folder))


def test_every_signal_ends_a_run_at_a_checkpoint_and_none_changes_what_it_trains(
    values: dict[str, object], tmp_path: Path, fork_server: ForkServer
) -> None:
    long = {**values, "max_steps": 40, "save_strategy": "no"}
    folder, whole = tmp_path / "run", tmp_path / "whole"
    folder.mkdir()
    for number in (signal.SIGINT, signal.SIGUSR1):  # SIGTERM: test_rank_runs.py; SIGUSR2: test_slurm_promote.py
        code, steps = signalled(folder, long, fork_server, number)
        assert code == 0
        assert steps < 40
        assert checkpoints(folder / "out")[0] == own_checkpoints(folder / "out") / f"checkpoint-{steps}"
        assert len(checkpoints(folder / "out")) <= 2
    code, steps = signalled(folder, long, fork_server, signal.SIGKILL)
    assert code == -signal.SIGKILL
    ours, theirs = train(folder, long, fork_server), train(whole, long, fork_server)
    assert ours is not None
    assert theirs is not None
    assert (ours["steps"], ours["final_loss"]) == (40, theirs["final_loss"])
    same = ("step", "loss", "grad_norm", "learning_rate")
    assert [[line[key] for key in same] for line in read_progress(folder)] == [
        [line[key] for key in same] for line in read_progress(whole)
    ]
    assert [e.kind for e in life_of(folder)] == [EventKind.RESUME] * 3
    assert not own_checkpoints(folder / "out").exists()  # of no use once the run is done


# -- a full disk ------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    mounted = os.getuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0
    if not mounted:
        pytest.skip("needs the right to mount a file system")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def fill(disk: Path) -> Path:
    """A file that takes all space of `disk`."""
    path = disk / "filler"
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1024))
    return path


def test_a_run_trains_on_while_the_disk_is_full_and_resumes_once_it_is_not(
    trained: tuple[Path, dict[str, object]], values: dict[str, object], tmp_path: Path, small_disk: Path,
    fork_server: ForkServer,
) -> None:  # fmt: skip
    folder, filler = tmp_path / "run", fill(small_disk)
    folder.mkdir()
    (folder / "out").symlink_to(small_disk)
    assert start(folder, values, fork_server).exit_code == 1
    failed = read_json(folder / "failed.json")
    assert failed is not None
    assert str(failed["reason"]).startswith(f"no space left in {folder / 'out'}; free some space and run the same")
    assert [line["step"] for line in read_progress(folder)] == [1, 2, 3, 4, 5, 6]
    texts = [e.text for e in life_of(folder)]
    assert [text.partition(" (")[0] for text in texts] == [
        f"checkpoint-{step} could not be saved: no space left" for step in (2, 4, 6)
    ]
    assert not checkpoints(folder / "out")
    filler.unlink()
    (folder / "failed.json").unlink()
    final = train(folder, values, fork_server)
    assert final is not None
    assert (final["steps"], final["final_loss"]) == (6, trained[1]["final_loss"])


def test_lines_wait_in_order_while_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write

    def full(handle: int, content: bytes) -> int:
        if len(content) > 5:
            return write(handle, content[:5])
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "progress.jsonl"
    append_line(path, {"step": 1})
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        for step in (2, 3):
            append_line(path, {"step": step})
    assert path.read_text() == '{"step": 1}\n'
    append_line(path, {"step": 4})
    assert [line["step"] for line in read_progress(tmp_path)] == [1, 2, 3, 4]


def test_promote_on_a_full_disk_is_one_clear_error(small_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = plan(small_disk / "studies", 2)
    Search(wanted, open_study(wanted), server_socket=None, launcher=AtOnce(lawful.at_once)).run()
    filler = fill(small_disk)
    command = ["promote", "0", "--write-only", "--dir", str(small_disk / "studies")]
    assert main(command) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("autofit: ")]
    assert len(errors) == 1
    assert "free some space" in errors[0]
    filler.unlink()
    assert main(command) == 0


# -- how a run ended --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ending", "reason"),
    [
        (ProcessEnding(exit_code=-9), "killed by signal 9, perhaps by the host's out-of-memory killer"),
        (ProcessEnding(exit_code=-9, kernel_oom=True), "killed by the kernel, as the machine had no memory left"),
        (ProcessEnding(exit_code=-11), "killed by signal 11 (SIGSEGV)"),
        (ProcessEnding(exit_code=3), "its process ended with exit code 3"),
    ],
)
def test_why_a_run_ended_is_said(tmp_path: Path, ending: ProcessEnding, reason: str) -> None:
    write_ending(tmp_path, ending)
    assert ending_of(tmp_path) == reason


def test_a_run_that_was_asked_to_end_says_so(tmp_path: Path) -> None:
    ask_to_end(tmp_path)
    write_ending(tmp_path, ProcessEnding(exit_code=0))
    assert ending_of(tmp_path) == "asked to end"


def test_a_run_that_is_done_or_has_failed_needs_no_other_reason(tmp_path: Path) -> None:
    write_json(tmp_path / "failed.json", {"reason": "a reward raised"})
    write_ending(tmp_path, ProcessEnding(exit_code=1))
    assert ending_of(tmp_path) is None


@pytest.mark.slow
@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.thorough), signal.SIGUSR1])
def test_a_signal_to_the_job_ends_its_training_at_a_checkpoint(
    values: dict[str, object], tmp_path: Path, number: signal.Signals
) -> None:
    request = write_request(tmp_path / "run", {**values, "max_steps": 500, "save_strategy": "no"})
    code = f"from autofit.promotion.job import run_promoted; run_promoted({str(request)!r})"
    job = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 300
    while len(read_progress(tmp_path / "run")) < 2:
        assert time.monotonic() < deadline, (tmp_path / "run" / "run.log").read_text()
        time.sleep(0.02)
    job.send_signal(number)
    assert job.wait(timeout=300) == 0
    steps = len(read_progress(tmp_path / "run"))
    assert steps < 500
    assert [c.name for c in checkpoints(tmp_path / "run" / "out")] == [f"checkpoint-{steps}"]
    assert ending_of(tmp_path / "run") == f"asked to end by {number.name}"


# -- autofit's own checkpoints ----------------------------------------------------------------------------------------


class _FakeRun(TransformersRun):
    """A run whose checkpoints need no files."""

    def __init__(self) -> None:
        super().__init__(None, phases={}, samples_per_step=1)

    @property
    def last_step(self) -> int:
        return 100

    def checkpoint_is_whole(self, checkpoint: Path) -> bool:
        return (checkpoint / "a.json").exists()


def recorder_in(folder: Path) -> RunRecorder:
    """A recorder of a run that has just begun."""
    watched = Watched(folder=folder, trainer="sft", values={}, device="cpu", generates=False, samples_per_step=1,
                      first_step=0, last_step=100)  # fmt: skip
    return RunRecorder(_FakeRun(), watched, [])


def saved(home: Path, step: int) -> Path:
    """A checkpoint of one file."""
    checkpoint = home / f"checkpoint-{step}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "a.json").write_text("{}")
    return checkpoint


def test_of_autofits_own_checkpoints_the_newest_two_are_kept_and_the_recipes_are_left_alone(tmp_path: Path) -> None:
    recorder, output = recorder_in(tmp_path), tmp_path / "out"
    for step in (9, 10, 11, 12):
        recorder.saved(saved(output, step))
        recorder.saved(saved(own_checkpoints(output), step))
    assert sorted(c.name for c in own_checkpoints(output).iterdir()) == ["checkpoint-11", "checkpoint-12"]
    assert len(list(output.glob("checkpoint-*"))) == 4


def test_saves_that_take_long_are_rarer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("autofit.promotion.reports.time.monotonic", lambda: now[0])
    recorder, saves = recorder_in(tmp_path), []

    def save(home: Path, step: int) -> None:
        recorder.save_begins()
        now[0] += 10.0  # seconds of writing the checkpoint
        recorder.saved(saved(home, step))

    for step in range(1, 3001):
        now[0] += 1.0
        if recorder.step_ends(step).save:
            saves.append(now[0])
            save(own_checkpoints(tmp_path / "out"), step)
        if step == 100:  # the recipe's own
            save(tmp_path / "out", step)
    assert 60 < saves[0] - 1000 < 63
    assert 200 <= saves[1] - saves[0] <= 280  # begins again after the recipe's
    between = [later - earlier for earlier, later in pairwise(saves[1:])]
    assert len(between) > 5
    assert all(200 <= seconds <= 220 for seconds in between)  # 10 s in 200 s: 5 %


def test_a_save_that_fails_for_another_reason_than_the_disk_ends_the_run(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    assert not recorder.save_failed(tmp_path / "out" / "checkpoint-1", RuntimeError("tensors share memory"))
    assert events_of(tmp_path) == []
    assert recorder.save_failed(tmp_path / "out" / "checkpoint-1", OSError(errno.EIO, "Input/output error"))
    assert "could not be saved: Input/output error (" in events_of(tmp_path)[0].text
