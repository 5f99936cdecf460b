"""Keeps one child process: waits for its end, a deadline or an abandoned caller, and leaves no descendant alive.

Linux only: the keeper is a subreaper, so whatever the child leaves behind becomes the keeper's own and is killed.
"""

import ctypes
import os
import select
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a child ended: its exit code (negative: the signal), and whether we or the kernel ended it."""

    exit_code: int
    deadline_passed: bool = False
    abandoned: bool = False
    kernel_oom: bool = False

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def computing_env(**more: str) -> dict[str, str]:
    """The environment of a process that computes: this one's, with OpenMP threads that sleep while they wait.

    Spinning threads on cores that others use as well made a step 4 to 14 times slower (experiments/LOG.md). Asking NVML
    whether there is a card, not CUDA, keeps the fork server's forks safe.
    """
    ours = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    return {**ours, **os.environ, **more}


def keep(start: Callable[[], int], *, deadline_s: float, abandoned: Callable[[], bool] = lambda: False) -> Ending:
    """Run `start` (returns the pid of a child of this process) to its end, and kill what is left of it.

    `abandoned` is asked every 0.2 s; when it says True the child is killed.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    kills_before = _kernel_oom_kills()
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
    finally:
        os.close(handle)
    _, status = os.waitpid(pid, 0)
    _kill_descendants()
    code = os.waitstatus_to_exitcode(status)
    oom = code == -signal.SIGKILL and not late and not left and _kernel_oom_kills() > kills_before
    return Ending(exit_code=code, deadline_passed=late, abandoned=left, kernel_oom=oom)


def die_with_parent() -> None:
    """Called in a child: the kernel kills it when its keeper dies."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _kill_descendants() -> None:
    """Kill all that descends from this process; orphans of orphans come to it as well, so ask until nobody is left."""
    for _ in range(100):
        children = psutil.Process().children(recursive=True)
        if not children:
            return
        for child in children:
            try:
                child.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(children, timeout=0.5)


def _kernel_oom_kills() -> int:
    """Processes that the kernel has killed for lack of memory since boot (/proc/vmstat), or 0 where it does not say."""
    try:
        lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
