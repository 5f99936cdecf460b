"""Locks of files, one process at a time of all that see the folder; who holds a SQLite database, and one born whole.

It warns where locks do not hold. A database is made in a file beside its path, which one rename puts in place; the
caller holds a lock meanwhile, so that two processes never make the same one."""

import contextlib
import fcntl
import logging
import os
import shutil
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import psutil

from autofit.errors import ConfigError, EnvironmentFault, option
from autofit.files import cannot_write, private_folder

_MOUNTS = Path("/proc/self/mounts")
_OF_A_NETWORK = (
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "9p", "afs", "glusterfs", "panfs",
    "wekafs", "orangefs", "pvfs2", "ocfs2", "gfs2",
)  # fmt: skip
_LOCAL_FUSE = ("fuse.fuse-overlayfs", "fuse.lxcfs", "fuse.gocryptfs", "fuse.encfs", "fuse.mergerfs")
_warned: set[Path] = set()


@contextlib.contextmanager
def exclusive(folder: Path, name: str, *, wait_s: float = 0.0) -> Iterator[None]:
    """Hold the lock `name`, waiting up to `wait_s`: one process drives a study. The lock ends with the process.

    Raises ConfigError if another process holds it for all of that time, and EnvironmentFault if it holds off no other.
    """
    path = folder / f"{name}.lock"
    try:
        private_folder(folder)  # under umask 002 a group that is shown the studies could take or replace locks
        file = _opened(path)
    except OSError as error:
        raise cannot_write(path, error) from error
    with file:
        deadline = time.monotonic() + wait_s
        while not _locked(file):
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"another autofit process is working on {name}; wait until it ends, or choose another study "
                    f"with {option('study')}"
                )
            time.sleep(0.1)
        with _opened(path) as second:  # another opening of the file, as another process has
            if _locked(second):
                raise _no_locks(folder, "it gives one lock to two at once")
        yield


def _opened(path: Path) -> TextIO:
    """The file for its lock; opened at once even if it is a pipe."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
    return open(path, "w", encoding="utf-8", opener=lambda name, _: os.open(name, flags, 0o666))


def _locked(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # Lustre mounted without -o flock, NFS without its lock server
        raise _no_locks(Path(file.name).parent, str(error.strerror)) from error
    return True


def _no_locks(folder: Path, why: str) -> EnvironmentFault:
    return EnvironmentFault(
        f"the file system of {folder} ({file_system(folder)}) must lock files, but {why}: two searches could drive "
        f"one study; choose a folder on a local disk with {option('dir')}"
    )


def file_system(folder: Path) -> str:
    """The type of the file system of `folder`, such as ext4 or nfs4; "unknown" if the kernel hides it."""
    place, best = folder.resolve(), ("", "unknown")
    with contextlib.suppress(OSError):
        for line in _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines():
            _, point, kind = line.split(" ", 3)[:3]
            point = point.replace("\\040", " ")
            if len(point) >= len(best[0]) and place.is_relative_to(point):  # of two on one point the last one counts
                best = point, kind
    return best[1]


def is_of_a_network(kind: str) -> bool:
    """True if a file system of this type may be on another machine, where SQLite is unsafe and slow."""
    return kind in _OF_A_NETWORK or (kind.startswith("fuse.") and kind not in _LOCAL_FUSE)


def warn_of_a_network(path: Path) -> None:
    """Say once that the SQLite file `path` is on a file system of a network."""
    kind = file_system(path.parent)
    if is_of_a_network(kind) and path not in _warned:
        _warned.add(path)
        logging.getLogger("autofit").warning(
            "%s is a SQLite file on a file system of a network (%s), where it may break if two machines write to it: "
            "share studies with --storage postgresql://..., or choose a folder on a local disk with --dir", path, kind,
        )  # fmt: skip


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
    """True if a transaction that writes can begin within 2 s, or if SQLite reports any other error."""
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=_QUIET_S, isolation_level=None)) as database:
            database.execute("BEGIN IMMEDIATE")
            database.execute("ROLLBACK")
    except sqlite3.DatabaseError as error:
        return getattr(error, "sqlite_errorcode", 0) & 0xFF not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
    return True


def holder_of(path: Path) -> str:
    """The processes that hold locks on `path`, by name and pid; "another process" if the kernel hides them."""
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
    """True if `path` has content; SQLite makes an empty file when it merely connects."""
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
