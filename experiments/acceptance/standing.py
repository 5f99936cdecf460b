"""Figures of our own cards, of torch's CUDA allocator and of published engines, read from the tables as they stand."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from experiments.acceptance.figures import Figure

EXPERIMENTS = Path(__file__).parents[1]
_SIZES = {"allocated peak": "peak_allocated_bytes", "reserved peak": "peak_reserved_bytes",
          "device-used": "device_used_bytes", "seconds of a step": "step_s"}  # fmt: skip
# Measured runs of a card, and what was predicted of them. The first predictions were made before any card was seen.
_CARDS = {
    "first H100": ("h100/predicted-h100.jsonl", ("h100",)),
    "both H100s, by the code that was mended with them": ("h100-2/predicted-h100.jsonl", ("h100", "h100-2")),
    "second H100, by that code": ("h100-2/predicted-h100.jsonl", ("h100-2",)),
    "H200, by that code": ("h200/predicted-h200.jsonl", ("h200",)),
}
_ALIKE = 0.05  # percent: a model counts as told


def card_figures() -> list[Figure]:
    """Sizes of the errors of bytes and seconds on our own cards: median, 90 % of rows, worst."""
    return [
        Figure(f"{card}, {label}, {len(errors)} runs: median, 90 % of rows, worst", _spread(errors))
        for card, (told, measured) in _CARDS.items()
        for label, key in _SIZES.items()
        if (errors := [one for folder in measured for one in _card_errors(told, folder, key)])
    ]


def _card_errors(told: str, folder: str, key: str) -> list[float]:
    """Shares that the predictions of the runs that fitted are off."""
    said = _by_name(EXPERIMENTS / "gpu" / told)
    found = _by_name(EXPERIMENTS / "gpu" / folder / "measured.jsonl")
    pairs = [
        (_number(said[name].get(key)), _number(row.get(key)))
        for name, row in found.items()
        if row.get("status") == "fit" and name in said
    ]
    return [abs(one / measured - 1) for one, measured in pairs if one and measured]


def _by_name(path: Path) -> dict[str, dict[str, Any]]:
    """The last line of each configuration."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return {str(line["name"]): line for line in lines if "name" in line}


def _number(value: object) -> float:
    if isinstance(value, list):
        return float(statistics.median(value)) if value else 0.0
    return float(value) if isinstance(value, int | float) else 0.0


def _spread(errors: Sequence[float]) -> str:
    ordered = sorted(errors)
    return f"{statistics.median(ordered):.2%}, {ordered[int(0.9 * len(ordered))]:.2%}, {ordered[-1]:.2%}"


def oracle_figures() -> list[Figure]:
    """Errors against torch's own CUDA allocator, in the real CUDA build of torch without a card."""
    found = []
    for file, what in (("table.md", "first configurations"), ("untried.md", "configurations not compared before"),
                       ("chance.md", "configurations drawn by chance"),
                       ("chance_on_ranks.md", "configurations drawn by chance, two to four ranks"),
                       ("zero.md", "DeepSpeed, two ranks")):  # fmt: skip
        rows = _oracle_rows(file)
        for size, errors in (("allocated", [row[1] for row in rows]), ("reserved", [row[2] for row in rows])):
            told = f"{statistics.mean(errors):.3f} %, {statistics.median(errors):.3f} %, {max(errors):.2f} %"
            found.append(Figure(f"{what}, {size} bytes, {len(rows)} rows: mean, median, worst", told))
    for ending, what in (("full", "all weights"), ("lora", "LoRA"), ("grpo", "GRPO with LoRA")):
        rows = [row for row in _oracle_rows("families.md") if row[0].endswith(f"-{ending}")]
        for size, column in (("allocated", 1), ("reserved", 2)):
            errors = [float(row[column]) for row in rows]
            near = sum(one <= _ALIKE for one in errors)
            worst = sorted(errors)[-2:]
            told = f"{near} of {len(rows)} within {_ALIKE:.2f} %; worst {worst[1]:.2f} %, then {worst[0]:.2f} %"
            found.append(Figure(f"one model of each architecture, {what}, {size} bytes", told))
    return found


def _oracle_rows(file: str) -> list[tuple[str, float, float]]:
    """(configuration, percent that the allocated bytes are off, the reserved ones), in size, of each compared row."""
    cells = _cells((EXPERIMENTS / "oracle" / file).read_text(encoding="utf-8"))
    rows = [row for row in cells if len(row) == 6 and row[3].endswith("%") and row[5].endswith("%")]
    return [(row[0], abs(float(row[3].rstrip("%"))), abs(float(row[5].rstrip("%")))) for row in rows]


def engine_figures() -> list[Figure]:
    """Published throughputs of vLLM and continuous batching that the simulation comes near."""
    cells = _cells((EXPERIMENTS / "engines" / "table.md").read_text(encoding="utf-8"))
    rows = [(row[0], abs(int(row[4].rstrip("%")))) for row in cells if len(row) == 5 and row[4].endswith("%")]
    small = [error for name, error in rows if name.endswith("(decode)") and _billions(name) <= 8]
    return [
        Figure("published throughputs", f"{_within(20, (error for _, error in rows))} of {len(rows)} within 20 %"),
        Figure("decoding of one sequence, models up to 8B", f"{_within(10, small)} of {len(small)} within 10 %"),
    ]


def _billions(name: str) -> float:
    found = re.search(r"([\d.]+)B\b", name)
    return float(found[1]) if found else math.inf


def _within(percent: int, errors: Iterable[int]) -> int:
    return sum(error <= percent for error in errors)


def _cells(text: str) -> list[list[str]]:
    """The cells of each table row of a page."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
