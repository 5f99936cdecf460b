"""The seeds' configurations on simulated cards, next to the figures that the seeds give. Every figure is predicted.

Run: python experiments/seeds/run.py [--only NAME ...]
Each NAME.yaml is a recipe; seeds.yaml has its card, ranks, prompt and claim, and `recipe` where its YAML is another's.
Further models of a seed, besides its policy, are not part of a TRL recipe: their bf16 weights are added. Results:
results.json and table.md.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from autofit.recipe.catalogue import architecture

HERE = Path(__file__).parent
GB = 1e9


def estimate(name: str, seed: dict[str, Any]) -> dict[str, Any]:
    """What `autofit estimate --json` says, or its one line of error."""
    ranks = seed.get("ranks", 1)
    card = seed["card"] if ranks == 1 else f"{ranks}x{seed['card']}"
    command = [sys.executable, "-m", "autofit", "estimate", f"{seed.get('recipe', name)}.yaml", "--gpu", card, "--json",
               "--no-advice", "--prompt-tokens", str(seed["tokens"])]  # fmt: skip
    command += ["--num-processes", str(ranks)] if ranks > 1 else []
    command += ["--trainer", seed["trainer"]] if "trainer" in seed else []
    command += ["--target-vram", seed["target"]] if "target" in seed else []
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        return {"error": done.stderr.strip().splitlines()[-1]}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def beside_bytes(seed: dict[str, Any], found: dict[str, Any]) -> int:
    """Weights of the models that only answer."""
    models = [architecture(model) for model in seed.get("beside", [])]
    total = sum(2 * model.parameters for model in models if model is not None)
    if seed.get("beside_policy"):
        total += next(p["categories"]["weights"] for p in found["phases"] if p["name"] == "update")
    return int(total)


def row(name: str, result: dict[str, Any]) -> str:
    seed, found = result["seed"], result["predicted"]
    if "error" in found:
        return f"| {name} | {seed['card']} | {seed.get('ranks', 1)} | {seed['says']} | {found['error']} | | | |"
    needs = found["least_capacity_bytes"] + result["beside_bytes"]
    peak = max(found["phases"], key=lambda p: p["peak_allocated_bytes"])
    held = ", ".join(f"{k} {v / GB:.1f}" for k, v in sorted(peak["categories"].items(), key=lambda e: -e[1])[:3])
    fits = "fits" if needs <= found["capacity_bytes"] else f"{(needs - found['capacity_bytes']) / GB:.1f} GB over"
    step = "-" if found["step_s"] is None else f"{found['step_s']:.2f} s"
    beside = f" + {result['beside_bytes'] / GB:.1f} beside" if result["beside_bytes"] else ""
    device = f"{found['device_used_bytes'] / GB:.1f}{beside}"
    card = f"{seed['card']} | {seed.get('ranks', 1)}"
    return f"| {name} | {card} | {seed['says']} | {device} | {fits} | {peak['name']}: {held} | {step} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="*", default=[], help="names of recipes; the others keep their last result")
    options = parser.parse_args()
    path = HERE / "results.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for name, seed in yaml.safe_load((HERE / "seeds.yaml").read_text()).items():
        if not options.only or name in options.only:
            found = estimate(name, seed)
            results[name] = {"seed": seed, "predicted": found, "beside_bytes": 0}
            if "error" not in found:
                results[name]["beside_bytes"] = beside_bytes(seed, found)
            print(row(name, results[name]), flush=True)
            path.write_text(json.dumps(results, indent=1) + "\n")
    columns = ("configuration", "card", "ranks", "the seed says", "device-used (GB), predicted", "verdict, predicted",
               "at the peak (GB)", "step, predicted")  # fmt: skip
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    lines += [row(name, result) for name, result in sorted(results.items())]
    (HERE / "table.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
