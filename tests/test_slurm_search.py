"""A search on a real Slurm: its probes are taken by jobs, and whatever becomes of these, none is lost or doubled."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import lawful
import pytest
import search_driver
import tiny
from search_driver import on_slurm, plan
from slurm_cluster import Cluster

from autofit.cluster.scheduler import executor_of
from autofit.errors import EnvironmentFault
from autofit.files import read_json
from autofit.probing.cluster_launch import launcher_for
from autofit.probing.fork_server import ForkServer
from autofit.probing.launch import Launcher
from autofit.probing.prepare import keep_worst_case, prepare
from autofit.space.knob import load_space
from autofit.space.space import Space
from autofit.tuning.search import Plan, Search, open_study
from autofit.tuning.study import load_study, trials_of


def found(folder: Path) -> list[tuple[object, ...]]:
    """What a study holds, in any order: which candidates were probed, and with what result."""
    return sorted(
        (str(t.changes), str(t.status), t.step_s, t.device_used_bytes) for t in trials_of(load_study(folder, "law"))
    )


def search_in(folder: Path, launcher: Launcher, trials: int | None = 6, parallel: int = 1) -> list[str]:
    """What a search said that ran to its end."""
    wanted, said = replace(plan(folder, trials), parallel=parallel, sampler="grid"), list[str]()
    search = Search(wanted, open_study(wanted), server_socket=None, launcher=launcher)
    search.on_note = said.append
    try:
        search.run()
    finally:
        launcher.close()
    return said


def driver(folder: Path, **env: str) -> subprocess.Popen[str]:
    command = [sys.executable, search_driver.__file__, str(folder), "8", "3"]
    return subprocess.Popen(command, env={**os.environ, **env}, stdout=subprocess.PIPE, text=True)


def until(what: Callable[[], object], within_s: float = 30) -> None:
    deadline = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def taken(folder: Path) -> dict[str, str]:
    """{probe: its job}."""
    names = os.listdir(folder / "probes/law/jobs/taken") if (folder / "probes/law/jobs/taken").exists() else []
    return {name.split("@")[1]: name.split("@")[0] for name in names}


def test_a_search_on_slurm_equals_the_one_on_this_machine(slurm: Cluster, tmp_path: Path) -> None:
    search_in(tmp_path / "here", Launcher(lawful.at_once))
    search_in(tmp_path / "there", on_slurm(tmp_path / "there"), parallel=3)
    assert found(tmp_path / "there") == found(tmp_path / "here")
    assert not taken(tmp_path / "there")


def test_a_driver_that_was_killed_attaches_again(slurm: Cluster, tmp_path: Path) -> None:
    first = driver(tmp_path, LAWFUL_S="1")
    until(lambda: len(taken(tmp_path)) == 3)
    first.kill()
    first.wait()
    said, _ = driver(tmp_path, LAWFUL_S="0.1").communicate(timeout=60)
    assert "8 of 8 trials are done" in said
    assert "repeated" not in said
    assert len(trials_of(load_study(tmp_path, "law"))) == 8
    assert len(list((tmp_path / "probes/law").glob("trial-*"))) == 8  # the running ones were not started again


def ends_whole(folder: Path, running: subprocess.Popen[str]) -> str:
    """What the driver said, which ended with every trial told once, as lawful probes do."""
    said, _ = running.communicate(timeout=120)
    assert running.returncode == 0, said
    trials = load_study(folder, "law").trials
    assert [t.state.name for t in trials] == ["COMPLETE"] * 8
    assert not taken(folder)
    return said


@pytest.mark.parametrize(
    "how",
    ["requeue", *(pytest.param(how, marks=pytest.mark.thorough) for how in ("scancel", "SIGKILL", "SIGUSR2"))],
)  # fmt: skip
def test_a_probe_whose_job_is_ended_is_repeated_and_its_trial_not_blamed(
    slurm: Cluster, tmp_path: Path, how: str
) -> None:
    running = driver(tmp_path, LAWFUL_S="1")
    until(lambda: taken(tmp_path))
    name, job = next(iter(taken(tmp_path).items()))
    commands = {"scancel": ("scancel", job), "requeue": ("scontrol", "requeue", job),
                "SIGKILL": ("scancel", "--signal=KILL", job), "SIGUSR2": ("scancel", "--signal=USR2", job)}  # fmt: skip
    slurm.run(*commands[how])
    said = ends_whole(tmp_path, running)
    assert f"{name} is repeated: job {job}" in said
    assert (tmp_path / "probes/law" / f"{name[:-2]}-2/answer.json").exists()


@pytest.mark.slow
def test_a_node_that_goes_away_loses_no_probe(slurm: Cluster, tmp_path: Path) -> None:
    slurm.run("scontrol", "update", "NodeName=n3", "State=DRAIN", "Reason=test")
    running = driver(tmp_path, LAWFUL_S="3")
    until(lambda: len(taken(tmp_path)) == 3)
    name, job = next(iter(taken(tmp_path).items()))
    node = slurm.run("squeue", "--noheader", "--format=%N", "--jobs", job).strip()
    slurm.kill_node(node)
    said = ends_whole(tmp_path, running)
    slurm.start_node(node)
    assert f"{name} is repeated: job {job}" in said


def test_jobs_that_cannot_begin_are_one_error_with_what_they_printed(slurm: Cluster, tmp_path: Path) -> None:
    launcher = on_slurm(tmp_path, setup="echo no such module; exit 3")
    with pytest.raises(EnvironmentFault, match=r"end before they begin.*no such module.*setup in executor\.yaml"):
        search_in(tmp_path, launcher, parallel=3)


def test_every_node_at_fault_is_one_error_that_names_them(
    slurm: Cluster,
    tmp_path: Path,
) -> None:
    launcher = on_slurm(tmp_path)
    for node in slurm.nodes:
        launcher._pool.set_aside("its card is occupied", node=node)
    with pytest.raises(EnvironmentFault, match=r"no node is left.*n1: its card is occupied; n2: its"):
        search_in(tmp_path, launcher)


@pytest.mark.slow
def test_the_tiny_model_is_probed_by_a_job_with_a_warm_server_of_its_own(
    slurm: Cluster, tmp_path: Path, tiny_model: Path, fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tiny.write_offline_recipe("sft", tmp_path, tiny_model)
    recipe = prepare(path, trainer="sft", device="cpu", folder=tmp_path / "i", server=fork_server)
    space = Space.of(recipe, load_space(None, trainer="sft"))
    wanted = Plan(recipe=recipe, space=space, folder=tmp_path, device="cpu", target_bytes=10**9, max_trials=2)
    keep_worst_case(tmp_path / "i", wanted.probes_folder)
    executor = executor_of({"kind": "slurm", "probes_per_job": 2, "mem": "3G"})
    launcher = launcher_for(executor, wanted.probes_folder, device="cpu")
    study = open_study(wanted)
    Search(wanted, study, server_socket=None, launcher=launcher).run()
    launcher.close()
    trials = trials_of(study)
    assert [t.status for t in trials] == ["fit"] * 2, trials
    jobs = [read_json(wanted.probes_folder / f"trial-000{number}-1/job.json") for number in (0, 1)]
    assert jobs[0] is not None
    assert jobs[1] is not None
    assert jobs[0]["slurm"] == jobs[1]["slurm"]
