"""SQLite databases that are born whole, in a file that one rename puts in place; and the holder of a lock on one.

The caller holds a lock meanwhile, so that two processes never make the same database.
"""

import contextlib
import logging
import os
import shutil
import sqlite3
import stat
import time
from collections.abc import Callable
from pathlib import Path

import psutil

_QUIET_S = 2.0  # a wait as long as another process's usual commit needs no word
_LOCKS = Path("/proc/locks")


def wait_until_free(path: Path, *, most_s: float) -> None:
    """Wait, up to `most_s`, until `path` can be written; says after 2 s who holds it."""
    deadline, said = time.monotonic() + most_s, False
    while not _is_free(path) and time.monotonic() < deadline:
        if not said:
            logging.getLogger("autofit").warning("waiting for %s, which %s has locked", path, holder_of(path))
            said = True


def _is_free(path: Path) -> bool:
    """Whether a transaction that writes can begin within 2 s; True where SQLite says anything else."""
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=_QUIET_S, isolation_level=None)) as database:
            database.execute("BEGIN IMMEDIATE")
            database.execute("ROLLBACK")
    except sqlite3.DatabaseError as error:
        return getattr(error, "sqlite_errorcode", 0) & 0xFF not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
    return True


def holder_of(path: Path) -> str:
    """The processes that hold locks on `path`, by name and pid; "another process" where the kernel does not say."""
    found = []
    with contextlib.suppress(OSError):
        inode = f":{path.stat().st_ino}"
        for line in _LOCKS.read_text(encoding="ascii").splitlines():
            fields = line.split()
            if len(fields) > 5 and fields[1] == "POSIX" and fields[5].endswith(inode) and int(fields[4]) > 0:
                found.append(int(fields[4]))
    named = [f"{_name(pid)} (pid {pid})" for pid in dict.fromkeys(found)]
    return " and ".join(named) or "another process"


def _name(pid: int) -> str:
    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return "a process"


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
