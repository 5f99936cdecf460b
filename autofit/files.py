"""Files put in place atomically; folders that only this user may change; and temporary folders.

A temporary folder holds a locked file as long as its process, or a fork of it, lives; one whose lock is free has no
owner, and the next process that makes such a folder deletes it: a killed process leaves nothing behind for ever.
"""

import contextlib
import errno
import fcntl
import grp
import json
import os
import pwd
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import IO, cast

from autofit.errors import ConfigError, EnvironmentFault, option

_LAST_BYTES = 4096  # of a log, which hold its last line
_WARNING = re.compile(r"\S+:\d+: \w*Warning: ")  # of Python; the next line is its source, indented


class TornFile(EnvironmentFault, ValueError):
    """The content of a file of autofit's own is corrupt: torn by the disk, or changed by another program."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} must hold a JSON object and does not: delete it and run the same command again")


def end_bytes(path: Path, most: int, *, start: int = 0) -> bytes:
    """The last bytes of a file, at most `most` of them, and none before `start`. Raises OSError as `open`."""
    with path.open("rb") as file:
        file.seek(max(start, file.seek(0, os.SEEK_END) - most))
        return file.read()


def last_line(log: Path) -> str:
    """The last line of a log, leaving out blank ones and warnings; "" if there is none, or it is unreadable."""
    try:
        said = end_bytes(log, _LAST_BYTES).decode("utf-8", errors="replace").split("\n")
    except OSError:
        return ""
    told = [line.strip() for before, line in pairwise(["", *said])
            if not _WARNING.match(line) and not (line.startswith("  ") and _WARNING.match(before))]  # fmt: skip
    return next(filter(None, reversed(told)), "")


def regular_bytes(path: Path, *, most: int | None = None, what: str = "a file") -> tuple[bytes, os.stat_result]:
    """(content, status) of a regular file of at most `most` bytes; the open call returns at once, even for a pipe.

    Raises ConfigError for a folder, a pipe, a device or a larger file, all unread; OSError as `open`.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode):
        os.close(handle)
        raise ConfigError(f"must be {what}, and is {kind_of(found.st_mode)}")
    limit = float("inf") if most is None else most
    with os.fdopen(handle, "rb") as file:
        content = b"" if found.st_size > limit else file.read(-1 if most is None else most + 1) or b""  # it may wait
    if max(found.st_size, len(content)) > limit:
        raise ConfigError(f"must have at most {limit // 1024:.0f} KiB")
    return content, found


def kind_of(mode: int) -> str:
    """Kind of file with this mode, in words."""
    kinds = ((stat.S_ISREG, "a file"), (stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"))
    return next((name for test, name in (*kinds, (stat.S_ISSOCK, "a socket")) if test(mode)), "a device")


def cache_folder() -> Path:
    """The folder for files that autofit can rebuild: AUTOFIT_CACHE, or ~/.cache/autofit."""
    return Path(os.environ.get("AUTOFIT_CACHE") or Path.home() / ".cache" / "autofit")


def stamp(path: str | Path) -> tuple[int, int] | None:
    """Bytes of a file, and its time of change (ns): others once it is written. None if it is unreadable."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def write_atomically(path: Path, text: str) -> None:
    """Write `text` to `path` so that a reader sees the old file or the whole new one.

    Raises EnvironmentFault where it cannot, as where `path` is a folder; a device or a pipe is not replaced either.
    """
    _check_replaceable(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise cannot_write(path, error) from error


def _check_replaceable(path: Path) -> None:
    with contextlib.suppress(OSError):  # the write of the file reports it
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise EnvironmentFault(
                f"cannot write {path}: it must be a file, and is {kind_of(mode)}; move it away, or choose another "
                f"place ({option('dir')}, {option('out')})"
            )


def is_full(folder: Path) -> bool:
    """True if the file system of `folder` has less than 1 MB free, so that a failed write there means a full disk."""
    return shutil.disk_usage(folder).free < 10**6


def cannot_write(path: Path, error: OSError) -> EnvironmentFault:
    """The error of a failed write to `path`: the reason, and the change that helps."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        left = "no space left" if error.errno == errno.ENOSPC else "your disk quota leaves no space"  # df shows some
        return EnvironmentFault(f"{left} to write {path}; free some space or choose another folder ({option('dir')})")
    if error.errno == errno.EISDIR:
        return EnvironmentFault(f"cannot write {path}: it must be a file, and is a folder; move that away")
    return EnvironmentFault(
        f"cannot write {path}: {error.strerror or error}; choose another place ({option('dir')}, {option('out')})"
    )


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write `content` as JSON to `path`, atomically (`os.replace`)."""
    write_atomically(path, json.dumps(content, indent=1) + "\n")


def read_json(path: Path) -> dict[str, object] | None:
    """The JSON object in `path`, if the file exists. Raises TornFile for anything else there."""
    try:
        content = json.loads(regular_bytes(path)[0].decode("utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise TornFile(path) from error
    if not isinstance(content, dict):
        raise TornFile(path)
    return cast(dict[str, object], content)


def written_json(path: str | Path) -> dict[str, object]:
    """The JSON object in `path`, which another part of autofit has written before."""
    found = read_json(Path(path))
    assert found is not None, path
    return found


_ACL = "system.posix_acl_access"  # extended attribute of a file whose mode is not all


def other_writers(path: Path) -> str:
    """Others who may write to `path`, in words that follow its name; "" if only this user, and root, may.

    A group that has no other member counts as the user.
    """
    found = path.stat()
    if found.st_uid not in (os.geteuid(), 0):
        return f"belongs to {user_name(found.st_uid)}"
    if found.st_mode & stat.S_IWOTH:
        return f"can be written by everybody (mode {stat.S_IMODE(found.st_mode):o})"
    if found.st_mode & stat.S_IWGRP and not (_is_own_group(found.st_gid) and not _has_acl(path)):
        return f"can be written by the group {group_name(found.st_gid)} (mode {stat.S_IMODE(found.st_mode):o})"
    return ""


def make_own(folder: Path) -> None:
    """Make `folder`, and those above it, such that only this user can enter it; one that is there is left as it is."""
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)


def private_folder(folder: Path) -> Path:
    """`folder`, made if missing; only this user can enter it from now on. Another user's is left as it is."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid == os.geteuid() and mode & 0o077:
        folder.chmod(mode & ~0o077)
    return folder


def check_is_own(folder: Path, *, say: Callable[[str], None]) -> None:
    """Make `folder` for this user alone, or check that only this user may write to it: jobs run code that lies there.

    Raises ConfigError if others may. For root `say` names the owner instead: in a container that is often the user.
    """
    make_own(folder)
    who = other_writers(folder)
    if not who:
        return
    what = f"{folder} {who}, and the jobs of its studies load code from there"
    if os.geteuid() == 0 and folder.stat().st_uid != 0:
        say(f"{what}: that user can run code as root")
        return
    fix = "" if folder.stat().st_uid != os.geteuid() else f"run `chmod go-w {folder}`, or "
    raise ConfigError(
        f"{what}, so they could run code as you; {fix}choose another folder with {option('dir')} (a new one is yours "
        "alone)"
    )


def user_name(number: int) -> str:
    """The name of a user; a number if unnamed."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def group_name(number: int) -> str:
    """The name of a group; its number if unnamed."""
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


def _is_own_group(number: int) -> bool:
    """True if the group is this user's alone: of the same name, as most systems make one for each user."""
    try:
        group, user = grp.getgrgid(number), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return group.gr_name == user.pw_name and number == user.pw_gid and set(group.gr_mem) <= {user.pw_name}


def _has_acl(path: Path) -> bool:
    try:
        return bool(os.getxattr(path, _ACL))
    except OSError:
        return False


OWNER = ".owner"
_PREFIX = "autofit-"
_YOUNG_S = 60.0  # a folder without a lock may be one that is being made
_claimed: dict[Path, IO[str]] = {}  # folders that are this process' own, with their locks
_swept: set[str] = set()  # folders for temporary files in which this process has looked


class ScratchFolder:
    """A temporary folder `path`, deleted by `close` or at the end of the context."""

    def __init__(self, name: str = "") -> None:
        _sweep(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{name}"))
        self._lock = _locked(self.path)

    def close(self) -> None:
        """Delete the folder and its content."""
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
    _claimed[folder] = _locked(folder)
    for other in folder.parent.iterdir():
        if other.is_dir() and not other.is_symlink():
            _delete_ownerless(other)


def release(folder: Path) -> None:
    """Delete `folder`, claimed or unclaimed, and its content."""
    folder = folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    lock = _claimed.pop(folder, None)
    if lock is not None:
        lock.close()


def _locked(folder: Path) -> IO[str]:
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
    """The file for its lock; OSError if it is missing: the folder is not a scratch folder."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC), "r+")


# ------------------------------------------------------------------------------------------ logs that grow without end

MOST_LOG_BYTES = 2**26  # a probe of TRL's trainers writes some KB
_KEPT_BYTES = 2**20
_END_BYTES = 10_000  # read of a log's end
_LEFT_OUT = b"\n... left out by autofit, as the log was longer than 64 MiB ...\n"


def keep_small(logs: Iterable[str | os.PathLike[str]]) -> None:
    """Cut each log of more than 64 MiB down to its first MiB; who writes must append (O_APPEND)."""
    for log in logs:
        try:
            if os.stat(log).st_size > MOST_LOG_BYTES:
                with open(log, "r+b") as file:
                    file.seek(_KEPT_BYTES)
                    file.write(_LEFT_OUT)
                    file.truncate()
        except OSError:  # not there yet, or on a disk that fails
            continue


def end_of(log: Path) -> str:
    """The last lines of a log; empty if it is missing."""
    try:
        return end_bytes(log, _END_BYTES).decode(errors="replace")
    except FileNotFoundError:
        return ""
