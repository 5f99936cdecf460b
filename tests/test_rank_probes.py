"""Probes of several ranks: real gloo ranks on the CPU, through the fork server and without it."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
from at_once import AtOnce, probed
from rank_peaks import real_peaks
from slurm_cluster import lives

from autofit.probing.fork_server import ForkServer
from autofit.probing.job import run_probe
from autofit.probing.launch import Launcher, is_alive
from autofit.probing.prepare import prepare, worst_case_path
from autofit.probing.result import Cause, ProbeRequest, ProbeResult, ProbeStatus
from autofit.recipe.keys import LAUNCH
from autofit.recipe.launch import Launch, Sharding
from autofit.recipe.launching import LaunchOptions
from autofit.recipe.recipe import Recipe

ALL_END_S = 60.0


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, fork_server: ForkServer) -> Recipe:
    folder = tmp_path_factory.mktemp("recipe")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        path = tiny.write_offline_recipe("sft", folder, tiny_model, gradient_accumulation_steps=2)
        found = prepare(
            path, trainer="sft", device="cpu", folder=folder, server=fork_server, launch=LaunchOptions(num_processes=2)
        )
    return replace(found, folder=folder)


def request_of(
    recipe: Recipe, folder: Path, server: ForkServer | None, *, sharding: Sharding = "ddp", ranks: int = 2,
    limit_bytes: int | None = None, deadline_s: float = 120,
) -> ProbeRequest:  # fmt: skip
    launch = Launch(ranks=ranks, sharding=sharding)
    return ProbeRequest(
        folder=folder, trainer=recipe.trainer, values={**recipe.values, LAUNCH: launch.to_values()}, device="cpu",
        limit_bytes=limit_bytes, worst_case=worst_case_path(recipe.folder), cwd=recipe.folder, deadline_s=deadline_s,
        server_socket=None if server is None else server.socket_path,
    )  # fmt: skip


def no_process_names(folder: Path) -> bool:
    """Whether no process runs whose pid a rank wrote in `folder`."""
    return not any(lives(pid) for pid in pids_in(folder))


def pids_in(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in folder.glob("rank-*.pid") if path.read_text()]


@pytest.mark.parametrize("sharding", ["ddp", "fsdp2"])
def test_every_rank_answers_and_the_largest_decides(
    sharding: Sharding, recipe: Recipe, tmp_path: Path, fork_server: ForkServer
) -> None:
    result = probed(request_of(recipe, tmp_path / "p", fork_server, sharding=sharding))
    assert result.status is ProbeStatus.FIT, result.reason
    assert [one.rank for one in result.ranks] == [0, 1]
    assert result.device_used_bytes == max(one.device_used_bytes for one in result.ranks)
    assert result.ranks[result.rank or 0].device_used_bytes == result.device_used_bytes
    assert len(result.step_s) == 2
    assert sum(result.step_s) == max(sum(one.step_s) for one in result.ranks)
    assert result.completions_per_step == 2 * 2 * 2
    assert {"load", "save", "resume", "update", "optimizer"} <= {phase.name for phase in result.phases}
    assert ProbeResult.from_json(json.loads(json.dumps(result.to_json()))) == result
    assert no_process_names(tmp_path / "p")


def test_an_oom_of_the_ranks_is_told_with_the_rank_and_its_phase(
    recipe: Recipe, tmp_path: Path, fork_server: ForkServer
) -> None:
    free = probed(request_of(recipe, tmp_path / "free", fork_server))
    assert free.device_used_bytes is not None
    began = time.monotonic()
    limit_bytes = int(0.97 * free.device_used_bytes)  # gloo's buffers vary by some bytes
    request = request_of(recipe, tmp_path / "p", fork_server, limit_bytes=limit_bytes)
    result = probed(request)
    assert time.monotonic() - began < ALL_END_S
    assert result.status is ProbeStatus.OOM
    assert result.oom_phase in [p.name for p in free.phases if p.device_used_bytes > limit_bytes]
    assert result.rank in (0, 1)
    assert f"rank {result.rank} of 2" in result.reason
    assert no_process_names(tmp_path / "p")


class Killer(threading.Thread):
    """Kills one rank of a running probe once that rank is in `phase`."""

    def __init__(self, request: ProbeRequest, rank: int, phase: str) -> None:
        super().__init__()
        self.one, self.phase = replace(request, rank=rank), phase
        self.killed_at: float | None = None

    def run(self) -> None:
        deadline = time.monotonic() + 100
        while time.monotonic() < deadline:
            if self.one.phase_path.exists() and self.one.phase_path.read_text() == self.phase:
                os.kill(int(self.one.pid_path.read_text()), signal.SIGKILL)
                self.killed_at = time.monotonic()
                return
            time.sleep(0.005)


@pytest.mark.parametrize(("sharding", "rank"), [("ddp", 1), ("fsdp2", 0)])
def test_a_killed_rank_ends_all_and_is_named(
    sharding: Sharding, rank: int, recipe: Recipe, tmp_path: Path, fork_server: ForkServer
) -> None:
    request = request_of(recipe, tmp_path / "p", fork_server, sharding=sharding)
    killer = Killer(request, rank, "update")
    request.folder.mkdir()
    killer.start()
    result = probed(request)
    killer.join()
    assert killer.killed_at is not None
    assert time.monotonic() - killer.killed_at < ALL_END_S
    assert (result.status, result.cause, result.rank) == (ProbeStatus.LOST, Cause.KILLED, rank)
    assert result.was_killed
    assert f"rank {rank} of 2: the probe was killed (SIGKILL) during" in result.reason
    assert no_process_names(tmp_path / "p")


@pytest.fixture
def started(recipe: Recipe, tmp_path: Path, fork_server: ForkServer) -> Iterator[ProbeRequest]:
    request = request_of(recipe, tmp_path / "p", fork_server)
    Launcher().submit(request)
    deadline = time.monotonic() + 60
    while len(pids_in(request.folder)) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    yield request
    Launcher().cancel(request.folder)


def test_a_cancelled_probe_leaves_no_rank(started: ProbeRequest) -> None:
    Launcher().cancel(started.folder)
    assert not is_alive(started.folder)
    assert no_process_names(started.folder)
    assert ProbeResult.read(started.answer_path) is None


def test_a_killed_job_leaves_no_rank(started: ProbeRequest) -> None:
    job = int(json.loads((started.folder / "started.json").read_text())["pid"])
    os.kill(job, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while not no_process_names(started.folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert no_process_names(started.folder)


def test_a_deadline_ends_all_ranks(recipe: Recipe, tmp_path: Path, fork_server: ForkServer) -> None:
    result = probed(request_of(recipe, tmp_path / "p", fork_server, deadline_s=0.01))
    assert (result.status, result.cause) == (ProbeStatus.LOST, Cause.DEADLINE)
    assert no_process_names(tmp_path / "p")


@pytest.mark.slow
def test_ranks_start_without_a_fork_server_too(recipe: Recipe, tmp_path: Path, fork_server: ForkServer) -> None:
    cold = AtOnce(run_probe).run(request_of(recipe, tmp_path / "cold", None))
    warm = probed(request_of(recipe, tmp_path / "warm", fork_server))
    assert cold.status is ProbeStatus.FIT, cold.reason
    apart = [a.peak_allocated_bytes - b.peak_allocated_bytes for a, b in zip(cold.ranks, warm.ranks, strict=True)]
    assert max(map(abs, apart)) <= 64, apart  # bytes: gloo's thread lets go of counters when it gets to it


@pytest.mark.thorough  # the peaks of four ranks, below, are of probes that fit
@pytest.mark.parametrize("sharding", ["ddp", "fsdp2"])
def test_four_ranks_fit(sharding: Sharding, recipe: Recipe, tmp_path: Path, fork_server: ForkServer) -> None:
    result = probed(request_of(recipe, tmp_path / "p", fork_server, sharding=sharding, ranks=4))
    assert result.status is ProbeStatus.FIT, result.reason
    assert [one.rank for one in result.ranks] == [0, 1, 2, 3]
    assert result.completions_per_step == 4 * 2 * 2


@pytest.mark.parametrize(
    ("sharding", "ranks", "lora"),
    [pytest.param("ddp", 2, False, marks=pytest.mark.slow),
     *(pytest.param(*case, marks=pytest.mark.thorough) for case in [  # CI has FSDP2's with LoRA in test_evaluation.py
        ("fsdp2", 2, True), ("fsdp2", 2, False), ("fsdp2", 4, False), ("fsdp2", 4, True), ("ddp", 4, True)])],
)  # fmt: skip
def test_the_peak_of_each_rank_is_that_of_its_allocator(
    sharding: Sharding, ranks: int, lora: bool, recipe: Recipe, tmp_path: Path, fork_server: ForkServer
) -> None:
    model = tiny.write_model(tmp_path / "model", hidden=128, layers=3)
    changes = {"use_peft": lora, "model_name_or_path": str(model)}
    found = real_peaks(recipe, Launch(ranks=ranks, sharding=sharding), tmp_path / "p", fork_server, changes)
    assert [peak.rank for peak in found] == list(range(ranks))
    for peak in found:
        assert -0.0005 <= peak.error_frac <= 0  # boxes of Python numbers, and what gloo's threads hold for a moment
