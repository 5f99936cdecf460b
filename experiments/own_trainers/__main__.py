"""LLaMA-Factory itself on the simulated card, beside `estimate`: `python -m experiments.own_trainers PYTHON [CASE]`.

PYTHON is that of an environment with LLaMA-Factory and its own versions (README.md). Results are added to results.json
and the table is made again after each case.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

import autofit
from experiments.own_trainers import made

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
LIFT = HERE.parents[1] / "fakegpu-torch" / "lift.py"
CARD = "a100-80gb"
LIBRARIES = ("llamafactory", "transformers", "trl", "peft", "accelerate", "torch")


def theirs(python: str, project: Path, file: Path) -> dict[str, Any]:
    """Bytes that the tool's own trainer holds on the simulated card, by category at its peak."""
    environment = os.environ | {
        "PYTHONPATH": str(project), "DISABLE_VERSION_CHECK": "1", "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    done = subprocess.run(
        [python, str(project / "examples" / "llama_factory.py"), file.name, CARD],
        cwd=file.parent, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1]}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def ours(file: Path) -> dict[str, Any]:
    """What `autofit estimate FILE` says of the same file."""
    command = [sys.executable, "-m", "autofit", "estimate", file.name, "--gpu", CARD, "--no-advice", "--json"]
    done = subprocess.run(command, cwd=file.parent, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        return {"failed": done.stderr.strip().splitlines()[-1]}
    said = json.loads(done.stdout)
    peak = max(said["phases"], key=lambda phase: phase["peak_allocated_bytes"])
    held = {"allocated": said["peak_allocated_bytes"], "reserved": said["peak_reserved_bytes"]}
    return held | {"at_peak": peak["categories"]}


def table(results: dict[str, Any]) -> str:
    lines = ["| case | its own trainer, GB | `estimate`, GB | difference |", "|---|---|---|---|"]
    for name, row in results["cases"].items():
        one, other = row["theirs"], row["ours"]
        if "failed" in one or "failed" in other:
            why = " ".join(
                f"{who}: {said['failed']}" for who, said in (("theirs", one), ("ours", other)) if "failed" in said
            )
            lines.append(f"| {name} | | | {why.replace('|', '/')[:160]} |")
            continue
        apart = other["allocated"] - one["allocated"]
        share = f"{apart:+,} B ({100 * apart / one['allocated']:+.3f} %)"
        lines.append(f"| {name} | {one['allocated'] / 1e9:.3f} | {other['allocated'] / 1e9:.3f} | {share} |")
    return "\n".join(lines) + "\n"


def versions(python: str) -> dict[str, str]:
    asked = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {LIBRARIES}}}))"
    done = subprocess.run([python, "-c", asked], check=True, capture_output=True, text=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(str(__doc__))
    python, chosen = sys.argv[1], sys.argv[2:]
    asked = yaml.safe_load((HERE / "cases.yaml").read_text("utf-8"))
    results = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {"cases": {}}
    results |= {"theirs": versions(python), "autofit": autofit.__version__}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made.write_model(folder / "model")
        made.write_data(folder / "data")
        subprocess.run([sys.executable, LIFT, folder / "project"], check=True)
        for case, changes in asked["cases"].items():
            if chosen and case not in chosen:
                continue
            file = folder / "recipe.yaml"
            places = {"model_name_or_path": "model", "dataset_dir": "data", "output_dir": "out"}
            data = {"dataset": asked["data"][changes["stage"]]}
            file.write_text(yaml.safe_dump(asked["base"] | places | data | changes), encoding="utf-8")
            results["cases"][case] = {"theirs": theirs(python, folder / "project", file), "ours": ours(file)}
            RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            (HERE / "table.md").write_text(table(results), encoding="utf-8")
            print(case, results["cases"][case]["theirs"], results["cases"][case]["ours"], sep="\n  ", flush=True)


if __name__ == "__main__":
    main()
