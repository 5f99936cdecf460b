"""Folders of promoted runs as a training writes them, without one: request, steps, events and the end."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from autofit.files import write_json
from autofit.watching.contract import Promise
from autofit.watching.events import EventKind, RunEvent, keep_event, keep_progress

PROMISE = Promise(device_name="cpu", fidelity="measured", device_used_bytes=120_000_000, limit_bytes=150_000_000,
                  step_s=0.5, samples_per_s=16.0, effective_batch_size=16)  # fmt: skip
VALUES = {"model_name_or_path": "tiny", "learning_rate": 1e-5, "hub_token": "hf_secretsecret", "env": {"KEY": "secret"}}


def write_request(studies: Path, *, trial: int = 0, study: str = "law") -> Path:
    """The folder of a promoted run that has not begun."""
    folder = studies / "promoted" / f"{study}-trial-{trial}"
    request = {"folder": str(folder), "study_folder": str(studies), "study": study, "trial": trial, "device": "cpu",
               "values": VALUES, "generates": True, "promise": PROMISE.to_json(), "proof": "the gradients are equal",
               "proof_verdict": "proven", "confirmation": ""}  # fmt: skip
    write_json(folder / "request.json", request)
    os.utime(folder / "request.json", (0, 0))  # a young one counts as a run that is about to start
    return folder


def write_start(folder: Path, step: int = 0) -> None:
    """What the run's watcher tells when a training starts."""
    data = {"promise": PROMISE.to_json(), "device": "cpu", "device_name": "cpu", "generates": True,
            "samples_per_step": 16, "effective_batch_size": 16, "batch_text": "4 x 4 x 1 = 16"}  # fmt: skip
    keep_event(folder, RunEvent(step=step, kind=EventKind.PROMISE, text="the search promised 500 ms a step", data=data))


def write_steps(folder: Path, steps: Sequence[int], *, of: int = 40, began: float = 1_700_000_000.0) -> None:
    """Logged steps; the loss of step n is 1/n."""
    for step in steps:
        line = {"step": step, "max_steps": of, "time": began + step, "loss": 1 / step, "reward": step / of}
        line |= {"step_s": 0.45 + 0.01 * (step % 3), "host_rss_bytes": 400_000_000 + step, "completions_per_s": 35.0}
        line["clip_ratio/high_max"] = 0.1  # MLflow makes a section of charts of its own for it
        keep_progress(folder, line)


def write_end(folder: Path, steps: int) -> None:
    (folder / "final.json").write_text(json.dumps({"steps": steps, "final_loss": 1 / steps}))
