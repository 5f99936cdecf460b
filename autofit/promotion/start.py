"""The checkpoint from which a full run starts, or goes on after it was out of memory. Imports torch."""

import gc
import shutil
import sys
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from autofit.errors import AutofitError, EnvironmentFault
from autofit.plugin.protocol import LOAD, OPTIMIZER, SYNC, WAKE_UP, Rescuable, Run, own_checkpoints
from autofit.probing.result import is_oom
from autofit.promotion.checkpoints import PassedOver, checkpoints, last_checkpoint, step_of, what_is_torn
from autofit.promotion.reports import Locating, Where
from autofit.promotion.run_folder import Oom, in_words, keep_oom, read_oom
from autofit.watching.contract import Watched, Watcher
from autofit.watching.events import (
    Kind,
    RunEvent,
    forget_events_after,
    forget_progress_after,
    keep_event,
    keep_only,
    read_progress,
)


class Start(Watcher):
    """The checkpoint to go on from, and what is passed over, as events of the run."""

    def __init__(self, folder: Path, output: Path, *, unloadable: Mapping[str, str] | None = None) -> None:
        """`unloadable` has the checkpoints that an earlier process could not load, and why."""
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
        """Choose the newest whole checkpoint that has not failed to load, and forget what came after it.

        Raises the error of loading where no whole checkpoint is left: what the run has reached is not thrown away.
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
            keep_event(self._folder, self._event(Kind.CHECKPOINT, f"{passed}; {self._goes_on}"))
        self._said = bool(torn)

    def begins(self, run: Watched) -> Iterable[RunEvent]:
        """That the run goes on, once its checkpoint is loaded."""
        return () if self._said or self.checkpoint is None else (self._event(Kind.RESUME, self._goes_on),)

    def passes_over(self, error: Exception) -> bool:
        """Whether an older checkpoint is to be tried, as `error` came up before the first step after this one.

        Not where memory ran out or the recipe is wrong: an older checkpoint would meet the same.
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

    def _event(self, kind: Kind, text: str) -> RunEvent:
        return RunEvent(step=self.step, kind=kind, text=text)


def not_loaded(checkpoint: Path | None, error: Exception) -> PassedOver | None:
    """`checkpoint`, as `error` came up before the first step after it; None where an older one would meet the same."""
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
    """The step of the newest whole checkpoint; 0 for none. A torn one is put aside."""
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
    """Save the last finished step unless it is saved already, or is no longer in memory as it was."""
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
    """Tell an OOM in oom.json that nobody has told yet: one before the training began."""
    if read_oom(folder) is None:
        traceback.print_exception(error)
        saved = next(map(step_of, checkpoints(output)), 0)
        keep_oom(folder, Oom(message=in_words(error), finished=saved, resumes_from=saved, rank=rank))
