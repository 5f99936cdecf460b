"""FLOPs and rates of single kernels of other packages, which torch's flop counter does not know.

Operations that are several kernels on a card are not here: `Tracer.in_parts` runs their parts, and each counts itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import cast

import torch
from torch._ops import OpOverload


def _gemm_4bit(args: Sequence[object]) -> int:
    return _product(args[0], cast("Sequence[int]", args[2])[0])


def _int8_matmul(args: Sequence[object]) -> int:
    return _product(args[0], cast("torch.Tensor", args[1]).shape[0])


def _product(rows: object, columns: int) -> int:
    return 2 * prod(cast("torch.Tensor", rows).shape) * columns


_COUNTS: dict[str, Callable[[Sequence[object]], int]] = {
    "bitsandbytes::gemm_4bit": _gemm_4bit,  # the fused kernel, which reads the packed weight
    "bitsandbytes::gemv_4bit": _gemm_4bit,
    "bitsandbytes::int8_linear_matmul": _int8_matmul,
}
_PER_HALF = {"bitsandbytes::gemm_4bit": 1, "bitsandbytes::gemv_4bit": 1, "bitsandbytes::int8_linear_matmul": 2}


def foreign_flops(func: OpOverload, args: Sequence[object]) -> int:
    """FLOPs of a kernel of another package; 0 if none is known, so that bytes alone bound its time."""
    count = _COUNTS.get(func._schema.name)
    return count(args) if count is not None else 0


def foreign_rate(name: str, half_flops_per_s: float) -> float | None:
    """The peak rate of such a kernel by the name of its schema, or None if it is none of these.

    Tensor cores multiply int8 at twice the rate of 16-bit floats on each card since Turing (NVIDIA's data sheets: T4
    130 of 65 TFLOP/s, A100 624 of 312, L40S 733 of 366, H100 1,979 of 989).
    """
    times = _PER_HALF.get(name)
    return None if times is None else times * half_flops_per_s
