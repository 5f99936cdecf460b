"""Whether the files of a checkpoint can be read to their end, found without loading them."""

import json
import zipfile
from collections.abc import Callable
from pathlib import Path


def unreadable(checkpoint: Path, *, without: str = "") -> str | None:
    """The first file of `checkpoint` that is torn, as words; None: none is. Leaves out the file `without`.

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
    """What torch.save writes: a zip archive with the checksum of every record."""
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
