"""Errors of the simulated card against what was measured: per row, per set, per cause, and a plot of them."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping

from scipy.stats import spearmanr

from experiments.accuracy.rows import HERE, SETS, MeasuredSet, Row
from experiments.kept import OLDER

Figures = Mapping[str, object]


def error(row: Row, figures: Figures, column: str) -> float | None:
    """Simulated over measured, less 1, or None where either is missing."""
    measured, simulated = row.measured(column), figures.get(column)
    return float(simulated) / measured - 1 if measured and isinstance(simulated, (int, float)) else None


def line(row: Row, figures: Figures) -> str:
    if "error" in figures:
        return f"{row.name:<58} failed: {figures['error']}"
    errors = {column: error(row, figures, column) for column in row.set.compared}
    shown = [f"{column} {value:+.2%}" for column, value in errors.items() if value is not None]
    older = f"  (older; {figures[OLDER]})" if OLDER in figures else ""
    return f"{row.name:<58} {'  '.join(shown)}  ({figures['wall_s']} s){older}"


def results(measured: MeasuredSet) -> dict[str, Figures]:
    file = HERE / "results" / f"{measured.name}.json"
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else {}


def pairs(measured: MeasuredSet, column: str) -> list[tuple[Row, float]]:
    """Each row with an error in this column."""
    found = results(measured)
    both = ((row, error(row, found.get(row.name, {}), column)) for row in measured.rows())
    return [(row, value) for row, value in both if value is not None]


def causes() -> dict[str, str]:
    """What is known of a row's error, by `SET/ROW`."""
    return dict(json.loads((HERE / "causes.json").read_text(encoding="utf-8")))


def write() -> None:
    """Print the table, and write it beside a plot."""
    lines = [
        "| set | figure | rows | mean of sizes | median | worst |",
        "|---|---|---|---|---|---|",
    ]
    for measured in SETS.values():
        for column in measured.compared:
            errors = [value for _, value in pairs(measured, column)]
            if errors:
                sizes = [abs(value) for value in errors]
                lines.append(
                    f"| {measured.name} | {column} | {len(errors)} | {statistics.mean(sizes):.2%} "
                    f"| {statistics.median(sizes):.2%} | {max(errors, key=abs):+.2%} |"
                )
        failed = [name for name, figures in results(measured).items() if "error" in figures]
        if failed:
            lines.append(f"| {measured.name} | did not run | {len(failed)} | {', '.join(failed)} | | |")
        older = [name for name, figures in results(measured).items() if OLDER in figures]
        if older:
            lines.append(f"| {measured.name} | older, not done again in time | {len(older)} | {', '.join(older)} | | |")
    lines += ["", *seconds(), "", *worst()]
    text = "\n".join(lines) + "\n"
    (HERE / "table.md").write_text(text, encoding="utf-8")
    (HERE / "errors.svg").write_text(plot(), encoding="utf-8")
    print(text)


def seconds() -> list[str]:
    """Step seconds of the set that has them: rank correlation, and simulated over measured."""
    measured = SETS["peft_l40s"]
    found = results(measured)
    rows = [row for row, _ in pairs(measured, "step_s")]
    if len(rows) < 3:
        return []
    simulated = [float(str(found[row.name]["step_s"])) for row in rows]
    real = [row.measured("step_s") or 0.0 for row in rows]
    ratios = sorted(a / b for a, b in zip(simulated, real, strict=True))
    spearman = float(spearmanr(simulated, real).statistic)
    widths = [found[row.name].get("log_error") for row in rows]  # rows of an earlier date have none
    inside = [
        abs(math.log(a / b)) <= width
        for a, b, width in zip(simulated, real, widths, strict=True)
        if isinstance(width, float)
    ]
    return [
        f"Step seconds of {measured.name}: Spearman {spearman:.2f}; simulated / measured from {ratios[0]:.2f} to "
        f"{ratios[-1]:.2f}, median {statistics.median(ratios):.2f}, {len(ratios)} rows. "
        f"Inside the stated 90 % interval: {sum(inside)} of {len(inside)}."
    ]


def worst(count: int = 5) -> list[str]:
    """The rows with the largest errors in bytes, and their causes."""
    known = causes()
    all_rows = [
        (abs(value), f"{measured.name}/{row.name}", column, value)
        for measured in SETS.values()
        for column in measured.compared
        if column.endswith("_bytes")
        for row, value in pairs(measured, column)
    ]
    lines = ["| the worst | figure | error | cause |", "|---|---|---|---|"]
    for _, name, column, value in sorted(all_rows, reverse=True)[:count]:
        lines.append(f"| {name} | {column} | {value:+.2%} | {known.get(name, 'not known')} |")
    return lines


COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#8c564b", "#7f7f7f")
WIDTH, LANE, PER_PERCENT = 900, 60, 60


def plot() -> str:
    """A strip of dots per set and figure, in bytes, ±6 %, coloured by cause; farther ones sit at the edge."""
    known = causes()
    lanes = [
        (
            f"{measured.name}: {column}",
            [(f"{measured.name}/{row.name}", value) for row, value in pairs(measured, column)],
        )
        for measured in SETS.values()
        for column in measured.compared
        if column.endswith("_bytes")
    ]
    kinds = ["none named", *sorted(set(known.values()))]
    height = LANE * len(lanes) + 20 * len(kinds) + 60
    middle = WIDTH // 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
        'font-size="12"><rect width="100%" height="100%" fill="white"/>'
    ]
    for percent in range(-6, 7, 2):
        x = middle + percent * PER_PERCENT
        parts.append(f'<line x1="{x}" y1="20" x2="{x}" y2="{20 + LANE * len(lanes)}" stroke="#ddd"/>')
        parts.append(f'<text x="{x}" y="14" text-anchor="middle">{percent:+d} %</text>')
    for number, (title, dots) in enumerate(lanes):
        y = 20 + LANE * number
        parts.append(f'<text x="4" y="{y + 14}">{title}</text>')
        for index, (name, value) in enumerate(dots):
            place = middle + max(-6.5, min(6.5, 100 * value)) * PER_PERCENT
            colour = COLOURS[kinds.index(known.get(name, "none named")) % len(COLOURS)]
            parts.append(
                f'<circle cx="{place:.1f}" cy="{y + 24 + index % 6 * 5}" r="3.5" fill="{colour}" fill-opacity="0.7">'
                f"<title>{name} {value:+.2%}</title></circle>"
            )
    for number, kind in enumerate(kinds):
        y = 40 + LANE * len(lanes) + 20 * number
        parts.append(f'<circle cx="12" cy="{y}" r="4" fill="{COLOURS[number % len(COLOURS)]}"/>')
        parts.append(f'<text x="22" y="{y + 4}">{kind}</text>')
    return "\n".join([*parts, "</svg>", ""])
