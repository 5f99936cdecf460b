"""A cluster's scheduler as a protocol: Slurm is `autofit/cluster/slurm.py`, another is one file of the same functions.

`executor: slurm` names the first, `executor: my_scheduler:CLUSTER` an object, or a module, of your own.
"""

import importlib
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol, cast

from autofit.cluster.executor import SLURM, Executor, Kind
from autofit.errors import ConfigError

IN = "AUTOFIT_CLUSTER"  # the kind of the executor, in the environment of a job; without it: Slurm
_ALIVE = frozenset((
    "PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESIZING",
    "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED", "SPECIAL_EXIT",
))  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """What a scheduler says of a job: its state in Slurm's words, its nodes, the reason why it waits, its name."""

    state: str
    nodes: str = ""
    reason: str = ""
    name: str = ""

    @property
    def is_alive(self) -> bool:
        return self.state in _ALIVE

    @property
    def waits(self) -> bool:
        return self.state in ("PENDING", "CONFIGURING", "REQUEUED")


class Queue(Protocol):
    """The states of all jobs of this user. It asks the scheduler seldom, whatever is asked of it."""

    command: str  # the command that it asks
    calls: int  # answers of the scheduler so far
    asked_at: float  # time.monotonic() before the call that told the states

    def state(self, job_id: str) -> JobState | None:
        """The state of a job; one that the scheduler no longer knows is ENDED. None: not known yet, ask again later."""
        ...

    def waits(self, job_id: str) -> bool:
        """Whether the job waits, as far as the scheduler has said."""
        ...

    def states(self) -> Mapping[str, JobState]:
        """All jobs of this user that the scheduler knows, by id."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnJob:
    """The job that this process belongs to, of which one process runs on each node."""

    job: str
    id: str  # as the queue tells it: of an array, with this job's number in it
    attempt: str  # new each time that the scheduler starts the job
    node: int  # the number of this node, from 0
    nodes: int
    name: str  # of this node

    @property
    def is_first(self) -> bool:
        """Whether this is the node that decides for all."""
        return self.node == 0

    def first_address(self) -> str:
        """The address under which the other nodes reach the first one. Raises EnvironmentFault."""
        return self.addresses()[0]

    def own_address(self) -> str:
        """The address under which the other nodes reach this one. Raises EnvironmentFault."""
        return self.addresses()[self.node]

    def addresses(self) -> Sequence[str]:
        """The addresses of the job's nodes, in their order. Raises EnvironmentFault."""
        raise NotImplementedError

    def is_running(self) -> bool:
        """Whether the job is to go on: neither cancelled nor put back into the queue."""
        raise NotImplementedError

    def requeue(self) -> None:
        """Put the job back into the queue, which ends this process soon. Raises EnvironmentFault where it cannot."""
        raise NotImplementedError


class Cluster(Protocol):
    """A scheduler: a module with these functions, or an object with these methods."""

    title: str  # its name, for people

    def check_commands(self) -> None:
        """Raise EnvironmentFault where this machine has not the scheduler's commands."""
        ...

    def submit(
        self, executor: Executor, folder: Path, function: Callable[[str], None], arguments: Sequence[str], *, name: str,
        nodes: int = 1, exclude: Sequence[str] = (), signal_s: int = 60,
    ) -> list[str]:  # fmt: skip
        """Submit a job that calls `function` with each of `arguments` (several are one array); returns their ids.

        With `nodes` > 1 the function is called once on each node, with `AUTOFIT_CLUSTER` set to the executor's kind.
        USR2 comes `signal_s` seconds before the time limit. What the job prints is in FOLDER/ID_0_log.out. Raises
        EnvironmentFault where the scheduler refuses.
        """
        ...

    def queue(self) -> Queue:
        """The one queue of this process."""
        ...

    def cancel(self, ids: Sequence[str]) -> None:
        """Cancel the jobs; those that have ended are left as they are."""
        ...

    def exclude(self, ids: Sequence[str], nodes: Sequence[str]) -> None:
        """Keep the jobs, which wait, off the nodes."""
        ...

    def limit_of_job_s(self, executor: Executor) -> float:
        """The time limit of a job in seconds."""
        ...

    def nodes_of(self, partition: str | None) -> frozenset[str]:
        """The names of the nodes of the partition, of the default one without a name; empty where it does not say."""
        ...

    def is_out_of_memory(self, said: str) -> bool:
        """Whether the end of a job's log says that the scheduler ended the job for its memory."""
        ...

    def own_job(self) -> OwnJob | None:
        """The job of this process; None where it is in none."""
        ...


@cache
def cluster_of(kind: Kind) -> Cluster:
    """The scheduler of the executor `kind`: slurm, or module:object. Raises ConfigError where it cannot be imported."""
    module, colon, target = ("autofit.cluster.slurm", "", "") if kind == SLURM else kind.partition(":")
    if colon and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        found: object = importlib.import_module(module)
        found = getattr(found, target) if colon else found
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"the executor {kind!r} must be importable, as module:object; {error}") from error
    needed = ("title", *(name for name, of in vars(Cluster).items() if callable(of) and not name.startswith("_")))
    lacking = [name for name in needed if not hasattr(found, name)]
    if lacking:
        raise ConfigError(f"the executor {kind!r} must have the functions of a cluster; it lacks {', '.join(lacking)}")
    return cast(Cluster, found)


def check_commands(executor: Executor) -> None:
    """Raise EnvironmentFault where jobs go to a scheduler and this machine has not its commands."""
    if executor.is_cluster:
        cluster_of(executor.kind).check_commands()


def own_job() -> OwnJob | None:
    """The job that this process is part of; None where it is in none."""
    return cluster_of(os.environ.get(IN, SLURM)).own_job()


def own_node() -> str:
    """The name of this node, as the scheduler has it where this process is in a job."""
    job = own_job()
    return platform.node() if job is None else job.name
