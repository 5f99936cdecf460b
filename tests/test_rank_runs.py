"""A full run on several gloo ranks: exact after an interruption, and ended as one by whatever ends a rank."""

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest
import tiny
import yaml

from autofit.files import read_json, write_json
from autofit.plugin.protocol import own_checkpoints
from autofit.probing.fork_server import ForkServer, call_ranks, detach
from autofit.probing.supervise import RanksEnded
from autofit.promotion.job import train_to_the_end
from autofit.promotion.ladder import RescueLadder
from autofit.promotion.run_folder import ask_to_end, ending_of, forget_signals, log_of
from autofit.recipe.keys import LAUNCH, BatchKeys
from autofit.recipe.launch import Launch
from autofit.watching.events import EventKind, RunEvent, events_of, read_progress

SAME = ("step", "loss", "grad_norm", "learning_rate")


class Runs:
    """Full runs of one recipe; their ranks are forked, which takes a second where a new process takes ten."""

    def __init__(self, server: ForkServer, model: Path, home: Path, *, device: str = "cpu") -> None:
        self._server, self._model, self._home, self._device = server, model, home, device

    def folder(self, name: str, launch: Launch, *, trainer: str = "sft", **changes: object) -> Path:
        """The folder of a run that has not begun."""
        folder = self._home / name
        folder.mkdir()
        device = self._device
        generates = trainer in ("grpo", "rloo")
        if generates:
            path = tiny.write_recipe(folder, self._model, **changes)
        else:
            path = tiny.write_offline_recipe(trainer, folder, self._model, **changes)
        values = {**yaml.safe_load(path.read_text()), "output_dir": str(folder / "out"), "use_cpu": device == "cpu"}
        values |= {} if launch.is_alone else {LAUNCH: launch.to_values()}
        ladder = RescueLadder(  # of a micro-batch that cannot be smaller: an OOM is met with the same settings
            trial=0, trainer=trainer, device=device, keys=BatchKeys(length="max_length"), compared=(), values=values,
            resolved={**values, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
        )  # fmt: skip
        request = {
            "folder": str(folder), "device": device, "trainer": trainer, "output_dir": str(folder / "out"),
            "generates": generates, "values": values, "ladder": ladder.to_json(), "cwd": str(folder),
            "slots": ["cpu-0"], "study_folder": str(folder), "study": "none", "trial": 0,
        }  # fmt: skip
        write_json(folder / "request.json", request)
        return folder

    def train(self, folder: Path, entry: str = "run_rank") -> dict[str, object] | None:
        """Its final summary; None where it did not come to its end."""
        forget_signals(folder)
        for name in ("stop", "failed.json"):
            (folder / name).unlink(missing_ok=True)

        def ranks(own: Sequence[dict[str, str]]) -> RanksEnded:
            each = [{"env": env, "log": str(log_of(folder, rank))} for rank, env in enumerate(own)]
            return call_ranks(
                self._server.socket_path,
                {"entry": f"offline_training:{entry}", "argument": str(folder / "request.json"), "cwd": str(folder),
                 "ranks": each, "deadline_s": 300},
            )  # fmt: skip

        train_to_the_end(folder / "request.json", folder, ranks)
        return read_json(folder / "final.json")

    def begin(self, folder: Path) -> int:
        """The process of its job, a fork whose ranks are forks of it."""
        return detach(
            self._server.socket_path,
            {"entry": "forked_runs:run", "argument": str(folder / "request.json"), "cwd": str(folder), "env": {},
             "log": str(folder / "job.log"), "deadline_s": 300},
        )  # fmt: skip


@pytest.fixture
def runs(fork_server: ForkServer, tiny_model: Path, tmp_path: Path) -> Runs:
    fork_server.call({"entry": "offline_training:ready", "argument": "", "cwd": str(tmp_path), "env": {},
                      "log": str(tmp_path / "ready.log"), "deadline_s": 300})  # fmt: skip
    return Runs(fork_server, tiny_model, tmp_path)


@pytest.fixture(scope="module")
def whole(fork_server: ForkServer, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two ranks that was never interrupted: six steps, of which each second one is saved."""
    made = Runs(fork_server, tiny_model, tmp_path_factory.mktemp("whole"))
    folder = made.folder("run", Launch(ranks=2), max_steps=6, save_steps=2)
    assert made.train(folder) is not None, logs(folder)
    return folder


def logs(folder: Path) -> str:
    return "".join(path.read_text() for path in sorted(folder.glob("r*.log")))


def lines(folder: Path) -> list[list[object]]:
    return [[line.get(key) for key in SAME] for line in read_progress(folder)]


def told(folder: Path, kind: EventKind) -> list[RunEvent]:
    return [event for event in events_of(folder) if event.kind is kind]


def at_step(folder: Path, step: int, act: Callable[[], object]) -> threading.Thread:
    """A thread that acts once `step` is logged."""

    def watch() -> None:
        deadline = time.monotonic() + 200
        while not any(int(str(line["step"])) >= step for line in read_progress(folder)):
            if time.monotonic() > deadline:
                return
            time.sleep(0.01)
        act()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def pid_of(folder: Path, rank: int) -> int:
    return int((folder / f"pid-{rank}").read_text())


@pytest.mark.parametrize(
    ("sharding", "trainer"),
    [("fsdp2", "sft"),  # CI has DDP's after a kill below, and GRPO's on one card (test_promotion.py)
     *(pytest.param(*case, marks=pytest.mark.thorough) for case in [
        ("ddp", "sft"), ("fsdp2", "grpo"), ("ddp", "grpo")])],
)  # fmt: skip
def test_a_run_of_two_ranks_that_is_stopped_ends_as_if_it_never_was(runs: Runs, sharding: str, trainer: str) -> None:
    launch, changes = Launch(ranks=2, sharding=sharding), {"max_steps": 4, "use_peft": trainer == "grpo"}  # type: ignore[arg-type]
    whole = runs.folder("whole", launch, trainer=trainer, **changes)
    expected = runs.train(whole)
    assert expected is not None, logs(whole)
    assert expected["steps"] == 4
    halves = runs.folder("halves", launch, trainer=trainer, **changes)
    stopping = at_step(halves, 1, lambda: ask_to_end(halves))
    assert runs.train(halves) is None
    stopping.join()
    assert ending_of(halves) == "asked to end"
    done = len(read_progress(halves))
    assert 1 <= done < 4
    saved = own_checkpoints(halves / "out") / f"checkpoint-{done}"
    assert {"rng_state_0.pth", "rng_state_1.pth", "autofit-manifest.json"} <= {path.name for path in saved.iterdir()}
    final = runs.train(halves)
    assert final is not None, logs(halves)
    assert final["final_loss"] == expected["final_loss"]
    assert lines(halves) == lines(whole)
    assert [event.step for event in told(halves, EventKind.RESUME)] == [done]
    assert not own_checkpoints(halves / "out").exists()
    assert any((halves / "out").glob("*.safetensors"))


def test_a_rank_that_is_killed_ends_all_and_the_run_goes_on_from_its_checkpoint(runs: Runs, whole: Path) -> None:
    folder = runs.folder("killed", Launch(ranks=2), max_steps=6, save_steps=2)
    killing = at_step(folder, 3, lambda: os.kill(pid_of(folder, 1), signal.SIGKILL))
    began = time.monotonic()
    assert runs.train(folder) is None
    assert time.monotonic() - began < 60
    killing.join()
    assert not any(Path(f"/proc/{pid_of(folder, rank)}").exists() for rank in (0, 1))
    [event] = told(folder, EventKind.RANK)
    assert "rank 1 of 2 was killed by SIGKILL in the " in event.text
    assert event.step >= 2
    assert "rank 1: killed by signal 9" in str(ending_of(folder))
    assert not (folder / "failed.json").exists()
    final = runs.train(folder)
    assert final is not None, logs(folder)
    assert lines(folder) == lines(whole)
    assert told(folder, EventKind.RANK) == [event]


def test_a_rank_that_is_asked_to_end_ends_all_at_a_checkpoint(runs: Runs) -> None:
    folder = runs.folder("asked", Launch(ranks=2), max_steps=40)
    asking = at_step(folder, 1, lambda: os.kill(pid_of(folder, 1), signal.SIGTERM))
    assert runs.train(folder) is None
    asking.join()
    done = len(read_progress(folder))
    assert done < 40
    assert (own_checkpoints(folder / "out") / f"checkpoint-{done}" / "rng_state_1.pth").exists()


def test_an_error_of_one_rank_is_the_reason_of_the_failure(runs: Runs) -> None:
    folder = runs.folder("failed", Launch(ranks=2), max_steps=6)
    began = time.monotonic()
    assert runs.train(folder, "fail_on_rank_1") is None
    assert time.monotonic() - began < 60
    reason = str((read_json(folder / "failed.json") or {})["reason"])
    assert reason == "rank 1: ValueError: told to fail (in the update, after step 2)"


@pytest.mark.parametrize("sharding", ["ddp", pytest.param("fsdp2", marks=pytest.mark.thorough)])
def test_the_oom_of_one_rank_is_told_with_its_phase_and_the_run_goes_on(runs: Runs, whole: Path, sharding: str) -> None:
    launch = Launch(ranks=2, sharding=sharding)  # type: ignore[arg-type]
    if sharding != "ddp":
        whole = runs.folder("whole", launch, max_steps=6, save_steps=2)
        assert runs.train(whole) is not None, logs(whole)
    folder = runs.folder("oom", launch, max_steps=6, save_steps=2)
    began = time.monotonic()
    final = runs.train(folder, "out_of_memory_on_rank_1")
    assert time.monotonic() - began < 120
    assert final is not None, logs(folder)
    [event] = told(folder, EventKind.RESCUE)
    assert event.text.startswith("step 3: rank 1 out of memory in the update (")
    assert event.data["resumed_from"] == 2
    assert lines(folder) == lines(whole)


@pytest.mark.slow
def test_the_ranks_of_a_killed_job_end_and_the_run_goes_on(runs: Runs) -> None:
    """A signal to the job is test_interruption.py's; the end of ranks that are asked to end, and the numbers of a run
    that went on, are above."""
    steps = 20  # enough that none is at its end before it notices
    folder = runs.folder("job", Launch(ranks=2), max_steps=steps, save_steps=2)
    job = psutil.Process(runs.begin(folder))
    ranks: list[psutil.Process] = []

    def kill() -> None:
        ranks.extend(job.children(recursive=True))
        job.kill()

    at_step(folder, 3, kill).join()
    assert len(ranks) >= 2
    assert not psutil.wait_procs(ranks, timeout=60)[1]
    assert len(read_progress(folder)) < steps
    assert runs.train(folder) is not None, logs(folder)
    assert [line[0] for line in lines(folder)] == list(range(1, steps + 1))


def test_a_checkpoint_that_no_rank_can_load_is_passed_over(runs: Runs) -> None:
    launch = Launch(ranks=2)
    folder = runs.folder("torn", launch, max_steps=6, save_steps=2)
    stopping = at_step(folder, 4, lambda: ask_to_end(folder))
    assert runs.train(folder) is None
    stopping.join()
    newest = max(
        (p for p in (folder / "out").rglob("checkpoint-*") if p.is_dir()), key=lambda p: int(p.name.rsplit("-")[-1])
    )
    step = int(newest.name.rsplit("-")[-1])
    (newest / "rng_state_1.pth").unlink()
    final = runs.train(folder)
    assert final is not None, logs(folder)
    assert final["steps"] == 6
    [event] = told(folder, EventKind.CHECKPOINT)
    assert f"checkpoint-{step} is torn (" in event.text
