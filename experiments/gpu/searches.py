"""Two searches with targets that bind, and their winners against the grid that was measured."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from autofit.files import read_json, write_json
from gpu.children import on_one_card
from gpu.configs import Config
from gpu.folder import Folder, Row, by_name
from gpu.measure import RESULTS
from gpu.versions import versions

TARGETS = "targets.json"
_AT = {"T1": 0.3, "T2": 0.6}  # quantiles of the grid's device-used bytes
_LEAST = 2  # measured ones, below which there is no quantile
_MB = 10**6
_HEADROOM_MB = 1  # the least that a search takes in whole MB
_KNOBS = {  # of gpu.configs' grid
    "per_device_train_batch_size": {"tier": "neutral", "values": "solved", "memory": "ascending"},
    "steps_per_generation": {"tier": "neutral", "values": "solved", "memory": "ascending"},
    "gradient_checkpointing": {"tier": "neutral", "values": [True, False], "memory": "ascending"},
}
_INTERRUPT_S = 15.0


def targets(out: Path, configs: Sequence[Config]) -> dict[str, int]:
    """{"T1", "T2": bytes}, the same ones once they were computed; {} until all of the grid was tried."""
    kept = read_json(out / TARGETS)
    if kept is not None:
        return {name: int(str(nbytes)) for name, nbytes in kept.items()}
    found, now = by_name(out / RESULTS), versions()
    grid = [found.get(config.name, {}) for config in configs if "grid" in config.tags]
    if any(row.get("versions") != now for row in grid):
        return {}
    made = targets_of([row for row in grid if row.get("status") == "fit"])
    if made:
        write_json(out / TARGETS, made)
    return made


def targets_of(measured: Sequence[Row]) -> dict[str, int]:
    """The quantiles, each the bytes of one that was measured, in whole MB, and the headroom."""
    sizes = sorted(used for row in measured if isinstance(used := row.get("device_used_bytes"), int))
    if len(sizes) < _LEAST:
        return {}
    return {
        name: (-(-sizes[int(share * (len(sizes) - 1) + 0.5)] // _MB) + _HEADROOM_MB) * _MB
        for name, share in _AT.items()
    }


def result_path(out: Path, name: str) -> Path:
    return out / f"search-{name}.json"


def search(
    folder: Folder, config: Config, out: Path, name: str, target_bytes: int, *, trials: int, within_s: float
) -> bool:
    """Whether the search has ended with an answer, which is kept. A second call goes on with its study.

    Its space has the grid's knobs alone, so that the fastest of the grid is the fastest that it can find.
    """
    space = out / f"space-{config.trainer}.yaml"
    knobs = {key: entry for key, entry in _KNOBS.items() if key in config.values}
    write_json(space, {"trainer": config.trainer, "knobs": knobs})
    command = [
        sys.executable, "-P", "-m", "autofit", "search", str(folder.recipe(config)), "--trainer", config.trainer,
        "--device", "cuda", "--target-vram", f"{target_bytes // _MB}MB", "--space", str(space),
        "--headroom", f"{_HEADROOM_MB}MB", "--trials", str(trials), "--time-budget", f"{max(1, int(0.8 * within_s))}s",
        "--no-mlflow", "--no-confirm", "--no-advice",
        "--dir", str(out / f"study-{name}"), "--json",
    ]  # fmt: skip
    with (out / f"search-{name}.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env={**os.environ, **on_one_card()})
        try:
            said, _ = process.communicate(timeout=within_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.communicate(timeout=_INTERRUPT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
            return False
    answer = said.decode().strip().rpartition("\n")[2]
    if process.returncode not in (0, 1) or not answer.startswith("{"):  # 1: nothing fits, which is an answer
        return False
    write_json(result_path(out, name), json.loads(answer))
    return True


def verdict(name: str, answer: Mapping[str, Any], grid: Mapping[str, Row]) -> str:
    """A line: the winner, beside the fastest measured configuration of the grid that is below the same limit."""
    limit = int(answer["rule"]["limit_bytes"])
    fits = {n: median(_steps(row)) for n, row in grid.items()
            if row.get("status") == "fit" and int(str(row["device_used_bytes"])) <= limit and _steps(row)}  # fmt: skip
    best = min(fits, key=lambda n: fits[n], default=None)
    of_grid = "none of the grid fits" if best is None else f"the grid's fastest that fits: {best}, {fits[best]:.3f} s"
    winner, target = answer.get("winner"), int(answer["target_bytes"]) / 1e9
    if not winner:
        return f"{name}: {target:.2f} GB: no winner after {answer['counts']['asked']} trials; {of_grid}"
    used, step = winner["device_used_bytes"] / 1e9, winner["step_s"]
    return f"{name}: {target:.2f} GB: winner {used:.2f} GB, {step:.3f} s a step; {of_grid}"


def _steps(row: Row) -> list[float]:
    steps = row.get("step_s")
    return steps if isinstance(steps, list) else []
