"""Which attention kernel each card runs, and that the math kernel's score matrix shows where it falls back."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from autofit.fakegpu import fake_gpu


def _run(
    name: str, *, dtype: torch.dtype = torch.bfloat16, mask: bool = False, gqa: bool = False, dim: int = 64
) -> str:
    with fake_gpu(name) as gpu:
        q = torch.randn(2, 8, 256, dim, device="cuda", dtype=dtype, requires_grad=True)
        k, v = (torch.randn(2, 2 if gqa else 8, 256, dim, device="cuda", dtype=dtype) for _ in range(2))
        m = torch.ones(2, 1, 256, 256, dtype=torch.bool, device="cuda") if mask else None
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, m, is_causal=not mask, enable_gqa=gqa)
        out.sum().backward()
        assert q.grad is not None
        assert out.shape == q.shape
    (kernel,) = gpu.attention_kernels
    return kernel


@pytest.mark.parametrize(
    ("name", "changes", "kernel"),
    [
        ("a100-40gb", {}, "flash"),
        ("a100-40gb", {"mask": True}, "efficient"),
        ("a100-40gb", {"dtype": torch.float32}, "efficient"),
        ("a100-40gb", {"gqa": True}, "flash"),
        ("a100-40gb", {"gqa": True, "mask": True}, "math"),
        ("h100", {}, "cudnn"),
        ("h100", {"mask": True}, "cudnn"),
        ("t4", {"dtype": torch.float16}, "efficient"),
        ("t4", {}, "math"),
        ("rtx4090", {"dim": 256}, "flash"),
        ("a100-40gb", {"dim": 512}, "efficient"),
    ],
)
def test_the_kernel_follows_the_card_and_the_tensors(name: str, changes: dict[str, object], kernel: str) -> None:
    assert _run(name, **changes) == kernel  # type: ignore[arg-type]


def test_a_kernel_that_is_switched_off_is_not_chosen() -> None:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
        assert _run("a100-40gb") == "efficient"


def test_cudnn_can_be_put_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert _run("h100") == "flash"


def test_a_name_imported_before_the_block_keeps_working_after_it() -> None:
    q = torch.randn(1, 1, 4, 8)
    with fake_gpu("a100-40gb"):
        pass
    assert scaled_dot_product_attention(q, q, q).shape == q.shape


def _kept(length: int, *, heads: int = 8) -> int:
    """Bytes that attention with a padding mask keeps for backward, without its output and the sums."""
    with fake_gpu("a100-40gb"):
        q = torch.randn(2, heads, length, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        mask = torch.ones(2, 1, length, length, dtype=torch.bool, device="cuda")
        before = torch.cuda.memory_allocated()
        out = scaled_dot_product_attention(q, q, q, mask)
        kept = torch.cuda.memory_allocated() - before
        sums = 4 * 2 * heads * -(-length // 32) * 32
        return kept - out.numel() * 2 - sums


def test_a_mask_is_padded_to_8_before_it_is_expanded_over_the_heads_so_one_more_token_costs_little() -> None:
    rounding = 6 * 512  # and the scalars of the mask and of the random numbers
    for length, padded in ((72, 72), (73, 80), (80, 80)):
        assert 0 <= _kept(length) - 2 * 2 * length * padded < rounding
        assert _kept(length, heads=2) == _kept(length)


def test_the_math_kernel_adds_its_mask_in_place_and_halves_its_weights_before_the_last_product_as_on_cuda() -> None:
    seen = []
    with fake_gpu("a100-40gb") as gpu:
        gpu.tracer.after = lambda function, *_: seen.append(function.__name__)
        q = torch.randn(1, 2, 8, 8, device="cuda", dtype=torch.bfloat16)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            scaled_dot_product_attention(q, q, q, torch.zeros(8, 8, device="cuda"))
        gpu.tracer.after = None
    assert "add_.Tensor" in seen
    products = [place for place, name in enumerate(seen) if name == "bmm.default"]
    assert "_to_copy.default" in seen[products[0] : products[1]]
