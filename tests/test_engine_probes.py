"""Probes of real trainings beside a vLLM engine in their own process, on the CPU with a stand-in for vLLM."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import tiny
from at_once import AtOnce
from engine_stand_in import BESIDE_ENGINE, engine_env, engines_in

from autofit.probing.fork_server import ForkServer
from autofit.probing.job import run_probe
from autofit.probing.launch import Launcher
from autofit.probing.prepare import prepare, worst_case_path
from autofit.probing.result import Cause, ProbeRequest, ProbeResult, ProbeStatus
from autofit.recipe.keys import LAUNCH
from autofit.recipe.launch import Launch

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def beside_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """A server whose children find the stand-in: TRL looks for vLLM when it is imported."""
    folder = tmp_path_factory.mktemp("server")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", engine_env(folder)["PYTHONPATH"], prepend=os.pathsep)
        patch.setenv("ENGINES", "engines")  # where a child works
        server = ForkServer(folder)
    yield server
    server.close()


@pytest.fixture
def request_of_one(
    tmp_path: Path, tiny_model: Path, beside_engines: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> ProbeRequest:
    """A probe of GRPO beside an engine, in processes that find the stand-in."""
    monkeypatch.chdir(tmp_path)
    for name, value in engine_env(tmp_path).items():
        monkeypatch.setenv(name, value)
    path = tiny.write_recipe(tmp_path, tiny_model)
    read = prepare(path, trainer="grpo", device="cpu", folder=tmp_path, server=beside_engines)
    return ProbeRequest(
        folder=tmp_path / "p", trainer="grpo", values={**read.values, **BESIDE_ENGINE}, device="cpu", limit_bytes=None,
        worst_case=worst_case_path(tmp_path), cwd=tmp_path, deadline_s=240,
        server_socket=beside_engines.socket_path,
    )  # fmt: skip


@pytest.mark.thorough  # CI has it of two ranks, below
def test_the_run_resumes_beside_an_engine_in_a_second_process(request_of_one: ProbeRequest) -> None:
    result = AtOnce(run_probe).run(request_of_one)
    assert result.status is ProbeStatus.FIT, result.reason + request_of_one.log_path.read_text()
    (first, second) = engines_in(request_of_one.cwd)
    assert first[1] == second[0]  # which started the first
    names = [phase.name for phase in result.phases]
    assert {"load", "rollout", "scoring", "update", "optimizer", "save", "resume"} <= set(names)
    assert names.index("save") < names.index("resume")  # so the first process' phases come first
    assert all(phase.peak_allocated_bytes > 0 for phase in result.phases)
    assert len(result.step_s) == len(result.rollout_s) == 2
    assert result.device_used_bytes == max(phase.device_used_bytes for phase in result.phases)
    assert not (request_of_one.folder / "checkpoints").exists()
    assert not request_of_one.saved_path.exists()


def test_ranks_resume_in_second_processes_too(request_of_one: ProbeRequest) -> None:
    values = {**request_of_one.values, LAUNCH: Launch(ranks=2, sharding="ddp").to_values()}
    result = AtOnce(run_probe).run(replace(request_of_one, values=values))
    assert result.status is ProbeStatus.FIT, result.reason
    assert [one.rank for one in result.ranks] == [0, 1]
    assert sorted(rank for _, _, rank in engines_in(request_of_one.cwd)) == [0, 0, 1, 1]
    names = [phase.name for phase in result.phases]
    assert {"load", "rollout", "scoring", "update", "optimizer", "save", "resume"} <= set(names)
    assert names.index("save") < names.index("resume")  # so the first process' phases come first
    assert len(result.step_s) == len(result.rollout_s) == 2
    assert not (request_of_one.folder / "checkpoints").exists()


def test_an_engine_that_finds_no_room_is_an_oom_of_the_first_process(request_of_one: ProbeRequest) -> None:
    (request_of_one.cwd / "engines.full").touch()
    result = AtOnce(run_probe).run(request_of_one)
    assert result.status is ProbeStatus.OOM, result.reason
    assert "No available memory" in result.reason
    assert result.oom_phase == "load"
    assert len(engines_in(request_of_one.cwd)) == 1
    assert not (request_of_one.folder / "checkpoints").exists()


def test_a_first_process_that_is_killed_is_a_killed_probe_and_a_cancelled_probe_leaves_none(
    request_of_one: ProbeRequest,
) -> None:
    (request_of_one.cwd / "engines.hang").touch()
    launcher = Launcher()
    launcher.submit(request_of_one)
    os.kill(_waits_for_engine(request_of_one, 1), signal.SIGKILL)
    result = _end_of(launcher, request_of_one)
    assert (result.status, result.cause) == (ProbeStatus.LOST, Cause.KILLED), result.reason
    assert "(SIGKILL)" in result.reason

    again = replace(request_of_one, folder=request_of_one.cwd / "q")
    launcher.submit(again)
    left = psutil.Process(_waits_for_engine(again, 2))
    launcher.cancel(again.folder)
    psutil.wait_procs([left], timeout=60)
    assert not left.is_running()


def _end_of(launcher: Launcher, request: ProbeRequest) -> ProbeResult:
    ends = time.monotonic() + 120
    while (result := launcher.result(request.folder)) is None and time.monotonic() < ends:
        time.sleep(0.1)
    assert result is not None
    return result


def _waits_for_engine(request: ProbeRequest, count: int) -> int:
    """The process of engine `count`, once it is being made."""
    ends = time.monotonic() + 120
    while len(engines_in(request.cwd)) < count and time.monotonic() < ends:
        time.sleep(0.1)
    return engines_in(request.cwd)[count - 1][0]
