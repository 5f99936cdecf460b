"""The probe: a few worst-case optimizer steps of the real trainer on one device. Does not know who started it.

Order: load, one step (the warm-up), save; then, as after an interruption, load, resume, one step, and the measured
steps. All but the measured steps are followed allocation by allocation; the measured ones run at full speed.
"""

import gc
import importlib
import os
import platform
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from autofit.files import is_full, write_json
from autofit.probing import offline
from autofit.probing.inspection import go_offline_without_a_hub
from autofit.probing.memory import Memory, is_oom, memory_of, merged
from autofit.probing.phases import BEFORE_UPDATE, QUIET, Recorder, read_worst_case, wrap_phases
from autofit.probing.result import Cause, PhasePeak, ProbeRequest, ProbeResult, ProbeStatus
from autofit.probing.supervise import die_with_parent
from autofit.recipe.trl_config import TrlConfig, parse


def run(request_path: str) -> int:
    """Probe as the request at `request_path` says; answer in JSON beside it. 0 when there is an answer."""
    started = time.perf_counter()
    request = ProbeRequest.read(Path(request_path))
    env = request.values.get("env")
    if isinstance(env, dict):  # an allocator reads its settings before the recipe is parsed
        os.environ.update({str(key): str(value) for key, value in env.items()})
    recorder: list[Recorder] = []
    models = {**request.values, **offline.overrides(request.values, request.worst_case.parent)}
    if not Path(str(models.get("model_name_or_path"))).is_dir():
        go_offline_without_a_hub()
    try:
        with memory_of(request.device, request.limit_bytes if request.capped else None) as memory:
            recorder.append(Recorder(memory, request.phase_path))
            result = _probe(request, memory, recorder[0])
    except Exception as error:
        result = _failure(request, error, recorder)
    except SystemExit as error:
        code = error.code if error.code is not None else 0
        phase = recorder[0].phase if recorder else "load"
        reason = f"sys.exit({code!r}) was called during {phase}"
        result = ProbeResult(status=ProbeStatus.FAILED, device=request.device, reason=reason, cause=Cause.EXITED)
    content = result.to_json() | {"process_s": time.perf_counter() - started}
    write_json(request.answer_path, content)
    return 0


def _failure(request: ProbeRequest, error: Exception, recorders: list[Recorder]) -> ProbeResult:
    import traceback

    traceback.print_exception(error)  # into the probe's log
    phase = recorders[0].phase if recorders else "load"
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
    if not is_oom(error):
        cause = Cause.NO_SPACE if is_full(request.folder) else Cause.RAISED
        head = f"no space left for {request.folder}: " if cause is Cause.NO_SPACE else ""
        reason = f"{head}{text} (during {phase}; see {request.log_path})"
        return ProbeResult(status=ProbeStatus.FAILED, device=request.device, reason=reason, cause=cause)
    peaks = recorders[0].peaks if recorders else []
    if recorders:
        error.__traceback__ = None
        recorders[0].enter(phase)
    top = _tops(merged(peaks))
    return ProbeResult(
        status=ProbeStatus.OOM, device=request.device, reason=text, oom_phase=phase, limit_bytes=request.limit_bytes,
        phases=merged(peaks), versions=_versions(), **top,
    )  # fmt: skip


def _probe(request: ProbeRequest, memory: Memory, recorder: Recorder) -> ProbeResult:
    worst_case = read_worst_case(request.worst_case)
    plug_in = importlib.import_module(f"autofit.trainers.{request.trainer}")
    memory.start()
    train = _train_simulated if request.device.startswith("sim:") else _train_and_resume
    config, steps = train(request, memory, recorder, plug_in, worst_case)
    peaks = merged(p for p in recorder.peaks)
    tops = {**_tops(peaks), **memory.account()}
    used = int(tops["device_used_bytes"])
    over = request.limit_bytes is not None and used > request.limit_bytes
    return ProbeResult(
        status=ProbeStatus.OOM if over else ProbeStatus.FIT,
        reason="the device held more than the target" if over else "",
        oom_phase=max(peaks, key=lambda p: p.device_used_bytes).name if over else None,
        device=request.device,
        limit_bytes=request.limit_bytes,
        phases=tuple(p for p in peaks if p.name != "end"),
        step_s=tuple(steps.step_s),
        rollout_s=tuple(steps.rollout_s),
        update_s=tuple(steps.update_s),
        completions_per_step=plug_in.samples_per_step(config),
        tokens_per_step=plug_in.tokens_per_step(config, worst_case),
        device_name=memory.device_name,
        versions=_versions(),
        **tops,
    )


def _train_and_resume(
    request: ProbeRequest, memory: Memory, recorder: Recorder, plug_in: Any, worst_case: dict[str, object]
) -> tuple[TrlConfig, Any]:
    """Load, a step, save; then load, resume, a step and the measured ones."""
    checkpoints = request.folder / "checkpoints"
    try:
        config = _config(request, plug_in, checkpoints, steps=1)
        with recorder.within("load"):
            trainer = plug_in.build(config, worst_case=worst_case)
        _follow(trainer, recorder, plug_in.PHASES)
        trainer.add_callback(_SaveNow())
        trainer.train()
        trainer = None
        gc.collect()
        recorder.enter("resume")
        recorder.seconds.clear()
        config = _config(request, plug_in, checkpoints, steps=2 + request.measured_steps)
        trainer = plug_in.build(config, worst_case=worst_case)
        _follow(trainer, recorder, plug_in.PHASES)
        steps = _StepClock(trainer, recorder, memory, measure_after=2)
        trainer.add_callback(steps)
        trainer.train(resume_from_checkpoint=str(checkpoints / "checkpoint-1"))
        recorder.enter("end")
    finally:
        memory.stop()
        shutil.rmtree(checkpoints, ignore_errors=True)
    return config, steps


def _train_simulated(
    request: ProbeRequest, memory: Memory, recorder: Recorder, plug_in: Any, worst_case: dict[str, object]
) -> tuple[TrlConfig, Any]:
    """Load and two steps: the second has the optimizer's state, and a simulated step takes the same time each time.

    A simulated card keeps no values, so there is nothing to save or to resume from. With few layers first; with all of
    them where what those do cannot be expanded.
    """
    from autofit.probing.simulated import SimMemory

    assert isinstance(memory, SimMemory)
    memory.least_of_fits = request.least_of_fits
    named = [
        str(value) for key, value in request.values.items() if key.startswith("lora_") and not isinstance(value, float)
    ]
    try:
        shallow = not any(re.search(r"layers|\.\d|[\[(]\d", name) for name in named)  # a layer's number means all
        config, share = _train_on_card(request, memory, recorder, plug_in, worst_case, shallow=shallow)
        simulation = memory.simulation(share_of_scoring=share)
    except Exception as error:  # NotRepeatingError, or a model that does not like to be shallow: the deep run decides
        print(f"traced again with all layers: {type(error).__name__}: {error}", flush=True)  # into the probe's log
        config, share = _train_on_card(request, memory, recorder, plug_in, worst_case, shallow=False)
        simulation = memory.simulation(share_of_scoring=share)
    recorder.peaks[:] = simulation.peaks
    return config, simulation


def _train_on_card(
    request: ProbeRequest, memory: Any, recorder: Recorder, plug_in: Any, worst_case: dict[str, object], *,
    shallow: bool,
) -> tuple[TrlConfig, float]:  # fmt: skip
    gc.freeze()  # trainers collect garbage while they are built: not over everything that was imported
    with memory.card(shallow=shallow):
        config = _config(request, plug_in, request.folder / "checkpoints", steps=2)
        recorder.enter("load")
        trainer = plug_in.build(config, worst_case=worst_case)
        _follow(trainer, recorder, plug_in.PHASES)
        trainer.add_callback(_StepMarks(recorder, memory, measure_after=1))
        trainer.train()
        recorder.enter("end")
        share = float(getattr(trainer, "scoring_share", 0.0))
    return config, share


def _config(request: ProbeRequest, plug_in: Any, checkpoints: Path, *, steps: int) -> TrlConfig:
    device = {"use_cpu": True} if request.device == "cpu" else {}
    standing_in = offline.overrides(request.values, request.worst_case.parent)
    quiet = {**QUIET, **plug_in.QUIET, **device, **standing_in}
    overrides = {**quiet, "max_steps": steps, "output_dir": str(checkpoints)}
    return parse(request.trainer, request.values, overrides=overrides)


def _follow(trainer: Any, recorder: Recorder, phases: dict[str, str]) -> None:
    from transformers import TrainerCallback

    wrap_phases(trainer, phases, recorder.wrap)

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: object, **__: object) -> None:
            recorder.enter("update")

        def on_pre_optimizer_step(self, *_: object, **__: object) -> None:
            recorder.enter("optimizer")

        def on_optimizer_step(self, *_: object, **__: object) -> None:
            recorder.enter("update")

    trainer.add_callback(Steps())


def _SaveNow() -> Any:
    from transformers import TrainerCallback

    class SaveNow(TrainerCallback):  # type: ignore[misc]
        """Save a checkpoint at the end of every step."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: object) -> None:
            control.should_save = True

    return SaveNow()


def _StepClock(trainer: Any, recorder: Recorder, memory: Memory, *, measure_after: int) -> Any:
    from transformers import TrainerCallback

    class StepClock(TrainerCallback):  # type: ignore[misc]
        """Seconds of each optimizer step after number `measure_after`, at which the memory account is closed.

        What a trainer scores once before it trains (DPO's reference) is spread over the steps: each bears its share.
        """

        def __init__(self) -> None:
            self.step_s: list[float] = []
            self.rollout_s: list[float] = []
            self.update_s: list[float] = []
            self._began: float | None = None
            self._share_s = 0.0

        def on_train_begin(self, *_: object, **__: object) -> None:
            self._share_s = recorder.seconds["scoring"] * getattr(trainer, "scoring_share", 0.0)

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: object) -> None:
            if state.global_step >= measure_after:
                recorder.enter("update")
                memory.stop()
                recorder.seconds.clear()
                self._began = memory.now_s()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: object) -> None:
            if self._began is None:
                return
            recorder.enter("update")
            self.step_s.append(memory.now_s() - self._began + self._share_s)
            before_update = sum(recorder.seconds[phase] for phase in BEFORE_UPDATE)
            self.rollout_s.append(before_update + self._share_s)
            self.update_s.append(recorder.seconds["update"] + recorder.seconds["optimizer"])

    return StepClock()


def _StepMarks(recorder: Recorder, memory: Any, *, measure_after: int) -> Any:
    from transformers import TrainerCallback

    class StepMarks(TrainerCallback):  # type: ignore[misc]
        """Tells the simulated card where each optimizer step after number `measure_after` begins and ends."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: object) -> None:
            if state.global_step >= measure_after:
                self._mark()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: object) -> None:
            if state.global_step > measure_after:
                self._mark()

        def _mark(self) -> None:
            recorder.enter("update")
            memory.mark_step()

    return StepMarks()


def _tops(peaks: tuple[PhasePeak, ...]) -> dict[str, Any]:
    """The largest of each peak over all phases."""
    names = ("device_used_bytes", "peak_reserved_bytes", "peak_allocated_bytes")
    return {name: max((getattr(p, name) for p in peaks), default=None) for name in names}


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    packages = ("torch", "transformers", "trl", "peft", "accelerate")
    return {"python": platform.python_version()} | {name: version(name) for name in packages}


if __name__ == "__main__":
    die_with_parent()
    os._exit(run(sys.argv[1]))
