"""Files of JSON lines that a run appends to. A full disk does not end the run: the lines wait, in order."""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

_WAITING: dict[Path, list[str]] = {}  # lines of this process that no disk has taken yet


def append_line(path: Path, row: Mapping[str, object]) -> None:
    """Append `row` to `path`, after the rows that could not be written before; keeps it in memory if it cannot be."""
    waiting = _WAITING.setdefault(path, [])
    waiting.append(json.dumps(row))
    try:
        _append(path, "".join(line + "\n" for line in waiting))
    except OSError as error:
        if len(waiting) == 1:
            print(f"{path.name} cannot be written ({error.strerror}); its lines wait in memory", file=sys.stderr)
    else:
        waiting.clear()


def sync_lines(path: Path) -> None:
    """Bring the lines of `path` to the disk, so that a machine that goes down keeps them. Raises OSError."""
    if path.exists():
        with path.open("ab") as file:
            os.fsync(file.fileno())


def _append(path: Path, text: str) -> None:
    """All of `text` or nothing: what a full disk took of it is cut off again."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        before = os.fstat(handle).st_size
        try:
            content = memoryview(text.encode())
            while content:
                content = content[os.write(handle, content) :]
        except OSError:
            os.ftruncate(handle, before)
            raise
    finally:
        os.close(handle)
