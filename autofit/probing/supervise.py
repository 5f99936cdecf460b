"""The keeper of one child process: waits for its end, a deadline or an abandoned call, and kills all descendants.

Linux only: the keeper is a subreaper, so orphans of the child become children of the keeper, which kills them.
"""

import contextlib
import ctypes
import math
import os
import select
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_PARENT = "AUTOFIT_PARENT"  # environment variable: the process that started this one
KILLED_WITHIN_S = 30.0  # of SIGKILL: a process that lives on hangs in a driver, or in a file system that is away


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The end of a child: its exit code (negative: the signal), and whether the keeper or the kernel killed it."""

    exit_code: int
    deadline_passed: bool = False
    abandoned: bool = False
    kernel_oom: bool = False
    rank: int | None = None  # of several ranks, the one that ended so
    node: str = ""  # of several machines, the one that it ran on
    left_pid: int | None = None  # of the child, where SIGKILL did not end it in time and it was left alone

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def computing_env(**more: str) -> dict[str, str]:
    """The environment of a computing process: this process' own, with OpenMP threads that sleep while they wait.

    Spinning threads on shared cores made a step 4 to 14 times slower (experiments/LOG.md). Torch detects the card by
    NVML, not by CUDA, which keeps the fork server's forks safe.
    """
    ours = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    return {**ours, **os.environ, _PARENT: str(os.getpid()), **more}


def keep(
    start: Callable[[], int], *, deadline_s: float = math.inf, abandoned: Callable[[], bool] = lambda: False
) -> Ending:
    """The end of the child that `start` starts (it returns the child's pid); kills the child's remaining descendants.

    `abandoned` is called every 0.2 s; if it returns True the child is killed. A child that SIGKILL does not end within
    KILLED_WITHIN_S is left alone (`Ending.left_pid`).
    """
    others = become_subreaper()
    kills_before = kernel_oom_kills()
    began = time.monotonic()
    pid = start()
    handle = os.pidfd_open(pid)
    late = left = False
    try:
        while not select.select([handle], [], [], 0.2)[0]:
            late = time.monotonic() - began > deadline_s
            left = not late and abandoned()
            if late or left:
                os.kill(pid, signal.SIGKILL)
                break
        ended = bool(select.select([handle], [], [], KILLED_WITHIN_S)[0])
    finally:
        os.close(handle)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if ended else -signal.SIGKILL
    kill_descendants(but=others if ended else others | {pid})
    oom = code == -signal.SIGKILL and not late and not left and kernel_oom_kills() > kills_before
    return Ending(
        exit_code=code, deadline_passed=late, abandoned=left, kernel_oom=oom, left_pid=None if ended else pid
    )  # fmt: skip


def become_subreaper() -> frozenset[int]:
    """Make the orphans of this process' descendants its own children, so that it can find and kill them.

    Returns the pids of the children that it has already, which are others' business (a fork server).
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    return frozenset(child.pid for child in psutil.Process().children())


def die_with_parent(parent: int | None = None) -> None:
    """Called in a child: the kernel kills it when its parent dies. If that has died already, the child ends here.

    `parent` is who forked it; None: who gave it `computing_env`, and may have died while it imported torch.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    started_by = os.environ.pop(_PARENT, None) if parent is None else str(parent)
    if started_by not in (None, str(os.getppid())):
        os._exit(1)


def started_by() -> int:
    """The process that started this one, which may have died since; the parent, where it gave no `computing_env`."""
    return int(os.environ.get(_PARENT, os.getppid()))


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def kill_descendants(*, but: frozenset[int]) -> None:
    """Kill all descendants of this process, without those of its children `but`.

    Orphans are reparented to it meanwhile, so repeat until none is left, or KILLED_WITHIN_S have passed.
    """
    began = time.monotonic()
    while (children := _descendants(but)) and time.monotonic() - began < KILLED_WITHIN_S:
        for child in children:
            try:
                child.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(children, timeout=0.5)


def _descendants(but: frozenset[int]) -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        if child.pid not in but:
            found.append(child)
            with contextlib.suppress(psutil.NoSuchProcess):
                found += child.children(recursive=True)
    return found


def kernel_oom_kills() -> int:
    """Number of out-of-memory kills by the kernel since boot (/proc/vmstat); 0 if the kernel does not report it."""
    try:
        lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
