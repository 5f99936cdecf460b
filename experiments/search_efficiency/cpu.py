"""The same searches over a measured table: a tiny real model under TRL's trainer on the CPU.

Run: `python experiments/search_efficiency/cpu.py`; `--measure` first measures the table again, as an exhaustive
`autofit search` (some minutes on an idle machine), and writes cpu_table.json. There is no prediction for a CPU, so
every sampler starts without predictions. Targets are quantiles of the measured bytes. Writes cpu_summary.json.
"""

import argparse
import functools
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import law
import numpy as np
import optuna
import run
from cases import Case, optimum

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import tiny

from autofit.recipe.recipe import Recipe
from autofit.space.knob import load_space
from autofit.space.space import Space
from autofit.trainers.keys import ROLLOUTS
from autofit.tuning.candidates import Grid
from autofit.tuning.record import record_of
from autofit.tuning.study import load_study

SHARES = (0.3, 0.6, 0.9)  # share of the candidates that fit
_HERE = Path(__file__).parent
_TABLE = _HERE / "cpu_table.json"


def measure() -> None:
    """Probe every neutral candidate of a recipe of 32 completions, and store the results."""
    folder = Path(tempfile.mkdtemp())
    path = tiny.write_recipe(
        folder, tiny.write_model(folder / "model", hidden=128, layers=4), per_device_train_batch_size=8,
        gradient_accumulation_steps=4, steps_per_generation=4, max_completion_length=48, gradient_checkpointing=True,
        loss_type="grpo",  # with this loss the rollout size is neutral too
    )  # fmt: skip
    subprocess.run(
        [sys.executable, "-m", "autofit", "search", str(path), "--dir", str(folder / "studies"), "--device", "cpu",
         "--target-vram", "8GB", "--sampler", "grid", "--trials", "1000", "--min-gain", "0", "--no-confirm",
         "--no-mlflow", "--measured-steps", "3"],
        check=True, cwd=folder,
    )  # fmt: skip
    study = load_study(folder / "studies", None)
    rows = []
    for trial in study.trials:
        result = trial.user_attrs["result"]
        rows.append({"params": trial.params, "device_used_bytes": result["device_used_bytes"],
                     "step_s": result["step_s"], "rollout_s": result["rollout_s"]})  # fmt: skip
    versions = {name: version(name) for name in ("torch", "transformers", "trl")}
    content: dict[str, Any] = {
        "date": date.today().isoformat(), "device": f"cpu x {os.cpu_count()} ({platform.machine()})",
        "versions": versions, "resolved": dict(record_of(study).resolved), "rows": rows,
    }  # fmt: skip
    content["resolved"] |= {"model_name_or_path": "a Llama of 4 layers, 128 wide", "output_dir": "out",
                            "dataset_name": "24 made-up prompts"}  # fmt: skip
    _TABLE.write_text(json.dumps(content) + "\n")


@functools.cache
def table() -> tuple[Space, Grid, law.Floats, law.Floats, law.Floats]:
    """The space and its grid; bytes, seconds of a step (median of three) and of its rollout, of each candidate."""
    content = json.loads(_TABLE.read_text())
    recipe = Recipe(trainer="grpo", values={}, resolved=content["resolved"], keys=ROLLOUTS)
    space = Space.of(recipe, load_space(None, trainer="grpo"), device="cpu")
    grid = Grid.of(space)
    used, step, rollout = (np.full(len(grid), np.nan) for _ in range(3))
    for row in content["rows"]:
        place = grid.find(row["params"])
        assert place is not None, row
        used[place], step[place] = row["device_used_bytes"], np.median(row["step_s"])
        rollout[place] = step[place] * sum(row["rollout_s"]) / sum(row["step_s"])
    assert not np.isnan(step).any(), "the table does not have every candidate; measure it anew with --measure"
    return space, grid, used, step, rollout


def search(task: tuple[str, float, int, int]) -> dict[str, Any]:
    """One search: (sampler, share of the candidates that fit, seed, probes)."""
    name, share, seed, probes = task
    space, grid, used, step, rollout = table()
    case = Case(name=f"{share:.0%} fit", space=space, grid=grid, predictions=None,
                target_bytes=int(np.quantile(used, share)))  # fmt: skip
    assert optimum(case, used, step) is not None
    prober = run.Prober(case, used, step, rollout, seed, stops_at_oom=True)
    return {"sampler": name, "case": case.name, **run.searched(name, prober, seed, probes)}


def main() -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--probes", type=int, default=run.PROBES)
    options = parser.parse_args()
    if options.measure:
        measure()
    tasks = [(name, share, seed, options.probes)
             for name in run.SAMPLERS for share in SHARES for seed in range(options.seeds)]  # fmt: skip
    with multiprocessing.get_context("fork").Pool() as pool:
        rows = pool.map(search, tasks, chunksize=4)
    _, grid, used, step, _ = table()
    summary: dict[str, Mapping[str, Any]] = {
        "table": {
            "date": date.today().isoformat(), "device": f"cpu x {os.cpu_count()} ({platform.machine()})",
            "versions": {n: version(n) for n in ("optuna", "numpy", "scipy")}, "candidates": len(grid),
            "bytes_largest_over_smallest": round(float(used.max() / used.min()), 2),
            "seconds_slowest_over_fastest": round(float(step.max() / step.min()), 2),
        },
    }  # fmt: skip
    for name in run.SAMPLERS:
        summary[name] = run.summary_of([r for r in rows if r["sampler"] == name], options.probes)
        print(name, json.dumps(summary[name]), flush=True)
    (_HERE / "cpu_summary.json").write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    main()
