"""Atomic writes of files."""

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from autofit.errors import EnvironmentFault


def cache_folder() -> Path:
    """The folder for files that autofit can rebuild: AUTOFIT_CACHE, or ~/.cache/autofit."""
    return Path(os.environ.get("AUTOFIT_CACHE") or Path.home() / ".cache" / "autofit")


def write_atomically(path: Path, text: str) -> None:
    """Write `text` to `path` so that a reader sees the old file or the whole new one."""
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


def is_full(folder: Path) -> bool:
    """Whether the file system of `folder` has less than 1 MB free, so that a failed write there means a full disk."""
    return shutil.disk_usage(folder).free < 10**6


def cannot_write(path: Path, error: OSError) -> str:
    """One line: the reason why `path` could not be written, and the change that helps."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space left to write {path}; free some space or choose another folder (--dir)"
    return f"cannot write {path}: {error.strerror or error}; choose another place (--dir, --out)"


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write `content` as JSON to `path`, atomically (`os.replace`)."""
    write_atomically(path, json.dumps(content, indent=1) + "\n")


def read_json(path: Path) -> dict[str, object] | None:
    """The JSON object in `path`, or None if the file does not exist."""
    try:
        return cast(dict[str, object], json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
