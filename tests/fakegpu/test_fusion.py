"""Functions under torch.compile: elementwise chains take no memory, as the kernels of inductor write none."""

from __future__ import annotations

import pytest
import torch

from autofit.fakegpu import FakeGpu, fake_gpu

ROWS, WIDTH, WORDS = 1024, 512, 32_000
LOGITS = 2 * ROWS * WORDS  # bytes, in bfloat16


def log_probabilities(hidden: torch.Tensor, head: torch.Tensor, words: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a chunked loss computes of each chunk."""
    logits = ((hidden @ head.t()) / 0.9).float()
    chosen = torch.gather(logits, -1, words[:, None]).squeeze(-1)
    return {"logps": chosen - torch.logsumexp(logits, -1)}


def measured(gpu: FakeGpu, *, compiled: bool, grad: bool) -> tuple[float, float, float, float]:
    """Peak of the forward pass, bytes held after it, and the peak of both, in logits; and the seconds."""
    function = torch.compile(log_probabilities) if compiled else log_probabilities
    hidden = torch.zeros(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=grad)
    head = torch.zeros(WORDS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=grad)
    torch.zeros(8, 8, device="cuda") @ torch.zeros(8, 8, device="cuda")
    words = torch.zeros(ROWS, dtype=torch.long, device="cuda")
    before, start_s = torch.cuda.memory_allocated(), gpu.elapsed_s
    out = function(hidden, head, words)["logps"]
    peak, held = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
    if grad:
        (-out.exp()).mean().backward()
        assert hidden.grad is not None
        assert head.grad is not None
    torch.cuda.synchronize()
    whole = torch.cuda.max_memory_allocated() - before
    return peak / LOGITS, held / LOGITS, whole / LOGITS, gpu.elapsed_s - start_s


@pytest.mark.parametrize("grad", [False, True])
def test_a_compiled_chunk_of_a_loss_writes_its_logits_once(*, grad: bool) -> None:
    with fake_gpu("a100-80gb") as gpu:
        eager = measured(gpu, compiled=False, grad=grad)
    with fake_gpu("a100-80gb") as gpu:
        fused = measured(gpu, compiled=True, grad=grad)
    assert eager[0] >= 3  # the product, and in float32
    assert fused[0] == pytest.approx(1, abs=0.01)
    assert fused[1] == pytest.approx(1 if grad else 0, abs=0.01)  # backward computes the rest again
    assert fused[3] < 0.8 * eager[3]
    assert any("elementwise chains fused" in note for note in gpu.notes)


def test_the_backward_pass_is_fused_too_but_for_what_it_scatters() -> None:
    with fake_gpu("a100-80gb") as gpu:
        eager = measured(gpu, compiled=False, grad=True)[2]
    with fake_gpu("a100-80gb") as gpu:
        fused = measured(gpu, compiled=True, grad=True)[2]
    assert fused == pytest.approx(4, abs=0.3)  # the product, a float32 buffer of zeros, and its gradient
    assert eager > 6


def test_gradients_arrive_in_order_and_only_where_they_are_wanted() -> None:
    def both(a: torch.Tensor, b: torch.Tensor, scale: float, *, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (a * b * scale).relu(), (a + c).detach()

    with fake_gpu("l4"):
        a, b = (torch.zeros(4, size, device="cuda", requires_grad=True) for size in (8, 1))
        c = torch.zeros(8, device="cuda")
        first, second = torch.compile(both)(a, b, 2.0, c=c)
        assert first.requires_grad
        assert not second.requires_grad
        first.sum().backward()
        assert (a.grad.shape, b.grad.shape, c.grad) == (a.shape, b.shape, None)  # type: ignore[union-attr]


def test_what_a_compiled_function_returns_and_what_follows_it_are_in_memory() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return (x + 1) * 2

    with fake_gpu("l4"):
        x = torch.zeros(1 << 20, device="cuda")
        before = torch.cuda.memory_allocated()
        y = torch.compile(double)(x)
        assert torch.cuda.memory_allocated() - before == 4 << 20
        z = y * 3
        assert torch.cuda.memory_allocated() - before == 8 << 20
        assert torch.cuda.max_memory_allocated() - before == 8 << 20
        del y, z
        assert torch.cuda.memory_allocated() == before


@torch.compile
def compiled_before(x: torch.Tensor) -> torch.Tensor:
    return (x + 1) * 2


def test_a_function_compiled_before_the_block_runs_eagerly_in_it() -> None:
    with fake_gpu("l4") as gpu:
        x = torch.zeros(1 << 20, device="cuda", requires_grad=True)
        compiled_before(x).sum().backward()
        assert x.grad is not None
    assert gpu.peak_allocated_bytes >= 12 << 20
