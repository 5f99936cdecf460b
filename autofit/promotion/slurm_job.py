"""The job of Slurm that trains a promoted trial: on each of its nodes one process, which keeps the node's ranks.

The first node decides, the others follow: orders and ends are files in the run's folder, which all machines share,
named by the start of the job, so that nothing of an earlier one is taken for news. The last node trains nothing where
the recipe has a vLLM server: its process keeps that. The job goes on from its last checkpoint whenever Slurm starts it
again, and asks for that itself when its time is over or its nodes are needed. Never raises. No torch here.
"""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

from autofit.cluster.nodes import card_fault, only_cards
from autofit.cluster.scheduler import OwnJob, own_job
from autofit.errors import AutofitError
from autofit.files import read_json, write_json, written_json
from autofit.probing.supervise import Keep, ProcessEnding, RanksEnded, computing_env, keep, keep_ranks
from autofit.promotion.job import in_processes, start_rank, train_to_the_end
from autofit.promotion.run_folder import (
    ADDRESS,
    REQUEUES,
    RunFolder,
    ask_after_signal,
    forget_signals,
    goes_on_later,
    listen,
    tell_ending,
)
from autofit.promotion.server import Beside, Post, log_of_server, start_keeper
from autofit.recipe.launch import Launch
from autofit.recipe.launching import RolloutServer
from autofit.watching.events import read_progress

_POLL_S = 0.2
_PATIENCE_S = 45.0  # for the ends of the other machines, once the ranks of the first have ended
_ATTEMPT = "attempt.json"
_FOLDER = "machines"

Start = Callable[[int, Mapping[str, str]], int]  # starts a rank with its own part of the environment; the pid


def begin(folder: Path, mine: OwnJob) -> None:
    """The job starts, on its first machine: what an earlier start left behind ends."""
    write_json(folder / _ATTEMPT, {"attempt": mine.attempt, "node": mine.name})
    shutil.rmtree(folder / _FOLDER, ignore_errors=True)


def superseded(folder: Path, mine: OwnJob) -> bool:
    """True if the run was started elsewhere, as Slurm had given up this machine, which lives."""
    return (read_json(folder / _ATTEMPT) or {}).get("attempt") != mine.attempt


@dataclass(slots=True)
class Machines:
    """The machines of one start of a job, seen from one of them. A round is one start of all ranks."""

    folder: Path
    mine: OwnJob
    start: Start
    abandoned: Callable[[], bool] = lambda: False  # also says that its ranks are to be killed
    round: int = 0

    def keep(self, own: Sequence[dict[str, str]]) -> RanksEnded:
        """On the first machine: the ends of all ranks, each of which gets its part `own` of the environment."""
        self.round += 1
        address = self.mine.first_address()
        self._order([{**env, ADDRESS: address} for env in own])
        ended = [self._keep_own()]
        deadline = time.monotonic() + _PATIENCE_S
        each = len(own) // self.mine.nodes
        for node in range(1, self.mine.nodes):
            while (found := read_json(self._end_path(node))) is None and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            ended.append(_gone(node, each) if found is None else RanksEnded.from_json(found))
        return _merged(ended)

    def dismiss(self) -> None:
        """On the first machine: tell the others that all work is done."""
        self.round += 1
        self._order([])

    def follow(self) -> None:
        """On another machine: keep its ranks whenever the first orders it, until it dismisses this one."""
        while True:
            self.round += 1
            while (order := read_json(self._order_path)) is None:
                began = (read_json(self.folder / _ATTEMPT) or {}).get("attempt") == self.mine.attempt
                if self.round > 1 and not began:
                    return
                time.sleep(_POLL_S)
            if not order["ranks"]:
                return
            self._keep_own()

    def _keep_own(self) -> RanksEnded:
        """The ends of this machine's ranks, also in a file. They end soon after those of another one failed."""
        order = cast("list[dict[str, str]]", (read_json(self._order_path) or {})["ranks"])
        each = len(order) // self.mine.nodes
        first = self.mine.node * each

        def start(local: int) -> int:
            return self.start(first + local, order[first + local])

        found = keep_ranks(start, each, abandoned=self._is_over)
        endings = (replace(e, rank=first + i, node=self.mine.name) for i, e in enumerate(found.endings))
        ended = RanksEnded(endings=tuple(endings), first=None if found.first is None else first + found.first)
        write_json(self._end_path(self.mine.node), ended.to_json())
        return ended

    def _is_over(self) -> bool:
        others = (read_json(self._end_path(node)) for node in range(self.mine.nodes) if node != self.mine.node)
        failed = any(end is not None and end["first"] is not None for end in others)
        return failed or superseded(self.folder, self.mine) or self.abandoned()

    def _order(self, ranks: list[dict[str, str]]) -> None:
        write_json(self._order_path, {"ranks": ranks})

    @property
    def _order_path(self) -> Path:
        return self.folder / _FOLDER / f"{self.mine.attempt}-{self.round}.json"

    def _end_path(self, node: int) -> Path:
        return self.folder / _FOLDER / f"{self.mine.attempt}-{self.round}-ended-{node}.json"


def _gone(node: int, ranks: int) -> RanksEnded:
    """The ends of ranks whose machine is silent."""
    first = node * ranks
    return RanksEnded(
        endings=tuple(ProcessEnding(exit_code=-9, abandoned=True, rank=first + i) for i in range(ranks)), first=first
    )


def _merged(ended: Sequence[RanksEnded]) -> RanksEnded:
    """The ends of the ranks of all machines. A killed rank counts as failed before those that missed it."""
    endings = tuple(ending for each in ended for ending in each.endings)
    failed = [each.first for each in ended if each.first is not None]
    killed = [rank for rank in failed if endings[rank].exit_code < 0 and not endings[rank].abandoned]
    return RanksEnded(endings=endings, first=next(iter([*killed, *failed]), None))


def serve_all(request_path: Path, folder: Path, mine: OwnJob) -> None:
    """Keep one server after the other, until the first node is done with them, or the run was started elsewhere."""
    number = 0
    while True:
        number += 1
        post = Post(folder=folder, name=mine.attempt, number=number)
        while (wanted := post.ordered()) is None:
            if number > 1 and superseded(folder, mine):
                return
            time.sleep(_POLL_S)
        if not wanted:
            return
        try:
            _serve(post, request_path, mine)
        except AutofitError as error:
            post.ended(f"the vLLM server on {mine.name} could not be started: {error}")


def _serve(post: Post, request_path: Path, mine: OwnJob) -> None:
    request = read_json(request_path) or {}
    cards: dict[str, str] = {}
    if request["device"] == "cuda":
        needed = RolloutServer.of(cast("dict[str, object]", request["values"])).cards
        fault = card_fault(None, needed)
        if fault is not None:
            post.ended(f"the vLLM server on {mine.name} could not be started: {fault}")
            return
        cards = only_cards(needed)
    address, cwd, env = mine.own_address(), str(request["cwd"]), computing_env(**cards)
    ending = keep(
        lambda: start_keeper(request_path, post, cwd=cwd, env=env, address=address, node=mine.name),
        abandoned=lambda: superseded(post.folder, mine),
    )
    if ending.exit_code and not ending.abandoned:
        post.ended(f"the keeper of the vLLM server on {mine.name} was killed; see {log_of_server(post.folder)}")


_MOST_FRUITLESS = 3  # requeues one after the other without a step between them


def run_allocated(request_path: str) -> None:
    """Run the requested training on this job's nodes, once on each. What comes of it is as in `run_promoted`."""
    path = Path(request_path)
    request = written_json(path)
    folder, serves, job = Path(str(request["folder"])), bool(request.get("serves")), own_job()
    assert job is not None, "a job of a scheduler runs this"
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
    run = RunFolder(folder)
    forget_signals(folder)
    begin(folder, mine)
    run.start(node=mine.name)
    beside = Beside(folder, mine.attempt, abandoned=lambda: superseded(folder, mine)) if serves else None
    try:
        fault = _fault(request, mine)
        if fault is not None:
            run.fail(f"on {mine.name}: {fault}")
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


def _trained(path: Path, cwd: str, env: Mapping[str, str], machines: Machines, beside: Beside | None) -> ProcessEnding:
    """The end of the training, which the first node starts on all that train."""
    folder, mine = machines.folder, machines.mine
    over = partial(superseded, folder, mine) if beside is None else beside.is_over
    machines.abandoned = over
    ranks: Keep = machines.keep
    if mine.nodes == 1:
        ranks = in_processes(path, folder, cwd=cwd, env=env, abandoned=over)
    if beside is not None:
        beside.address = mine.first_address()
        ranks = beside.beside(ranks)
    return train_to_the_end(path, folder, ranks)


def _env(request: Mapping[str, object], mine: OwnJob) -> dict[str, str]:
    """The environment of this node's training, which sees exactly a card for each of its ranks.

    A node may have more: for the server's sake, or as the site gives whole nodes. One rank that sees several would
    train by nn.DataParallel, which TRL's trainers refuse.
    """
    launch = Launch.of(cast("dict[str, object]", request["values"]))
    return computing_env(**(only_cards(launch.ranks // mine.nodes) if request["device"] == "cuda" else {}))


def _fault(request: Mapping[str, object], mine: OwnJob) -> str | None:
    """Reason why the cards of this node are unable to train the run, if they are."""
    if request["device"] != "cuda":
        return None
    launch = Launch.of(cast("dict[str, object]", request["values"]))
    return card_fault(None, launch.ranks // mine.nodes)


def _requeue(folder: Path, mine: OwnJob, ending: ProcessEnding) -> None:
    """Have Slurm start the job again if a signal alone has ended the run, at a checkpoint."""
    if RunFolder(folder).is_over or ending.exit_code or not goes_on_later(folder) or not mine.is_running():
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
