"""The job of Slurm that trains a promoted trial: on each of its nodes one process, which keeps the node's ranks.

It goes on from its last checkpoint whenever Slurm starts it again, and asks for that itself when its time is over or
its nodes are needed. Never raises. No torch here.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from autofit.cluster.inside import OwnJob, own_job
from autofit.cluster.node import card_fault
from autofit.errors import AutofitError
from autofit.files import read_json, write_json
from autofit.probing.births import note_of
from autofit.probing.supervise import Ending, computing_env, keep
from autofit.promotion.ending import forget_ending, tell_ending
from autofit.promotion.interruption import ask_after_signal, forget_signals, goes_on_later, listen
from autofit.promotion.job import start_alone, train_to_the_end
from autofit.promotion.machines import Machines, begin, superseded
from autofit.promotion.progress import read_progress
from autofit.promotion.rank_job import Keep, in_processes, start_rank
from autofit.recipe.launch import Launch

REQUEUES = "requeues.json"
_MOST_FRUITLESS = 3  # requeues one after the other without a step between them


def run_allocated(request_path: str) -> None:
    """Run the requested training on this job's nodes, once on each. What comes of it is as in `run_promoted`."""
    request = read_json(Path(request_path))
    assert request is not None
    folder, mine = Path(str(request["folder"])), own_job()
    listen(lambda: ask_after_signal(folder))
    env, cwd, path = computing_env(), str(request["cwd"]), Path(request_path)
    machines = Machines(folder, mine, lambda rank, own: start_rank(path, folder, rank, cwd, {**env, **own}))
    if not mine.is_first:
        machines.follow()
        return
    forget_signals(folder)
    forget_ending(folder)
    begin(folder, mine)
    write_json(folder / "started.json", note_of(os.getpid()) | {"node": mine.name})
    try:
        fault = _fault(request, mine)
        if fault is not None:
            write_json(folder / "failed.json", {"reason": f"on {mine.name}: {fault}"})
            return
        ranks: Keep = machines.keep
        if mine.nodes == 1:
            ranks = in_processes(path, folder, cwd=cwd, env=env, abandoned=lambda: superseded(folder, mine))
        ending = train_to_the_end(
            path, folder, ranks=ranks,
            alone=lambda: keep(
                lambda: start_alone(request_path, folder, cwd, env), abandoned=lambda: superseded(folder, mine)
            ),
        )  # fmt: skip
    finally:
        machines.dismiss()
    _requeue(folder, mine, ending)


def _fault(request: Mapping[str, object], mine: OwnJob) -> str | None:
    """Why the cards of this node cannot train the run; None where they can."""
    if request["device"] != "cuda":
        return None
    launch = Launch.of(cast("dict[str, object]", request["values"]))
    return card_fault(None, launch.ranks // mine.nodes)


def _requeue(folder: Path, mine: OwnJob, ending: Ending) -> None:
    """Have Slurm start the job again if a signal alone has ended the run, at a checkpoint."""
    done = any((folder / name).exists() for name in ("final.json", "failed.json"))
    if done or ending.exit_code or not goes_on_later(folder) or not mine.is_running():
        return
    lines = read_progress(folder)
    step = int(str(lines[-1]["step"])) if lines else 0
    before = read_json(folder / REQUEUES) or {}
    fruitless = int(str(before.get("fruitless", 0))) + 1 if before.get("step") == step else 0
    if fruitless >= _MOST_FRUITLESS:
        tell_ending(
            folder, f"the job ended {fruitless + 1} times after step {step}: its time is too short for a step; give a "
            "longer --time"
        )  # fmt: skip
        return
    write_json(folder / REQUEUES, {"step": step, "fruitless": fruitless})
    try:
        mine.requeue()
    except AutofitError as error:
        tell_ending(folder, f"its time on {mine.name} was over, and Slurm does not start it again: {error}")
