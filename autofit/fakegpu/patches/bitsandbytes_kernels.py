"""bitsandbytes' operators as its CUDA backend runs them: the same allocations and kernels, in the same order.

Follows bitsandbytes 0.50, `backends/cuda/ops.py` and, where CUDA has no implementation of its own,
`backends/default/ops.py`, which is called itself.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload

from autofit.fakegpu.card import FakeGpu
from autofit.fakegpu.specs import GpuSpec

OUTLIER_COLUMNS = 16  # per 8-bit matmul; data-dependent, a few on real models (LLM.int8() paper, section 4)
SIMT_ROWS = 4  # up to this many rows each version takes its fused kernel (_GEMM_4BIT_CUSTOM_FLOOR_M)
Fuses = Callable[[torch.dtype, int, int, int], bool]


def kernels_in_parts(gpu: FakeGpu) -> dict[OpOverload, Callable[..., object]]:
    """Operators of bitsandbytes that are several kernels on a card, with a function that runs these."""
    ops = torch.ops.bitsandbytes
    found: dict[OpOverload, Callable[..., object]] = {
        ops.int8_vectorwise_quant.default: functools.partial(_int8_quant, gpu),
        ops.int8_mm_dequant.default: functools.partial(_int8_dequant, gpu),
    }
    for packet in (ops.int8_mixed_scaled_mm, ops.int8_scaled_mm, ops.int8_vectorwise_dequant):
        found[packet.default] = functools.partial(packet.default._op_dk, DispatchKey.CompositeExplicitAutograd)
    if hasattr(ops, "gemm_4bit"):
        found[ops.gemm_4bit.default] = functools.partial(_gemm_4bit, gpu, _fuses(gpu))
    return found


def _gemm_4bit(
    gpu: FakeGpu, fuses: Fuses, a: torch.Tensor, b: torch.Tensor, shape: Sequence[int], absmax: torch.Tensor,
    blocksize: int, quant_type: str, bias: torch.Tensor | None = None, absmax_8bit: torch.Tensor | None = None,
    absmax_code: torch.Tensor | None = None, absmax_offset: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """gemm_4bit: a fused kernel for few rows; for more, the weight in a's dtype and then a plain matrix product."""
    ops, launch = torch.ops.bitsandbytes, gpu.tracer.clock.operation
    inner = a.shape[-1]
    if inner % blocksize == 0 and fuses(a.dtype, a.numel() // inner, shape[0], inner):
        out = a.new_empty((*a.shape[:-1], shape[0]))
        scales = absmax_8bit if absmax_8bit is not None else absmax
        launch(ops.gemm_4bit.default, (a, b, shape, scales), {}, out)
        return out
    if absmax_8bit is not None and absmax_offset is not None:
        scales = torch.empty_like(absmax_8bit, dtype=torch.float32)
        launch(ops.dequantize_blockwise.out, (absmax_8bit, absmax, absmax_code), {}, scales)
        absmax = scales + absmax_offset
    weight = torch.empty(shape, dtype=a.dtype, device=a.device)
    launch(ops.dequantize_4bit.out, (b, absmax), {}, weight)
    return torch.nn.functional.linear(a, weight, bias)


def _fuses(gpu: FakeGpu) -> Fuses:
    """Whether the installed version runs its fused 4-bit kernel for a dtype and the sizes M, N and K.

    Its CUDA backend cannot be imported without CUDA, so the function that chooses is taken out of its source.
    """
    choose = _function_that_chooses(gpu.spec)
    if choose is None:
        gpu.note("which 4-bit kernel this bitsandbytes takes is not known: the weight is dequantised for each product")
        return lambda dtype, rows, outer, inner: rows <= SIMT_ROWS
    limit, chosen = choose
    return lambda dtype, rows, outer, inner: rows <= limit and chosen(0, dtype, rows, outer, inner)


def _function_that_chooses(spec: GpuSpec) -> tuple[int, Callable[..., bool]] | None:
    package = find_spec("bitsandbytes")
    path = Path(package.origin or "").parent / "backends" / "cuda" / "ops.py" if package is not None else Path()
    if not path.is_file():
        return None
    major, minor = spec.compute_capability
    names: dict[str, object] = {"torch": torch, "_gpu_dispatch_props": lambda _: (spec.sm_count, major, minor)}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name == "_gemm_4bit_use_custom_cuda":
            node.decorator_list = []
            exec(compile(ast.Module([node], []), str(path), "exec"), names)  # noqa: S102 - the library's own function
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    names.setdefault(target.id, node.value.value)  # CUDA's comes before ROCm's
    limit, chosen = names.get("_gemm_4bit_custom_max_m"), names.get("_gemm_4bit_use_custom_cuda")
    known = {"_GEMM_4BIT_CUSTOM_FLOOR_M"} <= names.keys() and isinstance(limit, int) and inspect.isfunction(chosen)
    return (limit, chosen) if known else None  # type: ignore[return-value]


def _int8_quant(gpu: FakeGpu, a: torch.Tensor, threshold: float = 0.0) -> object:
    """int8_vectorwise_quant: int8 rows, their scales, and the outlier columns (a data-dependent number)."""
    rows = a.numel() // a.shape[-1]
    scales = torch.empty(rows, dtype=torch.float32, device=a.device)
    quantised = torch.empty(a.shape, dtype=torch.int8, device=a.device)
    columns = None
    if threshold > 0:
        outliers = a.abs() >= threshold
        bool(outliers.any())  # waits for the GPU
        outliers.any(dim=0)
        columns = torch.empty(OUTLIER_COLUMNS, dtype=torch.int64, device=a.device)
    op = torch.ops.bitsandbytes.int8_vectorwise_quant.default
    gpu.tracer.clock.operation(op, (a,), {}, (quantised, scales))
    if rows > 1 and columns is not None:
        quantised[:, columns] = 0
    return quantised, scales, columns


def _int8_dequant(
    gpu: FakeGpu, a: torch.Tensor, row_stats: torch.Tensor, col_stats: torch.Tensor,
    dtype: torch.dtype | None = None, bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """int8_mm_dequant: float16 from the int32 product, then the wanted dtype."""
    out = torch.empty_like(a, dtype=torch.float16)
    op = torch.ops.bitsandbytes.int8_mm_dequant.default
    gpu.tracer.clock.operation(op, (a, row_stats, col_stats), {}, out)
    if bias is not None and bias.dtype is not torch.float16:
        out.add_(bias)
    return out.to(dtype or torch.float16)
