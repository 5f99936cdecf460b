"""Jobs of Slurm: submitted by submitit, followed with one `squeue` for all, cancelled. The only caller of Slurm."""

import getpass
import math
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autofit.cluster.scheduler import Executor, JobState, OwnJob, time_s
from autofit.errors import EnvironmentFault, one_line, option
from autofit.files import cannot_write, private_folder

title = "Slurm"
SQUEUE_EVERY_S = 5.0  # least time between two calls, however many jobs there are
_CALL_S = 60.0  # longest wait for an answer of slurmctld
_UNSEEN = 3  # answers without a job that was seen, or submitted, before: then it has ended
_DAY_S = 24 * 3600.0  # default time limit of a job, unless the partition allows less
# What slurmstepd prints where it ends a step for its memory: by its own count (JobAcctGatherParams=OverMemoryKill;
# the job is FAILED then), or as the kernel tells it of a cgroup.
_OUT_OF_MEMORY = re.compile(r"exceeded (\w+ )?memory limit|oom[-_]kill|out-of-memory handler", re.IGNORECASE)
# A site that gives jobs a bare environment (--export=NONE, SBATCH_EXPORT) would hide from srun what the job itself set.
_EXPORT_ALL = "unset SLURM_EXPORT_ENV"
_COMMANDS = ("sbatch", "srun", "squeue", "scancel")
_NOT_HERE = (
    f"the executor slurm needs Slurm's commands ({', '.join(_COMMANDS)}) on the PATH; log in to the cluster, or use "
    f"{option('executor', 'local')}"
)


def check_commands() -> None:
    """Raise EnvironmentFault if this machine lacks Slurm's commands."""
    if any(shutil.which(command) is None for command in _COMMANDS):
        raise EnvironmentFault(_NOT_HERE)


def submit(
    executor: Executor, folder: Path, function: Callable[[str], None], arguments: Sequence[str], *, name: str,
    nodes: int = 1, exclude: Sequence[str] = (), signal_s: int = 60,
) -> list[str]:  # fmt: skip
    """Submit a job that calls `function` with each of `arguments` (several are one array); returns their ids.

    With `nodes` > 1 the function is called once on each node. Files of submitit are in `folder`, which every node must
    see. USR2 comes `signal_s` seconds before the time limit. Raises EnvironmentFault where sbatch refuses.
    """
    import submitit

    python = f"{shlex.quote(sys.executable)} -P"
    try:
        private_folder(folder)  # submitit unpickles what lies there
    except OSError as error:
        raise cannot_write(folder, error) from error
    try:
        made = submitit.SlurmExecutor(folder=folder, python=python, max_num_timeout=10**6)
    except RuntimeError as error:
        raise EnvironmentFault(_NOT_HERE) from error
    minutes = max(1, math.ceil(limit_of_job_s(executor) / 60))
    asked: dict[str, Any] = {
        "job_name": name, "partition": executor.partition, "account": executor.account, "qos": executor.qos,
        "constraint": executor.constraint, "mem": executor.mem, "gpus_per_node": executor.gpus_per_node,
        "cpus_per_task": executor.cpus_per_task, "nodes": nodes, "ntasks_per_node": 1, "time": minutes,
        "setup": [_EXPORT_ALL, *executor.setup], "exclude": ",".join(exclude) or None, "signal_delay_s": signal_s,
        "stderr_to_stdout": True, "wckey": "", "srun_args": ["--kill-on-bad-exit=1"] if nodes > 1 else None,
        "array_parallelism": max(1, len(arguments)),
        "additional_parameters": {**({"requeue": True} if executor.is_requeued else {}), **executor.slurm},
    }  # fmt: skip
    made.update_parameters(**{key: value for key, value in asked.items() if value is not None})
    try:
        jobs = [job for part in _arrays(arguments) for job in made.map_array(function, part)]
    except submitit.core.utils.FailedJobError as error:
        raise EnvironmentFault(f"sbatch refused the job: {one_line(str(error))}{_no_partition(executor)}") from error
    except OSError as error:
        raise EnvironmentFault(f"the job cannot be submitted from {folder}: {error.strerror or error}") from error
    return [job.job_id for job in jobs]


def _no_partition(executor: Executor) -> str:
    """Sentence on a missing partition, with the existing ones; "" if all exist, or Slurm is silent."""
    known = partition_limits_s() or {}
    missing = [name for name in (executor.partition or "").split(",") if name and name not in known]
    return f"; there is no partition {missing[0]}, but {', '.join(sorted(known)[:20])}" if known and missing else ""


def _arrays(arguments: Sequence[str]) -> list[Sequence[str]]:
    """`arguments` in parts that one array may have: a site's MaxArraySize, 0 if it forbids arrays."""
    longest = len(arguments)
    if longest > 1:
        found = re.search(r"MaxArraySize\s*=\s*(\d+)", _call(["scontrol", "show", "config"], needed=False) or "")
        longest = max(1, min(longest, int(found[1]))) if found else longest
    return [arguments[first : first + longest] for first in range(0, len(arguments), max(1, longest))]


def limit_of_job_s(executor: Executor) -> float:
    """The time limit of a job in seconds: the requested one, else a day or the partition's limit."""
    return executor.time_s or min(_DAY_S, _partition_s(executor.partition))


def _partition_s(name: str | None) -> float:
    """The longest time in seconds that the partition allows a job; `name` None is the default one."""
    if name not in _KNOWN_LIMITS_S and (found := _of_partition(name, "%l")):  # where Slurm is silent, it is asked again
        _KNOWN_LIMITS_S[name] = _limit_s(found[0])
    return _KNOWN_LIMITS_S.get(name, math.inf)


_KNOWN_LIMITS_S: dict[str | None, float] = {}


def nodes_of(partition: str | None) -> frozenset[str]:
    """The names of the nodes of the partition (None: the default one); empty if Slurm is silent."""
    return frozenset(_of_partition(partition, "%N", "--Node"))


def _of_partition(name: str | None, field: str, *options: str) -> list[str]:
    """A field of sinfo's lines for the partition; `name` None is the default one. Empty if Slurm is silent."""
    chosen = [f"--partition={name}"] if name else []
    said = _call(["sinfo", "--noheader", *options, f"--format=%P|{field}", *chosen], needed=False)
    return [line.split("|")[1].strip() for line in (said or "").splitlines() if name or "*|" in line]


def _limit_s(text: str) -> float:
    """A partition's longest time of a job, as sinfo writes it, in seconds."""
    return math.inf if text == "infinite" else time_s(text)


def partition_limits_s() -> dict[str, float] | None:
    """{partition: the longest time of its jobs in seconds}; None if Slurm is silent."""
    if shutil.which("sinfo") is None:
        return None
    said = _call(["sinfo", "--noheader", "--format=%R|%l"], needed=False)
    if said is None:
        return None
    lines = (line.strip().split("|") for line in said.splitlines())
    return {name: _limit_s(limit) for name, limit in lines}


def cancel(ids: Sequence[str]) -> None:
    """Cancel the jobs; those that have ended are left as they are."""
    if ids:
        _call(["scancel", "--quiet", *ids])


def exclude(ids: Sequence[str], nodes: Sequence[str]) -> None:
    """Keep the jobs, which wait, off the nodes; one that has started meanwhile is left as it is."""
    for job_id in ids:
        _call(["scontrol", "update", f"JobId={job_id}", f"ExcNodeList={','.join(nodes)}"], needed=False)


def requeue(job_id: str) -> None:
    """Put a running job back into the queue; Slurm starts it again from its beginning."""
    _call(["scontrol", "requeue", job_id])


def is_out_of_memory(said: str) -> bool:
    """True if the end of a job's log shows that Slurm ended the job for its memory."""
    return _OUT_OF_MEMORY.search(said) is not None


def is_running(job_id: str) -> bool:
    """True if Slurm has the job as running; False once it was cancelled or requeued, though it may end later."""
    return (_call(["squeue", "--noheader", f"--jobs={job_id}", "--format=%T"], needed=False) or "").strip() == "RUNNING"


def addresses_of(nodes: str) -> list[str]:
    """The addresses of the nodes that Slurm writes as `nodes` ("n[1-3]"), in their order. Raises EnvironmentFault."""
    names = (_call(["scontrol", "show", "hostnames", nodes]) or "").split()
    words = (_call(["scontrol", "--oneliner", "show", "node", nodes]) or "").split()
    found = [word.partition("=")[2] for word in words if word.startswith(("NodeName=", "NodeAddr="))]
    address = dict(zip(found[::2], found[1::2], strict=True))
    return [address.get(name, name) for name in names]


@dataclass(slots=True)
class SlurmQueue:
    """The states of all jobs of this user, asked for at most once in SQUEUE_EVERY_S, however often it is asked."""

    every_s: float = SQUEUE_EVERY_S
    command: str = "squeue"
    calls: int = 0
    _states: dict[str, JobState] = field(default_factory=dict)
    _unseen: dict[str, int] = field(default_factory=dict)  # answers without the job, since it was last seen
    asked_at: float = -math.inf  # time.monotonic() before the call that told the states
    _last: float = -math.inf
    _last_seen: dict[str, JobState] = field(default_factory=dict)

    def state(self, job_id: str) -> JobState | None:
        """The state of a job; one that Slurm has forgotten is ENDED. None: unknown yet, ask again later."""
        self._refresh()
        found = self._states.get(job_id)
        if found is not None:
            self._unseen.pop(job_id, None)
            self._last_seen[job_id] = found
            return found
        if self._unseen.setdefault(job_id, self.calls - 1) + _UNSEEN <= self.calls:
            return JobState(state="ENDED", nodes=getattr(self._last_seen.get(job_id), "nodes", ""))
        return self._last_seen.get(job_id)

    def waits(self, job_id: str) -> bool:
        """True if the job waits, by Slurm's last answer."""
        state = self.state(job_id)
        return state is not None and state.waits

    def states(self) -> Mapping[str, JobState]:
        """All jobs of this user that Slurm knows, by id."""
        self._refresh()
        return self._states

    def _refresh(self) -> None:
        if time.monotonic() - self._last < self.every_s:
            return
        self._last = time.monotonic()
        # Of the user, not -j: one id that Slurm has forgotten would fail the whole call. No accounting is needed.
        asked = ["squeue", "--noheader", "--array", "--states=all", f"--user={getpass.getuser()}"]
        said = _call([*asked, "--format=%i|%T|%N|%r|%j"], needed=False)
        if said is None:  # slurmctld does not answer: nothing is known to have changed
            return
        self.calls += 1
        self.asked_at = self._last
        self._states = {}
        for line in said.splitlines():
            job_id, state, nodes, reason, name = line.split("|", 4)
            told = JobState(state=state, nodes=nodes, reason="" if reason == "None" else reason, name=name)
            self._states[job_id] = told


_queue = SlurmQueue()


def queue() -> SlurmQueue:
    """The one queue of this process."""
    return _queue


def _call(command: Sequence[str], *, needed: bool = True) -> str | None:
    """Output of the command. If it fails: None, or EnvironmentFault if it is `needed`."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_CALL_S, check=False)
        if done.returncode == 0:
            return done.stdout
        problem = done.stderr or f"exit code {done.returncode}"
    except FileNotFoundError:
        problem = f"{command[0]} is not on the PATH"
        needed = True
    except subprocess.TimeoutExpired:
        problem = f"no answer within {_CALL_S:.0f} s"
    if needed:
        raise EnvironmentFault(f"`{' '.join(command[:3])}` failed: {one_line(problem)}")
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob(OwnJob):
    """The job of Slurm that this process belongs to."""

    def addresses(self) -> list[str]:
        return addresses_of(os.environ["SLURM_JOB_NODELIST"])

    def is_running(self) -> bool:
        return is_running(self.job)

    def requeue(self) -> None:
        requeue(self.job)


def own_job() -> SlurmJob | None:
    """The job in which submitit runs this process, or the one that started it, if it is in one."""
    if os.environ.get("SUBMITIT_EXECUTOR") != "slurm" or "SLURM_JOB_ID" not in os.environ:
        return None
    job = os.environ["SLURM_JOB_ID"]  # of an array, Slurm's own number of this element
    return SlurmJob(
        job=job, id=_own_id(job), attempt=f"{job}-{os.environ.get('SLURM_RESTART_COUNT', '0')}",
        node=int(os.environ.get("SLURM_NODEID", "0")), nodes=int(os.environ.get("SLURM_STEP_NUM_NODES", "1")),
        name=os.environ.get("SLURMD_NODENAME") or platform.node(),
    )  # fmt: skip


def _own_id(job: str) -> str:
    """The id of this process's `job`, as squeue tells it of each job of an array."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else job
