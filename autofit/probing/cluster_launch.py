"""Probes as a pool of Slurm jobs: keeps as many jobs as there are probes, and tells what became of each probe.

The search and its jobs share a folder. A job takes a probe by a rename, so no two jobs run the same one. Two listings
tell the states of all probes.
"""

import hashlib
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from autofit.cluster.nodes import is_card_broken, node_fault
from autofit.cluster.scheduler import SLURM, Executor, JobState, Kind, cluster_of, own_job, own_node
from autofit.errors import AutofitError, EnvironmentFault, one_line, printable
from autofit.files import cannot_write, end_of, read_json, write_json
from autofit.hardware.hardware import slot_names
from autofit.probing.fork_server import ForkServer
from autofit.probing.job import answered, cancel, run_probe
from autofit.probing.launch import LATE_S, DebugLauncher, Launcher, answer_in, lost, lost_path
from autofit.probing.result import Cause, ProbeRequest, ProbeResult, ProbeStatus

_AT = "@"
_KIND = "executor.json"


@dataclass(frozen=True, slots=True)
class Pool:
    """The shared folder `home`, beside the folders of the probes. A probe is named by its folder, a job by its id."""

    home: Path

    @property
    def kind(self) -> Kind:
        """The executor whose jobs take the probes."""
        return str((read_json(self.home / _KIND) or {}).get("kind", SLURM))

    def make(self, kind: Kind = SLURM) -> None:
        """Make the folders, for jobs of the executor `kind`. Faults noted of nodes are deleted: they may be well."""
        try:
            for folder in ("queue", "taken", "begun", "closed", "faults", "logs"):
                (self.home / folder).mkdir(parents=True, exist_ok=True)
            write_json(self.home / _KIND, {"kind": kind})
        except OSError as error:
            raise cannot_write(self.home, error) from error
        for node in _names(self.home / "faults"):
            (self.home / "faults" / node).unlink(missing_ok=True)

    # -- probes -----------------------------------------------------------------------------------------------------

    def folder(self, name: str) -> Path:
        """The folder of a probe."""
        return self.home.parent / name

    def put(self, name: str) -> None:
        """Let a job take the probe."""
        try:
            (self.home / "queue" / name).touch()
        except OSError as error:
            raise cannot_write(self.home, error) from error

    def waiting(self) -> set[str]:
        """The probes still to be taken by a job."""
        return set(_names(self.home / "queue"))

    def running(self) -> dict[str, str]:
        """{probe: the job that took it and is still at it}."""
        taken = (entry.split(_AT, 1) for entry in _names(self.home / "taken"))
        return {name: job for job, name in taken}

    def take(self, job: str) -> str | None:
        """The first probe that waits, now the job's, if one does."""
        for name in sorted(self.waiting()):
            mine = self._taken(job, name)
            with suppress(FileNotFoundError):
                os.rename(self.home / "queue" / name, mine)
                return name
            if mine.exists():  # a network file system repeated a rename that had succeeded
                return name
        return None

    def withdraw(self, name: str) -> None:
        """Remove the probe from the queue."""
        (self.home / "queue" / name).unlink(missing_ok=True)

    def end(self, job: str, name: str) -> bool:
        """Note that the job ended the probe, or must leave it. False if it had ceased to be the job's."""
        try:
            self._taken(job, name).unlink()
        except FileNotFoundError:
            return False
        return True

    def _taken(self, job: str, name: str) -> Path:
        return self.home / "taken" / f"{job}{_AT}{name}"

    # -- jobs -------------------------------------------------------------------------------------------------------

    def begin(self, job: str) -> None:
        """The job runs, on this node."""
        (self.home / "closed" / job).unlink(missing_ok=True)  # Slurm has started it again
        write_json(self.home / "begun" / job, {"node": own_node(), "pid": os.getpid()})

    def close(self, job: str) -> None:
        """Note that the job has stopped taking probes."""
        (self.home / "closed" / job).touch()

    def closed(self) -> set[str]:
        """The jobs that have stopped taking probes."""
        return set(_names(self.home / "closed"))

    def node_of(self, job: str) -> str:
        """The node on which the job began; empty before that."""
        return str((read_json(self.home / "begun" / job) or {}).get("node", ""))

    def log_of(self, job: str) -> Path:
        """The file with the job's output."""
        return self.home / "logs" / f"{job}_0_log.out"

    def forget(self, job: str) -> None:
        """Delete the notes on a job that has ended; its log stays."""
        for path in (f"begun/{job}", f"closed/{job}", f"logs/{job}_submitted.pkl", f"logs/{job}_0_result.pkl"):
            (self.home / path).unlink(missing_ok=True)

    # -- nodes ------------------------------------------------------------------------------------------------------

    def set_aside(self, reason: str, *, node: str = "") -> None:
        """Bar the node, by default this one, from taking probes, for this reason."""
        write_json(self.home / "faults" / (node or own_node()), {"reason": reason})

    def faulty(self) -> set[str]:
        """The nodes barred from taking probes."""
        return set(_names(self.home / "faults"))

    def fault_of(self, node: str) -> str:
        """Reason why the node is barred from taking probes."""
        return str((read_json(self.home / "faults" / node) or {}).get("reason", ""))


def _names(folder: Path) -> list[str]:
    """The names in `folder`, except those of files that are being written."""
    try:
        return [entry.name for entry in os.scandir(folder) if not entry.name.startswith(".")]
    except FileNotFoundError:
        return []


# -- the job of Slurm that runs the probes, one after the other, and leaves their answers in their folders ------------

_QUEUE_S = 0.2  # between two looks at the queue
_TOLD_S = 1.0  # Slurm's signal reaches the probe and its job at nearly the same time
_EARLY_S = 90.0  # Slurm sends the signal before the time limit up to a minute early
_ENDS = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueJob:
    """The function of such a job: takes up to `probes` probes, and ends after `idle_s` seconds of an empty queue."""

    home: Path
    device: str = "cpu"
    card: str | None = None  # the kind that the study is of; None: any
    cards: int = 1  # of a probe
    probes: int = 1
    idle_s: float = 20.0
    time_s: float = math.inf  # the time limit of the job
    signal_s: int = 30  # before the time limit USR2 comes
    function: Callable[[str], None] = run_probe

    def __call__(self, _: str) -> None:
        pool, job = Pool(self.home), _own_id()
        pool.begin(job)
        for name, taken_by in pool.running().items():  # by the same job, before Slurm put it back into the queue
            if taken_by == job and answer_in(pool.folder(name)) is None:
                _give_up(pool.folder(name), f"job {job} was put back into Slurm's queue")
            if taken_by == job:
                pool.end(job, name)
        with _told_to_end() as told, self._server(pool, job) as socket_path:
            try:
                self._take_probes(pool, job, told, socket_path)
            except (AutofitError, OSError, ValueError) as error:
                pool.set_aside(one_line(str(error)))
            finally:
                with suppress(OSError):
                    pool.close(job)

    def _take_probes(self, pool: Pool, job: str, told: "_Told", socket_path: str | None) -> None:
        for number in range(self.probes):
            name = self._next(pool, job, told)
            if name is None:
                return
            folder = told.folder = pool.folder(name)
            write_json(folder / "job.json", {pool.kind: job, "submitted": time.time()})
            self._run(folder, socket_path, told)
            if told.signal is not None:
                self._explain(folder, job, told, is_first=number == 0)
            told.folder = None
            broken = self._is_broken(folder, pool)
            is_last = broken or told.signal is not None or number == self.probes - 1
            if is_last:
                pool.close(job)  # before the probe ends: the driver asks for another job at once
            if not pool.end(job, name) or is_last:
                return  # or the driver has given the job up

    def _next(self, pool: Pool, job: str, told: "_Told") -> str | None:
        """The next probe; None if none came within `idle_s`, the job was told to end, or the node is at fault."""
        deadline = time.monotonic() + self.idle_s
        while told.signal is None:
            if pool.waiting():
                fault = node_fault(self.device, self.home, card=self.card, cards=self.cards)
                if fault is not None:
                    pool.set_aside(fault)
                    return None
                if (name := pool.take(job)) is not None:
                    return name
            elif time.monotonic() > deadline:
                return None
            time.sleep(_QUEUE_S)
        return None

    def _run(self, folder: Path, socket_path: str | None, told: "_Told") -> None:
        request = ProbeRequest.read(folder / "request.json")
        own = slot_names(request.device, 1)
        if request.device == "cpu":  # each job has CPUs of its own
            own = (f"cpu-{_own_id()}",)
        write_json(request.request_path, replace(request, slots=own, server_socket=socket_path).to_json())
        if told.signal is None:
            self.function(str(request.request_path))
        answer = answer_in(folder)
        if answer is not None and answer.cause is Cause.KILLED and told.signal is None:
            time.sleep(_TOLD_S)

    def _explain(self, folder: Path, job: str, told: "_Told", *, is_first: bool) -> None:
        """Give the reason of a missing answer, if it is the end of the job."""
        answer = answer_in(folder)
        if answer is not None and (answer.status is not ProbeStatus.LOST or answer.cause is not Cause.KILLED):
            return
        (folder / "answer.json").unlink(missing_ok=True)
        is_late = told.lasted_s > self.time_s - self.signal_s - _EARLY_S  # else preempted: Slurm may send USR2 for that
        if told.signal == signal.SIGUSR2 and is_first and is_late:
            words = f"job {job} came to its time limit during its first probe; give a longer --time (and partition)"
            write_json(folder / "answer.json", lost(folder, words, Cause.DEADLINE).to_json())
            return
        what = "came near its time limit" if told.signal == signal.SIGUSR2 else "was cancelled or preempted"
        _give_up(folder, f"job {job} on {own_node()} {what}")

    def _is_broken(self, folder: Path, pool: Pool) -> bool:
        """True if the probe ended because its card is broken: then it is repeated, and the node set aside."""
        answer = answer_in(folder)
        if self.device != "cuda" or answer is None or answer.status not in (ProbeStatus.FAILED, ProbeStatus.LOST):
            return False
        hangs = answer.cause in (Cause.HANGS, Cause.NO_CARD)
        if not hangs and not is_card_broken(f"{answer.reason}\n{end_of(folder / 'probe.log')}"):
            return False
        pool.set_aside(f"its card broke down: {one_line(answer.reason, 200)}")
        (folder / "answer.json").unlink()
        _give_up(folder, f"the card of {own_node()} is broken")
        return True

    @contextmanager
    def _server(self, pool: Pool, job: str) -> Iterator[str | None]:
        """The socket of a warm server of this job's own."""
        if self.function is not run_probe:
            yield None
            return
        server = ForkServer(pool.home / "servers" / job)
        try:
            yield server.socket_path if server.is_ready() else None
        finally:
            server.close()


def _own_id() -> str:
    job = own_job()
    assert job is not None, "a job of a scheduler runs this"
    return job.id


def _give_up(folder: Path, reason: str) -> None:
    write_json(lost_path(folder), lost(folder, reason, Cause.JOB).to_json())


@dataclass(slots=True)
class _Told:
    """The signal by which Slurm told the job to end, and the probe at work."""

    signal: int | None = None
    folder: Path | None = None
    began: float = field(default_factory=time.monotonic)

    @property
    def lasted_s(self) -> float:
        """Seconds of the job so far."""
        return time.monotonic() - self.began

    def __call__(self, number: int, _: FrameType | None) -> None:
        self.signal = number
        if self.folder is not None:
            with suppress(OSError):  # a full disk: the probe ends with the job
                cancel(self.folder)


@contextmanager
def _told_to_end() -> Iterator[_Told]:
    """Signals of Slurm are heard, in place of submitit's handlers."""
    told = _Told()
    old = {number: signal.signal(number, told) for number in _ENDS}
    try:
        yield told
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


# -- the search -----------------------------------------------------------------------------------------------------

_LOOK_S = 0.25  # between two listings of the shared folder
_SUBMIT_S = 1.0  # least time between two calls of sbatch: jobs that are missing meanwhile are one array
_BROKEN_JOBS = 3  # one after the other that end before they begin: nothing can run
_IDLE_S = 20.0
_HELD = "launch_failed_requeued_held"  # Slurm's reason
_CALM = ("CANCELLED", "PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "REVOKED")  # no sign that the next job ends so too


@dataclass(slots=True)
class _SeenFolder:
    """Contents of the shared folder at the last look; `since`: when a probe was first seen with its job."""

    at: float = -math.inf
    waiting: set[str] = field(default_factory=set)
    running: dict[str, str] = field(default_factory=dict)
    closed: set[str] = field(default_factory=set)
    since: dict[tuple[str, str], float] = field(default_factory=dict)


class ClusterLauncher(Launcher):
    """Probes in jobs of Slurm. The driver learns of them by the shared folder `home` alone, and one squeue."""

    poll_s = _LOOK_S

    def __init__(
        self, executor: Executor, home: Path, *, device: str = "cpu", card: str | None = None, cards: int = 1,
        function: Callable[[str], None] = run_probe, idle_s: float = _IDLE_S,
    ) -> None:  # fmt: skip
        super().__init__(function)
        self._executor, self._pool, self._cluster = executor, Pool(home), cluster_of(executor.kind)
        limit_s = self._cluster.limit_of_job_s(executor)
        self._signal_s = int(min(30, limit_s / 4))
        self._allocation = QueueJob(
            home=home.resolve(), device=device, card=card, cards=cards, probes=executor.probes_per_job, idle_s=idle_s,
            signal_s=self._signal_s, time_s=limit_s, function=function,
        )  # fmt: skip
        self._name = job_name(home)
        self._seen = _SeenFolder()
        self._fresh: set[str] = set()  # submitted by this process, and not yet told of by squeue
        self._jobs: set[str] = set()  # every job known to live
        self._failed: list[str] = []  # jobs that ended before they began
        self._one_began = False
        self._excluded: set[str] = set()
        self._missing: dict[str, float] = {}
        self._submitted_at = -math.inf
        self._said: set[str] = set()
        self._pool.make(executor.kind)

    # -- as any launcher --------------------------------------------------------------------------------------------

    def submit(self, request: ProbeRequest) -> None:
        """Write the request, and let a job take it."""
        write_json(request.request_path, request.to_json())
        if self._function is not run_probe or not answered(request):
            self._pool.put(request.folder.name)
            self._seen.waiting.add(request.folder.name)

    def result(self, folder: Path) -> ProbeResult | None:
        """The answer in `folder`; a LOST one if its job ended before giving one; None while it waits or runs."""
        self._look()
        name = folder.name
        job = self._seen.running.get(name)
        ended = None if job is None else self._ended(name, job)
        if name in self._seen.waiting or (job is not None and ended is None):
            self._missing.pop(name, None)
            return None
        if job is not None and ended is not None:
            completed = ended.state == "COMPLETED"  # then it had written an answer
            late = completed and answer_in(folder) is None and self._may_come(name)
            return None if late else self._concluded(folder, job, ended)
        found = answer_in(folder) or self._lost_in(folder)
        if found is None and self._may_come(name):
            return None
        self._missing.pop(name, None)
        return found or self._given_up(folder, lost(folder, "no job has it", Cause.JOB))

    def waits_for(self, folder: Path) -> str | None:
        return None  # a job has its own cards; the reason why jobs wait is shown once for all

    def cancel(self, folder: Path) -> None:
        """Stop the probe in `folder`, and return at once: another attempt has a folder of its own."""
        cancel(folder)
        self._pool.withdraw(folder.name)

    def close(self) -> None:
        """Cancel the jobs."""
        self._look()
        self._cluster.cancel(sorted(self._jobs | self._fresh))

    # -- probes -----------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._seen.at < _LOOK_S:
            return
        waiting = self._pool.waiting()  # first: a probe that a job takes meanwhile is seen at least once
        running = self._pool.running()
        since = {pair: self._seen.since.get(pair, now) for pair in running.items()}
        self._seen = _SeenFolder(at=now, waiting=waiting, running=running, closed=self._pool.closed(), since=since)
        self._follow_jobs()
        self._read_faults()
        self._submit_missing()

    def _ended(self, name: str, job: str) -> JobState | None:
        """The last state of the job, if it has ended, or lost its node, since it took the probe; else None."""
        queue = self._cluster.queue()
        state = queue.state(job)
        if state is None or queue.asked_at <= self._seen.since[name, job]:
            return None  # Slurm's answer is older than what the folder says
        if state.name not in ("", self._name):
            return JobState(state="ENDED")  # Slurm has begun to count anew
        return state if state.waits or not state.is_alive else None

    def _may_come(self, name: str) -> bool:
        """True if the probe's missing answer, or the name of its job, may still be on its way."""
        now = time.monotonic()
        return now - self._missing.setdefault(name, now) < LATE_S

    def _concluded(self, folder: Path, job: str, state: JobState) -> ProbeResult:
        """The result of a probe whose job ended while it had the probe."""
        self._pool.end(job, folder.name)
        del self._seen.running[folder.name]
        if (found := answer_in(folder) or self._lost_in(folder)) is not None:
            return found
        node = self._pool.node_of(job) or state.nodes
        where = f"job {job} on {node or 'a node'}"
        said = end_of(self._pool.log_of(job))
        if state.state == "OUT_OF_MEMORY" or self._cluster.is_out_of_memory(said):
            ended = f"ran out of host memory, and {self._cluster.title} ended it"
            words = f"{where} {ended}; give --mem more than {self._memory}"
            found = lost(folder, words, Cause.HOST_OOM)
            write_json(folder / "answer.json", found.to_json())
            cancel(folder)
            self._tell(f"{folder.name}: {words}")
            return found
        if state.waits or state.state in (*_CALM, "ENDED"):
            words = "was put back into the queue" if state.waits else f"ended as {state.state}"
            return self._given_up(folder, lost(folder, f"{where} {words} while it had the probe", Cause.JOB))
        last = next((line for line in reversed(said.splitlines()) if line.strip()), "nothing")
        words = f"ended as {state.state} while it had the probe; it printed: {printable(one_line(last), 200)}"
        return self._given_up(folder, lost(folder, f"{where} {words}", Cause.JOB_FAILED))

    @property
    def _memory(self) -> str:
        """Memory that a job asks a node for, in words."""
        return self._executor.mem or "the partition's default"

    def _given_up(self, folder: Path, result: ProbeResult) -> ProbeResult:
        """Keep `result`, and stop remains of the probe that may still run on a node out of Slurm's reach."""
        write_json(lost_path(folder), result.to_json())
        cancel(folder)
        return self._lost_in(folder) or result

    def _lost_in(self, folder: Path) -> ProbeResult | None:
        """The result of a probe that the cluster ended, if that is known."""
        found = ProbeResult.read(lost_path(folder))
        if found is not None:
            self._tell(f"{folder.name} is repeated: {found.reason}")
        return found

    # -- jobs -------------------------------------------------------------------------------------------------------

    def _follow_jobs(self) -> None:
        queue = self._cluster.queue()
        told = {job: state for job, state in queue.states().items() if state.name == self._name}
        alive = {job for job, state in told.items() if state.is_alive}
        known = self._jobs | self._fresh
        fresh = {job: queue.state(job) for job in self._fresh - set(told)}
        self._fresh = {job for job, state in fresh.items() if state is None or state.is_alive}
        self._jobs = alive
        for job in sorted(known - alive - self._fresh):
            self._note_end(job, told.get(job) or queue.state(job) or JobState(state="ENDED"))
        for job in alive:
            if told[job].waits and told[job].reason.lower() == _HELD:
                self._failed.append(job)
                self._cluster.cancel([job])
        if self._seen.waiting and alive and all(told[job].waits for job in alive) and not self._fresh:
            reasons = sorted({told[job].reason for job in alive} - {"", "None"})
            if reasons:
                self._tell(f"jobs wait in {self._cluster.title}'s queue: {', '.join(reasons)}")

    def _note_end(self, job: str, state: JobState) -> None:
        """Note a job's end. If it failed to begin, its node is set aside; if all did, EnvironmentFault is raised."""
        if self._pool.node_of(job):
            self._one_began = True
        elif state.state not in _CALM:
            self._failed.append(job)
            if not self._one_began and len(self._failed) >= _BROKEN_JOBS:
                raise EnvironmentFault(self._cannot_begin(job, state))
            if state.nodes:
                self._pool.set_aside(f"job {job} ended there as {state.state} before it began", node=state.nodes)
        if job not in self._seen.running.values():
            self._pool.forget(job)
        if state.state in _CALM:
            self._tell(f"job {job} ended as {state.state}: another one takes its place")

    def _cannot_begin(self, job: str, state: JobState) -> str:
        path = self._pool.log_of(job)
        lines = path.read_text(errors="replace").split("\n") if path.exists() else []
        said = next((line for line in reversed(lines) if line.strip()), "nothing")
        return (
            f"{self._cluster.title}'s jobs end before they begin ({', '.join(self._failed)}; the last one: "
            f"{state.state}{' on ' + state.nodes if state.nodes else ''}; it printed: "
            f"{printable(one_line(said), 200)}); make the environment there on every node "
            f"(setup in executor.yaml), and see {path}"
        )

    def _read_faults(self) -> None:
        found = self._pool.faulty() - self._excluded
        for node in sorted(found):
            self._tell(f"node {node} is set aside: {self._pool.fault_of(node)}")
        self._excluded |= found
        if found:
            self._cluster.exclude(
                [job for job in self._jobs if self._cluster.queue().waits(job)], sorted(self._excluded)
            )
        if found and (nodes := self._cluster.nodes_of(self._executor.partition)) and nodes <= self._excluded:
            reasons = "; ".join(f"{node}: {self._pool.fault_of(node)}" for node in sorted(nodes))
            raise EnvironmentFault(f"no node is left that can run probes: {reasons}")

    def _submit_missing(self) -> None:
        """Ask Slurm for as many jobs as probes lack: those that wait or run, less the jobs that take some."""
        seen, jobs = self._seen, self._jobs | self._fresh
        of_open = sum(job in jobs and job not in seen.closed for job in seen.running.values())
        missing = len(seen.waiting) + of_open - len(jobs - seen.closed)
        if missing <= 0 or time.monotonic() - self._submitted_at < _SUBMIT_S:
            return
        self._submitted_at = time.monotonic()
        self._fresh |= set(
            self._cluster.submit(
                self._executor, self._pool.home / "logs", self._allocation, ["probes"] * missing, name=self._name,
                exclude=sorted(self._excluded), signal_s=self._signal_s,
            )
        )  # fmt: skip

    def _tell(self, text: str) -> None:
        """Say it once."""
        if text not in self._said:
            self._said.add(text)
            self.say(text)


def job_name(home: Path) -> str:
    """The name of the jobs of the pool in `home`, unique to this study and folder."""
    return f"autofit-{home.parent.name}-{hashlib.sha256(str(home.resolve()).encode()).hexdigest()[:6]}"


def launcher_for(
    executor: Executor, probes_folder: Path, *, device: str, card: str | None = None, cards: int = 1
) -> Launcher:
    """The launcher of the probes in `probes_folder`: on this machine, or in jobs of Slurm on nodes with such cards."""
    if executor.kind == "debug":
        return DebugLauncher()
    if not executor.is_cluster:
        return Launcher()
    return ClusterLauncher(executor, probes_folder / "jobs", device=device, card=card, cards=cards)
