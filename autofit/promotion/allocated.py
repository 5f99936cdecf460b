"""The job of Slurm that trains a promoted trial: on each of its nodes one process, which keeps the node's ranks.

The last node trains nothing where the recipe has a vLLM server: its process keeps that. The job goes on from its last
checkpoint whenever Slurm starts it again, and asks for that itself when its time is over or its nodes are needed. Never
raises. No torch here.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

from autofit.cluster.inside import OwnJob, own_job
from autofit.cluster.node import card_fault, only_cards
from autofit.errors import AutofitError
from autofit.files import read_json, write_json
from autofit.probing.births import note_of
from autofit.probing.supervise import Ending, computing_env, keep
from autofit.promotion.beside import Beside
from autofit.promotion.ending import forget_ending, tell_ending
from autofit.promotion.interruption import ask_after_signal, forget_signals, goes_on_later, listen
from autofit.promotion.job import start_alone, train_to_the_end
from autofit.promotion.machines import Machines, begin, superseded
from autofit.promotion.progress import read_progress
from autofit.promotion.rank_job import Keep, in_processes, start_rank
from autofit.promotion.server_node import serve_all
from autofit.recipe.launch import Launch

REQUEUES = "requeues.json"
_MOST_FRUITLESS = 3  # requeues one after the other without a step between them


def run_allocated(request_path: str) -> None:
    """Run the requested training on this job's nodes, once on each. What comes of it is as in `run_promoted`."""
    path = Path(request_path)
    request = read_json(path)
    assert request is not None
    folder, serves, job = Path(str(request["folder"])), bool(request.get("serves")), own_job()
    mine = replace(job, nodes=job.nodes - serves)  # those that train
    listen(lambda: ask_after_signal(folder))
    if mine.node == mine.nodes:
        serve_all(path, folder, mine)
        return
    env, cwd = _env(request, mine), str(request["cwd"])
    machines = Machines(folder, mine, lambda rank, own: start_rank(path, folder, rank, cwd, {**env, **own}))
    if not mine.is_first:
        machines.follow()
        return
    forget_signals(folder)
    forget_ending(folder)
    begin(folder, mine)
    write_json(folder / "started.json", note_of(os.getpid()) | {"node": mine.name})
    beside = Beside(folder, mine.attempt, abandoned=lambda: superseded(folder, mine)) if serves else None
    try:
        fault = _fault(request, mine)
        if fault is not None:
            write_json(folder / "failed.json", {"reason": f"on {mine.name}: {fault}"})
            return
        ending = _trained(path, cwd, env, machines, beside)
    finally:
        machines.dismiss()
        if beside is not None:
            beside.dismiss()
    if beside is not None and beside.is_lost:  # Slurm has not seen yet that its node is gone
        ask_after_signal(folder)
        ending = replace(ending, exit_code=0)
    _requeue(folder, mine, ending)


def _trained(path: Path, cwd: str, env: Mapping[str, str], machines: Machines, beside: Beside | None) -> Ending:
    """The end of the training, which the first node starts on all that train."""
    folder, mine = machines.folder, machines.mine
    over = partial(superseded, folder, mine) if beside is None else beside.is_over
    machines.abandoned = over
    ranks: Keep = machines.keep
    if mine.nodes == 1:
        ranks = in_processes(path, folder, cwd=cwd, env=env, abandoned=over)

    def alone(own: Mapping[str, str]) -> Ending:
        return keep(lambda: start_alone(str(path), folder, cwd, {**env, **own}), abandoned=over)

    if beside is None:
        return train_to_the_end(path, folder, alone=partial(alone, {}), ranks=ranks)
    beside.address = mine.first_address()
    return train_to_the_end(path, folder, alone=beside.alone(alone), ranks=beside.ranks(ranks))


def _env(request: Mapping[str, object], mine: OwnJob) -> dict[str, str]:
    """The environment of this node's training, which sees a card for each of its ranks and no more.

    A node may have more: for the server's sake, or as the site gives whole nodes. One rank that sees several would
    train by nn.DataParallel, which TRL's trainers refuse.
    """
    launch = Launch.of(cast("dict[str, object]", request["values"]))
    return computing_env(**(only_cards(launch.ranks // mine.nodes) if request["device"] == "cuda" else {}))


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
