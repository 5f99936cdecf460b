"""One process of a promoted run: the full training of a tuned recipe, resumable from every whole checkpoint.

Runs in a process of its own (`python -m autofit.promotion.training REQUEST`), one for each rank. A rank of several has
RANK, MASTER_ADDR and MASTER_PORT in its environment; rank 0 records the run, and the others follow it. Loads torch.
"""

import contextlib
import gc
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from autofit.errors import AutofitError, EnvironmentFault
from autofit.files import written_json
from autofit.plugin.protocol import LOAD, OPTIMIZER, SYNC, WAKE_UP, Rescuable, Run, Task, own_checkpoints
from autofit.plugin.ranks import as_rank
from autofit.plugin.registry import load
from autofit.probing.result import is_oom
from autofit.probing.supervise import PORT_IS_TAKEN, die_with_parent
from autofit.promotion.checkpoints import (
    PassedOver,
    checkpoints,
    delete_own,
    last_checkpoint,
    print_leniently,
    reason_of,
    step_of,
    what_is_torn,
)
from autofit.promotion.reports import Following, Leading, Locating, Together, Where
from autofit.promotion.run_folder import (
    ADDRESS,
    Oom,
    Place,
    RunFolder,
    ask_after_signal,
    deaf_children,
    forget_unloadable,
    in_words,
    keep_oom,
    listen,
    read_oom,
    received,
    tell_failure,
    tell_unloadable,
    unloadable,
)
from autofit.promotion.server import with_address
from autofit.recipe.launch import Launch, split
from autofit.recipe.secrets import into_environment, opened
from autofit.tuning.storage import mlflow_follows
from autofit.watching.contract import Promise, Watched, Watcher
from autofit.watching.events import (
    EventKind,
    RunEvent,
    forget_events_after,
    forget_progress_after,
    keep_event,
    keep_only,
    read_progress,
)
from autofit.watching.thresholds import guards_of
from autofit.watching.watchers import watchers


class Start(Watcher):
    """The checkpoint to go on from, and the skipped ones, as events of the run."""

    def __init__(self, folder: Path, output: Path, *, unloadable: Mapping[str, str] | None = None) -> None:
        """`unloadable` has the checkpoints that failed to load in an earlier process, and why."""
        self._folder, self.output = folder, output
        found = (unloadable or {}).items()
        self._not_loaded = [PassedOver(checkpoint=Path(name), reason=reason) for name, reason in found]
        self._error: Exception | None = EnvironmentFault(str(self._not_loaded[-1])) if self._not_loaded else None
        self._said = False
        self._lines = read_progress(folder)
        self.checkpoint: Path | None = None

    @property
    def step(self) -> int:
        """The optimizer steps that are finished."""
        return 0 if self.checkpoint is None else step_of(self.checkpoint)

    def choose(self, run: Run) -> None:
        """Choose the newest whole checkpoint that loads, as far as known, and forget all that came after it.

        Raises the error of loading if no whole checkpoint is left: the progress of the run is not thrown away.
        """
        torn = self._not_loaded[-1:]
        self.checkpoint = last_checkpoint(
            self.output, run.checkpoint_is_whole, steps_between=run.steps_between_saves,
            without=[p.checkpoint for p in self._not_loaded], passes_over=torn.append,
        )  # fmt: skip
        if self._error is not None and self.checkpoint is None:
            keep_only(self._folder, self._lines)
            raise self._error
        forget_progress_after(self._folder, self.step)
        forget_events_after(self._folder, self.step)
        for passed in torn:
            keep_event(self._folder, self._event(EventKind.CHECKPOINT, f"{passed}; {self._goes_on}"))
        self._said = bool(torn)

    def begins(self, run: Watched) -> Iterable[RunEvent]:
        """That the run goes on, once its checkpoint is loaded."""
        return () if self._said or self.checkpoint is None else (self._event(EventKind.RESUME, self._goes_on),)

    def passes_over(self, error: Exception) -> bool:
        """True if an older checkpoint is to be tried, as `error` came up before the first step after this one.

        False if memory ran out or the recipe is wrong: an older checkpoint would meet the same.
        """
        passed = not_loaded(self.checkpoint, error)
        if passed is None:
            return False
        self._not_loaded.append(passed)
        self._error = error
        return True

    @property
    def _goes_on(self) -> str:
        return "starts again at step 0" if self.checkpoint is None else f"goes on after step {self.step}"

    def _event(self, kind: EventKind, text: str) -> RunEvent:
        return RunEvent(step=self.step, kind=kind, text=text)


def not_loaded(checkpoint: Path | None, error: Exception) -> PassedOver | None:
    """`checkpoint`, as `error` came up before the first step after it; None if an older one would meet the same."""
    if checkpoint is None or isinstance(error, AutofitError) or is_oom(error):
        return None
    reason = f"could not be loaded ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    return PassedOver(checkpoint=checkpoint, reason=reason)


def tell_oom_and_save(folder: Path, output: Path, error: BaseException, run: Run, at: Locating) -> None:
    """Tell the OOM of one process by itself in oom.json, after its last finished step was saved if it can be."""
    message, unused_frac = in_words(error), _unused_frac()
    _let_go(error)
    _save_on_the_spot(run, at, output)
    found = _located(message, run, at, resumes_from=_newest(run, output))
    keep_oom(folder, replace(found, unused_frac=unused_frac))


def tell_oom_of_rank(folder: Path, output: Path, error: BaseException, run: Run, at: Where) -> None:
    """Tell the OOM of one rank of several in oom.json, unless another rank has told its own.

    Nothing is saved: the other ranks are in another moment. The run goes on from its newest whole checkpoint.
    """
    if read_oom(folder) is not None:
        return
    whole = (p for p in checkpoints(output) if what_is_torn(p, run.checkpoint_is_whole) is None)
    saved = next((step_of(p) for p in whole if not step_of(p) % run.steps_between_saves), 0)
    found = _located(in_words(error), run, at, resumes_from=saved)
    keep_oom(folder, replace(found, unused_frac=_unused_frac(), rank=at.rank))


def _located(message: str, run: Run, at: Where, *, resumes_from: int) -> Oom:
    return Oom(
        message=message, phase=at.at_work, finished=at.steps, resumes_from=resumes_from,
        evaluating=at.at_work != LOAD and not at.in_step,
        samples=run.sample_facts if isinstance(run, Rescuable) else None,
    )  # fmt: skip


def _newest(run: Run, output: Path) -> int:
    """The step of the newest whole checkpoint, or 0. A torn one is put aside."""
    whole = last_checkpoint(output, run.checkpoint_is_whole, steps_between=run.steps_between_saves)
    return 0 if whole is None else step_of(whole)


def _unused_frac() -> float:
    if not torch.cuda.is_initialized() or not torch.cuda.memory_reserved():
        return 0.0
    return 1 - torch.cuda.memory_allocated() / torch.cuda.memory_reserved()


def _let_go(error: BaseException) -> None:
    """Free what the failed step held: the frames of the error keep its activations, the parameters its gradients."""
    traceback.print_exception(error)
    at: BaseException | None = error
    while at is not None:
        traceback.clear_frames(at.__traceback__)
        at = at.__cause__ or at.__context__
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _save_on_the_spot(run: Run, at: Locating, output: Path) -> None:
    """Save the last finished step unless it is saved already, or has changed in memory since."""
    # vLLM gets weights with the adapters merged into them
    unsafe = at.at_work in (LOAD, OPTIMIZER, WAKE_UP, SYNC)
    if unsafe or at.steps == 0 or not isinstance(run, Rescuable) or _newest(run, output) == at.steps:
        return
    run.model.zero_grad(set_to_none=True)
    try:
        run.save_on_the_spot()
    except Exception as error:  # memory or disk may be full still; the checkpoint before is whole
        print(f"no checkpoint of step {at.steps} could be saved: {in_words(error)}", file=sys.stderr, flush=True)
        shutil.rmtree(own_checkpoints(output) / f"checkpoint-{at.steps}", ignore_errors=True)


def tell_oom(folder: Path, output: Path, error: BaseException, *, rank: int | None = None) -> None:
    """Report an OOM in oom.json if it is still unreported: one before the training began."""
    if read_oom(folder) is None:
        traceback.print_exception(error)
        saved = next(map(step_of, checkpoints(output)), 0)
        keep_oom(folder, Oom(message=in_words(error), finished=saved, resumes_from=saved, rank=rank))


RANK = "RANK"  # environment variable: the number of this rank, of several


@dataclass(frozen=True, slots=True, kw_only=True)
class _Beginning:
    """Decisions before the training, by the process that records the run."""

    checkpoint: Path | None
    step: int
    asked_to_end: bool


def main(request_path: str) -> int:
    """Train until the end, a stop request, or an error, which is reported in the folder; the exit code."""
    request = written_json(request_path)
    folder, output = Path(str(request["folder"])), Path(str(request["output_dir"]))
    launch, values = split(with_address(opened(cast("dict[str, object]", request["values"]))))
    into_environment(values)
    rank = None if launch.is_alone else int(os.environ[RANK])
    try:
        with _mirrored(folder, rank), _as_rank(launch, rank, str(request["device"])):
            _train({**request, "values": values}, folder, output, rank)
    except SystemExit as error:
        traceback.print_exc()
        if error.code in (0, None):
            raise
        _tell_failure(folder, rank, f"its code called sys.exit({error.code!r})")
        return 1
    except Exception as error:
        if rank is not None and isinstance(error, dist.DistNetworkError):
            traceback.print_exc()
            return PORT_IS_TAKEN
        if is_oom(error):  # the job goes on with a setting that needs less
            tell_oom(folder, output, error, rank=rank)
            return 1
        traceback.print_exc()
        _tell_failure(folder, rank, reason_of(error, output))
        return 1
    return 0


def _as_rank(launch: Launch, rank: int | None, device: str) -> contextlib.AbstractContextManager[None]:
    if rank is None:
        return nullcontext()
    return as_rank(launch, rank=rank, port=int(os.environ["MASTER_PORT"]), device=device, address=os.environ[ADDRESS])


def _tell_failure(folder: Path, rank: int | None, reason: str) -> None:
    with contextlib.suppress(EnvironmentFault):  # a full disk
        if rank is None:
            RunFolder(folder).fail(reason)
        else:
            tell_failure(folder, rank, reason)


def _train(request: Mapping[str, Any], folder: Path, output: Path, rank: int | None) -> None:
    began = time.monotonic()
    start = None if rank else Start(folder, output, unloadable={} if rank is None else unloadable(folder))
    while True:
        run = load(request["trainer"]).build(request["values"], Task(device=request["device"], output=output))
        together = None if rank is None else Together()
        beginning = _begun(start, run, together)
        if beginning.asked_to_end:
            return
        report = _report(request, folder, run, start, beginning.step, together)
        try:
            with _errors_told(folder, output, run, report, beginning.checkpoint):
                run.train(report, resume_from=beginning.checkpoint)
        except Exception as error:
            if rank is not None or report.began or start is None or not start.passes_over(error):
                raise
        else:
            break
        del run, report
        gc.collect()
    if report.stopped:
        return
    run.save_model(output)
    final = None
    if isinstance(report, Locating):
        report.ends()
        final = _final(read_progress(folder), report.steps, output, time.monotonic() - began)
    if together is not None:
        together.wait()  # until every rank has saved its part
    if final is not None:
        RunFolder(folder).finish(final)
        delete_own(output)


def _begun(start: Start | None, run: Run, together: Together | None) -> _Beginning:
    """The beginning as `start` decides it, on rank 0 of several or alone."""

    def decide() -> _Beginning:
        assert start is not None
        start.choose(run)
        return _Beginning(checkpoint=start.checkpoint, step=start.step, asked_to_end=received() is not None)

    return decide() if together is None else cast(_Beginning, together.decided(decide))


def _report(
    request: Mapping[str, Any], folder: Path, run: Run, start: Start | None, first_step: int, together: Together | None
) -> Locating | Following:
    """The receiver of what `run` reports: alone, of rank 0 of several, or of another rank."""
    report: Leading | Following
    if start is None:
        report = Following(first_step)
    else:
        watched = _watched(request, folder, run, first_step)
        everyone = [start, *watchers(guards=guards_of(request.get("guards")))]
        if together is None:
            return Locating(run, watched, everyone)
        report = Leading(run, watched, everyone)
    assert together is not None
    report.joins(together, Place(folder, together.rank))
    return report


@contextmanager
def _errors_told(
    folder: Path, output: Path, run: Run, report: Locating | Following, checkpoint: Path | None
) -> Iterator[None]:
    """Context of a training: reports an OOM, and on one rank of several a checkpoint that fails to load."""
    try:
        yield
    except Exception as error:
        if not isinstance(report, Leading | Following):
            if is_oom(error):
                tell_oom_and_save(folder, output, error, run, report)
        elif is_oom(error):
            traceback.print_exc()
            tell_oom_of_rank(folder, output, error, run, report)
        elif not report.began and (passed := not_loaded(checkpoint, error)) is not None:
            tell_unloadable(folder, passed.checkpoint, passed.reason)
        raise
    else:
        forget_unloadable(folder)


@contextmanager
def _mirrored(folder: Path, rank: int | None) -> Iterator[None]:
    """Context with a mirror to MLflow, of the process that records the run."""
    mirror = None if rank or not mlflow_follows() else start_mirror(folder)
    try:
        yield
    finally:
        stop_mirror(mirror)


def _watched(request: Mapping[str, Any], folder: Path, run: Run, done: int) -> Watched:
    promise = request.get("promise")
    return Watched(
        folder=folder, trainer=request["trainer"], values=request["values"], device=request["device"],
        generates=request["generates"], samples_per_step=run.samples_per_step, first_step=done, last_step=0,
        promise=None if promise is None else Promise.from_json(promise), lines=tuple(read_progress(folder)),
        hf_trainer=getattr(run, "trainer", None),
    )  # fmt: skip


def _final(lines: list[dict[str, Any]], steps: int, output: Path, seconds: float) -> dict[str, object]:
    rewards = [line["reward"] for line in lines if line.get("reward") is not None]
    tenth = max(1, len(rewards) // 10)
    return {
        "steps": steps, "final_loss": next((line["loss"] for line in reversed(lines) if "loss" in line), None),
        "first_reward": sum(rewards[:tenth]) / tenth if rewards else None,
        "last_reward": sum(rewards[-tenth:]) / tenth if rewards else None, "reward_window_steps": tenth,
        "output_dir": str(output.resolve()), "seconds_since_resume": seconds,
    }  # fmt: skip


def start_mirror(folder: Path) -> "subprocess.Popen[bytes] | None":
    """Start a process that copies progress.jsonl to MLflow; the training waits for it only at its end.

    None if it fails to start: the training can do without MLflow.
    """
    command = [sys.executable, "-P", "-m", "autofit.tracking.study_mirror", str(RunFolder(folder).request_path)]
    try:
        with (folder / "mlflow.log").open("ab") as log, deaf_children():
            return subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}
            )
    except OSError as error:
        print(f"MLflow's mirror could not be started: {error}", file=sys.stderr)
        return None


def stop_mirror(mirror: "subprocess.Popen[bytes] | None") -> None:
    if mirror is None or mirror.stdin is None:
        return
    mirror.stdin.close()
    try:
        mirror.wait(timeout=30.0)
    except subprocess.TimeoutExpired:
        mirror.kill()


if __name__ == "__main__":
    die_with_parent()
    is_rank = RANK in os.environ
    listen(lambda: ask_after_signal(Path(sys.argv[1]).parent) if is_rank else None)
    print_leniently()
    code = main(sys.argv[1])
    if is_rank:  # at once: after a failure, leaving the process group would wait for ranks that are gone
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
