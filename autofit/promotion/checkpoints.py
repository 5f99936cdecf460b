"""The checkpoints of a full run: the newest that is whole. Torn ones are passed over, not deleted unless autofit's own.

Those that the recipe asks for (save_strategy, save_steps, save_total_limit) are in its output folder, as without
autofit. Those that autofit adds are in a folder of their own there, so neither counts towards the other's limit.
"""

import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from autofit.plugin.protocol import own_checkpoints
from autofit.plugin.readable_files import unreadable
from autofit.promotion.manifest import MANIFEST, first_difference, is_proven

_KEPT = 2  # of autofit's own: the newest, and one before it should the newest be torn


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedOver:
    """A checkpoint from which the run does not go on."""

    checkpoint: Path
    reason: str  # as a predicate: "is torn (...)"

    def __str__(self) -> str:
        return f"{self.checkpoint.name} {self.reason}"


def checkpoints(output: Path) -> list[Path]:
    """Every checkpoint of a run whose output folder is `output`, whole or not, newest first."""
    found = [p for home in (output, own_checkpoints(output)) for p in home.glob("checkpoint-*")]
    return sorted((p for p in found if step_of(p) >= 0 and p.is_dir()), key=step_of, reverse=True)


def last_checkpoint(
    output: Path, is_whole: Callable[[Path], bool], *, steps_between: int = 1, without: Iterable[Path] = (),
    passes_over: Callable[[PassedOver], None] = lambda _: None,
) -> Path | None:  # fmt: skip
    """The newest whole checkpoint in `output`, or None. Torn ones that are newer are put aside, and told.

    Leaves out the checkpoints `without`, and those that are not of a multiple of `steps_between` steps.
    """
    left_out = set(without)
    for folder in checkpoints(output):
        if folder in left_out or step_of(folder) % steps_between:
            continue
        reason = what_is_torn(folder, is_whole)
        if reason is None:
            return folder
        put_aside(folder)
        passes_over(PassedOver(checkpoint=folder, reason=f"is torn ({reason})"))
    return None


def what_is_torn(checkpoint: Path, is_whole: Callable[[Path], bool]) -> str | None:
    """Why training cannot continue from `checkpoint`, as words; None: it can.

    A checkpoint with a manifest is whole if every file is as saved; another one if every file can be read to its end.
    """
    reason = first_difference(checkpoint) if is_proven(checkpoint) else unreadable(checkpoint, without=MANIFEST)
    if reason is None and not is_whole(checkpoint):
        return "a file is missing, or is of another step"
    return reason


def put_aside(checkpoint: Path) -> None:
    """Delete a torn checkpoint of autofit's own; rename one that the recipe asked for to torn-checkpoint-N."""
    if _is_own(checkpoint):
        shutil.rmtree(checkpoint, ignore_errors=True)
        return
    aside = checkpoint.with_name(f"torn-{checkpoint.name}")
    shutil.rmtree(aside, ignore_errors=True)
    checkpoint.rename(aside)


def rotate(checkpoint: Path) -> None:
    """Delete older checkpoints of autofit's own once `checkpoint` is proven; those of the recipe are its own affair."""
    if _is_own(checkpoint):
        for older in sorted(checkpoint.parent.glob("checkpoint-*"), key=step_of)[:-_KEPT]:
            shutil.rmtree(older, ignore_errors=True)


def delete_own(output: Path) -> None:
    """Delete autofit's own checkpoints of a run that is done."""
    shutil.rmtree(own_checkpoints(output), ignore_errors=True)


def step_of(checkpoint: Path) -> int:
    """The optimizer steps that a checkpoint has finished; -1 for a folder that is none."""
    tail = checkpoint.name.rsplit("-", 1)[1]
    return int(tail) if tail.isdecimal() else -1


def _is_own(checkpoint: Path) -> bool:
    return checkpoint.parent.name == own_checkpoints(Path()).name
