"""The keeper of the ranks of one training: one process a rank, and the end of one that failed ends all.

Linux only, as autofit.probing.supervise is. No torch here.
"""

import math
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from autofit.probing.supervise import KILLED_WITHIN_S, Ending, become_subreaper, kernel_oom_kills, kill_descendants

# A rank waits in a collective for one that is gone: gloo says so at once, NCCL after ten minutes.
GRACE_S = 10.0
_POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksEnded:
    """The ends of all ranks, by their number. `first` is the rank that ended first of those that failed, if one did.

    Ranks that the keeper killed, as another one had failed, are `abandoned`.
    """

    endings: tuple[Ending, ...]
    first: int | None = None

    @property
    def worst(self) -> Ending:
        """The end of the rank that failed first, of rank 0 where none did, with any process that SIGKILL left alive."""
        left = next((ending.left_pid for ending in self.endings if ending.left_pid is not None), None)
        return replace(self.endings[self.first or 0], left_pid=left)

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "RanksEnded":
        return cls(endings=tuple(Ending(**ending) for ending in content["endings"]), first=content["first"])


Keep = Callable[[Sequence[dict[str, str]]], RanksEnded]  # starts a rank in each environment, and waits for all


def keep_ranks(
    start: Callable[[int], int], ranks: int, *, deadline_s: float = math.inf,
    abandoned: Callable[[], bool] = lambda: False, grace_s: float = GRACE_S,
) -> RanksEnded:  # fmt: skip
    """The ends of `ranks` processes: `start(rank)` starts one and returns its pid; kills all that they leave behind.

    Once a rank has failed, the others have `grace_s` to end by themselves. All are killed after `deadline_s`, and once
    `abandoned`, called every 0.2 s, returns True. One that SIGKILL does not end within KILLED_WITHIN_S is left alone.
    """
    others = become_subreaper()
    kills_before, began = kernel_oom_kills(), time.monotonic()
    pids: dict[int, int] = {}
    handles: dict[int, int] = {}  # of the processes that run still: {pidfd: rank}
    codes: dict[int, int] = {}
    killed: set[int] = set()
    first: int | None = None
    failed_at, killed_at, late, left = math.inf, math.inf, False, False
    try:
        for rank in range(ranks):
            pids[rank] = start(rank)
            handles[os.pidfd_open(pids[rank])] = rank
        while handles and time.monotonic() - killed_at < KILLED_WITHIN_S:
            for handle in select.select(list(handles), [], [], _POLL_S)[0]:
                rank = handles.pop(handle)
                os.close(handle)
                codes[rank] = os.waitstatus_to_exitcode(os.waitpid(pids[rank], 0)[1])
                if codes[rank] and first is None:
                    first, failed_at = rank, time.monotonic()
            late = late or time.monotonic() - began > deadline_s
            left = left or (not late and abandoned())
            if (late or left or time.monotonic() - failed_at > grace_s) and not killed:
                killed, killed_at = set(handles.values()), time.monotonic()
                _kill(pids, killed)
    finally:
        for handle in handles:
            os.close(handle)
        kill_descendants(but=others | {pids[rank] for rank in handles.values()})
    oom = kernel_oom_kills() > kills_before

    def ending(rank: int) -> Ending:
        code = codes.get(rank, -signal.SIGKILL)
        by_others = code == -signal.SIGKILL and rank not in killed
        return Ending(
            exit_code=code, deadline_passed=late and rank in killed,
            abandoned=rank in killed and not late, kernel_oom=oom and by_others, rank=rank,
            left_pid=None if rank in codes else pids[rank],
        )  # fmt: skip

    return RanksEnded(endings=tuple(ending(rank) for rank in range(ranks)), first=first)


def _kill(pids: Mapping[int, int], ranks: set[int]) -> None:
    for rank in ranks:
        os.kill(pids[rank], signal.SIGKILL)  # not reaped yet, so the pid is the rank's still


def free_port(address: str = "127.0.0.1") -> int:
    """A port of this machine's `address` ("": of all) that nobody listens on now; somebody may, before its users."""
    with socket.socket() as found:
        found.bind((address, 0))
        return int(found.getsockname()[1])
