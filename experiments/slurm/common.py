"""What the experiments on a real Slurm share: a large space of lawful probes, and the process that drives a search."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).parent
HELPERS = (str(HERE.parents[1] / "tests"), str(HERE), str(HERE.parents[1]))
sys.path[:0] = HELPERS
os.environ["PYTHONPATH"] = os.pathsep.join(HELPERS)

import lawful  # noqa: E402
from recipes import grpo_recipe  # noqa: E402

from autofit.cluster.scheduler import executor_of  # noqa: E402
from autofit.probing.cluster_launch import ClusterLauncher  # noqa: E402
from autofit.space.knob import load_space  # noqa: E402
from autofit.space.space import Space  # noqa: E402
from autofit.tuning.locks import exclusive  # noqa: E402
from autofit.tuning.search import Plan, Search, open_study  # noqa: E402
from autofit.tuning.study import load_study, trials_of  # noqa: E402


def plan(folder: Path, trials: int, at_once: int) -> Plan:
    """A search in grid order of the first of 25,272 candidates, all of which fit."""
    recipe = grpo_recipe(per_device_train_batch_size=4, gradient_accumulation_steps=60, loss_type="dapo")
    space = Space.of(recipe, load_space(None, trainer="grpo"), allow="recipe")
    return Plan(
        recipe=recipe, space=space, folder=folder, device="cpu", target_bytes=None, max_trials=trials,
        study_name="law", sampler="grid", parallel=at_once,
    )  # fmt: skip


def drive(folder: Path, trials: int, at_once: int, per_job: int) -> None:
    """Search to the end, as one driver would, and say what it does."""
    wanted = plan(folder, trials, at_once)
    executor = executor_of({"kind": "slurm", "probes_per_job": per_job, "time": 30, "mem": "100M"})
    with exclusive(folder / "locks", "law"):
        launcher = ClusterLauncher(executor, wanted.probes_folder / "jobs", function=lawful.run)
        search = Search(wanted, open_study(wanted), server_socket=None, launcher=launcher)
        search.on_note = lambda text: print(text, flush=True)
        try:
            print(search.run().words, flush=True)
        finally:
            launcher.close()


def start(arguments: list[object], log: Path, env: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    """A driver in a process of its own: folder, trials, at once, probes a job."""
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, str(HERE / "common.py"), *map(str, arguments)], env={**os.environ, **env}, stdout=file,
            stderr=file,
        )  # fmt: skip


def told(folder: Path) -> dict[str, tuple[object, ...]]:
    """{candidate: its result} of a study."""
    return {
        str(t.changes): (str(t.status), t.step_s, t.device_used_bytes) for t in trials_of(load_study(folder, "law"))
    }


def add_row(path: Path, row: Mapping[str, object]) -> None:
    """Add what was measured to the list in the file `path`, and print it."""
    rows = json.loads(path.read_text()) if path.exists() else []
    path.write_text(json.dumps([*rows, row], indent=1) + "\n")
    print(json.dumps(row, indent=1))


if __name__ == "__main__":
    began = time.monotonic()
    drive(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
