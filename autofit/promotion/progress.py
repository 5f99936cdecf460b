"""The logged steps of a full run: one line of JSON each in progress.jsonl."""

from collections.abc import Mapping
from pathlib import Path

from autofit.watching.events import PROGRESS, read_lines, write_lines
from autofit.watching.journal import append_line, sync_lines


def read_progress(folder: Path) -> list[dict[str, object]]:
    """The logged steps so far, one dict each. A line without a step is skipped: torn, or still being written."""
    return [line for line in read_lines(folder / PROGRESS) if type(line.get("step")) is int]


def keep_progress(folder: Path, line: Mapping[str, object]) -> None:
    """Append the line of one step. On a full disk it waits in memory."""
    append_line(folder / PROGRESS, line)


def sync_progress(folder: Path) -> None:
    """Bring the logged steps to the disk, as a checkpoint that is proven stands for them. Raises OSError."""
    sync_lines(folder / PROGRESS)


def forget_progress_after(folder: Path, step: int) -> None:
    """Drop the lines after the checkpoint's step: those steps are repeated, with the same result."""
    keep_only(folder, [line for line in read_progress(folder) if int(str(line["step"])) <= step])


def keep_only(folder: Path, lines: list[dict[str, object]]) -> None:
    """Put `lines` in place of the logged steps."""
    write_lines(folder / PROGRESS, lines)
