"""The probe: a few worst-case optimizer steps of the real trainer on one device, independent of its caller.

Order: load, one step (the warm-up), evaluation, save; then, as after an interruption, load, resume, one step, and the
measured steps. Memory is tracked in all but those, which run at full speed.

With a colocated vLLM engine all until the save runs in a process of its own: an engine does not give all of its memory
back while its process lives, and vLLM allows one engine with sleep mode in a process.
"""

import gc
import os
import platform
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

from torch.distributed import DistNetworkError, barrier, is_initialized

from autofit.files import is_full, read_json, write_json
from autofit.hardware.nvml import CardState
from autofit.plugin.protocol import (
    BEFORE_UPDATE,
    LOAD,
    OPTIMIZER,
    SCORING,
    UPDATE,
    Control,
    Report,
    Run,
    Task,
    Trainer,
    WorstCase,
    own_checkpoints,
)
from autofit.plugin.registry import load
from autofit.probing.fork_server import as_inside
from autofit.probing.memory import Memory, empty_allocator, memory_of, merged, tops
from autofit.probing.result import Cause, PhasePeak, ProbeRequest, ProbeResult, ProbeStatus, RankPeak, is_oom
from autofit.probing.supervise import PORT_IS_TAKEN, die_with_parent, trial_env
from autofit.recipe.launch import Launch, is_on, split
from autofit.recipe.secrets import into_environment, opened


class PhaseRecorder:
    """Records the current phase of the probe, the peak of each phase, and its seconds in the measured steps."""

    def __init__(self, memory: Memory, phase_path: Path) -> None:
        self._memory = memory
        self._phase_path = phase_path
        self._entered = memory.now_s()
        self.phase = LOAD
        self.peaks: list[PhasePeak] = []
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.latest_s: defaultdict[str, float] = defaultdict(float)  # of each phase's last visit alone
        phase_path.write_text(self.phase)

    def enter(self, phase: str) -> str:
        """Switch to `phase`; returns the previous phase."""
        now, left = self._memory.now_s(), self.phase
        self.peaks.append(self._memory.switch(left, phase))
        self.latest_s[left] = now - self._entered
        self.seconds[left] += self.latest_s[left]
        self._entered, self.phase = now, phase
        if phase != left:
            self._phase_path.write_text(phase)
        return left


class Followed(Report):
    """A run's report that passes its phases to a recorder."""

    def __init__(self, recorder: PhaseRecorder) -> None:
        self.recorder = recorder

    def enter(self, phase: str) -> str:
        return self.recorder.enter(phase)


# The clock of a probe's measured steps.


class StepClock(Followed):
    """Measures the seconds of each optimizer step after number `measure_after`, where memory tracking stops.

    Stops the training after `round_of` measured steps, or after the first multiple of them that took long enough.

    Seconds of scoring done before training (DPO's reference) are distributed: each step gets its share of the last one,
    as the first of a process also loads kernels.
    """

    def __init__(self, run: Run, recorder: PhaseRecorder, memory: Memory, *, measure_after: int, round_of: int) -> None:
        super().__init__(recorder)
        self._run, self._memory, self._measure_after, self._round_of = run, memory, measure_after, round_of
        self.step_s: list[float] = []
        self.sync_s: tuple[float, ...] = ()  # counted with the rollout
        self.rollout_s: list[float] = []
        self.update_s: list[float] = []
        self.card_states: list[CardState] = []
        self._began: float | None = None
        self._share_s = 0.0

    def train_begins(self) -> None:
        self._share_s = self.recorder.latest_s[SCORING] * self._run.scoring_share

    def step_begins(self, step: int) -> None:
        super().step_begins(step)
        if step >= self._measure_after:
            self._memory.stop()
            self._began = self._memory.now_s()
            self.recorder.enter(UPDATE)  # anew, so that the step holds every second of its phases
            self.recorder.seconds.clear()

    def step_ends(self, step: int) -> Control:
        if self._began is not None:
            seconds = self.recorder.seconds
            self.recorder.enter(UPDATE)
            self.step_s.append(self._memory.now_s() - self._began + self._share_s)
            self.rollout_s.append(sum(seconds[phase] for phase in BEFORE_UPDATE) + self._share_s)
            self.update_s.append(seconds[UPDATE] + seconds[OPTIMIZER])
            state = self._memory.card_state()
            self.card_states += [state] if state is not None else []
        return Control(stop=self._is_done)

    @property
    def _is_done(self) -> bool:
        whole_rounds = self.step_s and len(self.step_s) % self._round_of == 0
        return bool(whole_rounds) and sum(self.step_s) >= self._memory.least_measured_s


_MOST_ROUNDS = 8  # of the measured steps, where they are too short for a card to be observed
_RESUME = "resume"  # the phase
_UNTIL_SAVED = "until-saved"  # argument of the process that trains until the save
_ANSWERED = 3  # exit code of that process where it did not come so far, and has written the probe's answer


def run(request_path: str, *, until_saved: bool = False) -> int:
    """Run the probe requested at `request_path` and write its JSON answer beside it. Returns 0.

    A rank of several that does not train to the end returns another code, so that the others are ended too. A process
    that trains only `until_saved` writes the peaks of its phases for the one that resumes, and an answer if it fails.
    """
    started = time.perf_counter()
    request = ProbeRequest.read(Path(request_path))
    request = replace(request, values=opened(request.values))
    if not until_saved and _has_engine(request):
        if code := _train_until_saved_apart(request):
            return 0 if code == _ANSWERED and request.rank is None else code
        request = replace(request, port=request.resume_port)
    into_environment(request.values)
    recorder: list[PhaseRecorder] = []
    try:
        request.pid_path.write_text(str(os.getpid()), encoding="ascii")
        with rank_of(request), memory_of(request.device, request.limit_bytes if request.capped else None) as memory:
            recorder.append(PhaseRecorder(memory, request.phase_path))
            if until_saved:
                memory.start()
                _train_until_saved(request, recorder[0], load(request.trainer))
                write_json(request.saved_path, {"phases": [asdict(peak) for peak in recorder[0].peaks]})
                return 0
            result = _probe_of_ranks(request, memory, recorder[0])
    except Exception as error:
        loading = not recorder or recorder[0].phase == LOAD
        if request.rank == 0 and loading and isinstance(error, DistNetworkError):  # rank 0 listens on the port
            return PORT_IS_TAKEN
        result = _failure(request, error, recorder)
    except SystemExit as error:
        phase = recorder[0].phase if recorder else "load"
        reason = f"sys.exit({0 if error.code is None else error.code!r}) was called during {phase}"
        result = ProbeResult(status=ProbeStatus.FAILED, device=request.device, reason=reason, cause=Cause.EXITED)
    content = result.to_json() | {"process_s": time.perf_counter() - started}
    write_json(request.answer_path, content)
    if until_saved:
        return _ANSWERED
    return 0 if request.rank is None or result.step_s else 1


def _has_engine(request: ProbeRequest) -> bool:
    """True if the probe is of a real training beside a vLLM engine in its own process."""
    values = request.values
    colocated = is_on(values.get("use_vllm")) and values.get("vllm_mode", "colocate") == "colocate"
    return colocated and not request.device.startswith("sim:")


def _train_until_saved_apart(request: ProbeRequest) -> int:
    """The exit code of a process that trains until the save: 0 if it did. A signal that ended it ends this one too.

    It is started, not forked: an import of vLLM or of the recipe may have started CUDA here.
    """
    request.saved_path.unlink(missing_ok=True)
    command = [sys.executable, "-P", "-m", "autofit.probing.worker", str(request.request_path), _UNTIL_SAVED]
    code = subprocess.run(command, env=trial_env(), check=False).returncode
    if code and not request.rank:
        shutil.rmtree(_checkpoints(request), ignore_errors=True)
    if code < 0:
        os.kill(os.getpid(), -code)
    return code


def rank_of(request: ProbeRequest) -> AbstractContextManager[None]:
    """Context in which this process is the rank of `request`, if it is one of several."""
    if request.rank is None:
        return nullcontext()
    from autofit.plugin.ranks import as_rank

    assert request.port is not None
    launch = replace(Launch.of(request.values), machines=1)  # all ranks of a probe are on this one
    return as_rank(launch, rank=request.rank, port=request.port, device=request.device)


# Words of a library's error that do not say which key to change: what to do.
_CURES = {
    "ParamWrapper does not work with lora_dropout":
        "PEFT takes no dropout for experts that are one parameter: set lora_dropout: 0, or leave the experts out of "
        "lora_target_modules",
    "does not support activation checkpointing": "set gradient_checkpointing: false",
    "does not support gradient checkpointing": "set gradient_checkpointing: false",
}  # fmt: skip


def _failure(request: ProbeRequest, error: Exception, recorders: list[PhaseRecorder]) -> ProbeResult:
    import traceback

    traceback.print_exception(error)  # into the probe's log
    phase = recorders[0].phase if recorders else "load"
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
    if cure := next((cure for words, cure in _CURES.items() if words in text), ""):
        text = f"{text.rstrip('.')}; {cure}"
    if not is_oom(error):
        cause = Cause.NO_SPACE if is_full(request.folder) else Cause.RAISED
        head = f"no space left for {request.folder}: " if cause is Cause.NO_SPACE else ""
        reason = f"{head}{text} (during {phase}; see {request.log_path})"
        return ProbeResult(status=ProbeStatus.FAILED, device=request.device, reason=reason, cause=cause)
    peaks = recorders[0].peaks if recorders else []
    if recorders:
        error.__traceback__ = None
        recorders[0].enter(phase)
    top = tops(merged(peaks))
    return ProbeResult(
        status=ProbeStatus.OOM, device=request.device, reason=text, oom_phase=phase, limit_bytes=request.limit_bytes,
        phases=merged(peaks), versions=versions(), **top,
    )  # fmt: skip


def _probe_of_ranks(request: ProbeRequest, memory: Memory, recorder: PhaseRecorder) -> ProbeResult:
    """The probe; of several simulated ranks that of rank 0, and of the last rank too where it has another share."""
    first, run = _probe(request, memory, recorder)
    launch = Launch.of(request.values)
    if launch.is_plain or not request.device.startswith("sim:"):
        return first
    from autofit.plugin.ranks import share_differs
    from autofit.probing.simulated import SimMemory

    assert isinstance(memory, SimMemory)
    results = {0: first}
    if share_differs(run.model, launch):
        memory.rank = launch.ranks - 1
        recorder.peaks.clear()
        results[memory.rank] = _probe(request, memory, recorder)[0]
    largest = max(results, key=lambda rank: results[rank].device_used_bytes or 0)
    peaks = [RankPeak.of(rank, result) for rank, result in results.items()]
    return replace(results[largest], rank=largest, ranks=tuple(peaks))


def _probe(request: ProbeRequest, memory: Memory, recorder: PhaseRecorder) -> tuple[ProbeResult, Run]:
    trainer = load(request.trainer)
    memory.start()
    train = _train_simulated if request.device.startswith("sim:") else _train_and_resume
    run, steps = train(request, memory, recorder, trainer)
    peaks = merged(p for p in recorder.peaks)
    most = {**tops(peaks), **memory.account()}
    used = int(most["device_used_bytes"])
    over = request.limit_bytes is not None and used > request.limit_bytes
    result = ProbeResult(
        status=ProbeStatus.OOM if over else ProbeStatus.FIT,
        reason="device-used bytes exceeded the target" if over else "",
        oom_phase=max(peaks, key=lambda p: p.device_used_bytes).name if over else None, device=request.device,
        limit_bytes=request.limit_bytes, phases=tuple(p for p in peaks if p.name != "end"), step_s=tuple(steps.step_s),
        rollout_s=tuple(steps.rollout_s), update_s=tuple(steps.update_s), sync_s=tuple(steps.sync_s),
        phase_s=dict(getattr(steps, "phase_s", {})), card_states=tuple(steps.card_states),
        completions_per_step=run.samples_per_step, tokens_per_step=run.tokens_per_step, device_name=memory.device_name,
        versions=versions(), **most,
    )  # fmt: skip
    return result, run


def _checkpoints(request: ProbeRequest) -> Path:
    return request.folder / "checkpoints"


def _task(request: ProbeRequest, *, steps: int) -> Task:
    return Task(
        device=request.device, output=_checkpoints(request), steps=steps, worst_case=WorstCase(path=request.worst_case)
    )


def _train_and_resume(
    request: ProbeRequest, memory: Memory, recorder: PhaseRecorder, trainer: Trainer
) -> tuple[Run, Any]:
    """Load, one step, evaluation, save; then load, resume, one step and the measured steps. (run, its step times)."""
    try:
        if (saved := read_json(request.saved_path)) is None:
            _train_until_saved(request, recorder, trainer)
        else:  # by a process of its own
            recorder.enter(_RESUME)
            recorder.peaks[:] = [PhasePeak(**peak) for peak in cast(list[dict[str, Any]], saved["phases"])]
            request.saved_path.unlink()
        recorder.seconds.clear()
        rounds = _MOST_ROUNDS if memory.least_measured_s > 0 else 1
        run = trainer.build(split(request.values)[1], _task(request, steps=2 + rounds * request.measured_steps))
        steps = StepClock(run, recorder, memory, measure_after=2, round_of=request.measured_steps)
        run.train(steps, resume_from=own_checkpoints(_checkpoints(request)) / "checkpoint-1")
        recorder.enter("end")
    finally:
        memory.stop()
        if not request.rank:  # the ranks have one folder
            shutil.rmtree(_checkpoints(request), ignore_errors=True)
    return run, steps


def _train_until_saved(request: ProbeRequest, recorder: PhaseRecorder, trainer: Trainer) -> None:
    """Load, one step, save; the rest of the run is freed, and the phase is the resumption."""
    recorder.enter(LOAD)
    run: Run | None = trainer.build(split(request.values)[1], _task(request, steps=1))
    assert run is not None
    run.train(_SaveNow(recorder))
    run = None
    if request.rank is not None and is_initialized():  # until rank 0 has written the checkpoint
        barrier()
    gc.collect()
    if request.device == "cuda":  # else the model that resumes is built in the blocks of this one: 0.6 of 7.6 GB more
        empty_allocator()
    recorder.enter(_RESUME)


def _train_simulated(
    request: ProbeRequest, memory: Memory, recorder: PhaseRecorder, trainer: Trainer
) -> tuple[Run, Any]:
    """Load, two steps and an evaluation if the recipe has one.

    Only the second step is measured: it has the optimizer's state, and simulated steps do not vary.

    A simulated card keeps no values, so the probe does not save or resume. It runs with few layers first, and again
    with all layers if the few cannot represent them.
    """
    from autofit.fakegpu.depth.stack import LongerPatternError
    from autofit.probing.simulated import SimMemory, layers_alike, needs_all_layers

    assert isinstance(memory, SimMemory)
    memory.least_of_fits = request.least_of_fits
    _, values = split(request.values)
    pattern = None if needs_all_layers(request.values) else layers_alike(values)
    while True:
        try:
            run, simulation = _simulated(request, memory, recorder, trainer, pattern=pattern)
            break
        except LongerPatternError as error:
            pattern = 2
            print(f"traced again in pairs of layers: {error}", flush=True)  # into the probe's log
        except Exception as error:  # NotRepeatingError, or a model that fails with few layers: the deep run decides
            if pattern is None:
                raise
            pattern = None
            print(f"traced again with all layers: {type(error).__name__}: {error}", flush=True)
    recorder.peaks[:] = simulation.peaks
    return run, simulation


def _simulated(
    request: ProbeRequest, memory: Any, recorder: PhaseRecorder, trainer: Trainer, *, pattern: int | None
) -> tuple[Run, Any]:
    """The run and its simulation; with all its micro-batches if those left out differ from the repeated ones.

    With a `pattern` models have few layers, alike after this number of them; with None they have all.
    """
    from autofit.fakegpu.depth.expand import RoundsDifferError

    for leaves_out in (True, False):
        run = _train_on_card(request, memory, recorder, trainer, pattern=pattern, leaves_out=leaves_out)
        try:
            return run, memory.simulation(share_of_scoring=run.scoring_share, share_of_rollout=run.rollout_share)
        except RoundsDifferError as error:
            print(f"traced again with all micro-batches: {error}", flush=True)
    raise AssertionError


def _train_on_card(
    request: ProbeRequest, memory: Any, recorder: PhaseRecorder, trainer: Trainer, *, pattern: int | None,
    leaves_out: bool,
) -> Run:  # fmt: skip
    from autofit.plugin.ranks import simulated_rank
    from autofit.probing.simulated import loaded_bytes

    gc.freeze()  # trainers collect garbage in their constructors; this excludes the imported modules
    gc.collect()  # collections come at the same moments in every probe, whatever this process or its parent did before
    launch, values = split(request.values)
    card = memory.card(pattern=pattern, follow_host=not launch.is_plain, plays_micro_batches=leaves_out)
    with simulated_rank(launch, memory.rank, device=request.device), card:
        recorder.enter(LOAD)
        run = trainer.build(values, _task(request, steps=2))
        loaded = loaded_bytes(run.model)
        loads_apart = not launch.is_deepspeeds  # whose engine makes its host copies before the first step
        marks = _StepMarks(recorder, memory, measure_after=1, loads_apart=loads_apart, leaves_out=leaves_out)
        run.train(marks)
        recorder.enter("end")
        saved = marks.saved_bytes(launch, with_optimizer=not is_on(values.get("save_only_model", False)))
        memory.note_host(launch, loaded, saved_bytes=saved)
        return run


class _SaveNow(Followed):
    """Evaluates and saves a checkpoint at the end of every step."""

    def step_ends(self, step: int) -> Control:
        return Control(save=True, evaluate=True)


class _StepMarks(Followed):
    """Marks on the simulated card the begin and end of each optimizer step after number `measure_after`.

    With `loads_apart` what the host holds before the first step is gone when it begins.
    """

    def __init__(
        self, recorder: PhaseRecorder, memory: Any, *, measure_after: int, loads_apart: bool, leaves_out: bool
    ) -> None:
        super().__init__(recorder)
        self.leaves_out = leaves_out
        self._left_out: bool | None = None  # whether the micro-batch at work is; None where all are computed
        self._memory, self._measure_after, self._loads_apart = memory, measure_after, loads_apart
        self._trained: tuple[object, object] | None = None

    def gradient_is_whole(self, model: Any, optimizer: Any) -> None:
        super().gradient_is_whole(model, optimizer)
        self._trained = model, optimizer

    def micro_step_begins(self, *, left_out: bool) -> None:
        self._left_out = left_out

    def micro_step_ends(self) -> None:
        if self._left_out is not None:
            self.recorder.enter(UPDATE)
            self._memory.end_micro_batch(left_out=self._left_out)
            self._left_out = None

    def last_are_alike(self) -> bool:
        return bool(self._memory.micro_batches_alike())

    def saved_bytes(self, launch: Launch, *, with_optimizer: bool) -> int | None:
        """The most bytes of trained state that a save gathers; None for a run that hides it."""
        from autofit.probing.simulated import saved_bytes

        return None if self._trained is None else saved_bytes(*self._trained, launch, with_optimizer=with_optimizer)

    def step_begins(self, step: int) -> None:
        super().step_begins(step)
        if step == 0 and self._loads_apart:
            self._memory.host_has_loaded()
        if step >= self._measure_after:
            self._memory.mark_step()

    def step_ends(self, step: int) -> Control:
        if step > self._measure_after:
            self.recorder.enter(UPDATE)
            self._memory.mark_step()
        return Control(evaluate=step > self._measure_after)


def versions() -> dict[str, str]:
    from importlib.metadata import version

    packages = ("torch", "transformers", "trl", "peft", "accelerate")
    return {"python": platform.python_version()} | {name: version(name) for name in packages}


if __name__ == "__main__":
    die_with_parent()
    as_inside()
    os._exit(run(sys.argv[1], until_saved=sys.argv[2:] == [_UNTIL_SAVED]))
