"""Who holds a SQLite database, and a wait for it that is not silent."""

import contextlib
import logging
import sqlite3
import time
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
