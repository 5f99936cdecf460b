"""Other tools' own trainers on the simulated card, beside `estimate`: `python -m experiments.own_trainers TOOL PYTHON`.

TOOL is one of cases.yaml, PYTHON that of an environment with the tool and its own versions (README.md); names of cases
may follow. Results are added to results.json, and the table is made again after each case.
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from experiments.own_trainers import made

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
ROOT = HERE.parents[1]
LIFT = ROOT / "fakegpu-torch" / "lift.py"
CARD = "a100-80gb"
LIBRARIES = ("llamafactory", "ms-swift", "transformers", "trl", "peft", "accelerate", "torch")
PLACES = {
    "llama-factory": {"model_name_or_path": "model", "dataset_dir": "data", "output_dir": "out"},
    "ms-swift": {"model": "small", "output_dir": "out"},
}


def command_of(tool: str, case: Mapping[str, Any], kind: str, folder: Path) -> tuple[list[str], Path]:
    """The arguments of the example that runs `case` of `tool`, and the file in which autofit reads it."""
    if tool == "llama-factory":
        file = folder / "recipe.yaml"
        file.write_text(yaml.safe_dump({**case, "dataset": kind}), encoding="utf-8")
        return ["llama_factory.py", file.name, CARD], file
    stage = case["stage"]
    command = [stage] if stage in ("sft", "pt") else ["rlhf", "--rlhf_type", stage]
    said = {key: value for key, value in case.items() if key != "stage"} | {"dataset": f"data/{kind}.jsonl"}
    for key, value in said.items():
        command += [f"--{key}", str(value).lower() if isinstance(value, bool) else str(value)]
    file = folder / "train.sh"
    file.write_text(f"swift {shlex.join(command)}\n", encoding="utf-8")
    return ["ms_swift.py", CARD, *command], file


def theirs(python: str, folder: Path, words: list[str]) -> dict[str, Any]:
    """Bytes that the tool's own trainer holds on the simulated card, by category at its peak."""
    project = folder / "project"
    environment = os.environ | {
        "PYTHONPATH": str(project), "DISABLE_VERSION_CHECK": "1", "USE_HF": "1", "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    command = [python, str(project / "examples" / words[0]), *words[1:]]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
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


def table(results: Mapping[str, Any]) -> str:
    lines = []
    for found in results.values():
        said = ", ".join(f"{name} {version}" for name, version in found["theirs"].items())
        lines += [f"## {said}; autofit at {found['autofit']}", ""]
        lines += ["| case | its own trainer, GB | `estimate`, GB | difference |", "|---|---|---|---|"]
        lines += [_row(name, row["theirs"], row["ours"]) for name, row in found["cases"].items()]
        lines.append("")
    return "\n".join(lines)


def _row(name: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    both = {"theirs": one, "ours": other}
    failed = [f"{who}: {said['failed'].replace('|', '/')}" for who, said in both.items() if "failed" in said]
    if failed:
        return f"| {name} | | | {'; '.join(failed)} |"
    apart = other["allocated"] - one["allocated"]
    share = f"{apart:+,} B ({100 * apart / one['allocated']:+.3f} %)"
    ended = f"; it ended with {one['ended_by']}" if one.get("ended_by") else ""
    return f"| {name} | {one['allocated'] / 1e9:.3f} | {other['allocated'] / 1e9:.3f} | {share}{ended} |"


def versions(python: str) -> dict[str, str]:
    asked = f"""
import importlib.metadata, json
found = {{}}
for name in {LIBRARIES}:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""
    done = subprocess.run([python, "-c", asked], check=True, capture_output=True, text=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def main() -> None:
    asked = yaml.safe_load((HERE / "cases.yaml").read_text("utf-8"))
    if len(sys.argv) < 3 or sys.argv[1] not in asked:
        sys.exit(str(__doc__))
    tool, python, chosen = sys.argv[1], sys.argv[2], sys.argv[3:]
    results = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    found = results.setdefault(tool, {"cases": {}})
    found |= {"theirs": versions(python), "autofit": commit()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made.write_model(folder / "model")
        made.write_weights(folder / "model", folder / "small")
        made.write_data(folder / "data")
        subprocess.run([sys.executable, LIFT, folder / "project"], check=True)
        for case, changes in asked[tool]["cases"].items():
            if chosen and case not in chosen:
                continue
            kind = asked[tool]["data"][changes["stage"]]
            words, file = command_of(tool, {**asked[tool]["base"], **PLACES[tool], **changes}, kind, folder)
            row = found["cases"][case] = {"theirs": theirs(python, folder, words), "ours": ours(file)}
            RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            (HERE / "table.md").write_text(table(results), encoding="utf-8")
            print(_row(case, row["theirs"], row["ours"]), flush=True)


if __name__ == "__main__":
    main()
