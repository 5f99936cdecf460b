"""table.md: each estimator's errors on the rows that it can say, beside autofit's on the same rows."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.kept import OLDER
from experiments.peers.peers import PEERS, Peer
from experiments.peers.rows import HERE, Row, read_rows

Results = Mapping[str, Mapping[str, Mapping[str, Any]]]
OURS = ("autofit fit-check", "autofit estimate")


def error(row: Row, said: Mapping[str, Any] | None) -> float | None:
    """Share that the said bytes are over the measured ones; None where none were said."""
    return said["bytes"] / row.measured_bytes - 1 if said and said.get("bytes") else None


def ours(row: Row, results: Results) -> float | None:
    """autofit's error: of the plain loop where the row was one, else of the trainer's recipe."""
    found = (error(row, results.get(row.name, {}).get(name)) for name in OURS)
    return next((value for value in found if value is not None), None)


def of_their_code(row: Row) -> float | None:
    """autofit's error when it runs the project's own program (experiments/accuracy); None where it was not run."""
    name, _, key = row.own_program.partition(":")
    if not name:
        return None
    kept = json.loads((HERE.parent / "accuracy" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    found = kept.get(key, {}).get("peak_allocated_bytes" if row.kind == "allocated" else "reserved_max_bytes")
    return None if found is None else float(found) / row.measured_bytes - 1


def write(results: Results) -> None:
    rows = read_rows()
    lines = ["# Estimators on measured rows", "", _when(results), ""]
    lines += ["## Bytes, each on the rows that it can say", "",
              "| estimator | version | rows said | median | worst | autofit on them | by their code | wall s | CPU s |",
              "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    lines += [_line(peer, rows, results) for peer in PEERS]
    lines += [
        "",
        "## What each figure is, and what it has no words for",
        "",
        "| estimator | its figure | cannot say |",
        "|---|---|---|",
    ]
    lines += [f"| {peer.name} | {peer.means} | {peer.lacks} |" for peer in PEERS]
    lines += [
        "",
        "## Row by row (error of the bytes; `-`: no words for it; `x`: it failed; `*`: an older answer,"
        " which was not there again in time)",
        "",
    ]
    lines += ["| row | measured | " + " | ".join(peer.name for peer in PEERS) + " |", "|---" * (len(PEERS) + 2) + "|"]
    lines += [_row(row, results) for row in rows if row.name in results]
    lines += ["", "## Seconds of a step", "", "| row | measured | " + " | ".join(_timers(results)) + " |",
              "|---" * (len(_timers(results)) + 2) + "|"]  # fmt: skip
    lines += [_seconds(row, results) for row in rows if row.measured_step_s and row.name in results]
    (HERE / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _when(results: Results) -> str:
    found = [said for answers in results.values() for said in answers.values()]
    dates = sorted({said["date"] for said in found})
    commits = sorted({said["autofit"] for said in found})
    made = f"Made on {', '.join(dates)} by autofit at {', '.join(commits)}"
    return f"{made}; the machine was shared, so wall seconds are upper bounds."


def _line(peer: Peer, rows: Sequence[Row], results: Results) -> str:
    said = [(row, results.get(row.name, {}).get(peer.name)) for row in rows if peer.name in results.get(row.name, {})]
    pairs = [(row, value) for row, one in said if (value := error(row, one)) is not None]
    if not pairs:
        return f"| {peer.name} | - | 0 of {len(said)} | | | | | | |"
    took = [one for _, one in said if one and one.get("bytes")]
    beside = [value for row, _ in pairs if (value := ours(row, results)) is not None]
    same = "" if peer.name.startswith("autofit") else _spread(beside)
    wall, cpu = (statistics.median(one[key] for one in took) for key in ("wall_s", "cpu_s"))
    spread = _spread([value for _, value in pairs]).replace(", ", " | ")
    said_rows = f"{len(pairs)} of {len(said)}"
    theirs = _spread([value for row, _ in pairs if (value := of_their_code(row)) is not None])
    return (
        f"| {peer.name} | {took[0]['version']} | {said_rows} | {spread} | {same} | {theirs} | {wall:.1f} | {cpu:.1f} |"
    )


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "-, -"
    worst = max(values, key=abs)
    middle = statistics.median(abs(value) for value in values)
    return f"{middle:.1%}, {worst:+.1%}" if len(values) > 1 else f"one row, {worst:+.1%}"


def _row(row: Row, results: Results) -> str:
    cells = [_cell(row, results[row.name].get(peer.name)) for peer in PEERS]
    return f"| {row.name} | {row.measured_bytes / 1e9:.2f} GB {row.kind} | " + " | ".join(cells) + " |"


def _cell(row: Row, said: Mapping[str, Any] | None) -> str:
    if said is None:
        return ""
    value = error(row, said)
    older = "*" if OLDER in said else ""
    return (f"{value:+.1%}" if value is not None else "-" if "cannot" in said else "x") + older


def _timers(results: Results) -> list[str]:
    return [peer.name for peer in PEERS
            if any(answers.get(peer.name, {}).get("step_s") for answers in results.values())]  # fmt: skip


def _seconds(row: Row, results: Results) -> str:
    cells = []
    for name in _timers(results):
        said = results[row.name].get(name, {}).get("step_s")
        cells.append(f"{said:.3g} ({said / row.measured_step_s:.2f}x)" if said and row.measured_step_s else "-")
    return f"| {row.name} | {row.measured_step_s:.3g} | " + " | ".join(cells) + " |"
