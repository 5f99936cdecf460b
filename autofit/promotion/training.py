"""The promoted run itself: the full training of a tuned recipe, resumable from every saved checkpoint.

Runs in a process of its own (`python -m autofit.promotion.training REQUEST`). Loads torch.
"""

import os
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autofit.files import read_json, write_json
from autofit.plugin.protocol import Run, Task
from autofit.plugin.registry import load
from autofit.probing.supervise import die_with_parent
from autofit.promotion.checkpoints import last_checkpoint, step_of
from autofit.promotion.progress import forget_progress_after, read_progress
from autofit.promotion.recorder import Recorder
from autofit.watching.events import forget_events_after
from autofit.watching.promise import Promise
from autofit.watching.watcher import Watched, Watcher


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
    done = 0 if checkpoint is None else step_of(checkpoint)
    forget_progress_after(folder, done)
    forget_events_after(folder, done)
    recorder = Recorder(run, _watched(request, folder, run, done), _watchers(request))
    mirror = _start_mirror(request, folder)
    began = time.monotonic()
    try:
        run.train(recorder, resume_from=checkpoint)
        if recorder.stopped:
            return 0
        run.save_model(output)
        recorder.ends()
        lines: list[dict[str, Any]] = read_progress(folder)
        write_json(folder / "final.json", _final(lines, recorder.steps, output, time.monotonic() - began))
    finally:
        _stop_mirror(mirror)
    return 0


def _watched(request: Mapping[str, Any], folder: Path, run: Run, done: int) -> Watched:
    promise = request.get("promise")
    return Watched(
        folder=folder, trainer=request["trainer"], values=request["values"], device=request["device"],
        generates=request["generates"], samples_per_step=run.samples_per_step, first_step=done, last_step=0,
        promise=None if promise is None else Promise.from_json(promise), lines=tuple(read_progress(folder)),
        hf_trainer=getattr(run, "trainer", None),
    )  # fmt: skip


def _watchers(request: Mapping[str, Any]) -> list[Watcher]:
    """Everyone who looks at a promoted run."""
    return []


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
