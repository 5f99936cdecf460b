"""Who looks at a run while it trains: one small protocol, for a promoted run and for a callback in a user's script."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autofit.watching.contract import Promise
from autofit.watching.events import RunEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """What is known of a run when its training begins."""

    folder: Path | None  # where its own files are; None for a user's own script
    trainer: str  # grpo, sft, ..., or the name of a trainer of one's own
    values: Mapping[str, object]  # the recipe; of a user's script, its arguments
    device: str  # cpu or cuda
    generates: bool
    samples_per_step: int  # of one rank
    first_step: int  # optimizer steps that an earlier start finished
    last_step: int
    promise: Promise | None = None
    lines: tuple[Mapping[str, object], ...] = ()  # of the steps that an earlier start logged
    hf_trainer: Any = None  # the transformers.Trainer, where there is one


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """One finished optimizer step. Bytes are since the run began; None is "not measured"."""

    number: int  # from 1
    step_s: float
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    device_used_bytes: int | None = None


class Watcher:
    """Every method says nothing here; a watcher overrides what it wants to look at, and is cheap: at most 1 % of a step
    for all watchers together."""

    def begins(self, run: Watched) -> Iterable[RunEvent]:
        """Training begins, for the first time or after a resume."""
        return ()

    def step_ends(self, step: StepFacts) -> Iterable[RunEvent]:
        """Called after every optimizer step."""
        return ()

    def adds(self, line: Mapping[str, object]) -> Mapping[str, object]:
        """Figures that it adds to a logged line, before the line is kept and `logs` gets it."""
        return {}

    def logs(self, line: Mapping[str, object]) -> Iterable[RunEvent]:
        """Called with each logged line: step, max_steps, step_s, and the trainer's metrics."""
        return ()

    def ends(self) -> Iterable[RunEvent]:
        """The last step is finished."""
        return ()
