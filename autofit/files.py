"""Atomic writes of files."""

import contextlib
import errno
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from autofit.errors import ConfigError, EnvironmentFault

_LAST_BYTES = 4096  # of a log, which hold its last line


class TornFile(EnvironmentFault, ValueError):
    """A file of autofit's own is not as autofit writes it: torn by the disk, or changed by somebody."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} must hold a JSON object and does not: delete it and run the same command again")


def last_line(log: Path) -> str:
    """The last line of a log that is not blank; "" without one, or without a log that can be read."""
    try:
        said = log.read_bytes()[-_LAST_BYTES:].decode("utf-8", errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(said) if line.strip()), "")


def regular_bytes(path: Path, *, most: int | None = None, what: str = "a file") -> tuple[bytes, os.stat_result]:
    """(content, status) of a regular file of at most `most` bytes; opened without waiting, as a pipe would have it.

    Raises ConfigError for a folder, a pipe, a device or a larger file, of which nothing is read; OSError as `open`.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode):
        os.close(handle)
        raise ConfigError(f"must be {what}, and is {kind_of(found.st_mode)}")
    with os.fdopen(handle, "rb") as file:
        content = file.read() if most is None else file.read(most + 1)
    if most is not None and len(content) > most:
        raise ConfigError(f"must have at most {most // 1024} KiB")
    return content, found


def kind_of(mode: int) -> str:
    """What has this mode, in words."""
    kinds = ((stat.S_ISREG, "a file"), (stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"))
    return next((name for test, name in (*kinds, (stat.S_ISSOCK, "a socket")) if test(mode)), "a device")


def cache_folder() -> Path:
    """The folder for files that autofit can rebuild: AUTOFIT_CACHE, or ~/.cache/autofit."""
    return Path(os.environ.get("AUTOFIT_CACHE") or Path.home() / ".cache" / "autofit")


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
        raise EnvironmentFault(cannot_write(path, error)) from error


def _check_replaceable(path: Path) -> None:
    with contextlib.suppress(OSError):  # that is told where the file is written
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise EnvironmentFault(
                f"cannot write {path}: it must be a file, and is {kind_of(mode)}; move it away, or choose another "
                f"place (--dir, --out)"
            )


def is_full(folder: Path) -> bool:
    """Whether the file system of `folder` has less than 1 MB free, so that a failed write there means a full disk."""
    return shutil.disk_usage(folder).free < 10**6


def cannot_write(path: Path, error: OSError) -> str:
    """One line: the reason why `path` could not be written, and the change that helps."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space left to write {path}; free some space or choose another folder (--dir)"
    if error.errno == errno.EISDIR:
        return f"cannot write {path}: it must be a file, and is a folder; move that away"
    return f"cannot write {path}: {error.strerror or error}; choose another place (--dir, --out)"


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write `content` as JSON to `path`, atomically (`os.replace`)."""
    write_atomically(path, json.dumps(content, indent=1) + "\n")


def read_json(path: Path) -> dict[str, object] | None:
    """The JSON object in `path`, or None if the file does not exist. Raises TornFile for anything else there."""
    try:
        content = json.loads(regular_bytes(path)[0].decode("utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise TornFile(path) from error
    if not isinstance(content, dict):
        raise TornFile(path)
    return cast(dict[str, object], content)
