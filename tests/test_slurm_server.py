"""A full run on Slurm beside a vLLM server, on the last node of its job: TRL's real client, a stand-in server."""

from __future__ import annotations

import re
import time
from pathlib import Path

import psutil
import pytest
from served_runs import failure, folder_of_run
from slurm_cluster import Cluster
from test_slurm_promote import ended, lines, logs, resumed, steps, wait
from vllm_stand_in import servers_of, write_stand_in

from autofit.cluster.scheduler import executor_of
from autofit.files import read_json
from autofit.probing.launch import start_job
from autofit.promotion.slurm_job import run_allocated
from autofit.recipe.launch import Launch
from autofit.watching.events import EventKind, events_of

OUT_OF_MEMORY_ONCE = """
import pathlib
import torch

def share_of_t1(completions, **kwargs):
    try:
        (pathlib.Path(__file__).parent / "was-out").mkdir()
    except FileExistsError:
        return [c.split().count("t1") / max(1, len(c.split())) for c in completions]
    raise torch.OutOfMemoryError("CUDA out of memory")
"""


def start(folder: Path, setup: list[str], nodes: int = 2) -> str:
    """The number of the run's job, in which these lines of shell come first."""
    (folder / "failed.json").unlink(missing_ok=True)
    asked = executor_of({"kind": "slurm", "nodes": nodes, "mem": "2G", "time": "50", "setup": setup})
    start_job(folder, run_allocated, str(folder / "request.json"), timeout_s=0, executor=asked)
    return str((read_json(folder / "job.json") or {})["slurm"])


def url(folder: Path) -> str:
    """Where the server of the run answers now."""
    [path] = (folder / "server").glob("*-answers.json")
    return str((read_json(path) or {})["url"])


@pytest.mark.slow
def test_a_run_has_a_new_server_after_a_requeue_and_ends_with_it(
    slurm: Cluster, tiny_model: Path, tmp_path: Path
) -> None:
    folder = folder_of_run(tmp_path / "run", tiny_model, max_steps=4000)
    setup = write_stand_in(tmp_path / "stand-in")
    job = start(folder, setup)
    wait(folder, lambda: steps(folder) >= 2)
    first = url(folder)
    assert len(servers_of(folder)) == 2
    slurm.run("scontrol", "requeue", job)
    wait(folder, lambda: resumed(folder))
    since = resumed(folder)[0]
    wait(folder, lambda: steps(folder) > since)
    assert url(folder) != first
    server, engine = servers_of(folder)
    began = time.monotonic()
    server.kill()
    assert ended(folder) is None
    assert time.monotonic() - began < 20
    assert re.fullmatch(r"the vLLM server on n\d was killed by SIGKILL \(.*\); see .*/server.log", failure(folder))
    assert not engine.is_running()


@pytest.mark.thorough  # CI has a job that is killed beside its server on one machine (test_server_runs.py)
def test_a_job_that_is_killed_takes_its_server_along(slurm: Cluster, tiny_model: Path, tmp_path: Path) -> None:
    folder = folder_of_run(tmp_path / "run", tiny_model, max_steps=4000)
    start(folder, write_stand_in(tmp_path / "stand-in"))
    wait(folder, lambda: steps(folder) >= 2)
    keeper = servers_of(folder)[0].parent()
    assert keeper is not None
    job_process = keeper.parent()
    assert job_process is not None
    of_server = [keeper, *servers_of(folder)]
    job_process.kill()  # Slurm ends the step, with SIGTERM first: the job may put itself back, and begin anew
    assert not psutil.wait_procs(of_server, timeout=20)[1]


@pytest.mark.thorough
def test_a_run_saves_after_usr2_with_its_server_and_a_lost_node_of_the_server_starts_it_again(
    slurm: Cluster, tiny_model: Path, tmp_path: Path
) -> None:
    folder = folder_of_run(tmp_path / "run", tiny_model, max_steps=4000)
    job = start(folder, write_stand_in(tmp_path / "stand-in"))
    wait(folder, lambda: steps(folder) >= 2)
    slurm.run("scancel", "--signal=USR2", job)
    wait(folder, lambda: resumed(folder))
    since = resumed(folder)[0]
    assert [line[0] for line in lines(folder)] == list(range(1, steps(folder) + 1))
    wait(folder, lambda: steps(folder) > since)
    said = slurm.run("squeue", "--noheader", f"--jobs={job}", "--format=%N")
    [training] = [str((read_json(folder / "started.json") or {})["node"])]
    [lost] = [node for node in slurm.run("scontrol", "show", "hostnames", said.strip()).split() if node != training]
    slurm.kill_node(lost)
    wait(folder, lambda: len(resumed(folder)) > 1)
    assert not (folder / "failed.json").exists()


@pytest.mark.thorough
def test_a_run_of_two_nodes_trains_to_its_end_beside_a_server_on_a_third_also_after_an_oom(
    slurm: Cluster, tiny_model: Path, tmp_path: Path
) -> None:
    folder = folder_of_run(tmp_path / "run", tiny_model, Launch(ranks=2, machines=2), max_steps=3)
    (folder / "tiny_rewards.py").write_text(OUT_OF_MEMORY_ONCE)
    start(folder, write_stand_in(tmp_path / "stand-in"), nodes=3)
    final = ended(folder)
    assert final is not None, logs(folder)
    assert final["steps"] == 3
    assert not servers_of(folder)
    [rescue] = [event for event in events_of(folder) if event.kind is EventKind.RESCUE]
    assert "out of memory" in rescue.text
    assert len(list((folder / "server").glob("*-answers.json"))) == 2


@pytest.mark.slow
def test_a_server_that_cannot_start_ends_the_run_with_its_last_words(
    slurm: Cluster, tiny_model: Path, tmp_path: Path
) -> None:
    """TRL's own command, without vLLM."""
    folder = folder_of_run(tmp_path / "run", tiny_model)
    start(folder, [])
    assert ended(folder) is None
    assert re.fullmatch(
        r"the vLLM server on n\d ended with exit code 1 \(.*No module named 'vllm'\)*; see .*/server.log",
        failure(folder),
    )
    assert steps(folder) == 0
