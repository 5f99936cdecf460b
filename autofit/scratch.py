"""Temporary folders that a killed process does not leave behind for ever: the next one that makes such a folder does.

Each holds a locked file as long as its process, or a fork of it, lives; a folder whose lock is free has no owner.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import IO

OWNER = ".owner"
_PREFIX = "autofit-"
_YOUNG_S = 60.0  # a folder without a lock may be one that is being made
_claimed: dict[Path, IO[str]] = {}  # folders that are this process' own, with their locks
_swept: set[str] = set()  # folders for temporary files in which this process has looked


class Scratch:
    """A temporary folder `path`, deleted by `close` or at the end of the context."""

    def __init__(self, name: str = "") -> None:
        _sweep(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{name}"))
        self._lock = _owned(self.path)

    def close(self) -> None:
        """Delete the folder and what is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()


def claim(folder: Path) -> None:
    """Make `folder`, which is this process' own until `release`; those beside it whose owners are gone are deleted."""
    folder = folder.resolve()
    if folder in _claimed:  # by an earlier call of this thread that ended with an error
        release(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _claimed[folder] = _owned(folder)
    for other in folder.parent.iterdir():
        if other.is_dir() and not other.is_symlink():
            _delete_ownerless(other)


def release(folder: Path) -> None:
    """Delete `folder`, claimed or not, and what is in it."""
    folder = folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    lock = _claimed.pop(folder, None)
    if lock is not None:
        lock.close()


def _owned(folder: Path) -> IO[str]:
    """The lock of `folder`, held by this process."""
    lock = (folder / OWNER).open("w")
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return lock


def _sweep(home: Path) -> None:
    """Delete the scratch folders in `home` whose owners are gone; once in a process."""
    if str(home) in _swept:
        return
    _swept.add(str(home))
    with contextlib.suppress(OSError):
        for folder in [entry for entry in os.scandir(home) if entry.name.startswith(_PREFIX)]:
            if folder.is_dir(follow_symlinks=False) and folder.stat(follow_symlinks=False).st_uid == os.getuid():
                _delete_ownerless(Path(folder.path))


def _delete_ownerless(folder: Path) -> None:
    with contextlib.suppress(OSError):
        if abs(time.time() - folder.stat().st_mtime) < _YOUNG_S:  # the clock may have been set back
            return
        with _opened(folder / OWNER) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: its owner lives
            shutil.rmtree(folder, ignore_errors=True)


def _opened(path: Path) -> IO[str]:
    """The file for its lock; OSError where there is none: the folder is no scratch folder."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC), "r+")
