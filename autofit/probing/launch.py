"""Starts the jobs of probes through submitit, and finds them again: processes of this machine, or jobs of Slurm."""

import itertools
import math
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from types import FrameType

import psutil
import submitit

from autofit.cluster.scheduler import LOCAL, SLURM, Cluster, Executor, JobState, Kind, cluster_of
from autofit.errors import AutofitError, EnvironmentFault
from autofit.files import end_of, is_full, private_folder, read_json, write_json
from autofit.hardware.health import ProcessUse, tree_use
from autofit.probing.fork_server import detach
from autofit.probing.job import answered, cancel, run_probe, waiting_path
from autofit.probing.result import Cause, ProbeRequest, ProbeResult, ProbeStatus
from autofit.probing.supervise import lives, note_of

# What another machine writes may be seen this much later: NFS looks at a folder anew after 60 s at most (acdirmax of
# nfs(5)), and until then a file that was looked for and not found is taken for missing, and a listing is an old one.
LATE_S = 60.0
_ENDED = {  # by the state that Slurm gives it
    "CANCELLED": "was cancelled", "TIMEOUT": "reached its time limit before it had saved a checkpoint",
    "OUT_OF_MEMORY": "was killed, as it used more memory than --mem", "PREEMPTED": "was preempted",
    "NODE_FAIL": "lost a node", "BOOT_FAIL": "got a node that did not start", "FAILED": "failed",
    "DEADLINE": "was not over by its deadline",
}  # fmt: skip
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)  # a command's handlers raise an exception
_AFTER_DEADLINE_S = 3600.0  # a job waits for its slot first
_ATTEMPTS = 2  # a killed probe is repeated once
_JOBS = 20  # attempts, where the cluster ended the job each time: no fault of the probe's
_FAILED_JOBS = 3  # attempts, where the job ended each time, and the cluster tells no reason of its own


class Next(StrEnum):
    """The next action after the end of a probe."""

    KEEP = "keep"  # the result is final
    REPEAT = "repeat"  # the probe was killed; a second attempt may succeed
    MEND = "mend"  # the disk is full, or the cards are held: the user must mend that first


def what_next(result: ProbeResult, folder: Path, *, attempts: int, jobs: int = 1, failed_jobs: int = 0) -> Next:
    """The next action after `result` of the probe in `folder`, attempt number `attempts` (from 1).

    The jobs of `jobs` attempts have ended under them, which are not among `attempts`; `failed_jobs` of these failed.
    """
    if result.cause in (Cause.NO_SPACE, Cause.NO_CARD) or (result.status is ProbeStatus.LOST and is_full(folder)):
        return Next.MEND
    if result.cause is Cause.SHARED:
        return Next.REPEAT if attempts < _ATTEMPTS else Next.MEND
    if result.ended_with_job:
        return Next.REPEAT if jobs < _JOBS and failed_jobs < _FAILED_JOBS else Next.KEEP
    return Next.REPEAT if result.was_killed and attempts < _ATTEMPTS else Next.KEEP


def to_mend(result: ProbeResult, folder: Path) -> EnvironmentFault:
    """The fault that the user must mend after `result` of the probe in `folder`, before the search can go on."""
    if result.cause is Cause.NO_CARD:
        return EnvironmentFault(f"{result.reason}; then run the same command again")
    if result.cause is Cause.SHARED:
        words = "end these programs, or name other cards in CUDA_VISIBLE_DEVICES, and run the same command again"
        return EnvironmentFault(f"{result.reason}; {words}")
    return EnvironmentFault(f"no space left in {folder}; free some space and run the same command again")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempts:
    """The probe folders of one trial: NAME-1 in `home`, and NAME-2 if that probe was killed."""

    home: Path
    name: str

    def folders(self) -> list[Path]:
        """The existing folders, oldest first."""
        return list(itertools.takewhile(Path.exists, map(self._folder, itertools.count(1))))

    def counted(self) -> dict[str, int]:
        """Numbers of attempts, and of jobs that ended during one: arguments of `what_next`."""
        folders = self.folders()
        lost = [found for folder in folders if (found := ProbeResult.read(lost_path(folder))) is not None]
        failed = sum(found.cause is Cause.JOB_FAILED for found in lost)
        return {"attempts": len(folders) - len(lost), "jobs": len(lost), "failed_jobs": failed}

    def new_folder(self) -> Path:
        """The folder of the next attempt."""
        folder = self._folder(len(self.folders()) + 1)
        folder.mkdir(mode=0o700, parents=True)  # `chmod -R g+rX` must not make one that the group writes
        return folder

    def _folder(self, attempt: int) -> Path:
        return self.home / f"{self.name}-{attempt}"


def lost_path(folder: Path) -> Path:
    """The file that says that the cluster ended the job of the probe in `folder`."""
    return folder / "lost.json"


class Launcher:
    """Jobs of this machine: one per probe, which calls `function` with the path of its request.

    submitit's LocalExecutor starts them; those of simulated probes are forks of the search's server.
    """

    poll_s = 0.03  # between two looks at the probes that run

    def __init__(self, function: Callable[[str], None] = run_probe) -> None:
        self._function = function
        self.say: Callable[[str], None] = lambda _: None  # called with news of the jobs for the user

    def submit(self, request: ProbeRequest) -> None:
        """Write the request and start its job, unless an earlier simulated probe answers it."""
        write_json(request.request_path, request.to_json())
        ours = self._function is run_probe
        if (ours and answered(request)) or (ours and request.device.startswith("sim:") and _is_forked(request)):
            return
        start_job(
            request.folder, self._function, str(request.request_path), timeout_s=request.deadline_s + _AFTER_DEADLINE_S
        )

    def result(self, folder: Path) -> ProbeResult | None:
        """The answer in `folder`; a LOST one if the job ended before giving one; None while the job runs."""
        answer = answer_in(folder)
        if answer is not None and (_is_final(folder) or not is_alive(folder)):
            return answer
        if is_alive(folder):
            return None
        answer = answer_in(folder)  # may have been written between the two checks
        if answer is not None:
            return answer
        return lost(folder, "the job ended without an answer")

    def waits_for(self, folder: Path) -> str | None:
        """Resource that the probe in `folder` waits for on its machine, if it waits."""
        try:
            return waiting_path(folder).read_text()
        except OSError:
            return None

    def run(self, request: ProbeRequest) -> ProbeResult:
        """The answer of one probe: submits it and waits."""
        self.submit(request)
        while (result := self.result(request.folder)) is None:
            time.sleep(self.poll_s)
        return result

    def cancel(self, folder: Path) -> None:
        """Stop the probe in `folder` and wait until its job is gone."""
        cancel(folder)
        deadline = time.monotonic() + 10
        while is_alive(folder) and time.monotonic() < deadline:
            time.sleep(0.02)

    def close(self) -> None:
        """End the parts that serve several probes; here there are none."""


def answer_in(folder: Path) -> ProbeResult | None:
    """The answer in `folder`; a LOST one if the file is corrupt, and None if it is missing."""
    try:
        return ProbeResult.read(folder / "answer.json")
    except (ValueError, TypeError, KeyError, AttributeError):
        return lost(folder, "the answer of the probe cannot be read")


def _is_final(folder: Path) -> bool:
    """True if the answer in `folder` is its job's last word, so that the caller may go on before the job ends."""
    return (_note(folder / "answer.json") or {}).get("wall_s") is not None


def lost(folder: Path, reason: str, cause: Cause = Cause.KILLED) -> ProbeResult:
    """The result of the probe in `folder` that was killed before it could answer."""
    device = str((_note(folder / "request.json") or {}).get("device", ""))
    return ProbeResult(status=ProbeStatus.LOST, device=device, reason=reason, cause=cause)


def _note(path: Path) -> dict[str, object] | None:
    """The JSON object in `path`; None if it is missing, or something else."""
    try:
        found = read_json(path)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def start_job(
    folder: Path, function: Callable[[str], None], argument: str, *, timeout_s: float, executor: Executor = LOCAL,
    signal_s: int = 60,
) -> None:  # fmt: skip
    """Submit `function(argument)` as a job that outlives this process and ignores Ctrl-C; records it in `folder`.

    On a cluster it runs once on each of the executor's nodes, and USR2 comes `signal_s` seconds before its time limit.
    """
    private_folder(folder / "job")  # submitit unpickles what lies there
    if executor.is_cluster:
        name = f"autofit-{folder.name}"
        nodes = executor.nodes or 1
        submit = cluster_of(executor.kind).submit
        ids = submit(executor, folder / "job", function, [argument], name=name, nodes=nodes, signal_s=signal_s)
        write_json(folder / "job.json", {executor.kind: ids[0], "submitted": time.time()})
        return
    python = f"{shlex.quote(sys.executable)} -P"  # a folder `autofit` where the user works is not ours
    local = submitit.LocalExecutor(folder=folder / "job", python=python)
    # submitit counts a preemption within 10 minutes of the limit as a timeout, so the limit is well above the deadline.
    local.update_parameters(timeout_min=max(11, int(timeout_s / 60) + 1), stderr_to_stdout=True)
    with holding_back_interrupts():
        job = local.submit(function, argument)
        write_json(folder / "job.json", {"job_id": job.job_id, **note_of(int(job.job_id)), "submitted": time.time()})


def _is_forked(request: ProbeRequest) -> bool:
    """True if the search's server runs the job of `request`, which outlives this process as submitit's do.

    submitit starts two processes with imports of 0.5 s for it. A simulated probe needs none of a new one's environment.
    """
    if request.server_socket is None:
        return False
    private_folder(request.folder / "job")
    message = {
        "entry": f"{run_probe.__module__}:{run_probe.__name__}", "argument": str(request.request_path),
        "cwd": str(Path.cwd()), "log": str(request.folder / "job" / "log.out"), "env": dict(os.environ),
        "deadline_s": request.deadline_s + _AFTER_DEADLINE_S,
    }  # fmt: skip
    with holding_back_interrupts():
        try:
            pid = detach(request.server_socket, message)
        except EnvironmentFault:  # it was killed
            return False
        job = {"job_id": str(pid), **note_of(pid), "submitted": time.time()}
        write_json(request.folder / "job.json", job)
    return True


def is_alive(folder: Path) -> bool:
    """True if the job recorded in `folder` is running, or waits in a cluster's queue, whoever submitted it."""
    job = cluster_job(_note(folder / "job.json") or {})
    if job is not None:
        state = job.cluster.queue().state(job.id)
        return state is None or state.is_alive
    notes = [note for name in ("started.json", "job.json") if (note := _note(folder / name)) is not None]
    if notes:
        return lives(notes[0]) and not _is_a_copy(folder)
    request = folder / "request.json"  # a process submitted it a moment ago and died before it could record the job
    try:
        return abs(time.time() - request.stat().st_mtime) < 3  # a clock that was set back makes no file young for long
    except FileNotFoundError:
        return False


def is_listed(folder: Path) -> bool:
    """`is_alive` for a list: a job missing from its scheduler's answer counts as ended, and is asked for only once."""
    job = cluster_job(_note(folder / "job.json") or {})
    if job is None:
        return is_alive(folder)
    queue = job.cluster.queue()
    state = queue.state(job.id)
    return not queue.calls if state is None else state.is_alive


def _is_a_copy(folder: Path) -> bool:
    """True if `folder` was moved or copied after its job was noted: that job writes to the first place."""
    first = (_note(folder / "request.json") or {}).get("folder")
    return isinstance(first, str) and first.startswith("/") and Path(first).resolve() != folder.resolve()


@dataclass(frozen=True, slots=True)
class ClusterJob:
    """A job of a scheduler, as the file that records it says: the executor's kind, and the job's number there."""

    kind: Kind
    id: str

    @property
    def cluster(self) -> Cluster:
        return cluster_of(self.kind)


def cluster_job(note: Mapping[str, object]) -> ClusterJob | None:
    """The scheduler's job that the content of a job.json records; None for a process of this machine."""
    return next((ClusterJob(kind, str(job)) for kind, job in note.items() if kind == SLURM or ":" in kind), None)


def is_of_cluster(folder: Path) -> bool:
    """True if the job recorded in `folder` is a scheduler's, and so may run on another machine."""
    return cluster_job(_note(folder / "job.json") or {}) is not None


def _in_queue(folder: Path) -> tuple[ClusterJob, JobState] | None:
    """The scheduler's job recorded in `folder` and its state, if both are known."""
    job = cluster_job(_note(folder / "job.json") or {})
    state = None if job is None else job.cluster.queue().state(job.id)
    return None if job is None or state is None else (job, state)


def place_in_slurm(folder: Path) -> str | None:
    """Place of the scheduler's job recorded in `folder`, if known: in the queue and why, or on which nodes."""
    found = _in_queue(folder)
    if found is None:
        return None
    job, state = found
    if state.waits:
        queue = f"{job.cluster.title}'s queue"
        return f"job {job.id} waits in {queue}{f' ({state.reason})' if state.reason else ''}"
    return f"job {job.id} runs on {state.nodes}" if state.state == "RUNNING" and state.nodes else None


def end_in_slurm(folder: Path) -> str | None:
    """Reason for which the scheduler ended its job recorded in `folder`, if it did and still has it."""
    found = _in_queue(folder)
    if found is None or found[1].state not in _ENDED:
        return None
    job, state = found
    said = end_of(folder / "job" / f"{job.id}_0_log.out")
    words = _ENDED["OUT_OF_MEMORY" if job.cluster.is_out_of_memory(said) else state.state]
    return f"job {job.id} {words}{f', on {state.nodes}' if state.nodes else ''}"


def cancel_waiting(folder: Path) -> None:
    """Cancel the scheduler's job recorded in `folder` if it waits in the queue, with all its work still to do."""
    job = cluster_job(_note(folder / "job.json") or {})
    if job is not None and job.cluster.queue().waits(job.id):
        job.cluster.cancel([job.id])


@contextmanager
def holding_back_interrupts() -> Iterator[None]:
    """Context in which a job is started and noted: a signal that comes meanwhile takes effect at its end.

    Children started within never get Ctrl-C: the search itself decides which of its jobs to stop.
    """
    came: list[int] = []
    handlers: dict[signal.Signals, Callable[[int, FrameType | None], object]] = {}
    if threading.current_thread() is threading.main_thread():
        for number in _ENDING:
            handler = signal.getsignal(number)
            if callable(handler):
                handlers[number] = handler
                signal.signal(number, lambda number, _: came.append(number))  # a child that is started has none
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # one that waited comes now
        if came:
            signal.raise_signal(came[0])


# Ctrl-C ends the job without a traceback of its own, and its probe with it.
_QUIET = "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL)"


class DebugLauncher(Launcher):
    """The executor `debug`: a probe runs in this terminal, so that `breakpoint()` in a reward function stops there.

    It runs to its end when it is submitted: no server, no deadline, no kept answer. Not in this very process: a probe
    needs a fresh one (its memory is measured, its trainer may crash), and a child that inherits stdin, stdout and
    stderr serves a debugger as well.
    """

    def submit(self, request: ProbeRequest) -> None:
        """Write the request, and run its probe; Ctrl-C ends both the probe and the search."""
        request = replace(request, server_socket=None, terminal=True, deadline_s=math.inf)
        write_json(request.request_path, request.to_json())
        function = self._function
        call = f"from {function.__module__} import {function.__name__} as run; run(sys.argv[1])"
        subprocess.run([sys.executable, "-P", "-c", f"{_QUIET}; {call}", str(request.request_path)], check=False)


# -- the probes that run at this moment, whoever started them ---------------------------------------------------------

_NAMES = {"trial": "trial", "confirm": "confirmation of trial", "repeat": "second probe of trial"}


@dataclass(frozen=True, slots=True, kw_only=True)
class AtWork:
    """One running probe."""

    study: str
    trial: int
    name: str  # in words: trial 3, confirmation of trial 3
    folder: Path
    request: ProbeRequest
    phase: str | None  # None while it waits for its turn on the device, or starts

    @property
    def began_s(self) -> float:
        """Time at which it was asked for, in seconds since 1970."""
        return self.request.request_path.stat().st_mtime

    def use(self) -> ProcessUse | None:
        """Resource use of its processes: those of its job, and the worker, which a fork server may have started."""
        job = pid_of_job(self.folder)
        found = None if job is None else tree_use(job)
        for path in [self.request.pid_path, *sorted(self.folder.glob("rank-*.pid"))]:
            worker = _worker(path)
            used = None if worker is None or (found is not None and worker in found.pids) else tree_use(worker)
            found = found if used is None else used if found is None else found | used
        return found


def probes_at_work(folder: Path) -> list[AtWork]:
    """The running probes of all studies in `folder`, by study and name."""
    found = (_at_work(study, probe) for study in _folders(folder / "probes") for probe in _folders(study))
    return [probe for probe in found if probe is not None]


def _folders(folder: Path) -> Iterator[Path]:
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    except OSError:  # there is none, or it was deleted a moment ago
        return
    yield from (folder / name for name in names)


def _at_work(study: Path, folder: Path) -> AtWork | None:
    kind, _, rest = folder.name.partition("-")
    number = rest.partition("-")[0]
    if kind not in _NAMES or not number.isdigit():
        return None
    try:
        if (folder / "answer.json").exists() or not is_listed(folder):
            return None
        request = ProbeRequest.read(folder / "request.json")
        first = request.phase_path if request.phase_path.exists() else replace(request, rank=0).phase_path
        phase = first.read_text(encoding="utf-8").strip() if first.exists() else None
    except (OSError, ValueError, KeyError, TypeError, AssertionError, AutofitError):  # another user's, or deleted
        return None
    return AtWork(
        study=study.name, trial=int(number), name=f"{_NAMES[kind]} {int(number)}", folder=folder, request=request,
        phase=phase or None,
    )  # fmt: skip


def pid_of_job(folder: Path) -> int | None:
    """The pid of the living job in `folder`, a probe's or a full run's; None before it has started."""
    try:
        note = read_json(folder / "started.json")
        return int(str(note["pid"])) if note is not None and lives(note) else None
    except (ValueError, KeyError):
        return None


def _worker(path: Path) -> int | None:
    """The pid in `path`, unless another process has it by now."""
    try:
        pid, written = int(path.read_text(encoding="ascii")), path.stat().st_mtime
        return pid if psutil.Process(pid).create_time() <= written + 1 else None
    except (OSError, ValueError, psutil.NoSuchProcess):
        return None
