"""FLOPs and rates of single kernels, most of other packages, which torch's flop counter does not know.

Operations that are several kernels on a card are not here: `Tracer.in_parts` runs their parts, and each counts itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import cast

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import unset_fake_temporarily


def _gemm_4bit(args: Sequence[object]) -> int:
    return _product(args[0], cast("Sequence[int]", args[2])[0])


def _int8_matmul(args: Sequence[object]) -> int:
    return _product(args[0], cast("torch.Tensor", args[1]).shape[0])


def _grouped_mm(args: Sequence[object]) -> int:
    """Experts' products: rows of all groups times the other matrix of each, or (both 2-D) sums over each group."""
    a, b = cast("torch.Tensor", args[0]), cast("torch.Tensor", args[1])
    whole = _product(a, b.shape[-1])
    return whole // a.shape[0] if a.dim() == 3 and b.dim() == 2 else whole


def _grouped_mm_backward(args: Sequence[object]) -> int:
    a, b = cast("torch.Tensor", args[0]), cast("torch.Tensor", args[1])
    return 2 * _product(a, b.shape[-1])


def _attention(args: Sequence[object]) -> int:
    return 2 * _scores(args[0], args[1], args[3], args[4], args[6])


def _attention_backward(args: Sequence[object]) -> int:
    return 5 * _scores(args[1], args[2], args[6], args[7], args[9])


def _scores(query: object, key: object, starts_q: object, starts_k: object, longest_k: object) -> int:
    """FLOPs of one product of queries and keys, (..., heads, dim), causal or not, as torch counts them.

    For sequences one after the other, each has its length if it is known, else the longest one's.
    """
    q, k = cast("torch.Tensor", query), cast("torch.Tensor", key)
    heads_and_dim = q.shape[-2] * q.shape[-1]
    if not isinstance(starts_q, torch.Tensor):
        return 2 * q.shape[0] * q.shape[1] * k.shape[1] * heads_and_dim
    known = [getattr(starts, "_autofit_shadow", None) for starts in (starts_q, starts_k)]
    if any(values is None for values in known):
        return 2 * q.shape[0] * min(cast("int", longest_k), k.shape[0]) * heads_and_dim
    with unset_fake_temporarily():
        pairs = int((known[0].diff().long() * known[1].diff().long()).sum())  # type: ignore[union-attr]
    return 2 * pairs * heads_and_dim


def _product(rows: object, columns: int) -> int:
    return 2 * prod(cast("torch.Tensor", rows).shape) * columns


_COUNTS: dict[str, Callable[[Sequence[object]], int]] = {
    "bitsandbytes::gemm_4bit": _gemm_4bit,  # the fused kernel, which reads the packed weight
    "bitsandbytes::gemv_4bit": _gemm_4bit,
    "bitsandbytes::int8_linear_matmul": _int8_matmul,
    "aten::_grouped_mm": _grouped_mm,
    "aten::_flash_attention_forward": _attention,
    "aten::_flash_attention_backward": _attention_backward,
    "transformers::grouped_mm_fallback": _grouped_mm,  # a loop of products on cards before Ampere
    "transformers::grouped_mm_fallback_backward": _grouped_mm_backward,
}
_INT8 = {"bitsandbytes::int8_linear_matmul"}


def foreign_flops(func: OpOverload, args: Sequence[object]) -> int | None:
    """FLOPs of such a kernel, None if it is none of these."""
    count = _COUNTS.get(func._schema.name)
    return count(args) if count is not None else None


def foreign_rate(name: str, half_flops_per_s: float) -> float | None:
    """The peak rate of a kernel by the name of its schema where it does not follow from its dtype, else None.

    Tensor cores multiply int8 at twice the rate of 16-bit floats on each card since Turing (NVIDIA's data sheets: T4
    130 of 65 TFLOP/s, A100 624 of 312, L40S 733 of 366, H100 1,979 of 989).
    """
    return 2 * half_flops_per_s if name in _INT8 else None
