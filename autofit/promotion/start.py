"""Where a full run starts: after its newest checkpoint that is whole and can be loaded, or at step 0."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from autofit.errors import AutofitError, EnvironmentFault
from autofit.plugin.protocol import Run
from autofit.probing.oom import is_oom
from autofit.promotion.checkpoints import PassedOver, last_checkpoint, step_of
from autofit.watching.events import (
    Kind,
    RunEvent,
    forget_events_after,
    forget_progress_after,
    keep_event,
    keep_only,
    read_progress,
)
from autofit.watching.watcher import Watched, Watcher


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
        return "starts again at step 0" if self.checkpoint is None else f"goes on from {self.checkpoint.name}"

    def _event(self, kind: Kind, text: str) -> RunEvent:
        return RunEvent(step=self.step, kind=kind, text=text)


def not_loaded(checkpoint: Path | None, error: Exception) -> PassedOver | None:
    """`checkpoint`, as `error` came up before the first step after it; None where an older one would meet the same."""
    if checkpoint is None or isinstance(error, AutofitError) or is_oom(error):
        return None
    reason = f"could not be loaded ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    return PassedOver(checkpoint=checkpoint, reason=reason)
