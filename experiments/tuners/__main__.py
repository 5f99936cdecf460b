"""Tuners on one task inside the simulated card: `python -m experiments.tuners` runs what has no result yet."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.kept import commit

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
NAMES = {
    "autofit search": "autofit-llm", "transformers auto_find_batch_size": "transformers",
    "accelerate find_executable_batch_size": "accelerate", "Lightning scale_batch_size": "lightning",
    "Optuna alone": "optuna", "autovram": "autovram", "DeepSpeed autotuning": "deepspeed",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.tuners", description=__doc__)
    parser.add_argument("--only", action="append", choices=NAMES, help="this tuner, anew")
    parser.add_argument("--python", default=sys.executable, help="an interpreter whose environment has Lightning too")
    parser.add_argument("--one", choices=NAMES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        from experiments.tuners.tuners import TUNERS

        outcome = TUNERS[arguments.one]()
        version = importlib.metadata.version(NAMES[arguments.one])
        print(json.dumps({**asdict(outcome), "effective_batch": outcome.effective_batch, "version": version}))
        return
    results: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for name in arguments.only or [name for name in NAMES if name not in results]:
        answer = ran(name, arguments.python)
        results = {**(json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}), name: answer}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        print(name, results[name], flush=True)
    (HERE / "table.md").write_text(table(results), encoding="utf-8")


def ran(name: str, python: str) -> dict[str, Any]:
    """The tuner's outcome in a process of its own, with its wall and processor seconds."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    words = [python, "-m", "experiments.tuners", "--one", name]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "AUTOFIT_SERVER": "0"})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    stamp = {
        "wall_s": round(time.monotonic() - began, 1),
        "cpu_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        "date": datetime.date.today().isoformat(), "autofit": commit(),
    }  # fmt: skip
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1][:300], **stamp}
    return {**json.loads(done.stdout.strip().splitlines()[-1]), **stamp}


def table(results: dict[str, Any]) -> str:
    from experiments.tuners import task

    asked = task.MICRO * task.ACCUMULATION
    lines = [
        "# Tuners on one training", "",
        f"{task.MODEL}, all weights, bfloat16, samples of {task.TOKENS} tokens, no checkpointing, "
        f"as {task.MICRO} x {task.ACCUMULATION} = "
        f"{asked} samples an optimizer step, on a simulated {task.CARD}. Speeds are simulated.", "",
        "| tuner | version | probes | out of memory | split | samples a step | same? | samples/s | wall s | CPU s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, row in results.items():
        if "error" in row:
            lines.append(
                f"| {name} | did not run: {row['error']} | | | | | | | {row['wall_s']:.0f} | {row['cpu_s']:.0f} |"
            )
            continue
        same = "yes" if row["effective_batch"] == asked else "**no**"
        split = f"{row['micro_batch']} x {row['accumulation']} | {row['effective_batch']} | {same}"
        took = f"{row['samples_per_s']:.1f} | {row['wall_s']:.0f} | {row['cpu_s']:.0f}"
        lines.append(f"| {name} | {row['version']} | {row['probes']} | {row['ooms']} | {split} | {took} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
