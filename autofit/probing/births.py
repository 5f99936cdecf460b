"""Which process a pid was, whatever the clock does: the boot of the machine and the process' ticks since then. Linux.

A start as time of day moves with every step of the clock, and a living probe would seem to be another process.
"""

from collections.abc import Mapping
from pathlib import Path

import psutil

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_STATE, _START = 0, 19  # of the fields after the name in /proc/PID/stat: proc(5) counts them from 3


def birth(pid: int) -> str | None:
    """The birth of the living process `pid`, equal for no other one; None if there is none, or only a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return None if fields[_STATE] in "ZX" else f"{_BOOT.read_text().strip()} {fields[_START]}"
    except OSError:
        return None


def note_of(pid: int) -> dict[str, object]:
    """What `lives` needs of the process `pid`, which may have ended; the time is for earlier versions of autofit."""
    return {"pid": pid, "birth": birth(pid), "create_time": _create_time(pid)}


def lives(note: Mapping[str, object]) -> bool:
    """Whether the process of `note` is alive. One of an earlier version has submitit's `job_id`, and no birth."""
    text = str(note.get("pid", note.get("job_id")))
    if not text.isdecimal() or len(text) > 9:
        return False
    pid, created = int(text), note.get("create_time")
    now = birth(pid)
    if now is None or "birth" in note:
        return now is not None and now == note.get("birth")
    found = _create_time(pid)
    return found is not None and isinstance(created, int | float) and abs(found - created) < 1


def _create_time(pid: int) -> float | None:
    try:
        return psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        return None
