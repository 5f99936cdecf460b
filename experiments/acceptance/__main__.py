"""Make every claim again and write page.md: `python -m experiments.acceptance run`; `status` says how old each is."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import resource
import subprocess
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from experiments.acceptance import page, told
from experiments.acceptance.parts import Part, chosen
from experiments.kept import patience

PACKAGES = ("torch", "transformers", "trl", "peft")
_LONGEST = 4  # times the minutes of a part, after which it is ended


def main() -> None:
    """Run, show or write, as the command line asks."""
    parser = argparse.ArgumentParser(prog="python -m experiments.acceptance", description=__doc__)
    parser.add_argument(
        "what",
        choices=("run", "status", "page", "figures"),
        help="make claims again, say their age, write page.md, or list the figures of README, docs and CHANGELOG that"
        " have no row",
    )
    parser.add_argument("--only", action="append", metavar="PART", help="a part's name, may be given again")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no part that would end after these")
    parser.add_argument("--again", action="store_true", help="also the parts that today's code has made already")
    options = parser.parse_args()
    if options.what == "status":
        print("\n".join(status(part) for part in chosen(options.only)))
        return
    if options.what == "figures":
        print("\n".join(f"{one}: no row" for path in told.pages() for one in told.without_row(path)) or "all have rows")
        return
    if options.what == "run":
        run(chosen(options.only), until=time.monotonic() + 60 * options.minutes, again=options.again)
    page.PAGE.write_text(page.page(page.made()), encoding="utf-8")
    print(f"written: {page.PAGE}")


def run(parts: tuple[Part, ...], *, until: float, again: bool) -> None:
    """Run the parts that today's code has not made, one after the other; each is kept as soon as it has ended."""
    head = page.git("rev-parse", "--short", "HEAD")
    for part in (one for one in parts if one.command):
        made = page.made().get(part.name)
        if made and not again and not page.commits_since(made["commit"]):
            print(f"{part.name}: made by this code already")
        elif time.monotonic() + 60 * part.minutes > until:
            print(f"{part.name}: left for the next run, it takes about {part.minutes:g} minutes")
        else:
            print(f"{part.name}: {' '.join(part.command[1:])} ({part.minutes:g} minutes)", flush=True)
            print(f"{part.name}: {made_again(part, head)}", flush=True)


def made_again(part: Part, head: str) -> str:
    """Run one part and keep its figures; what happened, in a line."""
    began, spent, longest_s = time.monotonic(), _children_s(), patience(60 * _LONGEST * part.minutes)
    log = Path(tempfile.gettempdir()) / f"acceptance-{part.name.replace(' ', '-')}.log"
    with log.open("wb") as file:
        environment = {**os.environ, "PYTHONPATH": str(page.ROOT), "HF_HUB_OFFLINE": "1"}
        try:
            done = subprocess.run(
                part.command, cwd=page.ROOT, env=environment, stdout=file, stderr=file, timeout=longest_s
            )
        except subprocess.TimeoutExpired:
            return f"given up after {longest_s:.0f} s; what it said is in {log}"
    if done.returncode:
        said = log.read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line for line in reversed(said) if line.strip()), "it said nothing")
        needs = f" (it needs {part.needs})" if part.needs else ""
        return f"failed with exit code {done.returncode}{needs}: {last} (all that it said: {log})"
    log.unlink()
    runs = page.made()
    before = runs.get(part.name, {}).get("figures") or []
    runs[part.name] = {
        "commit": head, "date": datetime.date.today().isoformat(), "wall_s": round(time.monotonic() - began, 1),
        "cpu_s": round(_children_s() - spent, 1),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "figures": [asdict(figure) for figure in part.figures()], "before": before,
    }  # fmt: skip
    page.MADE.write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")
    return f"done in {time.monotonic() - began:.0f} s"


def _children_s() -> float:
    """Processor seconds of the commands that have ended, and of all that they started and waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def commit_of(part: Part) -> str:
    """The commit that made a part's figures, or that last changed the results which stand; "" where there is none."""
    made = page.made().get(part.name)
    return str(made["commit"]) if made else page.last_commit(part)[0]


def status(part: Part) -> str:
    """The age of a part's figures, in commits of the measured code."""
    if not (commit := commit_of(part)):
        return f"{part.name}: not made yet"
    if page.unknown([commit]):
        return f"{part.name}: results of commit {commit}, which this clone does not have"
    return f"{part.name}: results of commit {commit}; {page.commits_since(commit)} commits have changed the code since"


if __name__ == "__main__":
    main()
