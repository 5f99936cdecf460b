"""One configuration on the device itself, in a child: load, a step that warms up, the measured steps. No checkpoint."""

import os
import traceback
from dataclasses import asdict
from pathlib import Path

from autofit.files import write_json
from autofit.plugin.protocol import LOAD, Control, Run, Task, WorstCase
from autofit.plugin.registry import load
from autofit.probing.memory import Memory, memory_of, merged, tops
from autofit.probing.result import ProbeRequest, is_oom
from autofit.probing.worker import PhaseRecorder, StepClock, rank_of
from autofit.recipe.launch import split
from autofit.recipe.secrets import into_environment
from gpu.folder import Row
from gpu.kernels import Kernels
from gpu.readings import reading

_LONGEST_PROFILED_S = 3.0  # the launches of a long rollout, over 300,000, take the profiler longer than all other steps
_MOST_STEPS = 16  # measured ones, where they are too short for a card's power to be told
STEPS = "AUTOFIT_MEASURED_STEPS"  # a variable: so many measured ones, where only bytes are asked for


def run(request_path: str) -> int:
    """Measure the probe requested at `request_path` and write its answer beside it."""
    return _run(request_path, profiles=False)


def run_profiled(request_path: str) -> int:
    """As `run`, then the kernels of one more step. The answer is on the disk before that step begins."""
    return _run(request_path, profiles=True)


def _run(request_path: str, *, profiles: bool) -> int:
    request = ProbeRequest.read(Path(request_path))
    into_environment(request.values)
    row: Row = {"status": "failed", "reason": "", "limit_bytes": request.limit_bytes}
    recorders: list[PhaseRecorder] = []
    try:
        with rank_of(request), memory_of(request.device, request.limit_bytes) as memory:
            recorders.append(PhaseRecorder(memory, request.phase_path))
            _train(request, memory, recorders[0], row, profiles=profiles)
    except Exception as error:
        traceback.print_exc()
        said = f"{type(error).__name__}: {error}"[:500]
        if "step_s" in row:  # measured to its end: the profiled step alone failed
            row["kernels"] = {"missing": said}
        else:
            row |= {"status": "oom" if is_oom(error) else "failed", "reason": said}
            if recorders:
                row["oom_phase"] = phase = recorders[0].phase
                error.__traceback__ = None  # it holds tensors
                if row["status"] == "oom":
                    recorders[0].enter(phase)  # for the peaks up to here
                _keep_peaks(row, recorders[0])
    write_json(request.answer_path, row)
    return 0


def _train(request: ProbeRequest, memory: Memory, recorder: PhaseRecorder, row: Row, *, profiles: bool) -> None:
    """Fill `row`. What the driver says on the way is kept in it, whatever happens later."""
    row["device_name"] = memory.device_name
    readings = row["readings"] = {"context": getattr(memory, "context_bytes", None),
                                  "cublas": getattr(memory, "cublas_bytes", None)}  # fmt: skip
    memory.start()
    recorder.enter(LOAD)
    most = max(_MOST_STEPS if memory.least_measured_s else 0, request.measured_steps)
    most = int(os.environ.get(STEPS, most))
    task = Task(device=request.device, output=request.folder / "out", steps=1 + most + profiles,
                worst_case=WorstCase(path=request.worst_case))  # fmt: skip
    try:
        trained = load(request.trainer).build(split(request.values)[1], task)
        recorder.enter("loaded")
        readings["loaded"] = reading(request.device)
        clock = _Clock(trained, recorder, memory, row, request, most=most, profiles=profiles)
        trained.train(clock)
    finally:
        memory.stop()


def _keep_peaks(row: Row, recorder: PhaseRecorder) -> None:
    peaks = merged(recorder.peaks)
    row |= tops(peaks) | {"phases": [asdict(peak) for peak in peaks]}


class _Clock(StepClock):
    """Fills the row after the last measured step, whatever the next one does: that one's kernels may be recorded."""

    def __init__(
        self, trained: Run, recorder: PhaseRecorder, memory: Memory, row: Row, request: ProbeRequest, *, most: int,
        profiles: bool,
    ) -> None:  # fmt: skip
        super().__init__(trained, recorder, memory, measure_after=1, round_of=request.measured_steps)
        self._row, self._request, self._most = row, request, most
        self._kernels = Kernels(memory.now_s) if profiles else None

    def step_begins(self, step: int) -> None:
        if "step_s" in self._row:
            assert self._kernels is not None
            self._kernels.begin()
            return
        if step == 1:
            self._read("after a step")
        super().step_begins(step)

    def step_ends(self, step: int) -> Control:
        if "step_s" in self._row:
            assert self._kernels is not None
            self._row["kernels"] = self._kernels.end()
            return Control(stop=True)
        if not super().step_ends(step).stop and len(self.step_s) < self._most:
            return Control(stop=False, evaluate=len(self.step_s) == 1)  # nothing where the recipe has none
        self._measured()
        return Control(stop=self._kernels is None or max(self.step_s) > _LONGEST_PROFILED_S)

    def _measured(self) -> None:
        recorder, request = self.recorder, self._request
        recorder.enter("end")
        self._read("end")
        _keep_peaks(self._row, recorder)
        used = self._row["device_used_bytes"]
        over = request.limit_bytes is not None and isinstance(used, int) and used > request.limit_bytes
        self._row |= {
            "status": "oom" if over else "fit", "step_s": self.step_s, "rollout_s": self.rollout_s,
            "update_s": self.update_s, "card_states": [asdict(state) for state in self.card_states],
            "samples_per_step": self._run.samples_per_step, "tokens_per_step": self._run.tokens_per_step,
        }  # fmt: skip
        if self._kernels is not None:  # a profiler may end the process
            write_json(request.answer_path, {**self._row, "kernels": {"missing": "the profiled step did not end"}})

    def _read(self, moment: str) -> None:
        readings = self._row["readings"]
        assert isinstance(readings, dict)
        readings[moment] = reading(self._request.device)
