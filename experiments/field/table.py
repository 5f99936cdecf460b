"""The table of threads: symptom predicted, accepted fix among the first pieces of advice, seconds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from autofit.units import format_bytes
from experiments.field import judge
from experiments.field.threads import SEED, Thread

Answers = Mapping[str, dict[str, object] | None]
MARKS = {True: "yes", False: "no", None: "-"}
HEAD = (
    "| thread | need | card | said | predicted | symptom predicted | fix among the first 3 | verdict s | all s | CPU |"
)
RULE = "|---|---|---|---|---|---|---|---|---|---|"
TIMES = "| recipe | card | predicted | verdict s | all s | CPU s |"


def read(folder: Path, thread: Thread) -> dict[str, object] | None:
    """The thread's kept result, or None."""
    file = folder / f"{thread.name}.json"
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else None


def line(thread: Thread, answer: dict[str, object]) -> str:
    """One thread in one line, for the terminal."""
    symptom, fix = MARKS[judge.symptom_predicted(thread, answer)], fix_mark(thread, answer)
    return (
        f"{thread.name:<26} symptom {symptom:<4} fix {fix:<4} {figures(answer)} "
        f"(verdict {seconds(answer, 'verdict')} s, all "
        f"{seconds(answer, 'advised')} s, {answer.get('cpu_s')} CPU s)"
    )


def fix_mark(thread: Thread, answer: dict[str, object]) -> str:
    """yes or no; - where no fix is known, or no advice was asked for."""
    if not thread.accepted or ("advice" not in answer and "error" not in answer):
        return "-"
    return MARKS[judge.fix_found(thread, answer) is not None]


def figures(answer: dict[str, object]) -> str:
    """What was predicted, in a few words."""
    if "fits" not in answer:
        return f"failed: {answer.get('error')}"
    used, capacity = judge.device_used_bytes(answer), cast(float, answer["capacity_bytes"])
    share = judge.rollout_share(answer)
    text = f"{'fits' if answer['fits'] else 'does not fit'}: {format_bytes(int(used))} of {format_bytes(int(capacity))}"
    text += "" if not share else f", rollout {share:.0%} of the step"
    return f"{text}; advice: {answer['error']}" if "error" in answer else text


def advice(answer: dict[str, object]) -> list[str]:
    """The first pieces of advice, in words."""
    pieces = cast("Sequence[Mapping[str, object]]", answer.get("advice") or ())[: judge.FIRST]
    return [", ".join(f"{key}={value}" for key, value in piece.items()) for piece in pieces]


def table(threads: Sequence[Thread], answers: Answers) -> str:
    """Markdown: the totals, a row a thread, and beneath it the advice beside the accepted fix."""
    ran = [(thread, answer) for thread in threads if (answer := answers[thread.name]) is not None]
    seeds = [(thread, answer) for thread, answer in ran if thread.need == SEED]
    counted = [(thread, answer) for thread, answer in ran if thread.counts and thread.need != SEED]
    older = [(thread, answer) for thread, answer in ran if not thread.counts]
    lines = [
        *totals(counted, [t for t in threads if t.counts and t.need != SEED]),
        *times([answer for _, answer in ran]), "", HEAD, RULE,
    ]  # fmt: skip
    lines += [row(thread, answer) for thread, answer in counted]
    lines += [
        "",
        "Older libraries, which do not count (README.md says when they were marked):",
        "",
        HEAD,
        RULE,
    ]
    lines += [row(thread, answer) for thread, answer in older]
    lines += ["", "Field notes (`experiments/seeds`), which are timed only:", "", TIMES, "|---|---|---|---|---|---|"]
    lines += [timed(thread, answer) for thread, answer in seeds]
    lines += ["", "| thread | accepted | advice, in its order |", "|---|---|---|"]
    lines += [f"| {t.name} | {t.solved_by} | {'<br>'.join(advice(a)) or '-'} |" for t, a in ran if t.accepted]
    return "\n".join(lines) + "\n"


def totals(counted: Sequence[tuple[Thread, dict[str, object]]], all_counted: Sequence[Thread]) -> list[str]:
    """Two sentences: symptoms and fixes, of how many."""
    symptoms = [judge.symptom_predicted(thread, answer) is True for thread, answer in counted]
    fixes = [judge.fix_found(thread, answer) is not None for thread, answer in counted if thread.accepted]
    with_advice = sum("advice" in answer for thread, answer in counted if thread.accepted)
    return [
        f"Symptom predicted: {sum(symptoms)} of {len(symptoms)} threads run ({len(all_counted)} count). Accepted fix "
        f"among the first {judge.FIRST} pieces of advice: {sum(fixes)} of {len(fixes)} threads with a known fix "
        f"({with_advice} were advised)."
    ]


def row(thread: Thread, answer: dict[str, object]) -> str:
    """The thread's row."""
    cells = [
        f"[{thread.name}]({thread.url})", thread.need, thread.cards, thread.said, figures(answer),
        MARKS[judge.symptom_predicted(thread, answer)], fix_mark(thread, answer), *took(answer),
    ]  # fmt: skip
    return _cells(cells)


def timed(thread: Thread, answer: dict[str, object]) -> str:
    """The row of a field note."""
    return _cells([thread.name, thread.gpu, figures(answer), *took(answer)])


def took(answer: dict[str, object]) -> list[str]:
    """Seconds from the start of the process to the verdict and to the end of the advice, and of CPU."""
    return [seconds(answer, "verdict"), seconds(answer, "advised"), str(answer.get("cpu_s", "-"))]


def seconds(answer: dict[str, object], name: str) -> str:
    """The seconds to `verdict` or `advised`; - where they were not taken."""
    return str(answer.get(f"{name}_s", "-"))


def times(answers: Sequence[dict[str, object]]) -> list[str]:
    """One sentence: how long the verdict and the whole answer took, and beside what load."""
    known = [answer for answer in answers if "verdict_s" in answer and "advice" in answer]
    if not known:
        return []
    verdicts, alls, loads = (
        sorted(cast(float, answer[name]) for answer in known) for name in ("verdict_s", "advised_s", "load")
    )
    middle = len(known) // 2
    return [
        f"Seconds of {len(known)} cold commands, nothing kept (load {loads[0]:g} to {loads[-1]:g} when each began): "
        f"verdict {verdicts[middle]:g} in the middle, {verdicts[-1]:g} at worst; all advice {alls[middle]:g}, "
        f"{alls[-1]:g} at worst."
    ]


def _cells(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
