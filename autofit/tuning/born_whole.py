"""SQLite databases that are born whole: made in a file beside the path, and put in place by one rename.

The caller holds a lock meanwhile, so that two processes never make the same database.
"""

import contextlib
import os
import shutil
import sqlite3
import stat
from collections.abc import Callable
from pathlib import Path

_SIDE_FILES = ("-journal", "-wal", "-shm")  # SQLite's own, beside the database


def is_there(path: Path) -> bool:
    """Whether `path` holds something; SQLite makes an empty file when it merely connects."""
    return path.exists() and path.stat().st_size > 0


def put_in_place(path: Path, make: Callable[[Path], None], *, update: bool = False) -> None:
    """Let `make` build the database in another file, and rename that to `path`; `update` starts from a copy of `path`.

    Only this user may read a new one. A kill leaves `path` as it was. `make` must have closed the file when it returns.
    """
    new = path.with_name(f".{path.name}.new")
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove(new)  # of a process that was killed
    try:
        if update:
            _copy(path, new)
        make(new)
        new.chmod(stat.S_IMODE(path.stat().st_mode) if update else 0o600)
        for suffix in _SIDE_FILES:  # SQLite would apply an old journal to the new database
            _with_suffix(path, suffix).unlink(missing_ok=True)
        os.replace(new, path)
    except BaseException:
        _remove(new)
        raise


def set_aside(path: Path) -> Path:
    """Move the database away, with SQLite's own files. Returns its new path: `NAME.broken-1`, or the next free one."""
    number = 1
    while (aside := path.with_name(f"{path.name}.broken-{number}")).exists():
        number += 1
    for suffix in _SIDE_FILES:
        with contextlib.suppress(FileNotFoundError):
            shutil.move(_with_suffix(path, suffix), _with_suffix(aside, suffix))
    shutil.move(path, aside)
    return aside


def _copy(source: Path, target: Path) -> None:
    """Copy as SQLite reads it: after an interrupted transaction is rolled back."""
    with contextlib.closing(sqlite3.connect(source)) as old, contextlib.closing(sqlite3.connect(target)) as new:
        old.backup(new)


def _remove(path: Path) -> None:
    for suffix in ("", *_SIDE_FILES):
        _with_suffix(path, suffix).unlink(missing_ok=True)


def _with_suffix(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)
