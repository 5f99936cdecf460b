"""The checkpoints of a full run: the newest that is whole."""

import shutil
from collections.abc import Callable
from pathlib import Path


def last_checkpoint(output: Path, is_whole: Callable[[Path], bool]) -> Path | None:
    """The newest complete checkpoint in `output`, or None. Deletes incomplete ones (killed while saving)."""
    for folder in sorted(output.glob("checkpoint-*"), key=step_of, reverse=True):
        if is_whole(folder):
            return folder
        shutil.rmtree(folder, ignore_errors=True)
    return None


def step_of(checkpoint: Path) -> int:
    """The optimizer steps that a checkpoint has finished; -1 for a folder that is none."""
    tail = checkpoint.name.rsplit("-", 1)[1]
    return int(tail) if tail.isdigit() else -1
