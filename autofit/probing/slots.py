"""Slots: at most one probe per GPU, and by default one on the CPU, across all searches of a user on a machine.

A slot is a locked file, so a killed holder frees it at once. Its folder is the user's own: others cannot write there.
"""

import fcntl
import os
import platform
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from autofit.files import cache_folder

_OPENED = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def slot(names: tuple[str, ...], *, abandoned: Callable[[], bool] = lambda: False) -> Iterator[str | None]:
    """Hold the first free slot of `names`; yields its name, or None if `abandoned` became true while waiting."""
    folder = slots_folder()
    while not abandoned():
        for name in names:
            with os.fdopen(
                os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            ) as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                yield name
                return
        time.sleep(0.1)
    yield None


def slots_folder() -> Path:
    """The folder of this machine's slots, made: in the temporary folder, or in the cache where another user was there
    first with a folder or a link of that name."""
    usual = Path(tempfile.gettempdir()) / f"autofit-slots-{os.getuid()}"
    for folder in (usual, cache_folder() / f"slots-{platform.node()}"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        if _is_own(folder):
            return folder
    raise PermissionError(1, "belongs to another user, or others can write there", str(folder))


def _is_own(folder: Path) -> bool:
    """Whether `folder` is a folder itself, not a link, in which the user alone can write."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
