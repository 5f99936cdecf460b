"""This host's costs: measured without a GPU, corrected by a probe, kept in a file, and used by the clock."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autofit.fakegpu import FakeGpuError, HostCosts, fake_gpu
from autofit.fakegpu.calibrate import fit_to_probe, load_host_costs, measure_host_costs, save_host_costs


def test_a_kernel_costs_microseconds_and_more_than_a_view() -> None:
    costs = measure_host_costs()
    assert 1e-7 < costs.view_s <= costs.launch_s < 1e-3
    assert costs.gpu_slowdown == HostCosts().gpu_slowdown  # what only a card can show stays


def test_the_clock_follows_the_costs() -> None:
    def seconds(costs: HostCosts | None) -> float:
        with fake_gpu("h100", host_costs=costs) as gpu:
            x = torch.zeros(4, device="cuda")
            with torch.no_grad():
                for _ in range(100):
                    x = x + 1
        return gpu.elapsed_s

    assert seconds(HostCosts(launch_s=10 * HostCosts().launch_s)) > 5 * seconds(None)


def test_costs_are_kept_with_their_source_and_date(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "host.json"
    assert load_host_costs(path) is None
    costs = HostCosts(launch_s=5e-6, gpu_slowdown=1.2)
    save_host_costs(costs, path, source="a tiny model on the CPU")
    assert load_host_costs(path) == costs
    record = json.loads(path.read_text())
    assert record["source"] == "a tiny model on the CPU"
    assert record["measured_at"].endswith("+00:00")
    assert [file.name for file in path.parent.iterdir()] == ["host.json"]


def test_a_file_of_a_version_that_knew_no_recorded_launches_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "host.json"
    path.write_text('{"host_costs": {"launch_s": 1e-5, "backward_launch_s": 6e-6, "view_s": 1e-6, "gpu_slowdown": 1}}')
    assert load_host_costs(path) is None


@pytest.mark.parametrize("text", ["", "{}", '{"host_costs": {"launch_s": 1}}', "[1]"])
def test_a_damaged_file_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "host.json"
    path.write_text(text)
    with pytest.raises(FakeGpuError, match="holds no host costs"):
        load_host_costs(path)


def test_costs_that_cannot_be_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "host.json"
    save_host_costs(HostCosts(launch_s=-1.0), path, source="a bad day")
    with pytest.raises(FakeGpuError, match=r"cannot be \(launch_s\)"):
        load_host_costs(path)


def test_a_probe_corrects_kernels_by_its_update_and_the_host_by_its_rollout() -> None:
    costs = fit_to_probe(
        HostCosts(), predicted_update_s=1.0, measured_update_s=1.4, predicted_rollout_s=2.0, measured_rollout_s=3.0
    )
    own = HostCosts()
    assert costs == replace(
        own, gpu_slowdown=1.4, launch_s=own.launch_s * 1.5, recorded_launch_s=own.recorded_launch_s * 1.5,
        backward_launch_s=own.backward_launch_s * 1.5, view_s=own.view_s * 1.5,
    )  # fmt: skip
    assert fit_to_probe(costs, predicted_update_s=2.0, measured_update_s=1.0).gpu_slowdown == 0.7
    with pytest.raises(FakeGpuError, match="above 0"):
        fit_to_probe(HostCosts(), measured_update_s=0.0)
