"""The table: a row a measured training, its error, and how many are within the goal."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

from experiments.frontends.peaks.rows import Row

GIB = 2**30
NARROW = 0.02  # a row is compared where the fewest and the most tokens make less than this of a difference
METHODS = {
    "ms-swift": "ms-swift's scripts, text models", "axolotl": "Axolotl's READMEs, text models",
    "ms-swift-2024": "ms-swift's benchmark of 2024-01 (A100; torch 2.1; other model code)",
    "qwen": "Qwen's finetune.py, 2023 (A100; torch 2.0; other model code)",
}  # fmt: skip
Answer = Mapping[str, object]


def read(folder: Path, row: Row) -> dict[str, object] | None:
    """The row's kept answer, or None."""
    file = folder / f"{slug(row)}.json"
    return dict(json.loads(file.read_text("utf-8"))) if file.exists() else None


def slug(row: Row) -> str:
    """The row's file name."""
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in row.name)


def predicted_gib(row: Row, answer: Answer, end: str = "most") -> float:
    """What the row's figure is compared with: torch's reserved where the source says so, else the card's used bytes.

    Used bytes are simulated as CUDA loads kernels since 12.2, those that are used; before, all of them were.
    """
    found = cast("Mapping[str, int]", answer[end if end in answer else "most"])
    return (found["reserved"] if row.kind == "reserved" else found["used"] + row.kernels_bytes) / GIB


def compared(row: Row, answer: Answer) -> bool:
    """Whether what decides the figure is known well enough for an error to mean something."""
    if "error" in answer or row.longest_tokens is None or row.undecided:
        return False
    return predicted_gib(row, answer) <= predicted_gib(row, answer, "fewest") * (1 + NARROW)


def error(row: Row, answer: Answer) -> float:
    """Relative error of the prediction at the most tokens."""
    return predicted_gib(row, answer) / row.measured_gib - 1


def as_reserved(row: Row, answer: Answer) -> float:
    """Relative error where torch's reserved bytes are what was read."""
    return cast("Mapping[str, int]", answer["most"])["reserved"] / GIB / row.measured_gib - 1


def within_digits(row: Row, answer: Answer) -> bool:
    """Whether the prediction rounds to the figure."""
    return abs(predicted_gib(row, answer) - row.measured_gib) <= row.half_digit_gib


def table(rows: Sequence[Row], answers: Mapping[str, Answer | None]) -> str:
    """Markdown: the totals by source and half, then every row."""
    ran = [(row, answer) for row in rows if (answer := answers[row.name]) is not None]
    lines = [
        "# Peaks that the tools' own authors measured, and autofit's predictions", "",
        "| source | half | predicted | read | compared | median | worst | bias | within 5 % | within 15 % | reserved "
        "| rank of s |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for half, odd in (("even", False), ("odd, kept out", True)):
        for method, words in METHODS.items():
            lines += totals(f"{words} | {half}", [p for p in ran if p[0].method == method and p[0].kept_out is odd])
        lines += totals(
            f"today's code (the first two) | {half}", [p for p in ran if not p[0].older and p[0].kept_out is odd]
        )
        lines += totals(f"all | {half}", [p for p in ran if p[0].kept_out is odd])
    for half, odd in (("Even rows", False), ("Odd rows, predicted once", True)):
        lines += ["", f"## {half}", "",
                  "| row | ranks | longest | measured GiB | predicted | reserved | off | s | s predicted | why |",
                  "|---|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
        lines += [line(row, answer) for row, answer in ran if row.kept_out is odd]
    return "\n".join(lines) + "\n"


def totals(label: str, ran: Sequence[tuple[Row, Answer]]) -> Iterator[str]:
    """One line of the first table; none where nothing ran."""
    if not ran:
        return
    told = [(row, answer) for row, answer in ran if "error" not in answer]
    errors = [error(row, answer) for row, answer in told if compared(row, answer)]
    cells = ["-"] * 6
    if errors:
        cells = [f"{statistics.median(map(abs, errors)):.1%}", f"{max(errors, key=abs):+.1%}",
                 f"{statistics.median(errors):+.1%}",
                 *(f"{sum(abs(e) <= limit for e in errors)} of {len(errors)}" for limit in (0.05, 0.15))]  # fmt: skip
        held = [as_reserved(row, answer) for row, answer in told if compared(row, answer)]
        cells += [f"{statistics.median(map(abs, held)):.1%}, {max(held, key=abs):+.1%}"]
    timed = [(row.measured_step_s, seconds) for row, answer in told if row.measured_step_s and compared(row, answer)
             and (seconds := cast("Mapping[str, float]", answer["most"])["step_s"])]  # fmt: skip
    rank = "-"
    if len(timed) > 4:
        measured, ours = zip(*timed, strict=True)
        rank = f"{statistics.correlation(ranks(measured), ranks(ours)):.2f} of {len(timed)}"
    yield f"| {label} | {len(ran)} | {len(told)} | {len(errors)} | {' | '.join(cells)} | {rank} |"


def ranks(values: Sequence[float]) -> list[float]:
    """The place of each value in their order; equal ones share the middle of theirs."""
    return [sum(other < value for other in values) + sum(other == value for other in values) / 2 for value in values]


def line(row: Row, answer: Answer) -> str:
    """The row's line."""
    if "error" in answer:
        known = f"| {row.name} | {row.ranks} | {lengths(row)} | {row.measured_gib:g} |"
        return f"{known} not read: {said(answer)} | - | - | - | - | - |"
    most = cast("Mapping[str, float]", answer["most"])
    predicted = f"{predicted_gib(row, answer):.2f}"
    off = f"{error(row, answer):+.1%}" + (" (rounds to it)" if within_digits(row, answer) else "")
    if not compared(row, answer):
        low, high = predicted_gib(row, answer, "fewest"), predicted_gib(row, answer)
        inside = low - row.half_digit_gib <= row.measured_gib <= high + row.half_digit_gib
        predicted = f"{low:.2f} to {high:.2f}" if low != high else f"at most {high:.2f}"
        off = "not compared: lengths not known" + ("" if low == high else f"; {'inside' if inside else 'outside'}")
        if row.undecided:
            predicted, off = f"{high:.2f}", f"not compared: {row.undecided.partition(':')[0]}"
    measured_s = "-" if row.measured_step_s is None else f"{row.measured_step_s:.2f}"
    step_s = "-" if most["step_s"] is None or row.measured_step_s is None else f"{most['step_s']:.2f}"
    cells = [
        row.name,
        row.ranks,
        lengths(row),
        f"{row.measured_gib:g}",
        predicted,
        f"{most['reserved'] / GIB:.2f}",
        off,
        measured_s,
        step_s,
        row.why or "-",
    ]
    return f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |"


def lengths(row: Row) -> str:
    """The longest sample, as the table has it."""
    if row.longest_tokens is None:
        return "not known"
    low, high = row.longest_tokens
    text = f"{high:,}" if low == high else f"{low:,} to {high:,}"
    return f"{text}, mixed" if row.samples else text


def said(answer: Answer) -> str:
    """The reason of a row that was not read, without the file's name."""
    words = str(answer["error"]).removeprefix("autofit.errors.").removeprefix("ConfigError: ")
    return words.rpartition("read as a file of ")[2].replace("|", "/")[:160]
