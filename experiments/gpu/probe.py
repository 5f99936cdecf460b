"""One configuration on the device itself, in a child: load, a step that warms up, the measured steps. No checkpoint."""

import os
import traceback
from dataclasses import asdict
from pathlib import Path

from autofit.files import write_json
from autofit.plugin.protocol import LOAD, Run, Task, WorstCase
from autofit.plugin.registry import load
from autofit.probing.memory import Memory, memory_of, merged, tops
from autofit.probing.oom import is_oom
from autofit.probing.phases import Recorder
from autofit.probing.result import ProbeRequest
from autofit.probing.steps import StepClock
from autofit.probing.worker import rank_of
from autofit.recipe.launch import split
from gpu.folder import Row
from gpu.readings import reading

_MOST_STEPS = 16  # measured ones, where they are too short for a card's power to be told


def run(request_path: str) -> int:
    """Measure the probe requested at `request_path` and write its answer beside it."""
    request = ProbeRequest.read(Path(request_path))
    env = request.values.get("env")
    if isinstance(env, dict):  # before CUDA starts: torch's allocator reads its settings once
        os.environ.update({str(key): str(value) for key, value in env.items()})
    row: Row = {"status": "failed", "limit_bytes": request.limit_bytes}
    recorders: list[Recorder] = []
    try:
        with rank_of(request), memory_of(request.device, request.limit_bytes) as memory:
            recorders.append(Recorder(memory, request.phase_path))
            row |= _trained(request, memory, recorders[0], row)
    except Exception as error:
        traceback.print_exc()
        row |= {"status": "oom" if is_oom(error) else "failed", "reason": f"{type(error).__name__}: {error}"[:500]}
        if recorders:
            row["oom_phase"] = phase = recorders[0].phase
            error.__traceback__ = None  # it holds tensors
            if row["status"] == "oom":
                recorders[0].enter(phase)  # for the peaks up to here
    if recorders:
        peaks = merged(peak for peak in recorders[0].peaks if peak.name != "end")
        row |= tops(peaks) | {"phases": [asdict(peak) for peak in peaks]}
    used = row.get("device_used_bytes")
    if row["status"] == "fit" and request.limit_bytes is not None and isinstance(used, int):
        row["status"] = "fit" if used <= request.limit_bytes else "oom"
    write_json(request.answer_path, {"reason": "", **row})
    return 0


def _trained(request: ProbeRequest, memory: Memory, recorder: Recorder, row: Row) -> Row:
    """The times of the steps. What the driver says on the way is kept in `row`, whatever happens later."""
    row["device_name"] = memory.device_name
    readings = row["readings"] = {"context": getattr(memory, "context_bytes", None),
                                  "cublas": getattr(memory, "cublas_bytes", None)}  # fmt: skip
    memory.start()
    recorder.enter(LOAD)
    count = 1 + max(_MOST_STEPS if memory.least_measured_s else 0, request.measured_steps)
    task = Task(device=request.device, output=request.folder / "out", steps=count,
                worst_case=WorstCase(path=request.worst_case))  # fmt: skip
    try:
        trained = load(request.trainer).build(split(request.values)[1], task)
        recorder.enter("loaded")
        readings["loaded"] = reading(request.device)
        clock = _Clock(trained, recorder, memory, readings, request)
        trained.train(clock)
        recorder.enter("end")
        readings["end"] = reading(request.device)
    finally:
        memory.stop()
    return {
        "status": "fit", "step_s": clock.step_s, "rollout_s": clock.rollout_s, "update_s": clock.update_s,
        "card_states": [asdict(state) for state in clock.card_states], "samples_per_step": trained.samples_per_step,
        "tokens_per_step": trained.tokens_per_step,
    }  # fmt: skip


class _Clock(StepClock):
    """Also asks the driver after the step that warms up."""

    def __init__(self, trained: Run, recorder: Recorder, memory: Memory, readings: Row, request: ProbeRequest) -> None:
        super().__init__(trained, recorder, memory, measure_after=1, round_of=request.measured_steps)
        self._readings, self._device = readings, request.device

    def step_begins(self, step: int) -> None:
        if step == 1:
            self._readings["after a step"] = reading(self._device)
        super().step_begins(step)
