"""Jobs of a real Slurm: submitted, followed, cancelled."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from slurm_cluster import Cluster

from autofit.cluster import slurm as slurm_module
from autofit.cluster.scheduler import executor_of
from autofit.cluster.slurm import SlurmQueue, cancel, submit
from autofit.errors import EnvironmentFault


def _say(argument: str) -> None:
    print("said", argument, os.environ.get("HELLO"), os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
    if argument == "sleep":
        time.sleep(60)


def _ended(queue: SlurmQueue, ids: list[str]) -> list[str]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        states = [queue.state(one) for one in ids]
        if all(state is not None and not state.is_alive for state in states):
            return [state.state for state in states if state is not None]
        time.sleep(0.1)
    raise AssertionError(states)


def test_jobs_run_once_each_with_the_setup_and_a_card(slurm: Cluster, tmp_path: Path) -> None:
    setup = ["export HELLO=world", f"export PYTHONPATH={os.environ['PYTHONPATH']}"]
    site = {"export": "NONE", "requeue": False}  # as some sites demand
    asked = executor_of({"kind": "slurm", "gpus_per_node": 1, "mem": "500M", "setup": setup, "slurm": site})
    ids = submit(asked, tmp_path, _say, ["a", "b"], name="autofit-test")
    assert len(ids) == 2
    assert _ended(SlurmQueue(every_s=0.3), ids) == ["COMPLETED", "COMPLETED"]
    said = "".join(path.read_text() for path in tmp_path.glob("*.out"))
    assert "said a world" in said
    assert "said b world" in said
    assert "None" not in said
    assert "Requeue=0" in slurm.run("scontrol", "show", "job", ids[0])


@pytest.mark.parametrize(
    ("told", "sizes"),
    [
        ("MaxArraySize            = 1001\n", [5]),
        ("MaxArraySize            = 2\n", [2, 2, 1]),
        ("MaxArraySize            = 0\n", [1] * 5),
        (None, [5]),
    ],
)
def test_more_jobs_than_a_site_allows_in_one_array_are_several(
    monkeypatch: pytest.MonkeyPatch, told: str | None, sizes: list[int]
) -> None:
    monkeypatch.setattr(slurm_module, "_call", lambda command, needed: told)
    assert [len(part) for part in slurm_module._arrays("abcde")] == sizes
    assert slurm_module._arrays("a") == ["a"]


def test_a_partition_that_is_not_there_is_told_with_those_that_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = {"sbatch": "echo 'sbatch: error: Invalid partition name specified' >&2; exit 1", "srun": "exit 1",
             "sinfo": "printf 'main|1:00:00\nurgent|infinite\n'"}  # fmt: skip
    for name, line in lines.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for asked, told in (("gpu", " specified; there is no partition gpu, but main, urgent"), ("main", " specified")):
        executor = executor_of({"kind": "slurm", "partition": asked, "time": "1h"})
        with pytest.raises(EnvironmentFault, match=f"Invalid partition name{told}$"):
            submit(executor, tmp_path / "jobs", _say, ["x"], name="x")


def test_a_job_of_two_nodes_runs_on_each(slurm: Cluster, tmp_path: Path) -> None:
    ids = submit(executor_of({"kind": "slurm"}), tmp_path, _say, ["x"], name="autofit-test", nodes=2)
    assert _ended(SlurmQueue(every_s=0.3), ids) == ["COMPLETED"]
    assert "".join(path.read_text() for path in tmp_path.glob("*.out")).count("said x") == 2


def test_a_cancelled_job_has_ended(slurm: Cluster, tmp_path: Path) -> None:
    queue = SlurmQueue(every_s=0.3)
    ids = submit(executor_of({"kind": "slurm"}), tmp_path, _say, ["sleep"], name="autofit-test")
    while (state := queue.state(ids[0])) is None or state.waits:
        time.sleep(0.1)
    assert state.nodes in slurm.nodes
    cancel(ids)
    assert _ended(queue, ids) == ["CANCELLED"]


def test_one_call_of_squeue_serves_all_jobs(slurm: Cluster, tmp_path: Path) -> None:
    queue = SlurmQueue(every_s=60)
    for number in range(1000):
        queue.state(str(number))
    assert queue.calls == 1


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 5400), ("1:30", 90), ("2:00:00", 7200), ("1-12", 129600), ("4h", 14400)]
)
def test_time_limits_are_read_as_slurm_reads_them(text: str, seconds: float) -> None:
    assert executor_of({"time": text}).time_s == seconds
