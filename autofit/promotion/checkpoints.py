"""The checkpoints of a full run: the newest that is whole, and what keeps one from being written.

Those that the recipe asks for (save_strategy, save_steps, save_total_limit) are in its output folder, as without
autofit. Those that autofit adds are in a folder of their own there, so neither counts towards the other's limit. Torn
ones are passed over, not deleted unless autofit's own: each has a manifest, the size and the checksum of every file.
"""

import errno
import json
import os
import shutil
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from autofit.errors import AutofitError
from autofit.plugin.protocol import own_checkpoints

MANIFEST = "autofit-manifest.json"
_CHUNK = 1 << 24


def prove(checkpoint: Path) -> None:
    """Bring every file of `checkpoint` to the disk, and put its manifest in place. Raises OSError.

    CRC-32 at 2.5 GB/s on a core of the development machine (2026-11-22): 6 s for a checkpoint of 14 GB.
    """
    temporary = checkpoint / f".{MANIFEST}"
    saved = sorted(p for p in checkpoint.rglob("*") if p.is_file() and p.name not in (MANIFEST, temporary.name))
    files = {str(path.relative_to(checkpoint)): _facts(path, sync=True) for path in saved}
    with temporary.open("w", encoding="utf-8") as file:
        json.dump({"files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, checkpoint / MANIFEST)
    for folder in (checkpoint, checkpoint.parent):
        _sync(folder)


def is_proven(checkpoint: Path) -> bool:
    """True if `checkpoint` has a readable manifest."""
    return _recorded(checkpoint) is not None


def first_difference(checkpoint: Path) -> str | None:
    """The first file of `checkpoint` that differs from its manifest, in words, if any does."""
    for name, (size, checksum) in (_recorded(checkpoint) or {}).items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name}: {path.stat().st_size:,} of {size:,} bytes"
        if _facts(path)[1] != checksum:
            return f"{name}: its content is not what was saved"
    return None


def _recorded(checkpoint: Path) -> dict[str, tuple[int, int]] | None:
    """{file: (bytes, checksum)} of the manifest; None for one that is missing or torn itself."""
    try:
        content = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        return {str(name): (int(size), int(checksum)) for name, (size, checksum) in content["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _facts(path: Path, *, sync: bool = False) -> tuple[int, int]:
    """The bytes and the checksum of a file; with `sync` it is on the disk afterwards."""
    checksum = size = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            checksum = zlib.crc32(chunk, checksum)
            size += len(chunk)
        if sync:
            os.fsync(file.fileno())
    return size, checksum


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def unreadable(checkpoint: Path, *, without: str = "") -> str | None:
    """The first torn file of `checkpoint`, in words, if any is. Leaves out the file `without`.

    Sees files that are empty, cut off or overwritten by zeros, as a kill or a full disk leaves them.
    """
    for path in sorted(p for p in checkpoint.rglob("*") if p.is_file() and p.name != without):
        check = _CHECKS.get(path.suffix)
        try:
            whole = check is None or check(path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile):
            whole = False
        if not whole:
            return f"{path.relative_to(checkpoint)} cannot be read to its end ({path.stat().st_size:,} bytes)"
    return None


def _is_archive(path: Path) -> bool:
    """True for an intact file of torch.save: a zip archive with the checksum of every record."""
    with zipfile.ZipFile(path) as archive:
        return archive.testzip() is None


def _is_safetensors(path: Path) -> bool:
    """A header of JSON that says where each tensor ends, and as many bytes as it says."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= path.stat().st_size - 8:
            return False
        header = json.loads(file.read(length))
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return path.stat().st_size == 8 + length + max(ends, default=0)


def _is_json(path: Path) -> bool:
    """JSON; of an index of weights, with every file that it names."""
    content = json.loads(path.read_text(encoding="utf-8"))
    parts = content.get("weight_map", {}) if isinstance(content, dict) else {}
    return all((path.parent / name).is_file() for name in parts.values())


_CHECKS: dict[str, Callable[[Path], bool]] = {
    ".pt": _is_archive, ".pth": _is_archive, ".bin": _is_archive, ".safetensors": _is_safetensors, ".json": _is_json,
}  # fmt: skip


_KEPT = 2  # of autofit's own: the newest, and one before it should the newest be torn


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedOver:
    """A checkpoint that the run skips when it resumes."""

    checkpoint: Path
    reason: str  # as a predicate: "is torn (...)"

    def __str__(self) -> str:
        return f"{self.checkpoint.name} {self.reason}"


def checkpoints(output: Path) -> list[Path]:
    """Every checkpoint of a run whose output folder is `output`, whole or torn, newest first."""
    found = [p for home in (output, own_checkpoints(output)) for p in home.glob("checkpoint-*")]
    return sorted((p for p in found if step_of(p) >= 0 and p.is_dir()), key=step_of, reverse=True)


def last_checkpoint(
    output: Path, is_whole: Callable[[Path], bool], *, steps_between: int = 1, without: Iterable[Path] = (),
    passes_over: Callable[[PassedOver], None] = lambda _: None,
) -> Path | None:  # fmt: skip
    """The newest whole checkpoint in `output`, if any. Newer torn ones are put aside, and reported.

    Leaves out the checkpoints `without`, and those that are not of a multiple of `steps_between` steps.
    """
    left_out = set(without)
    for folder in checkpoints(output):
        if folder in left_out or step_of(folder) % steps_between:
            continue
        reason = what_is_torn(folder, is_whole)
        if reason is None:
            return folder
        put_aside(folder)
        passes_over(PassedOver(checkpoint=folder, reason=f"is torn ({reason})"))
    return None


def what_is_torn(checkpoint: Path, is_whole: Callable[[Path], bool]) -> str | None:
    """Reason why training cannot continue from `checkpoint`, in words; None: it can.

    A checkpoint with a manifest is whole if every file is as saved; another one if every file can be read to its end.
    """
    reason = first_difference(checkpoint) if is_proven(checkpoint) else unreadable(checkpoint, without=MANIFEST)
    if reason is None and not is_whole(checkpoint):
        return "a file is missing, or is of another step"
    return reason


def put_aside(checkpoint: Path) -> None:
    """Delete a torn checkpoint of autofit's own; rename one that the recipe asked for to torn-checkpoint-N."""
    if _is_own(checkpoint):
        shutil.rmtree(checkpoint, ignore_errors=True)
        return
    aside = checkpoint.with_name(f"torn-{checkpoint.name}")
    shutil.rmtree(aside, ignore_errors=True)
    checkpoint.rename(aside)


def rotate(checkpoint: Path) -> None:
    """Delete older checkpoints of autofit's own once `checkpoint` is proven; those of the recipe are its own affair."""
    if _is_own(checkpoint):
        for older in sorted(checkpoint.parent.glob("checkpoint-*"), key=step_of)[:-_KEPT]:
            shutil.rmtree(older, ignore_errors=True)


def delete_own(output: Path) -> None:
    """Delete autofit's own checkpoints of a run that is done."""
    shutil.rmtree(own_checkpoints(output), ignore_errors=True)


def step_of(checkpoint: Path) -> int:
    """The optimizer steps that a checkpoint has finished; -1 for any other folder."""
    tail = checkpoint.name.rsplit("-", 1)[1]
    return int(tail) if tail.isdecimal() else -1


def _is_own(checkpoint: Path) -> bool:
    return checkpoint.parent.name == own_checkpoints(Path()).name


_PROBE = bytes(1 << 20)
_FULL = (errno.ENOSPC, errno.EDQUOT)


def unwritten(checkpoint: Path, error: Exception) -> str | None:
    """Cause that kept `checkpoint` from being written, as a sentence, if it is the disk's.

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
    """A text stream that drops text that a full disk refuses, where print would raise."""

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
    """Make prints of this process survive a full disk of its log."""
    sys.stdout, sys.stderr = Lenient(sys.stdout), Lenient(sys.stderr)


def _write_error(checkpoint: Path) -> OSError | None:
    """The error, if any, of writing a small file beside the existing part of `checkpoint`."""
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
