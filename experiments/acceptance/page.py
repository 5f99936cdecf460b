"""The page: each claim with its figure, when and by which commit it was made, and what changed since the run before."""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.acceptance.figures import Figure
from experiments.acceptance.parts import PARTS, Part

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MADE = HERE / "made.json"
PAGE = HERE / "page.md"
CODE = ("autofit", "trainers", "search_spaces")
_HEAD = """# Acceptance

Written by `python -m experiments.acceptance` (README.md). *Predicted* figures are of a simulated card; only the
part `cards` has figures that were measured on cards of ours.
"""
MARKS = {None: "", True: "yes", False: "**no**"}


def made() -> dict[str, Any]:
    """{part: its last run}: commit, date, versions, wall_s, figures, and the figures of the run before."""
    return dict(json.loads(MADE.read_text(encoding="utf-8"))) if MADE.exists() else {}


def kept(part: Part, runs: Mapping[str, Any]) -> list[Figure]:
    """The figures of `part` as its last run left them; of results that are older than the runs, as they are there."""
    if part.name in runs:
        return [Figure(**one) for one in runs[part.name]["figures"]]
    return part.figures() if (ROOT / "experiments" / part.results).exists() else []


def page(runs: Mapping[str, Any]) -> str:
    """Markdown: what does not hold, what changed, then a table for each part."""
    found = {part: kept(part, runs) for part in PARTS}
    broken = [
        f"- {part.name}: {one.claim}: {one.found} (goal {one.goal})"
        for part, figures in found.items()
        for one in figures
        if one.holds is False
    ]
    moved = [line for part in PARTS for line in changes(part, runs)]
    lines = [_HEAD, "## What does not hold", "", *(broken or ["- nothing"]), ""]
    lines += ["## What changed since the run before", "", *(moved or ["- nothing"]), ""]
    lines += ["## What a whole run costs", "", *cost(runs), ""]
    for part, figures in found.items():
        rows = [f"| {one.claim} | {one.found} | {one.goal} | {MARKS[one.holds]} |" for one in figures]
        lines += [f"## {part.name}: {part.says}", "", when(part, runs), ""]
        lines += ["| claim | found | goal | holds |", "|---|---|---|---|", *rows, ""] if rows else []
    return "\n".join(lines)


def cost(runs: Mapping[str, Any]) -> list[str]:
    """Markdown: seconds of the last run of each part, and their sums."""
    timed = [(part, runs[part.name]) for part in PARTS if part.name in runs]
    rows = [f"| {part.name} | {run['wall_s']:.0f} | {_cpu_s(run)} | {run['commit']} |" for part, run in timed]
    wall_s = sum(run["wall_s"] for _, run in timed)
    told = [run["cpu_s"] for _, run in timed if "cpu_s" in run]
    rows.append(f"| together | {wall_s:.0f} | {sum(told):.0f} of {len(told)} parts | |")
    said = f"{wall_s / 60:.0f} minutes as each part last ran; the goal is 60 on two cores of its own."
    return [said, "", "| part | wall s | CPU s | commit |", "|---|---|---|---|", *rows]


def _cpu_s(run: Mapping[str, Any]) -> str:
    return f"{run['cpu_s']:.0f}" if "cpu_s" in run else ""


def changes(part: Part, runs: Mapping[str, Any]) -> list[str]:
    """A line for each figure of `part` that its last run found otherwise than the run before."""
    run = runs.get(part.name, {})
    before = {one["claim"]: one["found"] for one in run.get("before", ())}
    return [
        f"- {part.name}: {one['claim']}: {before[one['claim']]} -> {one['found']}"
        for one in run.get("figures", ())
        if before.get(one["claim"], one["found"]) != one["found"]
    ]


def when(part: Part, runs: Mapping[str, Any]) -> str:
    """When the results of `part` were made, by which commit, with which versions, and in how long."""
    run = runs.get(part.name)
    if not part.command:
        return f"Not made again here (it needs {part.needs}): the results as they stand in experiments/{part.results}."
    if run is None:
        return "Not made by this command yet: the results as they stand in their folder."
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    return f"Made on {run['date']} by commit {run['commit']} in {run['wall_s']:.0f} s; {versions}."


def last_commit(part: Part) -> tuple[str, str]:
    """(commit, date) in which the results of `part` were last changed; two empty texts where there are none."""
    path = f"experiments/{part.results}"
    said = git("log", "-1", "--format=%h %cs", "--", path).split()
    return (said[0], said[1]) if said else ("", "")


@functools.cache
def commits_since(commit: str) -> int:
    """How many commits have changed the measured code since `commit`."""
    return int(git("rev-list", "--count", f"{commit}..HEAD", "--", *CODE) or 0)


def unknown(commits: Sequence[str]) -> list[str]:
    """Those of the commits that this clone does not have, as one with a short history; asked for together."""
    asked = "".join(f"{commit}^{{commit}}\n" for commit in commits)
    command = ["git", "cat-file", "--batch-check=%(objecttype)"]
    said = subprocess.run(command, input=asked, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [commit for commit, found in zip(commits, said.splitlines(), strict=True) if found != "commit"]


@functools.cache
def no_history() -> str:
    """Reason why commits cannot be looked up here: no repository of git, or a short history; "" if they can."""
    try:
        shallow = git("rev-parse", "--is-shallow-repository") == "true"
    except (OSError, subprocess.CalledProcessError):
        return "no git repository: commits of results cannot be looked up"
    return "a clone with a short history does not have the commits of the results" if shallow else ""


def git(*words: str) -> str:
    """What a git command prints in this repository."""
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
