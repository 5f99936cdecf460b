"""What a job of Slurm knows of its own allocation: its nodes, which of them it is on, and how often it has started."""

import os
import platform
from dataclasses import dataclass

from autofit.cluster.slurm import addresses_of, is_running, requeue


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnJob:
    """The job that this process belongs to, of which one process runs on each node."""

    job: str
    attempt: str  # new each time that Slurm starts the job
    node: int  # the number of this node, from 0
    nodes: int
    name: str  # of this node

    @property
    def is_first(self) -> bool:
        """Whether this is the node that decides for all."""
        return self.node == 0

    def first_address(self) -> str:
        """The address under which the other nodes reach the first one. Raises EnvironmentFault."""
        return addresses_of(os.environ["SLURM_JOB_NODELIST"])[0]

    def own_address(self) -> str:
        """The address under which the other nodes reach this one. Raises EnvironmentFault."""
        return addresses_of(os.environ["SLURM_JOB_NODELIST"])[self.node]

    def is_running(self) -> bool:
        """Whether the job is to go on: neither cancelled nor put back into the queue."""
        return is_running(self.job)

    def requeue(self) -> None:
        """Put the job back into the queue, which ends this process soon. Raises EnvironmentFault if Slurm refuses."""
        requeue(self.job)


def in_job() -> bool:
    """Whether submitit runs this process, or the one that started it, as a job of Slurm."""
    return os.environ.get("SUBMITIT_EXECUTOR") == "slurm" and "SLURM_JOB_ID" in os.environ


def own_job() -> OwnJob:
    """The allocation of this process, which must be `in_job`."""
    job = os.environ["SLURM_JOB_ID"]  # of an array, Slurm's own number of this element
    return OwnJob(
        job=job, attempt=f"{job}-{os.environ.get('SLURM_RESTART_COUNT', '0')}",
        node=int(os.environ.get("SLURM_NODEID", "0")), nodes=int(os.environ.get("SLURM_STEP_NUM_NODES", "1")),
        name=node_name(),
    )  # fmt: skip


def own_id() -> str:
    """The id of this process's job, as squeue tells it of each job of an array."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ["SLURM_JOB_ID"]


def node_name() -> str:
    """Slurm's name of this node."""
    return os.environ.get("SLURMD_NODENAME") or platform.node()
