"""DeepSpeed's own ZeRO engine on the simulated card: its flat buffers, its offload, its gathered parameters."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from autofit.fakegpu import fake_gpu
from autofit.fakegpu.rates.collectives import fake_ranks

deepspeed = pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")

RANKS, LAYERS, WIDTH = 4, 8, 1024
PARAMETERS = LAYERS * (WIDTH * WIDTH + WIDTH)
BUCKET = WIDTH * WIDTH
SLACK = 1.01  # biases, alignment, counters
TOLERANCE = 64  # bytes: counters
CUBLAS = 2 * 8_519_680  # the workspaces of forward and backward


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.float().sum()


@dataclass(frozen=True)
class Held:
    """Bytes of live tensors on the card before training and between steps, and the peak of the last step."""

    prepared: int
    between: int
    peak: int
    notes: tuple[str, ...]
    elapsed_s: float


@pytest.fixture(autouse=True)
def _one_rank_of_four(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": RANKS, "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    with fake_ranks(RANKS):
        yield


def train(stage: int, **zero: object) -> Held:
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True}, "gradient_clipping": 1.0, "steps_per_print": 10**9,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": BUCKET, **zero},
    }  # fmt: skip
    with fake_gpu("a100-80gb") as gpu:
        model = Stack().to(torch.bfloat16)
        kind = deepspeed.ops.adam.DeepSpeedCPUAdam if "offload_optimizer" in zero else torch.optim.AdamW
        engine = deepspeed.initialize(model=model, optimizer=kind(model.parameters()), config_params=config)[0]
        prepared = torch.cuda.memory_allocated()
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            for _ in range(2):
                engine.backward(engine(torch.randn(2, 16, WIDTH, device="cuda", dtype=torch.bfloat16)))
                engine.step()
        return Held(
            prepared, torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), tuple(gpu.notes), gpu.elapsed_s
        )


def sized(found: int, expected: int) -> bool:
    return expected <= found <= expected * SLACK


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_1_and_2_hold_all_weights_and_a_share_of_the_optimizer(stage: int) -> None:
    held = train(stage)
    assert sized(held.prepared, 2 * PARAMETERS + 4 * PARAMETERS // RANKS)
    assert sized(held.between, 2 * PARAMETERS + 12 * PARAMETERS // RANKS + CUBLAS)
    # gradients in bf16 are kept until the step: the rank's own share, made float32 in the step
    assert held.peak > held.between + 4 * PARAMETERS // RANKS


def test_stage_3_holds_a_share_of_the_weights_too() -> None:
    held = train(3, stage3_param_persistence_threshold=0)
    gradients = 2 * PARAMETERS // RANKS
    assert sized(held.prepared, 6 * PARAMETERS // RANKS + gradients + 2 * BUCKET)
    assert sized(held.between, 14 * PARAMETERS // RANKS + gradients + 2 * BUCKET + CUBLAS)


def test_offload_moves_the_optimizer_to_the_host_and_says_what_is_not_counted() -> None:
    held = train(2, offload_optimizer={"device": "cpu", "pin_memory": True})
    assert sized(held.between, 2 * PARAMETERS + 2 * BUCKET + CUBLAS)
    assert any("Adam on the host" in note for note in held.notes)


def test_offloaded_parameters_leave_buckets_on_the_card() -> None:
    held = train(
        3, offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"}, stage3_param_persistence_threshold=0
    )
    assert held.between < 2 * PARAMETERS // RANKS + 4 * BUCKET + CUBLAS


def test_overlapped_communication_has_a_second_bucket() -> None:
    large = 16 * BUCKET
    one, two = (train(2, reduce_bucket_size=large, overlap_comm=overlaps) for overlaps in (False, True))
    assert two.peak - one.peak == 2 * large


@pytest.mark.slow
@pytest.mark.parametrize(
    "stages",
    [pytest.param((1,), marks=pytest.mark.thorough), (2, 3)],
    ids=str,  # 1 and 2 are one engine
)
def test_simulated_ranks_hold_the_bytes_of_real_ones(stages: tuple[int, ...], tmp_path: Path) -> None:
    """DeepSpeed on two gloo ranks of the CPU, against the same on the card less cuBLAS' workspaces."""
    started = [_start(kind, tmp_path, stages) for kind in ("real", "simulated")]
    try:
        reals, fakes = (_bytes(process) for process in started)
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert list(reals) == list(fakes) == [(stage, rank) for stage in stages for rank in (0, 1)]
    for of, real in reals.items():
        for number, (here, there) in enumerate(zip(real, fakes[of], strict=True)):
            workspaces = 0 if number == 0 else CUBLAS // 2 if number == 1 else CUBLAS
            for on_cpu, on_card in zip(here, there, strict=True):
                assert abs(on_card - workspaces - on_cpu) <= TOLERANCE, (of, number, here, there)


def _start(kind: str, folder: Path, stages: tuple[int, ...]) -> subprocess.Popen[str]:
    script = Path(__file__).with_name("zero_rank.py")
    command = [sys.executable, str(script), kind, str(folder), *map(str, stages)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _bytes(process: subprocess.Popen[str]) -> dict[tuple[int, int], list[list[int]]]:
    """{(stage, rank): (live, peak) bytes after each part of the training}."""
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said[-3000:]
    found = [json.loads(line.removeprefix("BYTES ")) for line in said.splitlines() if line.startswith("BYTES ")]
    return {(stage, rank): parts for stage, rank, parts in sorted(found)}
