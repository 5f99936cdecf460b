"""Does the GRPO run raise the tiny model's reward on problems it never saw? Three seeds, before and after.

Run: python experiments/tiny_reward/run.py [--seeds 0 1 2] [--threads 1]
Every run is TRL's own script on the recipe as `prepare_tiny` wrote it; only the folder and the device are added.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import yaml

from autofit.demo import prepare_tiny
from autofit.demo.heldout import HeldOutReward, held_out_reward

HERE = Path(__file__).parent
PACKAGES = ("torch", "transformers", "trl", "peft", "reasoning-gym")


def run_grpo(recipe: Path, output_dir: Path, *, threads: int) -> float:
    """Seconds TRL's own script took to train `recipe` on the CPU."""
    command = [sys.executable, "-m", "trl.scripts.grpo", "--config", str(recipe)]
    command += ["--use_cpu", "true", "--output_dir", str(output_dir), "--disable_tqdm", "true"]
    started = time.perf_counter()
    log = output_dir.with_suffix(".log")
    with log.open("w") as file:
        env = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        subprocess.run(command, check=True, stdout=file, stderr=subprocess.STDOUT, env=env)
    return time.perf_counter() - started


def measure_seed(seed: int, work: Path, *, threads: int) -> dict[str, float]:
    """Held-out reward before and after the run of one seed."""
    recipe = prepare_tiny(work / "cache", seed=seed, progress=say)
    settings = yaml.safe_load(recipe.read_text())
    test = Path(settings["dataset_name"]) / "test.jsonl"
    model = Path(settings["model_name_or_path"])
    before = held_out_reward(model, test)
    grpo_s = run_grpo(recipe, work / f"grpo-{seed}", threads=threads)
    after = held_out_reward(work / f"grpo-{seed}", test)
    return row(seed, before, after, grpo_s)


def row(seed: int, before: HeldOutReward, after: HeldOutReward, grpo_s: float) -> dict[str, float]:
    """One line of the table."""
    return {
        "seed": seed,
        "problems": before.num_problems,
        "sampled_before": round(before.sampled, 4),
        "sampled_after": round(after.sampled, 4),
        "greedy_before": round(before.greedy, 4),
        "greedy_after": round(after.greedy, 4),
        "grpo_s": round(grpo_s, 1),
    }


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as work:
        rows = []
        for seed in arguments.seeds:
            rows.append(measure_seed(seed, Path(work), threads=arguments.threads))
            print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    results = {
        "date": datetime.now(UTC).date().isoformat(),
        "device": f"cpu ({platform.machine()}, {arguments.threads} threads)",
        "python": platform.python_version(),
        "versions": {package: version(package) for package in PACKAGES},
        "reward": "share of held-out problems solved; sampled: 8 completions a problem at temperature 1",
        "rows": rows,
    }
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
