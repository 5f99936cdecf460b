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


class TornFile(EnvironmentFault, ValueError):
    """A file of autofit's own is not as autofit writes it: torn by the disk, or changed by somebody."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} must hold a JSON object and does not: delete it and run the same command again")


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
    """The JSON object in `path`, or None if the file does not exist. Raises TornFile for anything else in it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise TornFile(path) from error
    if not isinstance(content, dict):
        raise TornFile(path)
    return cast(dict[str, object], content)
