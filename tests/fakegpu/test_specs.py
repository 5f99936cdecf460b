"""The table of GPUs: forgiving names, sources for every figure, and no card that cannot be."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autofit.fakegpu import FakeGpuError, GpuSpec, fake_gpu
from autofit.fakegpu.specs import GPU_SPECS, UnknownGpuError, gpu_spec


def test_every_card_leaves_room_and_names_its_sources() -> None:
    for spec in GPU_SPECS.values():
        assert 0 < spec.context_bytes < spec.capacity_bytes / 10
        assert spec.capacity_source
        assert spec.context_source
        assert spec.rates_source


def test_names_are_forgiving() -> None:
    assert gpu_spec("NVIDIA RTX 4090") is gpu_spec("rtx-4090") is gpu_spec("4090")
    assert gpu_spec("A100 80GB").name == "a100-80gb"
    assert gpu_spec("NVIDIA A100 80GB PCIe").name == "a100-pcie-80gb"
    assert gpu_spec("GeForce RTX 4060 Ti").name == "rtx4060ti"


def test_an_unknown_name_gets_one_message_with_the_near_ones() -> None:
    with pytest.raises(UnknownGpuError, match=r"did you mean h100, h100-pcie, h100-nvl\?"):  # the chip, not the size
        gpu_spec("h100-96gb")
    with pytest.raises(UnknownGpuError, match=r"several cards are written 8xh100"):
        gpu_spec("8 h100")
    assert gpu_spec("a800-80gb").name == "a800"
    with pytest.raises(UnknownGpuError, match=r"unknown GPU 'rtx3050'; did you mean rtx.*\?"):
        gpu_spec("rtx3050")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"capacity_bytes": 0}, "capacity_bytes must be a number above 0; got 0"),
        ({"capacity_bytes": "24GB"}, "capacity_bytes must be a number above 0; got '24GB'"),
        ({"bandwidth_bytes_per_s": 0.0, "sm_count": -1}, "bandwidth_bytes_per_s .* got 0.0; sm_count .* got -1"),
        ({"half_flops_per_s": float("nan")}, "half_flops_per_s must be a number above 0; got nan"),
        ({"fp32_flops_per_s": float("inf")}, "fp32_flops_per_s .* got inf"),
        ({"context_bytes": 1 << 50}, "context_bytes must be from 0 to below capacity_bytes="),
        ({"compute_capability": (8.6, 0)}, "compute_capability must be two whole numbers"),
        ({"compute_capability": (3, 5)}, "torch still runs on"),
    ],
)
def test_a_card_that_cannot_be_is_refused_in_one_line(changes: dict[str, object], message: str) -> None:
    with pytest.raises(FakeGpuError, match=message) as raised:
        replace(gpu_spec("l4"), **changes)  # type: ignore[arg-type]
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [("rtx4090x2", "written 2xrtx4090"), ("H100 x 8", "written 8xH100"), ("rtx4090x2x", "did you mean rtx4090")],
)
def test_several_cards_behind_a_name_are_told_how_they_are_written(name: str, message: str) -> None:
    with pytest.raises(UnknownGpuError, match=message):
        gpu_spec(name)


@pytest.mark.parametrize("occupied_bytes", [-1, 1 << 40])
def test_others_cannot_hold_more_than_there_is(occupied_bytes: int) -> None:
    with (
        pytest.raises(FakeGpuError, match="occupied_bytes must be from 0"),
        fake_gpu("l4", occupied_bytes=occupied_bytes),
    ):
        pass


def test_a_card_of_ones_own_runs() -> None:
    card = GpuSpec(
        name="mine", full_name="My Card", capacity_bytes=8 << 30, context_bytes=1 << 28, bandwidth_bytes_per_s=5e11,
        half_flops_per_s=5e13, tf32_flops_per_s=2e13, fp32_flops_per_s=2e13, compute_capability=(8, 6), sm_count=30,
    )  # fmt: skip
    with fake_gpu(card) as gpu:
        assert torch.cuda.get_device_properties(0).total_memory == 8 << 30
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(8 << 30, dtype=torch.uint8, device="cuda")
    assert gpu.spec.capacity_source == "given by the caller"


def test_eager_loading_puts_every_kernel_into_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = gpu_spec("a100-80gb").context_bytes
    with fake_gpu("a100-80gb", kernel_loading="eager") as gpu:
        assert gpu.spec.context_bytes == lazy + 1_065_000_000
    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")
    with fake_gpu("b200") as gpu:  # no figure for its kernels: the largest known one counts
        assert gpu.spec.context_bytes == gpu_spec("b200").context_bytes + 1_407_000_000
    with fake_gpu("a100-80gb", kernel_loading="lazy") as gpu:
        assert gpu.spec.context_bytes == lazy


@pytest.mark.parametrize(("version", "noted"), [("4.45.2", True), ("4.46.0", False), ("5.23.0", False)])
def test_libraries_older_than_lazy_loading_count_the_worst_case(
    monkeypatch: pytest.MonkeyPatch, version: str, noted: bool
) -> None:
    monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)
    monkeypatch.setattr("importlib.metadata.version", lambda package: version)
    with fake_gpu("a100-80gb") as gpu:
        assert (gpu.spec.context_bytes > gpu_spec("a100-80gb").context_bytes) is noted
        assert any(f"transformers {version} is of the time of CUDA 12.1" in note for note in gpu.notes) is noted


def test_a_card_of_amd_is_said_not_to_be_simulated() -> None:
    for name in ("MI300X", "AMD Instinct MI250"):
        with pytest.raises(UnknownGpuError, match="AMD's and not simulated"):
            gpu_spec(name)
