"""How MLflow shows a promoted run beside its promise: figures, tags and a note. No MLflow here."""

from collections.abc import Mapping, Sequence
from typing import Any

from autofit.watching.contract import Row
from autofit.watching.events import Kind, RunEvent

_SHOWN_EVENTS = 50
_FIGURES = ("step_s", "device_used_bytes", "samples_per_s")
_COUNTED = (Kind.RESCUE, Kind.RESUME, Kind.CHECKPOINT)  # each of them is a tag of its own


def outcome(rows: Sequence[Row]) -> str:
    """kept, broken, or "not compared"; "" for a run without a promise."""
    kept = {row.kept for row in rows}
    return "broken" if False in kept else "kept" if True in kept else "not compared" if rows else ""


def contract_figures(promise: Mapping[str, Any] | None, rows: Sequence[Row]) -> dict[str, float]:
    """`promised_` and `actual_` seconds, bytes and samples a second, and the limit, as far as they are known."""
    known = promise or {}
    found: dict[str, object] = {f"promised_{key}": known.get(key) for key in _FIGURES}
    found["limit_bytes"] = known.get("limit_bytes")
    found |= {f"promised_{row.key}": row.promised for row in rows if row.key in _FIGURES}
    found |= {f"actual_{row.key}": row.actual for row in rows if row.key in _FIGURES}
    return {key: float(value) for key, value in found.items() if isinstance(value, int | float)}


def event_tags(events: Sequence[RunEvent]) -> dict[str, str]:
    """The tags of the events: the last of a guard, each rescue, each resume, the memory's warning, the verdict."""
    tags: dict[str, str] = {}
    counts = dict.fromkeys(Kind, 0)
    for event in events:
        counts[event.kind] += 1
        name = _tag(event, counts[event.kind])
        if name:
            tags[name] = str(event.data.get("tag_value", event.text))
    return tags


def _tag(event: RunEvent, number: int) -> str:
    """The name of the event's tag; "" for one that stands in the note only."""
    if "tag" in event.data:
        return str(event.data["tag"])
    if event.kind in _COUNTED:
        return f"autofit.{event.kind}.{number}"
    if event.kind is Kind.GUARD:
        return f"autofit.guard.{event.data.get('guard', number)}"
    return f"autofit.{event.kind}" if event.kind in (Kind.MEMORY, Kind.VERDICT) else ""


def note(request: Mapping[str, Any], state: str, rows: Sequence[Row], events: Sequence[RunEvent]) -> str:
    """The run's description in Markdown: its state, promised against actual, and its last events."""
    verdict = next((f" {event.text}" for event in reversed(events) if event.kind is Kind.VERDICT), "")
    promise = outcome(rows)
    kept = f", and its promise is {promise}" if promise in ("kept", "broken") else ""
    parts = [f"**The full run of trial {request['trial']} is {state}{kept}.**{verdict}"]
    if rows:
        parts.append("| | promised | actual | |\n|---|---|---|---|\n" + "\n".join(_row(row) for row in rows))
    told = [f"- step {event.step}, {event.kind}: {_line(event.text)}" for event in events[-_SHOWN_EVENTS:]]
    return "\n\n".join([*parts, *(["\n".join(told)] if told else [])])


def _row(row: Row) -> str:
    kept = "" if row.kept is None else "kept" if row.kept else "**broken**"
    cells = (row.what, row.promised_text, row.actual_text, kept)
    return "| " + " | ".join(_line(cell).replace("|", "\\|") for cell in cells) + " |"


def _line(text: str) -> str:
    return " ".join(text.split())
