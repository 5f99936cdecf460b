"""Predict what users of public threads saw, and look for their fixes in the advice: `python -m experiments.field`."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from autofit.files import write_json
from experiments.field import table
from experiments.field.threads import HERE, SEED, Thread, read_seeds, read_threads

REPOSITORY = HERE.parents[1]
RESULTS = HERE / "results"
CODE = ("autofit", "trainers", "search_spaces", "experiments/field/recipes")  # what decides an answer
TIMED = ("verdict_s", "advised_s", "wall_s", "cpu_s", "load")
PACKAGES = ("torch", "transformers", "trl", "peft")


def main() -> None:
    """Estimate every thread that has no result yet, one at a time, and write the table."""
    parser = argparse.ArgumentParser(prog="python -m experiments.field", description=__doc__)
    parser.add_argument("--only", action="append", help="a thread's name, may be given again; replaces its result")
    parser.add_argument("--again", action="store_true", help="estimate every thread again")
    parser.add_argument(
        "--stale", action="store_true", help="only what was made before the last change of autofit or of a recipe"
    )
    parser.add_argument(
        "--untimed", action="store_true", help="keep the seconds of the earlier result, if there is one"
    )
    parser.add_argument("--no-notes", action="store_true", help="the threads only, not the field notes that are timed")
    parser.add_argument("--no-advice", action="store_true", help="the symptom only")
    parser.add_argument("--advice-time", type=float, default=20.0, help="seconds; a loaded machine needs more")
    parser.add_argument("--limit-s", type=float, default=600, help="seconds after which a thread is given up")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the results")
    parser.add_argument("--table", action="store_true", help="write the table of what is there, and estimate nothing")
    arguments = parser.parse_args()
    threads = (*read_threads(), *read_seeds())
    for thread in () if arguments.table else threads:
        kept = table.read(arguments.results, thread)
        skipped = arguments.no_notes and thread.need == SEED
        again = arguments.again or not done(kept, arguments) or (arguments.stale and is_stale(kept))
        wanted = thread.name in arguments.only if arguments.only else again and not skipped
        if wanted:
            advice_s = 0.0 if arguments.no_advice else arguments.advice_time
            found = estimate(thread, advice_s=advice_s, limit_s=arguments.limit_s)
            if "error" in found and kept and "fits" in kept and not arguments.again and not is_stale(kept):
                found = {**kept, **found}  # the symptom of an earlier run of the same code stays
            if arguments.untimed and kept:
                found |= {name: kept[name] for name in TIMED if name in kept}
            arguments.results.mkdir(parents=True, exist_ok=True)
            write_json(arguments.results / f"{thread.name}.json", found)
            print(table.line(thread, found), flush=True)
    text = table.table(threads, {thread.name: table.read(arguments.results, thread) for thread in threads})
    (arguments.results.parent / "table.md").write_text(text, encoding="utf-8")
    print(text)


def is_stale(kept: dict[str, object] | None) -> bool:
    """Whether autofit or a recipe has changed since the result was made."""
    return kept is None or bool(_git("rev-list", "-1", f"{kept['autofit']}..HEAD", "--", *CODE))


def done(kept: dict[str, object] | None, arguments: argparse.Namespace) -> bool:
    """Whether the kept result has what is asked for, its seconds too; an error is kept as well."""
    return kept is not None and ("error" in kept or arguments.no_advice or {"advice", "verdict_s"} <= kept.keys())


def estimate(thread: Thread, *, advice_s: float, limit_s: float) -> dict[str, object]:
    """The thread's answer or the last line of its error, with seconds of wall clock and of CPU, and the versions."""
    command = [sys.executable, "-m", "experiments.field.estimating", thread.name]
    load = os.getloadavg()[0]
    began, used = time.monotonic(), _child_cpu_s()
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "answer.json"
        cold = {"AUTOFIT_CACHE": str(Path(scratch) / "cache")}
        found = _run([*command, str(out), str(advice_s)], out, limit_s, cold)
    since = {
        f"{name}_s": round(cast(float, found.pop(f"{name}_at_s")) - began, 1)
        for name in ("verdict", "advised") if f"{name}_at_s" in found
    }  # fmt: skip
    return {
        **found, **since, "load": round(load, 2), "advice_time_s": advice_s,
        "wall_s": round(time.monotonic() - began, 1), "cpu_s": round(_child_cpu_s() - used, 1),
        "date": datetime.date.today().isoformat(), "autofit": _git("rev-parse", "--short", "HEAD"),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
    }  # fmt: skip


def _run(command: list[str], out: Path, limit_s: float, settings: Mapping[str, str]) -> dict[str, object]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **settings}
    child = subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        _, errors = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGTERM)
        child.communicate()
        return {"error": f"not done after {limit_s:g} s"}
    if out.exists():
        return dict(json.loads(out.read_text(encoding="utf-8")))
    lines = [line for line in errors.splitlines() if line.strip()] or ["nothing was written"]
    return {"error": lines[-1][:500]}


def _child_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
