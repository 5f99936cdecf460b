"""A probe with a law instead of a trainer: bytes grow with the micro-batch, time falls with it. Run as a real job."""

import json
import os
import random
import time
from dataclasses import replace
from pathlib import Path

import psutil

from autofit.files import write_json
from autofit.probing.job import cancelled
from autofit.probing.result import PhasePeak, ProbeRequest, ProbeResult, ProbeStatus
from autofit.probing.supervise import note_of

MB = 10**6


def law(values: dict[str, object]) -> tuple[int, float]:
    """(device-used bytes, step seconds) of a recipe's values."""
    micro = int(str(values["per_device_train_batch_size"]))
    kept = 4 if values.get("gradient_checkpointing", True) else 10
    slow = 1.3 if values.get("gradient_checkpointing", True) else 1.0
    eager = 1.2 if values.get("attn_implementation") == "eager" else 1.0
    return int(100 * MB + eager * kept * MB * micro), slow * eager * (0.5 + 4.0 / micro)


def result_of(request: ProbeRequest) -> ProbeResult:
    used, step_s = law(dict(request.values))
    oom = request.limit_bytes is not None and used > request.limit_bytes
    return ProbeResult(
        status=ProbeStatus.OOM if oom else ProbeStatus.FIT, device="cpu", limit_bytes=request.limit_bytes,
        oom_phase="update" if oom else None, device_used_bytes=used, peak_allocated_bytes=used,
        peak_reserved_bytes=used, phases=(PhasePeak(name="update", peak_allocated_bytes=used,
        peak_reserved_bytes=used, device_used_bytes=used),), step_s=() if oom else (step_s,),
        completions_per_step=16, tokens_per_step=1600, wall_s=0.1,
    )  # fmt: skip


def at_once(request_path: str) -> None:
    """The same without a process to be told of, and without the moment."""
    request = ProbeRequest.read(Path(request_path))
    write_json(request.answer_path, result_of(request).to_json())


def unsteady(request_path: str) -> None:
    """As `at_once`; a confirmation does what UNSTEADY says of its trial: oom, kill, wait, or be N times slower."""
    request = ProbeRequest.read(Path(request_path))
    confirms = request.folder.name.startswith("confirm-")
    trial = str(int(request.folder.name.split("-")[1]))
    does = json.loads(os.environ.get("UNSTEADY", "{}")).get(trial) if confirms else None
    result = result_of(request)
    if does == "kill":  # a job that is gone without an answer
        write_json(request.folder / "started.json", note_of(2**22))
        return
    if does == "wait":
        run(request_path)
        return
    if does == "oom":
        result = replace(result, status=ProbeStatus.OOM, step_s=(), oom_phase="save")
    if isinstance(does, float):
        result = replace(result, step_s=tuple(s * does for s in result.step_s))
    write_json(request.answer_path, result.to_json())


def seconds_of(probe: str, asked: str) -> float:
    """How long the probe of this name takes: `asked` seconds, or between the two of "least-most", always the same."""
    least_s, _, most_s = asked.partition("-")
    return random.Random(probe).uniform(float(least_s), float(most_s or least_s))


def run(request_path: str) -> None:
    """The job: says that it started, takes a moment, answers."""
    request = ProbeRequest.read(Path(request_path))
    process = psutil.Process()
    write_json(request.folder / "started.json", note_of(process.pid))
    time.sleep(seconds_of(request.folder.name, os.environ.get("LAWFUL_S", "0.15")))
    if not cancelled(request):
        write_json(request.answer_path, result_of(request).to_json())
