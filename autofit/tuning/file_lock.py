"""Locks of files: one process at a time, of all that see the folder. Where they do not hold, it is said."""

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from autofit.errors import ConfigError, EnvironmentFault
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
        raise EnvironmentFault(cannot_write(path, error)) from error
    with file:
        deadline = time.monotonic() + wait_s
        while not _locked(file):
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"another autofit process is working on {name}; wait until it ends, or choose another study "
                    f"with --study"
                )
            time.sleep(0.1)
        with _opened(path) as second:  # another opening of the file, as another process has
            if _locked(second):
                raise _no_locks(folder, "it gives one lock to two at once")
        yield


def _opened(path: Path) -> TextIO:
    """The file for its lock; a pipe in its place is not waited for."""
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
        f"one study; choose a folder on a local disk with --dir"
    )


def file_system(folder: Path) -> str:
    """The type of the file system of `folder`, such as ext4 or nfs4; "unknown" where the kernel does not say."""
    place, best = folder.resolve(), ("", "unknown")
    with contextlib.suppress(OSError):
        for line in _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines():
            _, point, kind = line.split(" ", 3)[:3]
            point = point.replace("\\040", " ")
            if len(point) >= len(best[0]) and place.is_relative_to(point):  # of two on one point the last one counts
                best = point, kind
    return best[1]


def is_of_a_network(kind: str) -> bool:
    """Whether a file system of this type may be on another machine, where SQLite is neither safe nor fast."""
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
