"""A full run on a full disk: what kept a checkpoint from being written, and streams that no full disk breaks."""

import errno
import shutil
import sys
from pathlib import Path
from typing import TextIO

from autofit.errors import AutofitError

_PROBE = bytes(1 << 20)
_FULL = (errno.ENOSPC, errno.EDQUOT)


def unwritten(checkpoint: Path, error: Exception) -> str | None:
    """What kept `checkpoint` from being written, as a sentence; None for an error that is not the disk's.

    torch and safetensors say a full disk in errors of their own, so one more write is tried.
    """
    disk = error if isinstance(error, OSError) else _write_error(checkpoint)
    if disk is None:
        return None
    home = _existing(checkpoint)
    needed = max((_bytes(p) for p in (*home.glob("checkpoint-*"), *home.parent.glob("checkpoint-*"))), default=0)
    reason = "no space left" if disk.errno in _FULL else str(disk.strerror or disk)
    like_others = f", the others have {_mb(needed)}" if needed else ""
    return (
        f"{checkpoint.name} could not be saved: {reason} ({_mb(shutil.disk_usage(home).free)} free{like_others}); "
        f"training goes on, and the next one is tried later"
    )


def reason_of(error: Exception, output: Path) -> str:
    """Why a run failed, in one line; of a full disk, what helps."""
    disk = error if isinstance(error, OSError) else _write_error(output / "checkpoint")
    if disk is not None and disk.errno in _FULL:
        return f"no space left in {output}; free some space and run the same command again"
    text = " ".join(str(error).split())[:500]
    return text if isinstance(error, AutofitError) else f"{type(error).__name__}: {text}"


class Lenient:
    """A text stream that loses what a full disk does not take, where print would raise."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            return

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def print_leniently() -> None:
    """Let no print of this process fail because the disk of its log is full."""
    sys.stdout, sys.stderr = Lenient(sys.stdout), Lenient(sys.stderr)


def _write_error(checkpoint: Path) -> OSError | None:
    """The error of writing a small file beside what there is of `checkpoint`; None if it can be written."""
    path = _existing(checkpoint) / ".autofit-write"
    try:
        path.write_bytes(_PROBE)
    except OSError as error:
        return error
    finally:
        path.unlink(missing_ok=True)
    return None


def _existing(checkpoint: Path) -> Path:
    """The folder in which `checkpoint` is, or would be."""
    return next(folder for folder in checkpoint.absolute().parents if folder.is_dir())


def _bytes(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def _mb(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
