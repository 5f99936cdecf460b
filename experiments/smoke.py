"""Every experiment, started with its shortest arguments: `python -m experiments.smoke [NAME ...]`, or `nox -s smoke`.

It runs in a clone of the last commit, where it may write its results. One that still runs after --seconds is stopped
and counts as one that runs: what is looked for is a program that no longer fits the code which it measures.

`--sample` runs four of those that end within seconds (SHORT), drawn by the last commit: CI's share, in `.ci/smoke`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
_WHOLE_RUN = "ms-swift-2024/lora qwen-1_8b-chat, Max Length 2048"
COMMANDS: dict[str, list[str]] = {  # by name: what python is given
    "acceptance": ["-m", "experiments.acceptance", "status"],
    "acceptance/first_search": ["-m", "experiments.acceptance.first_search"],
    "busy_machine": ["experiments/busy_machine/run.py", "--seeds", "1"],
    "drift": ["-m", "experiments.drift.run"],
    "engines": ["-m", "experiments.engines"],
    "engines/continuous": ["-m", "experiments.engines.continuous"],
    "fakegpu_depth": ["experiments/fakegpu_depth/depth.py"],
    "faults": ["-m", "experiments.faults", "--runs", "1", "--beside", "1"],
    "field": ["-m", "experiments.field", "--only", "trl-3678-20gb", "--no-notes", "--no-advice"],
    "frontends/examples": ["-m", "experiments.frontends.examples"],
    "frontends/recipes": ["-m", "experiments.frontends.recipes"],
    "full_run/overhead": ["experiments/full_run/overhead.py", "--pairs", "4"],
    "full_run/peak": ["experiments/full_run/peak.py", "--only", "sft"],
    "key_tables": ["-m", "experiments.key_tables"],
    "large_study": ["experiments/large_study/run.py", "--trials", "20", "--samplers", "random", "--short", "5"],
    "large_study/storages": ["experiments/large_study/storages.py", "--smoke"],
    "neutrality": ["experiments/neutrality/run.py", "--only", "sft"],
    "neutrality/ranks": ["experiments/neutrality/ranks.py"],
    "peaks": ["-m", "experiments.frontends.peaks", "--smoke"],
    "peaks/whole_run": ["-m", "experiments.frontends.peaks.whole_run", _WHOLE_RUN, "--least", "--steps", "2", "--seeds",
                        "1", "--all-weights", "HuggingFaceTB/SmolLM2-135M"],
    "peers": ["-m", "experiments.peers", "table"],
    "probe_overhead": ["experiments/probe_overhead/run.py"],
    "ranks": ["-m", "experiments.ranks.peaks", "sft"],
    "ranks/foundry": ["-m", "experiments.ranks.foundry", "table"],
    "ranks/scaling": ["-m", "experiments.ranks.scaling"],
    "rates/bandwidth": ["experiments/rates/bandwidth.py"],
    "rates/fsdp_hooks": ["experiments/rates/fsdp_hooks.py"],
    "search_efficiency": ["experiments/search_efficiency/run.py", "--samplers", "autofit", "--seeds", "1", "--probes",
                          "2", "--workers", "1", "--no-plot"],
    "search_efficiency/cpu": ["experiments/search_efficiency/cpu.py", "--seeds", "1", "--probes", "2"],
    "search_efficiency/scale": ["experiments/search_efficiency/scale.py"],
    "seeds": ["experiments/seeds/run.py", "--only", "003_bf16"],
    "shared_studies": ["experiments/shared_studies/cost.py", "postgres", "5", "1"],
    "shared_studies/sqlite": ["experiments/shared_studies/cost.py", "sqlite", "5", "1"],
    "slurm": ["experiments/slurm/scale.py", "--smoke"],
    "slurm/cost": ["experiments/slurm/cost.py", "--trials", "20"],
    "slurm/storm": ["experiments/slurm/storm.py", "--probes", "6", "--events", "2"],
    "storm": ["-m", "experiments.storm", "--inputs", "100", "--torn", "1", "--kills", "1", "--minutes", "1"],
    "tabular": ["-m", "experiments.tabular.searches"],
    "tuners": ["-m", "experiments.tuners", "--only", "autofit search"],
    "two_cards": ["-m", "experiments.two_cards.program", "mistral-7b/full/2", "out.json"],
    "verl_boundaries": ["experiments/verl_boundaries/run.py", "1"],
    "verl_logs": ["experiments/verl_logs/run.py", "1"],
}  # fmt: skip
# Each took at most 6 s of a processor and 11 s in all: CI draws from them. Without a Slurm of its own: CI's tests start
# several, on the same two cores, and a test that failed for want of time has a second chance there.
SHORT = (
    "acceptance", "engines", "key_tables", "large_study/storages", "peers", "ranks/foundry", "seeds", "shared_studies",
    "shared_studies/sqlite", "slurm/cost",
)  # fmt: skip
_DRAWN = 4
# Of a server that Debian has: the module of tests/ that starts one, and says what this machine lacks for it.
SERVERS = {"shared_studies": "postgres_server", "slurm": "slurm_cluster", "slurm/storm": "slurm_cluster"}
NEEDS = {  # what the others need beside this repository's own environment
    "accuracy": "a clone of the measured project",
    "advise": "nothing: three recipes that `autofit advise` is given",
    "context": "CUDA's libraries",
    "frontends/chance": "checkouts of the other tools",
    "gpu": "a card, or `--tiny` and `--device cpu`, as tests/test_campaign.py runs it",
    "oracle": "torch's CUDA build",
    "own_trainers": "the other tools' own environments",
    "slurm/two_nodes": "minutes: tests/test_slurm_promote.py has its run, with fewer steps",
    "tiny_reward": "GSM8K",
}


def lacking(name: str) -> str | None:
    """What this machine lacks for a server that the experiment starts; None where it has all."""
    if name not in SERVERS:
        return None
    if (tests := str(REPOSITORY / "tests")) not in sys.path:
        sys.path.append(tests)
    said: str | None = importlib.import_module(SERVERS[name]).missing()
    return said


def sample(commit: str) -> list[str]:
    """Names of the short experiments that are drawn for a commit, in their order; always the same ones."""
    return sorted(random.Random(commit).sample(SHORT, _DRAWN))


def run(name: str, copy: Path, limit_s: float) -> tuple[str, float]:
    """("" where it ends well or still runs after `limit_s` seconds, else the last lines it said; its seconds)."""
    began = time.monotonic()
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{copy}:{copy / 'experiments'}"}
    with tempfile.TemporaryFile("w+") as said:
        child = subprocess.Popen([sys.executable, *COMMANDS[name]], cwd=copy, env=environment, stdin=subprocess.DEVNULL,
                                 stdout=said, stderr=said, start_new_session=True)  # fmt: skip
        try:
            code = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = 0
        finally:
            _end(child)
        said.seek(0)
        lines = [line.rstrip() for line in said if line.strip()]
    return "" if code == 0 else "\n".join(lines[-5:]) or f"exit code {code}", time.monotonic() - began


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a program and what it started, as Ctrl-C would; at last by force."""
    for how, wait_s in ((signal.SIGINT, 20), (signal.SIGKILL, 20)):
        try:
            os.killpg(child.pid, how)
            child.wait(wait_s)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.smoke", description=__doc__)
    parser.add_argument("name", nargs="*", choices=[*COMMANDS, []], help="of an experiment (default: all)")
    parser.add_argument("--seconds", type=float, default=120.0, help="after which one is stopped (120)")
    parser.add_argument("--sample", action="store_true", help="four short ones, drawn by the last commit")
    options = parser.parse_args()
    names, failed = options.name or list(COMMANDS), 0
    with tempfile.TemporaryDirectory(prefix="smoke-") as home:
        copy = Path(home) / "autofit"
        subprocess.run(["git", "clone", "-q", REPOSITORY, copy], check=True)
        if options.sample:
            head = ["git", "-C", str(copy), "rev-parse", "HEAD"]
            names = sample(subprocess.run(head, check=True, capture_output=True, text=True).stdout.strip())
            print(f"drawn by the last commit: {', '.join(names)}", flush=True)
        for name in names:
            if lacks := lacking(name):
                print(f"{name}: not run, {lacks}", flush=True)
                continue
            problem, spent_s = run(name, copy, options.seconds)
            failed += bool(problem)
            print(f"{name}: {'ok' if not problem else 'FAILED'} in {spent_s:.0f} s", flush=True)
            if problem:
                print(problem, flush=True)
    for name, what in NEEDS.items() if not (options.sample or options.name) else ():
        print(f"{name}: not run, it needs {what}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
