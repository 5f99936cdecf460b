"""The folder that a search shares with its Slurm jobs, and the job that runs the probes that wait in it.

A job takes a probe by a rename, so no two jobs run the same one. Two listings tell the states of all probes.
"""

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
from autofit.cluster.scheduler import SLURM, Kind, own_job, own_node
from autofit.errors import AutofitError, one_line
from autofit.files import cannot_write, end_of, read_json, write_json
from autofit.hardware.hardware import slot_names
from autofit.probing.fork_server import ForkServer
from autofit.probing.job import cancel, run_probe
from autofit.probing.launch import answer_in, lost, lost_path
from autofit.probing.result import Cause, ProbeRequest, ProbeStatus

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
        """Make the folders, for jobs of the executor `kind`. What was said of nodes is forgotten: they may be well."""
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
        """The probes that no job has taken."""
        return set(_names(self.home / "queue"))

    def running(self) -> dict[str, str]:
        """{probe: the job that took it and has not ended it}."""
        taken = (entry.split(_AT, 1) for entry in _names(self.home / "taken"))
        return {name: job for job, name in taken}

    def take(self, job: str) -> str | None:
        """The first probe that waits, now the job's; None where none waits."""
        for name in sorted(self.waiting()):
            mine = self._taken(job, name)
            with suppress(FileNotFoundError):
                os.rename(self.home / "queue" / name, mine)
                return name
            if mine.exists():  # a network file system repeated a rename that had succeeded
                return name
        return None

    def withdraw(self, name: str) -> None:
        """No job shall take the probe."""
        (self.home / "queue" / name).unlink(missing_ok=True)

    def end(self, job: str, name: str) -> bool:
        """The job has ended the probe, or must not go on with it. False if it was not the job's any more."""
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
        """The job takes no further probe."""
        (self.home / "closed" / job).touch()

    def closed(self) -> set[str]:
        """The jobs that take no further probe."""
        return set(_names(self.home / "closed"))

    def node_of(self, job: str) -> str:
        """The node on which the job began; empty where it has not."""
        return str((read_json(self.home / "begun" / job) or {}).get("node", ""))

    def log_of(self, job: str) -> Path:
        """What the job printed."""
        return self.home / "logs" / f"{job}_0_log.out"

    def forget(self, job: str) -> None:
        """Delete what is kept of a job that has ended, but what it printed."""
        for path in (f"begun/{job}", f"closed/{job}", f"logs/{job}_submitted.pkl", f"logs/{job}_0_result.pkl"):
            (self.home / path).unlink(missing_ok=True)

    # -- nodes ------------------------------------------------------------------------------------------------------

    def set_aside(self, reason: str, *, node: str = "") -> None:
        """The node, this one without a name, must not take probes, for this reason."""
        write_json(self.home / "faults" / (node or own_node()), {"reason": reason})

    def faulty(self) -> set[str]:
        """The nodes that must not take probes."""
        return set(_names(self.home / "faults"))

    def fault_of(self, node: str) -> str:
        """Why the node must not take probes."""
        return str((read_json(self.home / "faults" / node) or {}).get("reason", ""))


def _names(folder: Path) -> list[str]:
    """The names in `folder`, but those of files that are being written."""
    try:
        return [entry.name for entry in os.scandir(folder) if not entry.name.startswith(".")]
    except FileNotFoundError:
        return []


# -- the job of Slurm that runs the probes, one after the other, and leaves their answers in their folders ------------

_LOOK_S = 0.2  # between two looks at the queue
_TOLD_S = 1.0  # Slurm's signal reaches the probe and its job at nearly the same time
_EARLY_S = 90.0  # Slurm sends the signal before the time limit up to a minute early
_ENDS = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """The function of such a job: takes up to `probes` probes, and ends when none waits for `idle_s` seconds."""

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
        """The next probe; None where none came within `idle_s`, the job was told to end, or the node is at fault."""
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
            time.sleep(_LOOK_S)
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
        """Say why there is no answer, where the end of the job is the reason."""
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
        """Whether the probe ended because its card is broken: then it is repeated, and the node set aside."""
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
