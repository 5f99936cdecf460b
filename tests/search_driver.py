"""Drives one search with lawful probes: a process for tests to kill.

Arguments: folder, trials, and for probes on Slurm how many at once.
"""

import sys
from dataclasses import replace
from pathlib import Path

import lawful
from at_once import AtOnce
from recipes import grpo_recipe

from autofit.cluster import slurm
from autofit.cluster.scheduler import executor_of
from autofit.probing.cluster_launch import ClusterLauncher
from autofit.probing.launch import Launcher
from autofit.space.knob import load_space
from autofit.space.space import Space
from autofit.tuning.search import Plan, Search, open_study
from autofit.tuning.study import driving


def plan(folder: Path, trials: int | None, target_bytes: int = 150 * lawful.MB) -> Plan:
    recipe = grpo_recipe(per_device_train_batch_size=4, gradient_accumulation_steps=4, loss_type="dapo")
    space = Space.of(recipe, load_space(None, trainer="grpo"))
    return Plan(recipe=recipe, space=space, folder=folder, device="cpu", target_bytes=target_bytes, max_trials=trials,
                study_name="law")  # fmt: skip


def on_slurm(folder: Path, **asked: object) -> ClusterLauncher:
    """Jobs of four lawful probes each, followed more closely than Slurm would like."""
    slurm.queue().every_s = 0.3
    executor = executor_of({"kind": "slurm", "probes_per_job": 4, "time": "10", "mem": "200M", **asked})
    return ClusterLauncher(executor, folder / "probes/law/jobs", function=lawful.run, idle_s=3)


def made(folder: Path, trials: int) -> None:
    """A whole search in this process, whose probes are no jobs, as of each a job takes a second."""
    with driving(folder, "law"):
        wanted = plan(folder, trials)
        Search(wanted, open_study(wanted), server_socket=None, launcher=AtOnce(lawful.at_once)).run()


def main(folder: Path, trials: int, at_once: int) -> None:
    with driving(folder, "law"):
        launcher = on_slurm(folder) if at_once else Launcher(lawful.run)
        wanted = replace(plan(folder, trials), parallel=max(1, at_once))
        search = Search(wanted, open_study(wanted), server_socket=None, launcher=launcher)
        search.on_note = lambda text: print(text, flush=True)
        try:
            print(search.run().words, flush=True)
        except KeyboardInterrupt:
            search.interrupt()
            sys.exit(130)
        finally:
            launcher.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int((sys.argv[3:] or ["0"])[0]))
