"""Ordinary training loops run on the simulated card, and peak at the real CPU allocator's byte count."""

from __future__ import annotations

import gc
import io

import pytest
import torch

from autofit.fakegpu import FakeGpuError, fake_gpu

from .ordinary_loops import EXACT, RUNNING
from .tiny_trainers import profiler_peak_bytes

pytestmark = pytest.mark.filterwarnings("ignore")  # loops warn as they would anywhere


# Loops of more than half a second. The default tests have their kinds: a generation, autocast, a Trainer, two models.
LONG = {
    "accumulation-padded", "autocast-fp16-scaler", "encoder-decoder", "generate-beams", "generate-static",
    "hf-adafactor", "policy-reference",
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in [*EXACT, *RUNNING]]
)
def test_an_ordinary_loop_runs_on_the_card(name: str) -> None:
    with fake_gpu("a100-40gb") as gpu:
        (EXACT | RUNNING)[name]("cuda")
    assert gpu.mode == "cuda"
    assert sum(gpu.timeline.at_peak.values()) == gpu.peak_allocated_bytes  # nothing is held without a category
    assert gpu.peak_allocated_bytes + gpu.spec.context_bytes < gpu.least_capacity_bytes <= gpu.device_used_bytes


QUICK = {"transformer-encoder", "cnn", "rnn", "autocast-bf16", "generate-static", "bert", "checkpoint", "adamw-fused"}


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in EXACT]
)
def test_an_ordinary_loop_peaks_where_the_cpu_allocator_does(name: str) -> None:
    torch.set_num_threads(1)
    loop = EXACT[name]
    with fake_gpu("a100-40gb", mode="cpu", enforce_capacity=False) as gpu:
        loop("cpu")
    gc.collect()
    real = profiler_peak_bytes(lambda: loop("cpu"))
    assert gpu.peak_requested_bytes == pytest.approx(real, rel=2e-4, abs=64)


@pytest.mark.parametrize(("name", "words"), [
    ("cnn", "cuDNN's workspace for convolutions is not counted"),
    ("lstm", "estimated from the mathematics"),
    ("compiled", "ran eagerly"),
    ("encoder-eval", "fast path"),
])  # fmt: skip
def test_what_is_not_simulated_is_noted(name: str, words: str) -> None:
    with fake_gpu("l4") as gpu:
        (EXACT | RUNNING)[name]("cuda")
    assert any(words in note for note in gpu.notes)


def test_an_operation_that_turns_its_input_around_does_so_each_time() -> None:
    with fake_gpu("l4"):
        for _ in range(3):
            x = torch.zeros(2, 3, device="cuda")
            assert x.transpose_(0, 1).unsqueeze_(0).shape == x.shape == (1, 3, 2)


def test_a_recurrent_layer_keeps_its_gates_in_training_only() -> None:
    with fake_gpu("l4") as gpu:
        net = torch.nn.LSTM(64, 128).cuda()
        x = torch.randn(100, 8, 64, device="cuda")
        before = gpu.memory.allocator.allocated_bytes
        out = net(x)[0]
        assert gpu.memory.allocator.allocated_bytes - before >= 4 * 100 * 8 * 128 * (1 + 5)
        del out
        net.eval()
        out = net(x)[0]
        assert gpu.memory.allocator.allocated_bytes - before < 4 * 100 * 8 * 128 * 1.2
        assert out.shape == (100, 8, 128)


def test_a_checkpoint_made_outside_is_read_inside_and_a_whole_module_is_refused() -> None:
    file = io.BytesIO()
    torch.save({"weight": torch.ones(3, 4), "step": 7}, file)
    file.seek(0)
    with fake_gpu("l4"):
        held = torch.load(file, map_location="cuda")
        assert (held["weight"].device.type, tuple(held["weight"].shape), held["step"]) == ("cuda", (3, 4), 7)
        whole = io.BytesIO()
        torch.save(torch.nn.Linear(2, 2).cuda(), whole)
        whole.seek(0)
        with pytest.raises(FakeGpuError, match=r"save its state_dict\(\)"):
            torch.load(whole)


def test_sparse_gradients_are_refused_in_one_line() -> None:
    with fake_gpu("l4"):
        table = torch.nn.Embedding(1000, 32, sparse=True).cuda()
        with pytest.raises(FakeGpuError, match=r"not simulated \(nn.Embedding\(sparse=True\) makes them\)"):
            table(torch.tensor([1, 2], device="cuda")).sum().backward()


def test_inference_mode_counts_what_is_inside_a_composite_operation() -> None:
    peaks = []
    for context in (torch.no_grad, torch.inference_mode):
        with fake_gpu("a100-40gb") as gpu, context():
            layer = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).cuda().eval()
            layer(torch.randn(4, 32, 64, device="cuda")).mean().item()
        peaks.append(gpu.peak_allocated_bytes)
    assert peaks[0] == peaks[1]


def test_truncated_normal_values_are_drawn_twice_at_most() -> None:
    with fake_gpu("a10g"):
        weight = torch.empty(1024, 1024, device="cuda")
        torch.nn.init.trunc_normal_(weight, std=0.02)
        assert torch.cuda.memory_allocated() == weight.nbytes
        draws_again = "where" in torch.nn.init._no_grad_trunc_normal_.__code__.co_names
        assert torch.cuda.max_memory_allocated() >= weight.nbytes * (2 if draws_again else 1)
    real = torch.nn.init.trunc_normal_(torch.empty(100), std=1.0, a=-1.0, b=1.0)
    assert real.abs().max() <= 1
