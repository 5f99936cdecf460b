"""The keeper of one or several child processes: waits for their end, a deadline or an abandoned call, and kills all.

Linux only: the keeper is a subreaper, so orphans of a child become children of the keeper, which kills them. Of the
ranks of one training, the end of one that failed ends all. Forks of a process may do a share of its jobs, on a machine
with cores to spare. No torch here.
"""

import contextlib
import ctypes
import errno
import math
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from autofit.files import write_json
from autofit.probing.result import ProbeRequest, ProbeResult, ProbeStatus, RankPeak
from autofit.recipe.launch import Launch

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_STATE, _START = 0, 19  # of the fields after the name in /proc/PID/stat: proc(5) counts them from 3
_PARENT = "AUTOFIT_PARENT"  # environment variable: the process that started this one
# A rank waits in a collective for one that is gone: gloo says so at once, NCCL after ten minutes.
GRACE_S = 10.0
_POLL_S = 0.2
KILLED_WITHIN_S = 30.0  # of SIGKILL: a process that lives on hangs in a driver, or in a file system that is away


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnding:
    """The end of a child: its exit code (negative: the signal), and whether the keeper or the kernel killed it."""

    exit_code: int
    deadline_passed: bool = False
    abandoned: bool = False
    kernel_oom: bool = False
    rank: int | None = None  # of several ranks, the one that ended so
    node: str = ""  # of several machines, the one that it ran on
    left_pid: int | None = None  # of the child, where SIGKILL did not end it in time and it was left alone


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksEnded:
    """The ends of all ranks, by their number. `first` is the rank that ended first of those that failed, if one did.

    Ranks that the keeper killed, as another one had failed, are `abandoned`.
    """

    endings: tuple[ProcessEnding, ...]
    first: int | None = None

    @property
    def worst(self) -> ProcessEnding:
        """The end of the rank that failed first, else of rank 0, with any process that SIGKILL left alive."""
        left = next((ending.left_pid for ending in self.endings if ending.left_pid is not None), None)
        return replace(self.endings[self.first or 0], left_pid=left)

    @property
    def alone(self) -> ProcessEnding:
        """The end of the only process."""
        return replace(self.endings[0], rank=None)

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "RanksEnded":
        return cls(endings=tuple(ProcessEnding(**ending) for ending in content["endings"]), first=content["first"])


Keep = Callable[[Sequence[dict[str, str]]], RanksEnded]  # starts a rank in each environment, and waits for all


def computing_env(**more: str) -> dict[str, str]:
    """The environment of a computing process: this process' own, with OpenMP threads that sleep while they wait.

    Spinning threads on shared cores made a step 4 to 14 times slower (experiments/LOG.md). Torch detects the card by
    NVML, not by CUDA, which keeps the fork server's forks safe. Sets of names have one order: transformers makes the
    masks of a model with two kinds of attention in that of a set, which moved reserved bytes of Gemma 3 4B by 0.2 %.
    """
    ours = {
        "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false", "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        "PYTHONHASHSEED": "0",
    }  # fmt: skip
    return {**ours, **os.environ, _PARENT: str(os.getpid()), **more}


def trial_env(**more: str) -> dict[str, str]:
    """`computing_env` of trainings that are only tried.

    TRL tells Hugging Face of every trainer that is made, with the name of the card; a probe is nobody's training.
    """
    return computing_env(HF_HUB_DISABLE_TELEMETRY="1", **more)


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
                for rank in killed:
                    os.kill(pids[rank], signal.SIGKILL)  # not reaped yet, so the pid is the rank's still
    finally:
        for handle in handles:
            os.close(handle)
        kill_descendants(but=others | {pids[rank] for rank in handles.values()})
    oom = kernel_oom_kills() > kills_before

    def ending(rank: int) -> ProcessEnding:
        code = codes.get(rank, -signal.SIGKILL)
        by_others = code == -signal.SIGKILL and rank not in killed
        return ProcessEnding(
            exit_code=code, deadline_passed=late and rank in killed,
            abandoned=rank in killed and not late, kernel_oom=oom and by_others, rank=rank,
            left_pid=None if rank in codes else pids[rank],
        )  # fmt: skip

    return RanksEnded(endings=tuple(ending(rank) for rank in range(ranks)), first=first)


def start_child(command: Sequence[str], **options: Any) -> int:
    """The pid of a started process, for whose end its keeper waits; `options` are Popen's."""
    process = subprocess.Popen(command, **options)
    process.returncode = 0  # nobody waits for it through this object
    return process.pid


def keep(
    start: Callable[[], int], *, deadline_s: float = math.inf, abandoned: Callable[[], bool] = lambda: False
) -> ProcessEnding:
    """The end of the child that `start` starts, kept as `keep_ranks` does."""
    return keep_ranks(lambda _: start(), 1, deadline_s=deadline_s, abandoned=abandoned).alone


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
    """The process that started this one, which may have died since; by default, the parent."""
    return int(os.environ.get(_PARENT, os.getppid()))


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def kill_descendants(*, but: frozenset[int]) -> None:
    """Kill all descendants of this process, except those of its children `but`.

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
    """Number of out-of-memory kills by the kernel since boot (/proc/vmstat); 0 if the kernel hides it."""
    try:
        lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def free_port(address: str = "127.0.0.1") -> int:
    """A currently free port of this machine's `address` ("": of all). Another process may take it before its users."""
    with socket.socket() as found:
        found.bind((address, 0))
        return int(found.getsockname()[1])


# -- which process a pid was, whatever the clock does: the boot of the machine and the process' ticks since then -------


def birth(pid: int) -> str | None:
    """The birth of the living process `pid`, unique to it; None if it is missing, or only a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return None if fields[_STATE] in "ZX" else f"{_BOOT.read_text().strip()} {fields[_START]}"
    except OSError:
        return None


def note_of(pid: int) -> dict[str, object]:
    """Note on the process `pid` for `lives`; the process may have ended."""
    return {"pid": pid, "birth": birth(pid)}


def lives(note: Mapping[str, object]) -> bool:
    """True if the process of `note` is alive."""
    pid = str(note.get("pid"))
    return pid.isdecimal() and note.get("birth") is not None and birth(int(pid)) == note["birth"]


# -- forks that do a share --------------------------------------------------------------------------------------------

T = TypeVar("T")
Job = Callable[[], T]


def shared_out(jobs: Sequence[Job[T]], processes: int) -> list[T]:
    """Results of the jobs, in their order; each of `processes`, this one among them, does its share.

    To be called before this process has run a backward pass, whose threads a fork does not have. The jobs of a fork
    that ends without an answer, by an exception or a kill, are done here, where an exception is raised.
    """
    shares = [jobs[number::processes] for number in range(min(processes, len(jobs)))]
    forks = [_begun_fork(share) for share in shares[1:]]
    found = [[job() for job in shares[0]]]
    for share, fork in zip(shares[1:], forks, strict=True):
        answer = _fork_answer(*fork)
        found.append([job() for job in share] if answer is None else answer)
    return [found[place % len(found)][place // len(found)] for place in range(len(jobs))]


def _begun_fork(jobs: Sequence[Job[T]]) -> tuple[int, "Connection[None, list[T]]"]:
    """(pid, where its answer will be) of a fork that does the jobs. It ends with this process."""
    from multiprocessing import Pipe  # not at the top: 50 ms, and few commands fork

    parent = os.getpid()
    reads, writes = Pipe(duplex=False)
    pid = os.fork()
    if pid:
        writes.close()
        return pid, reads
    try:
        die_with_parent(parent)
        writes.send([job() for job in jobs])
    finally:
        os._exit(0)


def _fork_answer(pid: int, reads: "Connection[None, list[T]]") -> list[T] | None:
    with reads:
        try:
            return reads.recv()
        except EOFError:
            return None
        finally:
            os.waitpid(pid, 0)


# -- a probe of several ranks: one worker a rank, and one answer of theirs --------------------------------------------
# Each rank writes files of its own beside the request: rank-0.json, rank-0.log and so on. The largest rank decides.

PORT_IS_TAKEN = errno.EADDRINUSE  # exit code of a rank that found another process listening on the port
PORTS = 5  # that are tried: another program may take one between its choice and its use
Classify = Callable[[ProcessEnding, ProbeRequest], ProbeResult]
KeepProbes = Callable[[Sequence[ProbeRequest]], RanksEnded]  # starts a worker for each request, and waits for all


def has_ranks(request: ProbeRequest) -> bool:
    """True if `request` is for a probe with a process for each rank; a simulated one has a single process."""
    return request.rank is None and not request.device.startswith("sim:") and not Launch.of(request.values).is_plain


def keep_rank_probes(
    request: ProbeRequest, keep: KeepProbes, *, abandoned: Callable[[], bool], classify: Classify
) -> ProcessEnding:
    """Run the ranks of `request` to their ends and write its answer, unless it was abandoned."""
    for _ in range(PORTS):
        requests = _rank_requests(request)
        ended = keep(requests)
        shutil.rmtree(request.folder / "checkpoints", ignore_errors=True)  # a killed rank 0 leaves them
        if abandoned():
            return ProcessEnding(exit_code=ended.worst.exit_code, abandoned=True)
        if ended.worst.exit_code != PORT_IS_TAKEN:
            break
    write_json(request.answer_path, joined_answer(requests, ended, classify).to_json())
    return ended.worst


def _rank_requests(request: ProbeRequest) -> list[ProbeRequest]:
    """The request of each rank, written; what an earlier attempt left there is removed."""
    port, again = free_port(), free_port()
    ranks = range(Launch.of(request.values).ranks)
    requests = [replace(request, rank=rank, port=port, resume_port=again) for rank in ranks]
    for one in requests:
        for path in (one.answer_path, one.phase_path):
            path.unlink(missing_ok=True)
        write_json(one.request_path, one.to_json())
    return requests


def joined_answer(requests: Sequence[ProbeRequest], ended: RanksEnded, classify: Classify) -> ProbeResult:
    """One result of all ranks: an OOM of any rank first, then the rank that failed first, else the largest rank."""
    answers = [ProbeResult.read(one.answer_path) for one in requests]
    told = {
        rank: answer if answer is not None else classify(ended.endings[rank], requests[rank])
        for rank, answer in enumerate(answers)
        if answer is not None or not ended.endings[rank].abandoned
    }
    peaks = tuple(RankPeak.of(rank, answer) for rank, answer in told.items() if answer.device_used_bytes is not None)
    ooms = [rank for rank, answer in told.items() if answer.status is ProbeStatus.OOM]
    fits = len(told) == len(requests) and all(answer.status is ProbeStatus.FIT for answer in told.values())
    if fits or ooms:
        rank = max(ooms or told, key=lambda rank: told[rank].device_used_bytes or 0)
    else:
        rank = ended.first if ended.first in told else next(r for r, a in told.items() if a.status != ProbeStatus.FIT)
    whole = len(told) == len(requests) and all(answer.step_s for answer in told.values())
    return _of_all(told[rank], rank, told if whole else {rank: told[rank]}, len(requests), peaks)


def _of_all(
    answer: ProbeResult, rank: int, timed: dict[int, ProbeResult], count: int, peaks: tuple[RankPeak, ...]
) -> ProbeResult:
    """`answer` of `rank` as that of all: the seconds of the slowest rank, the samples of all `count`."""
    slowest = max(timed.values(), key=lambda one: sum(one.step_s))
    samples, tokens = answer.completions_per_step, answer.tokens_per_step
    return replace(
        answer, rank=rank, ranks=peaks, step_s=slowest.step_s, rollout_s=slowest.rollout_s, update_s=slowest.update_s,
        completions_per_step=None if samples is None else count * samples,
        tokens_per_step=None if tokens is None else count * tokens,
        reason=f"rank {rank} of {count}: {answer.reason}" if answer.reason else "",
    )  # fmt: skip


# -- a program that ends with whoever started it: `python -m autofit.probing.supervise MODULE ARGUMENTS` --------------


def keep_module(words: Sequence[str]) -> int:
    """Run `python -m` with these words until standard input closes; its exit code, or 0 where that ended it.

    However the process at the other end of the pipe ends, `kill -9` included, the program and its children end with it.
    """

    start = partial(start_child, [sys.executable, "-P", "-m", *words], stdin=subprocess.DEVNULL)
    ending = keep(start, deadline_s=math.inf, abandoned=lambda: bool(select.select([sys.stdin], [], [], 0)[0]))
    return 0 if ending.abandoned else abs(ending.exit_code)


if __name__ == "__main__":
    sys.exit(keep_module(sys.argv[1:]))
