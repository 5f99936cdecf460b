"""The promoted run itself: the full training of a tuned recipe, resumable from every saved checkpoint.

Runs in a process of its own (`python -m autofit.promotion.training REQUEST`). Loads torch.
"""

import contextlib
import gc
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from autofit.errors import EnvironmentFault
from autofit.files import read_json, write_json
from autofit.plugin.protocol import Run, Task
from autofit.plugin.registry import load
from autofit.probing.oom import is_oom
from autofit.probing.supervise import die_with_parent
from autofit.promotion.checkpoints import delete_own, print_leniently, reason_of
from autofit.promotion.interruption import deaf_children, listen, received
from autofit.promotion.reports import Locating, Recorder
from autofit.promotion.server import with_address
from autofit.promotion.start import Start
from autofit.promotion.whereabouts import oom_told, tell_oom
from autofit.recipe.launch import split
from autofit.recipe.secrets import opened
from autofit.watching.contract import Promise
from autofit.watching.events import read_progress
from autofit.watching.thresholds import guards_of
from autofit.watching.watcher import Watched, Watcher
from autofit.watching.watchers import watchers


def main(request_path: str) -> int:
    """Train until the end, a stop request, or an error, which goes to failed.json. The exit code: 1 after an error."""
    request = read_json(Path(request_path))
    assert request is not None
    folder = Path(str(request["folder"]))
    request["values"] = with_address(opened(cast("dict[str, object]", request["values"])))
    try:
        return _train(request, folder)
    except SystemExit as error:
        traceback.print_exc()
        if error.code in (0, None):
            raise
        _fail(folder, f"its code called sys.exit({error.code!r})")
        return 1
    except Exception as error:
        if is_oom(error):  # the job goes on with a setting that needs less
            tell_oom(folder, Path(str(request["output_dir"])), error)
            return 1
        traceback.print_exc()
        _fail(folder, reason_of(error, Path(str(request["output_dir"]))))
        return 1


def _fail(folder: Path, reason: str) -> None:
    with contextlib.suppress(EnvironmentFault):  # a full disk
        write_json(folder / "failed.json", {"reason": reason})


def _train(request: dict[str, Any], folder: Path) -> int:
    output = Path(str(request["output_dir"]))
    mirror = start_mirror(request, folder)
    began = time.monotonic()
    try:
        trained = _trained(request, folder, Start(folder, output))
        if trained is None:
            return 0
        run, recorder = trained
        run.save_model(output)
        recorder.ends()
        lines: list[dict[str, Any]] = read_progress(folder)
        write_json(folder / "final.json", final_of(lines, recorder.steps, output, time.monotonic() - began))
        delete_own(output)
    finally:
        stop_mirror(mirror)
    return 0


def _trained(request: dict[str, Any], folder: Path, start: Start) -> tuple[Run, Recorder] | None:
    """The finished training, from the newest checkpoint that can be loaded; None: it was asked to end before."""
    while True:
        _, values = split(request["values"])
        run = load(request["trainer"]).build(values, Task(device=request["device"], output=start.output))
        start.choose(run)
        if received():
            return None
        recorder = Locating(run, watched_of(request, folder, run, start.step), [start, *watchers_of(request)])
        try:
            with oom_told(folder, start.output, run, recorder):
                run.train(recorder, resume_from=start.checkpoint)
        except Exception as error:
            if recorder.began or not start.passes_over(error):
                raise
        else:
            return None if recorder.stopped else (run, recorder)
        del run, recorder
        gc.collect()


def watched_of(request: Mapping[str, Any], folder: Path, run: Run, done: int) -> Watched:
    promise = request.get("promise")
    return Watched(
        folder=folder, trainer=request["trainer"], values=request["values"], device=request["device"],
        generates=request["generates"], samples_per_step=run.samples_per_step, first_step=done, last_step=0,
        promise=None if promise is None else Promise.from_json(promise), lines=tuple(read_progress(folder)),
        hf_trainer=getattr(run, "trainer", None),
    )  # fmt: skip


def watchers_of(request: Mapping[str, Any]) -> list[Watcher]:
    """Everyone who looks at a promoted run."""
    return watchers(guards=guards_of(request.get("guards")))


def final_of(lines: list[dict[str, Any]], steps: int, output: Path, seconds: float) -> dict[str, object]:
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


def start_mirror(request: dict[str, Any], folder: Path) -> "subprocess.Popen[bytes] | None":
    """Start a process that copies progress.jsonl to MLflow; the training does not wait for it before its end.

    None where it cannot be started: the training needs no MLflow.
    """
    command = [sys.executable, "-P", "-m", "autofit.tracking.run_mirror", str(folder / "request.json")]
    try:
        with (folder / "mlflow.log").open("ab") as log, deaf_children():
            return subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}
            )
    except OSError as error:
        print(f"MLflow's mirror could not be started: {error}", file=sys.stderr)
        return None


def stop_mirror(mirror: "subprocess.Popen[bytes] | None", *, wait_s: float = 30.0) -> None:
    if mirror is None or mirror.stdin is None:
        return
    mirror.stdin.close()
    try:
        mirror.wait(timeout=wait_s)
    except subprocess.TimeoutExpired:
        mirror.kill()


if __name__ == "__main__":
    die_with_parent()
    listen()
    print_leniently()
    sys.exit(main(sys.argv[1]))
