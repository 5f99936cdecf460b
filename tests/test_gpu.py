"""The `cuda` device on a real card. Run with `nox -s gpu`; everywhere else it skips and says why."""

import subprocess
import sys
from pathlib import Path

import pytest

from autofit.hardware.hardware import gpus, slot_names
from autofit.probing.fork_server import ForkServer
from autofit.probing.launch import Launcher
from autofit.probing.prepare import prepare, worst_case_path
from autofit.probing.result import ProbeRequest, ProbeResult, ProbeStatus

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not gpus(), reason="no CUDA card: the driver lists none")]


def probe(recipe_path: Path, folder: Path, server: ForkServer, limit_bytes: int | None) -> ProbeResult:
    recipe = prepare(recipe_path, trainer="grpo", device="cuda", folder=folder, server=server)
    request = ProbeRequest(
        folder=folder / "probe", trainer="grpo", values=recipe.values, device="cuda", limit_bytes=limit_bytes,
        worst_case=worst_case_path(folder), server_socket=server.socket_path, slots=slot_names("cuda", 1),
    )  # fmt: skip
    return Launcher().run(request)


def test_device_used_is_the_drivers_and_holds_the_allocators_peak(
    tiny_recipe: Path, tmp_path: Path, fork_server: ForkServer
) -> None:
    result = probe(tiny_recipe, tmp_path / "i", fork_server, None)
    assert result.status is ProbeStatus.FIT, result.reason
    assert result.device_used_bytes is not None
    assert result.peak_reserved_bytes is not None
    assert result.peak_allocated_bytes is not None
    assert result.peak_allocated_bytes <= result.peak_reserved_bytes < result.device_used_bytes
    assert result.device_used_bytes < gpus()[0].capacity_bytes


def test_a_target_below_what_the_context_holds_is_an_oom(
    tiny_recipe: Path, tmp_path: Path, fork_server: ForkServer
) -> None:
    result = probe(tiny_recipe, tmp_path / "i", fork_server, 100 * 10**6)
    assert result.status is ProbeStatus.OOM, result.reason


def test_a_search_and_a_promotion_run_on_the_card(tiny_recipe: Path) -> None:
    for command in (
        ["search", "run.yaml", "--target-vram", "4GB", "--trials", "4", "--no-mlflow"],
        ["promote", "best"],
    ):
        done = subprocess.run([sys.executable, "-m", "autofit", *command], cwd=tiny_recipe.parent, capture_output=True)
        assert done.returncode == 0, done.stderr.decode()
