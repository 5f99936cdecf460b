"""A scheduler in one file: jobs are processes of this machine. `executor: spare_cluster:CLUSTER`."""

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from autofit.cluster.scheduler import Executor, JobState, OwnJob

_RUN = "import pickle, sys; function, argument = pickle.load(open(sys.argv[1], 'rb')); function(argument)"


class SpareJob(OwnJob):
    def addresses(self) -> Sequence[str]:
        return ["127.0.0.1"]

    def is_running(self) -> bool:
        return True


@dataclass
class SpareQueue:
    command: str = "spare-queue"
    calls: int = 0
    asked_at: float = 0.0
    running: dict[str, tuple[str, subprocess.Popen[bytes]]] = field(default_factory=dict)

    def state(self, job_id: str) -> JobState | None:
        return self.states().get(job_id, JobState(state="ENDED"))

    def waits(self, job_id: str) -> bool:
        return False

    def states(self) -> Mapping[str, JobState]:
        self.calls, self.asked_at = self.calls + 1, time.monotonic()
        return {
            job_id: JobState(state="RUNNING" if job.poll() is None else "COMPLETED", nodes="spare-1", name=name)
            for job_id, (name, job) in self.running.items()
        }


class SpareCluster:
    title = "the spare cluster"

    def __init__(self) -> None:
        self.jobs = SpareQueue()

    def check_commands(self) -> None: ...

    def submit(
        self, executor: Executor, folder: Path, function: Callable[[str], None], arguments: Sequence[str], *, name: str,
        nodes: int = 1, exclude: Sequence[str] = (), signal_s: int = 60,
    ) -> list[str]:  # fmt: skip
        ids = []
        folder.mkdir(parents=True, exist_ok=True)
        for argument in arguments:
            job_id = f"spare-{len(self.jobs.running)}"
            (folder / f"{job_id}.pkl").write_bytes(pickle.dumps((function, argument)))
            with (folder / f"{job_id}_0_log.out").open("wb") as log:
                job = subprocess.Popen(
                    [sys.executable, "-c", _RUN, str(folder / f"{job_id}.pkl")], stdout=log, stderr=log,
                    env={**os.environ, "AUTOFIT_CLUSTER": executor.kind, "SPARE_JOB": job_id,
                         "PYTHONPATH": os.pathsep.join(sys.path)},
                )  # fmt: skip
            self.jobs.running[job_id] = (name, job)
            ids.append(job_id)
        return ids

    def queue(self) -> SpareQueue:
        return self.jobs

    def cancel(self, ids: Sequence[str]) -> None:
        for job_id in ids:
            self.jobs.running[job_id][1].terminate()
            self.jobs.running[job_id][1].wait()

    def exclude(self, ids: Sequence[str], nodes: Sequence[str]) -> None: ...

    def limit_of_job_s(self, executor: Executor) -> float:
        return executor.time_s or 600.0

    def nodes_of(self, partition: str | None) -> frozenset[str]:
        return frozenset({"spare-1"})

    def is_out_of_memory(self, said: str) -> bool:
        return False

    def own_job(self) -> SpareJob | None:
        job = os.environ.get("SPARE_JOB")
        return None if job is None else SpareJob(job=job, id=job, attempt=job, node=0, nodes=1, name="spare-1")


CLUSTER = SpareCluster()
