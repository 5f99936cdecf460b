"""Full runs with injected faults against uninterrupted ones: `python -m experiments.faults [--only KIND] [--runs N]`.

Needs Linux, and root for the full disk (a small tmpfs is mounted). The results are added to results.json.
"""

import argparse
import json
import math
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path

import yaml

HERE = Path(__file__).parent
for helpers in (HERE.parents[1] / "tests", HERE.parent):
    sys.path.insert(0, str(helpers))
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE.parents[1] / "tests"), str(HERE.parent), str(HERE.parents[1])])

import tiny  # noqa: E402

from autofit.probing.fork_server import ForkServer  # noqa: E402
from experiments.faults.faults import KINDS, OOM_REWARD, STEPS  # noqa: E402
from experiments.faults.run import FaultyRun  # noqa: E402
from experiments.faults.table import table  # noqa: E402

_ROUNDING = 1e-5  # of what another micro-batch adds up in another order


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=sorted(KINDS), action="append")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--beside", type=int, default=os.cpu_count() or 1, help="runs at a time")
    options = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="faults-"))
    server = ForkServer(home / "warm")
    try:
        recipes = {name: _recipe(name, home) for name in ("sft", "grpo")}
        whole = {name: _uninterrupted(name, recipes[name], home, server) for name in recipes}
        with ThreadPoolExecutor(options.beside) as pool:
            for kind in options.only or KINDS:
                row = partial(_row, kind, seed=options.seed, recipes=recipes, whole=whole, home=home, server=server)
                _keep(kind, list(pool.map(row, range(options.runs))))
    finally:
        server.close()


def _recipe(name: str, home: Path) -> tuple[Path, Mapping[str, object]]:
    """(the working folder of a tiny recipe, its values); it saves every fourth step."""
    folder = home / name
    model = tiny.write_model(folder / "model")
    # Dropout would draw other masks for another micro-batch, after an OOM.
    changes = {"max_steps": STEPS, "save_steps": 4, "save_total_limit": 3, "lora_dropout": 0.0}
    if name == "grpo":
        path = tiny.write_recipe(folder, model, temperature=1.0, **changes)
        (folder / "oom_rewards.py").write_text(OOM_REWARD)
    else:
        path = tiny.write_offline_recipe(name, folder, model, **changes)
    return folder, yaml.safe_load(path.read_text())


def _run(name: str, recipe: tuple[Path, Mapping[str, object]], folder: Path, server: ForkServer) -> FaultyRun:
    cwd, values = recipe
    return FaultyRun(folder=folder, output=folder / "out", trainer=name, values=values, cwd=cwd, server=server)


def _uninterrupted(name: str, recipe: tuple[Path, Mapping[str, object]], home: Path, server: ForkServer) -> FaultyRun:
    """A run without faults, at its end."""
    run = _run(name, recipe, home / f"whole-{name}", server)
    run.start()
    run.wait()
    assert run.final is not None, (run.folder / "log").read_text()
    return run


def _row(
    kind: str, number: int, *, seed: int, recipes: Mapping[str, tuple[Path, Mapping[str, object]]],
    whole: Mapping[str, FaultyRun], home: Path, server: ForkServer,
) -> dict[str, object]:  # fmt: skip
    """What one run met, and whether it ended as the uninterrupted one."""
    name = "grpo" if kind == "oom" else ("sft", "grpo")[number % 2]
    run = _run(name, recipes[name], home / f"{kind}-{number}", server)
    began = time.monotonic()
    facts = KINDS[kind](run, random.Random(f"{kind} {number} {seed}"))
    rounding = _ROUNDING if kind == "oom" else 0.0
    mine, apart = run.final, run.weights_apart(whole[name]) if run.final is not None else None
    row: dict[str, object] = {
        "kind": kind, "number": number, "seed": seed, "trainer": name, **facts,
        "done": mine is not None, "each_step_once": [line[0] for line in run.curves] == list(range(1, STEPS + 1)),
        "lines_equal": _same(run.curves, whole[name].curves, rounding), "events": run.events,
        "final_loss_equal": mine is not None and _same([[mine["final_loss"]]], [[_final_loss(whole[name])]], rounding),
        "weights_equal": apart is not None and apart <= rounding, "weights_apart": apart,
        "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip
    print(json.dumps(row), flush=True)
    return row


def _final_loss(run: FaultyRun) -> object:
    assert run.final is not None
    return run.final["final_loss"]


def _same(ours: list[list[object]], theirs: list[list[object]], rounding: float) -> bool:
    """Whether the numbers are the same: to the last digit for `rounding` 0, or up to that share."""
    pairs = [pair for one, other in zip(ours, theirs, strict=False) for pair in zip(one, other, strict=True)]
    return len(ours) == len(theirs) and all(
        a == b if None in (a, b) else math.isclose(float(str(a)), float(str(b)), rel_tol=rounding, abs_tol=rounding)
        for a, b in pairs
    )


def _keep(kind: str, rows: list[dict[str, object]]) -> None:
    """Put the rows of a kind into results.json in place of its earlier ones, and write the table."""
    path = HERE / "results.json"
    found = json.loads(path.read_text()) if path.exists() else {"kinds": {}}
    found["kinds"][kind] = {
        "date": date.today().isoformat(), "device": f"cpu x {os.cpu_count()} ({platform.machine()})",
        "versions": {name: version(name) for name in ("torch", "transformers", "trl", "peft")}, "rows": rows,
    }  # fmt: skip
    path.write_text(json.dumps(found, indent=1) + "\n")
    (HERE / "table.md").write_text(table(found["kinds"]))


main()
