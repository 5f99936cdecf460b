"""`autofit jobs`: full runs and probes of this machine and of Slurm, listed, shown and cancelled."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from slurm_cluster import Cluster

from autofit import jobs
from autofit.api import Job
from autofit.cli import main
from autofit.cluster.scheduler import executor_of
from autofit.cluster.slurm import SlurmQueue, submit
from autofit.files import write_json
from autofit.probing.cluster_launch import Pool, job_name
from autofit.probing.supervise import note_of


def _sleep(_: str) -> None:
    print("hello from a job", flush=True)
    time.sleep(60)


def _full_run(home: Path, **job: object) -> Path:
    folder = home / "promoted/study-trial-3"
    write_json(folder / "request.json", {"study": "study", "trial": 3, "device": "cpu"})
    write_json(folder / "job.json", {"submitted": time.time() - 90, **job})
    return folder


def _when(found: Callable[[], Job | None]) -> Job:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if (job := found()) is not None:
            return job
        time.sleep(0.1)
    raise AssertionError("it was not there in time")


@pytest.fixture
def process() -> Iterator[psutil.Process]:
    child = psutil.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield child
    with suppress(psutil.NoSuchProcess):
        child.kill()
    child.wait()


def test_a_full_run_of_this_machine_is_listed_and_asked_to_save_before_it_is_killed(
    tmp_path: Path, process: psutil.Process, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _full_run(tmp_path, job_id=str(process.pid), **note_of(process.pid))
    write_json(folder / "started.json", note_of(process.pid))
    (folder / "run.log").write_text("step 1\nstep 2\n")
    assert main(["jobs", "--dir", str(tmp_path)]) == 0
    row = capsys.readouterr().out
    assert str(process.pid) in row
    assert "full run of trial 3" in row
    assert "1m30s ago" in row
    assert main(["jobs", "tail", str(process.pid), "--dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "step 1\nstep 2\n"
    (job,) = jobs(tmp_path)
    assert "saves a checkpoint" in job.cancel()
    assert (folder / "stop").exists()
    assert process.is_running()
    job.cancel()
    process.wait(5)
    assert not jobs(tmp_path).jobs


def test_what_slurm_runs_and_lets_wait_is_listed_with_one_squeue(slurm: Cluster, tmp_path: Path) -> None:
    pool = Pool(tmp_path / "probes/study/jobs")
    pool.make()
    name = job_name(pool.home)
    (first,) = submit_sleeping(pool, name, mem="500M")
    (waits,) = submit_sleeping(pool, name, cpus_per_task=8, slurm={"begin": "now+3600"})
    (other,) = submit_sleeping(pool, "not-ours")
    run = _full_run(tmp_path, slurm=other)
    pool.folder("trial-0002-1").mkdir()
    (pool.home / "queue/trial-0002-1").touch()
    assert pool.take(first) == "trial-0002-1"

    def running() -> Job | None:
        found = {job.id: job for job in jobs(tmp_path)}
        states = {which: found[which].state for which in found}
        return found[first] if states == {first: "running", waits: "pending", other: "running"} else None

    job = _when(running)
    assert (job.what, job.study, job.where) == ("trial-0002-1", "study", "slurm")
    assert job.node in slurm.nodes
    found = {job.id: job for job in jobs(tmp_path)}
    assert set(found) == {first, waits, other}
    assert found[waits].reason == "BeginTime"
    assert found[other].what == "full run of trial 3"
    assert found[other].folder == run
    _when(lambda: job if "hello from a job" in job.tail() else None)
    for job in found.values():
        job.cancel()
    assert (run / "stop").exists(), "it trains, so it saves first"
    found[other].cancel()
    _when(lambda: None if {"running", "pending"} & {job.state for job in jobs(tmp_path)} else job)


def submit_sleeping(pool: Pool, name: str, **options: object) -> list[str]:
    return submit(executor_of({"kind": "slurm", **options}), pool.home / "logs", _sleep, ["x"], name=name)


def test_ids_that_are_none_and_words_that_do_not_belong_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["jobs", "--dir", str(tmp_path)]) == 2
    assert "there are no studies" in capsys.readouterr().err
    (tmp_path / "promoted").mkdir()
    for words, said in (
        (["cancel", "7"], "no job '7' runs or waits"),
        (["cancel"], "takes no ID"),
        (["tail", "1", "2"], "takes no ID"),
        (["list", "--follow"], "--follow is for"),
    ):
        assert main(["jobs", *words, "--dir", str(tmp_path)]) == 2
        assert said in capsys.readouterr().err
    assert main(["jobs", "--json", "--dir", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out) == {"jobs": [], "problem": ""}


def test_a_machine_without_slurm_lists_its_own_jobs_and_says_what_is_missing(
    tmp_path: Path, process: psutil.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("autofit.cluster.slurm._queue", SlurmQueue())
    _full_run(tmp_path, job_id=str(process.pid), **note_of(process.pid))
    (tmp_path / "probes/study/jobs").mkdir(parents=True)
    found = jobs(tmp_path)
    assert [job.id for job in found] == [str(process.pid)]
    assert "squeue is not on the PATH" in str(found)
