"""Simulate what others measured on real cards, and compare: `python -m experiments.accuracy run SET`, then `table`."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from experiments.accuracy import places, table
from experiments.accuracy.rows import HERE, SETS, MeasuredSet, Row
from experiments.kept import TIMED_OUT, newer, patience

LIMIT_S = 300  # of one row; the slowest took 150 s on a shared core


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.accuracy", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="simulate the rows of a set that have no result yet")
    run.add_argument("set", choices=SETS)
    run.add_argument("--only", action="append", help="a row's name, may be given again; replaces its result")
    run.add_argument("--again", action="store_true", help="simulate all rows again")
    run.add_argument("--repo", type=Path, help="a clone of the project, where it cannot be cloned from here")
    run.add_argument("--beside", type=int, default=os.cpu_count() or 1, help="rows at a time")
    commands.add_parser("table", help="errors of each set, by cause, and a plot of them")
    arguments = parser.parse_args()
    if arguments.command == "table":
        table.write()
        return
    measured = SETS[arguments.set]
    results = read(measured)
    rows = [
        row for row in measured.rows()
        if (row.name in arguments.only if arguments.only else arguments.again or row.name not in results)
    ]  # fmt: skip
    for row in rows:
        places.checkout(measured, row.commit, arguments.repo)
    with ThreadPoolExecutor(arguments.beside) as pool:
        for row, found in zip(rows, pool.map(partial(simulate, source=arguments.repo), rows), strict=True):
            results[row.name] = newer(results.get(row.name), found)
            write(measured, results)
            print(table.line(row, results[row.name]), flush=True)


def simulate(row: Row, *, source: Path | None) -> dict[str, object]:
    """The figures of one row, or the last line of what stopped it; in a process of its own."""
    tree, interpreter = places.checkout(row.set, row.commit, source), places.python(row.set)
    folder = places.store() / "models" / row.set.name
    folder.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ, "PYTHONPATH": str(places.REPOSITORY), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "figures.json"
        worker = f"experiments.accuracy.workers.{row.set.name}"
        command = [str(interpreter), "-m", worker, row.name, str(tree), str(folder), str(out)]
        limit_s = patience(LIMIT_S)
        try:
            done = subprocess.run(
                command, cwd=places.REPOSITORY, env=environment, capture_output=True, text=True, timeout=limit_s
            )
        except subprocess.TimeoutExpired:
            late = {"error": f"not done after {limit_s:.0f} s", TIMED_OUT: round(limit_s)}
            return {**late, **provenance(row, interpreter)}
        if not out.exists():
            lines = [text for text in done.stderr.splitlines() if text.strip()] or ["nothing was written"]
            return {"error": lines[-1][:300], **provenance(row, interpreter)}
        return {**json.loads(out.read_text(encoding="utf-8")), **provenance(row, interpreter)}


def provenance(row: Row, interpreter: Path) -> dict[str, object]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=places.REPOSITORY, check=True, capture_output=True, text=True
    )
    return {
        "date": datetime.date.today().isoformat(),
        "autofit": commit.stdout.strip(),
        "code": row.commit,
        "versions": places.versions(interpreter),
    }


def read(measured: MeasuredSet) -> dict[str, dict[str, object]]:
    file = HERE / "results" / f"{measured.name}.json"
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else {}


def write(measured: MeasuredSet, results: dict[str, dict[str, object]]) -> None:
    file = HERE / "results" / f"{measured.name}.json"
    file.parent.mkdir(exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    os.replace(part, file)


if __name__ == "__main__":
    main()
