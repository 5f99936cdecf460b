"""The logged steps of a full run: one line of JSON each in progress.jsonl."""

import json
from collections.abc import Mapping
from pathlib import Path

from autofit.watching.events import read_lines, write_lines

_FILE = "progress.jsonl"


def read_progress(folder: Path) -> list[dict[str, object]]:
    """The logged steps so far, one dict each. An incomplete last line is skipped: it is still being written."""
    return read_lines(folder / _FILE)


def keep_progress(folder: Path, line: Mapping[str, object]) -> None:
    """Append the line of one step."""
    with (folder / _FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def forget_progress_after(folder: Path, step: int) -> None:
    """Drop the lines after the checkpoint's step: those steps are repeated, with the same result."""
    write_lines(
        folder / _FILE, [line for line in read_progress(folder) if int(str(line.get("step", step + 1))) <= step]
    )
