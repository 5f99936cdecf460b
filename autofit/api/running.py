"""The promoted runs of a folder, read again and again: each only when its files have changed."""

import json
import os
import time
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path

from autofit.api.promoted import PromotedRun, promoted_run
from autofit.probing.launch import is_alive
from autofit.promotion.run_folder import RunFolder
from autofit.watching.events import EVENTS, PROGRESS
from autofit.watching.progress import Progress, progress_of

_ENDED_SHOWN = 3  # of the runs that ended, the last
_REST = 10.0  # a long run is read anew after so many times the time that reading it took
_TAIL_BYTES = 2**16  # of the logged steps, about a hundred lines


@dataclass(slots=True)
class _Read:
    stamp: Hashable
    run: PromotedRun | None
    at_s: float
    took_s: float
    lines: list[dict[str, object]] = field(default_factory=list)


class Runs:
    """`now` gives the running ones and the last that ended."""

    def __init__(self, folder: Path) -> None:
        self._home = folder / "promoted"
        self._read: dict[Path, _Read] = {}

    def now(self) -> list[PromotedRun]:
        """The running ones first, then the last that ended, newest first."""
        folders = sorted(path.parent for path in self._home.glob("*/request.json"))
        found = [run for folder in folders if (run := self._run(folder)) is not None]
        ended = sorted((r for r in found if r.state != "running"), key=lambda r: -_changed_s(r.folder))
        return [r for r in found if r.state == "running"] + ended[:_ENDED_SHOWN]

    def progress(self, run: PromotedRun) -> Progress | None:
        """How far the run is; None before its first logged step."""
        return progress_of(self._read[run.folder].lines)

    def last_line(self, run: PromotedRun) -> dict[str, object]:
        """The figures of the last logged step; {} before the first."""
        lines = self._read[run.folder].lines
        return lines[-1] if lines else {}

    def _run(self, folder: Path) -> PromotedRun | None:
        known, state = self._read.get(folder), _state_stamp(folder)
        stamp = (state, _size(folder / PROGRESS), _size(folder / EVENTS))
        now = time.monotonic()
        if known is not None and isinstance(known.stamp, tuple):
            resting = now - known.at_s < _REST * known.took_s and known.stamp[0] == state
            if known.stamp == stamp or resting:
                known.lines = _last_lines(folder / PROGRESS) if known.stamp != stamp else known.lines
                return known.run
        run = _readable(folder)
        self._read[folder] = _Read(
            stamp, run, time.monotonic(), time.monotonic() - now, _last_lines(folder / PROGRESS) if run else []
        )
        return run


def _readable(folder: Path) -> PromotedRun | None:
    """The run in `folder`; None for files that are not a run's."""
    try:
        return promoted_run(folder)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _last_lines(path: Path) -> list[dict[str, object]]:
    """The logged steps at the end of a file; a line that is cut off is left out."""
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES)
            file.seek(start)
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    lines = text[: text.rfind("\n") + 1].splitlines()
    return [line for line in map(_object, lines[1:] if start else lines) if line is not None]


def _object(line: str) -> dict[str, object] | None:
    try:
        content = json.loads(line)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def _state_stamp(folder: Path) -> Hashable:
    return RunFolder(folder).state(lambda: _alive(folder))


def _alive(folder: Path) -> bool:
    try:
        return is_alive(folder)
    except (OSError, ValueError, KeyError):
        return False


def _size(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def _changed_s(folder: Path) -> float:
    """When the run last logged, in seconds since 1970."""
    sizes = [_size(folder / name) for name in (PROGRESS, "request.json")]
    return max((size[1] for size in sizes if size is not None), default=0) / 1e9
