"""The promoted run itself: the full training of a tuned recipe, resumable at every optimizer step it saved.

Runs in a process of its own (`python -m autofit.promotion.training REQUEST`). Imports torch.
"""

import importlib
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import TrainerCallback

from autofit.files import read_json, write_atomically, write_json
from autofit.probing.inspection import device_overrides, go_offline_without_a_hub
from autofit.probing.supervise import die_with_parent
from autofit.recipe.trl_config import parse

_SAVE_EVERY_S = 60.0  # so a kill costs at most about a minute
_CHECKPOINT_FILES = ("trainer_state.json", "optimizer.pt", "scheduler.pt")


def main(request_path: str) -> int:
    """Train to the end, to a request to stop, or to an error that is noted in failed.json."""
    request = read_json(Path(request_path))
    assert request is not None
    folder = Path(str(request["folder"]))
    try:
        return _train(request, folder)
    except Exception as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        write_json(folder / "failed.json", {"reason": reason})
        return 1


def _train(request: dict[str, Any], folder: Path) -> int:
    go_offline_without_a_hub()
    values = request["values"]
    overrides: dict[str, object] = {
        **device_overrides(request["device"]),
        "report_to": values.get("report_to", "none"),
        "logging_steps": 1,
        "logging_strategy": "steps",
        "disable_tqdm": True,
        "save_only_model": False,
        "resume_from_checkpoint": None,
        "save_total_limit": values.get("save_total_limit", 2),
    }
    config = parse(request["trainer"], values, overrides=overrides)
    trainer = importlib.import_module(f"autofit.trainers.{request['trainer']}").build(config)
    output = Path(config.training.output_dir)
    checkpoint = last_checkpoint(output)
    step = 0 if checkpoint is None else _step_of(checkpoint)
    _forget_after(folder / "progress.jsonl", step)
    if checkpoint is not None and request["trainer"] == "grpo":
        _advance_sampler(trainer, checkpoint)
    recorder = _Recorder(folder, config.training, "completions" if request["trainer"] == "grpo" else "samples")
    trainer.add_callback(recorder)
    mirror = _start_mirror(request, folder)
    began = time.monotonic()
    try:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        if recorder.stopped:
            return 0
        trainer.save_model(str(output))
        lines = [json.loads(line) for line in (folder / "progress.jsonl").read_text().splitlines()]
        write_json(folder / "final.json", _final(lines, trainer, output, time.monotonic() - began))
    finally:
        _stop_mirror(mirror)
    return 0


def _final(lines: list[dict[str, Any]], trainer: Any, output: Path, seconds: float) -> dict[str, object]:
    rewards = [line["reward"] for line in lines if line.get("reward") is not None]
    tenth = max(1, len(rewards) // 10)
    return {
        "steps": trainer.state.global_step,
        "final_loss": next((line["loss"] for line in reversed(lines) if "loss" in line), None),
        "first_reward": sum(rewards[:tenth]) / tenth if rewards else None,
        "last_reward": sum(rewards[-tenth:]) / tenth if rewards else None,
        "reward_window_steps": tenth,
        "output_dir": str(output.resolve()),
        "seconds_since_resume": seconds,
    }


# -- resuming ---------------------------------------------------------------------------------------------------------


def last_checkpoint(output: Path) -> Path | None:
    """The newest whole checkpoint in `output`; a torn one (killed while saving) is deleted."""
    found = sorted(output.glob("checkpoint-*"), key=_step_of, reverse=True)
    for folder in found:
        whole = all((folder / name).exists() for name in _CHECKPOINT_FILES) and list(folder.glob("rng_state*.pth"))
        if whole and _readable(folder / "trainer_state.json"):
            return folder
        shutil.rmtree(folder, ignore_errors=True)
    return None


def _readable(path: Path) -> bool:
    try:
        json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return True


def _step_of(checkpoint: Path) -> int:
    tail = checkpoint.name.rsplit("-", 1)[1]
    return int(tail) if tail.isdigit() else -1


def _forget_after(path: Path, step: int) -> None:
    """Drop what was logged after the checkpoint: those steps are done again, to the same result."""
    if not path.exists():
        return
    lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    write_atomically(path, "".join(line for line in lines if json.loads(line)["step"] <= step))


def _advance_sampler(trainer: Any, checkpoint: Path) -> None:
    """Give the prompts of a resumed epoch the order they would have had.

    TRL's sampler draws each epoch's order from one generator, which starts anew in a new process; the trainer skips
    whole epochs without drawing from it.
    """
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    epochs_done = int(float(state["epoch"]) + 1e-6)
    original = trainer._get_train_sampler

    def advanced(*args: Any, **kwargs: Any) -> Any:
        sampler = original(*args, **kwargs)
        for _ in range(epochs_done):
            torch.randperm(sampler.num_samples, generator=sampler.generator)
        return sampler

    if trainer.shuffle_dataset and epochs_done:
        trainer._get_train_sampler = advanced


# -- logging ----------------------------------------------------------------------------------------------------------


class _Recorder(TrainerCallback):  # type: ignore[misc]
    """Writes each logged step to progress.jsonl, saves now and then, and stops when asked to."""

    def __init__(self, folder: Path, training: Any, samples_word: str) -> None:
        self._folder = folder
        self._samples_word = samples_word
        self._samples = training.per_device_train_batch_size * training.gradient_accumulation_steps
        steps = training.gradient_accumulation_steps
        rollouts = getattr(training, "steps_per_generation", steps) * getattr(training, "num_iterations", 1)
        self._aligned = (steps, rollouts)
        self._saved = self._began = time.monotonic()
        self.stopped = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: object) -> None:
        self._began = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: object) -> None:
        steps, rollouts = self._aligned
        if (state.global_step * steps) % rollouts:  # a rollout is in use and is not saved with a checkpoint
            return
        asked = (self._folder / "stop").exists()
        if asked or time.monotonic() - self._saved > _SAVE_EVERY_S:
            control.should_save = True
            self._saved = time.monotonic()
        if asked and state.global_step < state.max_steps:
            control.should_training_stop = True
            self.stopped = True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: object) -> None:
        if not logs or "loss" not in logs:
            return
        step_s = time.monotonic() - self._began
        line = {"step": state.global_step, "max_steps": state.max_steps, "time": time.time(), **_numbers(logs)}
        line |= {"step_s": step_s, f"{self._samples_word}_per_s": self._samples / step_s, **_memory()}
        with (self._folder / "progress.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _numbers(logs: dict[str, Any]) -> dict[str, float]:
    return {k: float(v) for k, v in logs.items() if isinstance(v, int | float) and not isinstance(v, bool)}


def _memory() -> dict[str, int]:
    found = {"host_rss_bytes": int(psutil.Process().memory_info().rss)}
    if torch.cuda.is_available():
        found["peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
        found["peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
    return found


def _start_mirror(request: dict[str, Any], folder: Path) -> "subprocess.Popen[bytes] | None":
    """A process that copies progress.jsonl to MLflow; the training never waits for it."""
    with (folder / "mlflow.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "autofit.tracking.run_mirror", str(folder / "request.json")],
            stdin=subprocess.PIPE, stdout=log, stderr=log, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )  # fmt: skip


def _stop_mirror(mirror: "subprocess.Popen[bytes] | None", *, wait_s: float = 30.0) -> None:
    if mirror is None or mirror.stdin is None:
        return
    mirror.stdin.close()
    try:
        mirror.wait(timeout=wait_s)
    except subprocess.TimeoutExpired:
        mirror.kill()


if __name__ == "__main__":
    die_with_parent()
    sys.exit(main(sys.argv[1]))
