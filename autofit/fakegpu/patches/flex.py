"""Flex attention as torch compiles it for a card: two Triton kernels, and what they keep.

Read in torch 2.13, torch/_inductor/kernel/flex/flex_attention.py: the forward writes the output, in the layout of the
queries, and float32 sums (batch, heads, queries); the backward one float32 number a query (`delta`) and the gradients,
those of keys and values with their own number of heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention.flex_attention import AuxOutput

from autofit.fakegpu.card import FakeGpu
from autofit.fakegpu.patches.redirect import untouched

Target = tuple[object, str, object, str]
NAME = "compile_friendly_flex_attention"  # transformers' own wrapper of torch.compile(flex_attention)
_NOTE = "flex attention: its kernels were not measured; seconds are those of torch's flash attention with a causal mask"

torch.library.define(
    "flex::flex_attention", "(Tensor query, Tensor key, Tensor value, bool is_causal) -> (Tensor, Tensor)"
)
torch.library.define(
    "flex::flex_attention_backward",
    "(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor sums, bool is_causal)"
    " -> (Tensor, Tensor, Tensor)",
)


def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.empty_like(query) if value.shape[-1] == query.shape[-1] else query.new_empty(
        (*query.shape[:3], value.shape[-1])
    )  # fmt: skip
    return out, query.new_empty(query.shape[:3], dtype=torch.float32)


def _backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


torch.library.register_fake("flex::flex_attention", _forward)
torch.library.register_fake("flex::flex_attention_backward", _backward)


class _Flex(torch.autograd.Function):
    """(attention (B, H, T, D), the logarithms of the sums (B, H, T)), without values."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        out, sums = torch.ops.flex.flex_attention(query, key, value, True)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.mark_non_differentiable(sums)
        return out, sums

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return torch.ops.flex.flex_attention_backward(grads[0], *ctx.saved_tensors, True)


def transformers_flex(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    """Let the models' flex attention run on fakes, for which torch has no rule."""
    if not hasattr(module, NAME):
        return
    original = cast("Callable[..., object]", untouched(getattr(module, NAME)))

    def attention(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, training: bool = False, **options: Any
    ) -> object:
        if not isinstance(query, FakeTensor):
            return original(query, key, value, training=training, **options)
        gpu.note(_NOTE)
        out, sums = _Flex.apply(query, key, value)  # type: ignore[no-untyped-call]
        if options.get("return_lse"):
            return out, sums
        wanted = options.get("return_aux")
        return out if wanted is None else (out, AuxOutput(lse=sums))

    yield module, NAME, attention, "torch has no rule for flex attention on fakes"
