"""The promoted run itself: the full training of a tuned recipe, resumable from every saved checkpoint.

Runs in a process of its own (`python -m autofit.promotion.training REQUEST`). Imports torch.
"""

import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from autofit.files import read_json, write_atomically, write_json
from autofit.plugin.protocol import Control, Report, Run, Task
from autofit.plugin.registry import load
from autofit.probing.supervise import die_with_parent

_SAVE_EVERY_S = 60.0  # time between checkpoints: a kill loses at most about a minute


def main(request_path: str) -> int:
    """Train until the end, a stop request, or an error, which goes to failed.json. The exit code: 1 after an error."""
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
    output = Path(str(request["output_dir"]))
    run = load(request["trainer"]).build(request["values"], Task(device=request["device"], output=output))
    checkpoint = last_checkpoint(output, run.checkpoint_is_whole)
    _forget_after(folder / "progress.jsonl", 0 if checkpoint is None else _step_of(checkpoint))
    recorder = _Recorder(folder, run, "completions" if request["generates"] else "samples")
    mirror = _start_mirror(request, folder)
    began = time.monotonic()
    try:
        run.train(recorder, resume_from=checkpoint)
        if recorder.stopped:
            return 0
        run.save_model(output)
        lines = [json.loads(line) for line in (folder / "progress.jsonl").read_text().splitlines()]
        write_json(folder / "final.json", _final(lines, recorder.steps, output, time.monotonic() - began))
    finally:
        _stop_mirror(mirror)
    return 0


def _final(lines: list[dict[str, Any]], steps: int, output: Path, seconds: float) -> dict[str, object]:
    rewards = [line["reward"] for line in lines if line.get("reward") is not None]
    tenth = max(1, len(rewards) // 10)
    return {
        "steps": steps,
        "final_loss": next((line["loss"] for line in reversed(lines) if "loss" in line), None),
        "first_reward": sum(rewards[:tenth]) / tenth if rewards else None,
        "last_reward": sum(rewards[-tenth:]) / tenth if rewards else None,
        "reward_window_steps": tenth,
        "output_dir": str(output.resolve()),
        "seconds_since_resume": seconds,
    }


# -- resuming ---------------------------------------------------------------------------------------------------------


def last_checkpoint(output: Path, is_whole: Callable[[Path], bool]) -> Path | None:
    """The newest complete checkpoint in `output`, or None. Deletes incomplete ones (killed while saving)."""
    for folder in sorted(output.glob("checkpoint-*"), key=_step_of, reverse=True):
        if is_whole(folder):
            return folder
        shutil.rmtree(folder, ignore_errors=True)
    return None


def _step_of(checkpoint: Path) -> int:
    tail = checkpoint.name.rsplit("-", 1)[1]
    return int(tail) if tail.isdigit() else -1


def _forget_after(path: Path, step: int) -> None:
    """Delete the log lines after the checkpoint's step: those steps are repeated, with the same result."""
    if not path.exists():
        return
    lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    write_atomically(path, "".join(line for line in lines if json.loads(line)["step"] <= step))


# -- logging ----------------------------------------------------------------------------------------------------------


class _Recorder(Report):
    """Writes each logged step to progress.jsonl, saves a checkpoint about once a minute, and stops on request."""

    def __init__(self, folder: Path, run: Run, samples_word: str) -> None:
        self._folder, self._run, self._samples_word = folder, run, samples_word
        self._saved = self._began = time.monotonic()
        self.steps = 0
        self.stopped = False

    def step_begins(self, step: int) -> None:
        self._began = time.monotonic()

    def step_ends(self, step: int) -> Control:
        self.steps = step
        if step % self._run.steps_between_saves:
            return Control()
        asked = (self._folder / "stop").exists()
        save = asked or time.monotonic() - self._saved > _SAVE_EVERY_S
        if save:
            self._saved = time.monotonic()
        self.stopped = asked and step < self._run.last_step
        return Control(save=save, stop=self.stopped)

    def logs(self, step: int, last_step: int, values: Mapping[str, Any]) -> None:
        step_s = time.monotonic() - self._began
        line = {"step": step, "max_steps": last_step, "time": time.time(), **_numbers(values), "step_s": step_s}
        line |= {f"{self._samples_word}_per_s": self._run.samples_per_step / step_s, **_memory()}
        with (self._folder / "progress.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _numbers(logs: Mapping[str, Any]) -> dict[str, float]:
    return {k: float(v) for k, v in logs.items() if isinstance(v, int | float) and not isinstance(v, bool)}


def _memory() -> dict[str, int]:
    found = {"host_rss_bytes": int(psutil.Process().memory_info().rss)}
    if torch.cuda.is_available():
        found["peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
        found["peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
    return found


def _start_mirror(request: dict[str, Any], folder: Path) -> "subprocess.Popen[bytes] | None":
    """Start a process that copies progress.jsonl to MLflow; the training does not wait for it before its end."""
    with (folder / "mlflow.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "autofit.tracking.run_mirror", str(folder / "request.json")],
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
