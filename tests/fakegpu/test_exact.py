"""The accuracy gate: whole `train()` runs on fakes, against the bytes the real CPU allocator held."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from autofit.fakegpu import fake_gpu

from .tiny_trainers import Case, profiler_peak_bytes, train

CASES = [
    Case(kind="grpo", lora_rank=8, checkpointing=True),
]
MORE = [
    Case(kind="dpo"),
    Case(kind="reward", lora_rank=8, checkpointing=True),
    Case(kind="sft", lora_rank=8, attention="eager"),
]
MOST = [
    Case(kind="sft", checkpointing=True),
    Case(kind="dpo", lora_rank=8, checkpointing=True),
    Case(kind="reward"),
    Case(kind="grpo", checkpointing=True, beta=0.04),
    Case(kind="grpo", lora_rank=8, beta=0.04),
]


def host_random_state_bytes(case: Case) -> int:
    """Checkpointing keeps the CPU's random state (5056 B) for each of the two layers: host memory on a GPU run."""
    return 2 * 5056 if case.checkpointing else 0


@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE),
     *(pytest.param(case, marks=pytest.mark.thorough) for case in MOST)],
    ids=str,
)  # fmt: skip
def test_whole_training_run_peaks_at_the_real_allocators_byte_count(case: Case, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    with fake_gpu("h100", mode="cpu", enforce_capacity=False) as gpu:
        train(case, tmp_path / "fake")
    gc.collect()
    real = profiler_peak_bytes(lambda: train(case, tmp_path / "real"))
    error = (gpu.peak_requested_bytes + host_random_state_bytes(case)) / real - 1
    print(f"{case}: real {real / 2**20:.3f} MiB, error {error:+.4%}")
    assert abs(error) <= 2e-4


ROWS = 256


@pytest.mark.parametrize(
    "pick",
    [
        lambda x: x.gather(1, torch.zeros(ROWS, 1, dtype=torch.long)),
        lambda x: x[torch.arange(3)],
        lambda x: x.max(dim=1)[0],
        lambda x: x.topk(3, dim=1)[0],
        lambda x: x.index_select(0, torch.arange(2)),
        lambda x: x.take(torch.arange(2)),
        lambda x: x.log_softmax(-1).gather(1, torch.zeros(ROWS, 1, dtype=torch.long)),
        lambda x: x[:, :-1].log_softmax(-1).gather(1, torch.zeros(ROWS, 1, dtype=torch.long)),
    ],
    ids=["gather", "index", "max", "topk", "index_select", "take", "log-probabilities", "log-probabilities of a part"],
)
def test_a_gradient_of_picked_elements_is_written_into_zeros_in_place(
    pick: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """For a fake, autograd copies the zeros first, 1 MB here; a card, like the CPU, does not."""

    def step() -> None:
        x = torch.zeros(ROWS, 1000, requires_grad=True)
        pick(x * 1).sum().backward()

    with fake_gpu("h100", mode="cpu") as gpu:
        step()
    assert abs(gpu.peak_requested_bytes - profiler_peak_bytes(step)) < 4096
