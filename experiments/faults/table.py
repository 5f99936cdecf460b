"""The table of the campaign: a line for each kind of fault."""

from collections.abc import Mapping
from typing import Any


def table(kinds: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown: runs, how many ended as the uninterrupted run, and the steps that were trained again."""
    lines = [
        "| fault | runs | done | each step once | all lines equal | final loss equal | weights equal | trained again |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind, content in kinds.items():
        rows = content["rows"]
        counts = [sum(bool(row[key]) for row in rows) for key in
                  ("done", "each_step_once", "lines_equal", "final_loss_equal", "weights_equal")]  # fmt: skip
        lines.append(f"| {kind} | {len(rows)} | {' | '.join(map(str, counts))} | {_again(rows)} |")
    facts = next(iter(kinds.values()))
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    return "\n".join([*lines, "", f"{facts['date']}, {facts['device']}, {versions}."]) + "\n"


def _again(rows: list[dict[str, Any]]) -> str:
    """Steps trained again after the newest whole checkpoint, over all interruptions."""
    steps = [fact["reached"] - fact["newest_whole"] for row in rows for fact in row["interruptions"]]
    return f"{sum(steps)} steps in {len(steps)} interruptions, at most {max(steps)}" if steps else "-"
