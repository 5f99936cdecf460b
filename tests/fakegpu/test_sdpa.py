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


def test_a_name_imported_before_the_block_keeps_working_after_it() -> None:
    q = torch.randn(1, 1, 4, 8)
    with fake_gpu("a100-40gb"):
        pass
    assert scaled_dot_product_attention(q, q, q).shape == q.shape
