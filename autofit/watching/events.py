"""The events and the logged steps of a full run: files of JSON lines, read by the terminal, MLflow and reports.

A full disk does not end the run: the lines wait in memory, in order.
"""

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import cast

from autofit.files import end_bytes, write_atomically

_WAITING: dict[Path, list[str]] = {}  # lines of this process that no disk has taken yet


def append_line(path: Path, row: Mapping[str, object]) -> None:
    """Append `row` to `path`, after the rows that failed to be written before; keeps it in memory if this fails."""
    waiting = _WAITING.setdefault(path, [])
    waiting.append(json.dumps(row))
    try:
        _append_text(path, "".join(line + "\n" for line in waiting))
    except OSError as error:
        if len(waiting) == 1:
            print(f"{path.name} cannot be written ({error.strerror}); its lines wait in memory", file=sys.stderr)
    else:
        waiting.clear()


def _append_text(path: Path, text: str) -> None:
    """Append `text` atomically: a part written before the disk was full is cut off again."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        before = os.fstat(handle).st_size
        try:
            content = memoryview(text.encode())
            while content:
                content = content[os.write(handle, content) :]
        except OSError:
            os.ftruncate(handle, before)
            raise
    finally:
        os.close(handle)


EVENTS = "events.jsonl"
PROGRESS = "progress.jsonl"  # the logged steps of a run, one line of JSON each (autofit.watching.events)


class EventKind(StrEnum):
    """Subject of an event."""

    START = "start"  # what the run does, before its first step
    PROMISE = "promise"  # the promise of the search, and whether the run keeps it
    MEMORY = "memory"  # memory drifts towards the limit
    GUARD = "guard"  # a metric left its band
    RESCUE = "rescue"  # the run went on with another setting after an OOM
    RESUME = "resume"  # the run went on from a checkpoint
    CHECKPOINT = "checkpoint"  # a checkpoint was saved on the spot, or passed over because it is torn
    RANK = "rank"  # a rank was killed, and all were ended
    FAULT = "fault"  # a watcher failed, and watches no more
    VERDICT = "verdict"  # the promise against the whole run


# Events of the run's own life; the others come again with the steps that a resumed run repeats.
_LASTING = (EventKind.RESCUE, EventKind.RESUME, EventKind.CHECKPOINT, EventKind.RANK)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """Something that a person should know of a run. `stop` asks the run to save a checkpoint and to end."""

    step: int  # finished optimizer steps when it happened
    kind: EventKind
    text: str  # one sentence
    stop: bool = False
    data: Mapping[str, object] = field(default_factory=dict)  # its figures, as JSON
    time: float = field(default_factory=time.time)

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, object]) -> "RunEvent":
        return cls(**{**content, "kind": EventKind(str(content["kind"]))})  # type: ignore[arg-type]


def keep_event(folder: Path, event: RunEvent) -> None:
    """Append `event` to the events of the run in `folder`."""
    append_line(folder / EVENTS, event.to_json())


def events_of(folder: Path) -> list[RunEvent]:
    """The events of the run in `folder`, oldest first."""
    return [RunEvent.from_json(line) for line in read_lines(folder / EVENTS)]


def stop_asked(folder: Path) -> RunEvent | None:
    """The event that asked the run in `folder` to stop since it was last started or resumed, if any did."""
    asked = None
    for event in events_of(folder):
        asked = None if event.kind is EventKind.START else event if event.stop else asked
    return asked


def forget_events_after(folder: Path, step: int) -> None:
    """Drop what the steps after `step` said, as they are repeated; rescues and resumes stay."""
    kept = [e for e in events_of(folder) if e.step <= step or e.kind in _LASTING]
    write_lines(folder / EVENTS, [e.to_json() for e in kept])


def read_lines(path: Path, *, most_bytes: int | None = None) -> list[dict[str, object]]:
    """The JSON objects of a file, or at its end, one a line; other lines (torn by a kill) are skipped."""
    if not path.exists():
        return []
    written = path.read_bytes() if most_bytes is None else end_bytes(path, most_bytes)
    text = written.decode("utf-8", errors="replace")
    found = []
    for line in text[: text.rfind("\n") + 1].splitlines():
        try:
            content = json.loads(line)
        except ValueError:
            continue
        if isinstance(content, dict):
            found.append(cast("dict[str, object]", content))
    return found


def write_lines(path: Path, rows: list[dict[str, object]]) -> None:
    """Put a file of JSON lines in place, whole."""
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))


def read_progress(folder: Path) -> list[dict[str, object]]:
    """The logged steps so far, one dict each. A line that lacks a step is skipped: torn, or still being written."""
    return [line for line in read_lines(folder / PROGRESS) if type(line.get("step")) is int]


def keep_progress(folder: Path, line: Mapping[str, object]) -> None:
    """Append the line of one step. On a full disk it waits in memory."""
    append_line(folder / PROGRESS, line)


def sync_progress(folder: Path) -> None:
    """Bring the logged steps to the disk, as a checkpoint that is proven stands for them. Raises OSError."""
    if (folder / PROGRESS).exists():
        with (folder / PROGRESS).open("ab") as file:
            os.fsync(file.fileno())


def forget_progress_after(folder: Path, step: int) -> None:
    """Drop the lines after the checkpoint's step: those steps are repeated, with the same result."""
    keep_only(folder, [line for line in read_progress(folder) if int(str(line["step"])) <= step])


def keep_only(folder: Path, lines: list[dict[str, object]]) -> None:
    """Put `lines` in place of the logged steps."""
    write_lines(folder / PROGRESS, lines)
