"""A run on several machines: a process of the job keeps the ranks of each, the first decides and the others follow.

Orders and ends are files in the run's folder, which all machines share: put in place by rename, and named by the start
of the job, so that nothing of an earlier one is taken for news. No torch here.
"""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from autofit.cluster.inside import OwnJob
from autofit.files import read_json, write_json
from autofit.probing.rank_processes import RanksEnded, keep_ranks
from autofit.probing.supervise import Ending
from autofit.promotion.rank_files import ADDRESS

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
    """Whether the run was started elsewhere, as Slurm had given up this machine, which lives."""
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
        """On the first machine: the others have nothing more to do."""
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
    """The ends of ranks of which their machine says nothing."""
    first = node * ranks
    return RanksEnded(
        endings=tuple(Ending(exit_code=-9, abandoned=True, rank=first + i) for i in range(ranks)), first=first
    )


def _merged(ended: Sequence[RanksEnded]) -> RanksEnded:
    """The ends of the ranks of all machines. A rank that somebody killed failed before those that missed it."""
    endings = tuple(ending for each in ended for ending in each.endings)
    failed = [each.first for each in ended if each.first is not None]
    killed = [rank for rank in failed if endings[rank].exit_code < 0 and not endings[rank].abandoned]
    return RanksEnded(endings=endings, first=next(iter([*killed, *failed]), None))
