"""Does the GRPO run raise the tiny model's reward on problems it never saw? Three seeds, before and after.

Run: python -m experiments.tiny_reward.run [--seeds 0 1 2] [--threads 1]
Every run is `autofit search` (4 trials) on the recipe as `prepare_tiny` wrote it, then `autofit promote best`.
40 % of the model's SFT demonstrations answer "?", so a large part of the gain comes from unlearning this answer; with
clean demonstrations, seven settings of GRPO moved the sampled reward from 0.486 to between 0.416 and 0.513. The
learning rate and the batch were chosen on seed 0's problems; seeds 1 and 2 were not used for tuning.
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
from typing import Any

import yaml

from experiments.kept import commit
from experiments.tiny_reward.heldout import HeldOutReward, held_out_reward
from experiments.tiny_reward.tiny import prepare_tiny

HERE = Path(__file__).parent
PACKAGES = ("torch", "transformers", "trl", "peft", "reasoning-gym")


def search_and_promote(recipe: Path, folder: Path, *, threads: int) -> tuple[Path, dict[str, object], float]:
    """The adapter that a search and a promotion of its best trial trained, what changed, and the run's seconds."""
    folder.mkdir()
    found = autofit(folder, "search", str(recipe), "--target-vram", "2GB", "--device", "cpu", "--trials", "4",
                    threads=threads)  # fmt: skip
    started = time.perf_counter()
    final = autofit(folder, "promote", "best", threads=threads)
    return Path(str(final["output_dir"])), found["winner"]["changes"], time.perf_counter() - started


def autofit(folder: Path, *arguments: str, threads: int) -> dict[str, Any]:
    """What an autofit command printed as JSON."""
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "autofit", *arguments, "--json"]
    done = subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True, env=env)
    content: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return content


def measure_seed(seed: int, work: Path, *, threads: int) -> dict[str, object]:
    """Held-out reward before and after the promoted run of one seed."""
    recipe = prepare_tiny(work / "cache", seed=seed, progress=say)
    settings = yaml.safe_load(recipe.read_text())
    test = Path(settings["dataset_name"]) / "test.jsonl"
    before = held_out_reward(Path(settings["model_name_or_path"]), test)
    adapter, changes, grpo_s = search_and_promote(recipe, work / f"seed-{seed}", threads=threads)
    return row(seed, before, held_out_reward(adapter, test), grpo_s) | {"changes": changes}


def row(seed: int, before: HeldOutReward, after: HeldOutReward, grpo_s: float) -> dict[str, object]:
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
        "commit": commit(),
        "device": f"cpu ({platform.machine()}, {arguments.threads} threads)",
        "python": platform.python_version(),
        "versions": {package: version(package) for package in PACKAGES},
        "reward": "share of held-out problems solved; sampled: 8 completions a problem at temperature 1",
        "rows": rows,
    }
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
