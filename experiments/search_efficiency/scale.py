"""Seconds to list, score and sort 10^5 candidates of the built-in baseline.

Run: `python experiments/search_efficiency/scale.py`

The mass models are traced first, and not timed: scoring is their evaluation for every candidate. The Pareto front is
computed from as many trials, by the same code as for a study. Writes scale.json; one run, one machine.
"""

import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import TypeVar

import numpy as np

from autofit.forecast.forecast import Forecaster
from autofit.probing.fork_server import ForkServer
from autofit.probing.prepare import prepare, worst_case_path
from autofit.probing.result import ProbeResult, ProbeStatus
from autofit.recipe.yaml_file import PROMPT_TOKENS, baseline_path
from autofit.space.knob import load_space
from autofit.space.space import Knob, Space
from autofit.tuning.candidates import Grid
from autofit.tuning.frontier import Trial, pareto_front
from autofit.tuning.sampler import make_sampler

T = TypeVar("T")
_HERE = Path(__file__).parent
_DEVICE = "sim:a100-40gb"
_SPLIT = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 16, "steps_per_generation": 16}
_MORE = {
    "lora_r": (4, 8, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128),
    "max_completion_length": (32, 48, 64, 80, 96, 112, 128, 144, 160, 192, 224, 256, 320, 384, 512, 768),
    "num_generations": (2, 4, 8),
}


def timed(work: Callable[[], T], repeats: int = 3) -> tuple[float, T]:
    """(median seconds, result of the last run)."""
    seen = []
    for _ in range(repeats):
        began = time.perf_counter()
        found = work()
        seen.append(round(time.perf_counter() - began, 3))
    return median(seen), found


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    server = ForkServer(folder / "warm")
    try:
        recipe = prepare(
            baseline_path(), trainer="grpo", device=_DEVICE, folder=folder, server=server, changes=_SPLIT,
            prompt_tokens=PROMPT_TOKENS,
        )  # fmt: skip
        plain = [k for k in load_space(None, trainer="grpo") if k.tier == "neutral" and not k.when]
        knobs = (*plain, *(Knob(name=n, tier="recipe", values=v) for n, v in _MORE.items()))
        list_s, space = timed(lambda: _listed(Space.of(recipe, knobs, allow="recipe", device=_DEVICE)))
        forecaster = Forecaster(
            device=_DEVICE, worst_case=worst_case_path(folder), server=server, scratch=folder / "forecasts",
            kept=folder / "kept",
        )  # fmt: skip
        trace_s, _ = timed(lambda: forecaster.predict(space), repeats=1)
        score_s, predictions = timed(lambda: forecaster.predict(space))
    finally:
        server.close()
    grid_s, grid = timed(lambda: Grid.of(space))
    sampler_s, _ = timed(lambda: make_sampler("autofit", grid, predictions=predictions, target_bytes=39 * 10**9))
    rows = zip(predictions.device_used_bytes.tolist(), predictions.step_s.tolist(), strict=True)
    trials = [
        Trial(number=n, tier="neutral", changes={}, params={}, result=ProbeResult(
            status=ProbeStatus.FIT, device=_DEVICE, device_used_bytes=int(used), step_s=(step_s,),
        ))
        for n, (used, step_s) in enumerate(rows)
    ]  # fmt: skip
    front_s, front = timed(lambda: pareto_front(trials))
    content = {
        "date": date.today().isoformat(), "device": f"cpu x {os.cpu_count()} ({platform.machine()})",
        "versions": {name: version(name) for name in ("numpy", "torch", "optuna")},
        "candidates": len(grid), "known": int((~np.isnan(predictions.step_s)).sum()),
        "list_s": list_s, "trace_s": round(trace_s, 1), "score_s": score_s, "front_s": front_s, "front": len(front),
        "grid_s": grid_s, "sampler_s": sampler_s,
    }  # fmt: skip
    (_HERE / "scale.json").write_text(json.dumps(content, indent=1) + "\n")
    print(json.dumps(content, indent=1))


def _listed(space: Space) -> Space:
    space.allowed()
    return space


if __name__ == "__main__":
    main()
