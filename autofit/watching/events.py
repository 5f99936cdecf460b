"""The events of a full run: one line of JSON each in events.jsonl, read by the terminal, MLflow and reports."""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import cast

from autofit.files import write_atomically
from autofit.watching.journal import append_line

EVENTS = "events.jsonl"
PROGRESS = "progress.jsonl"  # the logged steps of a run, one line of JSON each (autofit.promotion.progress)


class Kind(StrEnum):
    """What an event is about."""

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


# Events of the run's own life; the others are said again by the steps that a resumed run repeats.
_LASTING = (Kind.RESCUE, Kind.RESUME, Kind.CHECKPOINT, Kind.RANK)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """Something that a person should know of a run. `stop` asks the run to save a checkpoint and to end."""

    step: int  # finished optimizer steps when it happened
    kind: Kind
    text: str  # one sentence
    stop: bool = False
    data: Mapping[str, object] = field(default_factory=dict)  # its figures, as JSON
    time: float = field(default_factory=time.time)

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, object]) -> "RunEvent":
        return cls(**{**content, "kind": Kind(str(content["kind"]))})  # type: ignore[arg-type]


def keep_event(folder: Path, event: RunEvent) -> None:
    """Append `event` to the events of the run in `folder`."""
    append_line(folder / EVENTS, event.to_json())


def events_of(folder: Path) -> list[RunEvent]:
    """The events of the run in `folder`, oldest first."""
    return [RunEvent.from_json(line) for line in read_lines(folder / EVENTS)]


def stop_asked(folder: Path) -> RunEvent | None:
    """The event that asked the run in `folder` to stop since it was last started or resumed; None: nothing did."""
    asked = None
    for event in events_of(folder):
        asked = None if event.kind is Kind.START else event if event.stop else asked
    return asked


def forget_events_after(folder: Path, step: int) -> None:
    """Drop what the steps after `step` said, as they are repeated; rescues and resumes stay."""
    kept = [e for e in events_of(folder) if e.step <= step or e.kind in _LASTING]
    write_lines(folder / EVENTS, [e.to_json() for e in kept])


def read_lines(path: Path) -> list[dict[str, object]]:
    """The JSON objects of a file, one a line; a line that is none (torn by a kill) is skipped."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
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
