"""CUDA kernel memory that is not visible in shapes: library workspaces, and scratch inside one operation.

Each rule names the function of torch's source that it follows. Operations without a rule count as scratch-free.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch._ops import OpOverload

aten = torch.ops.aten
KIB = 1 << 10


class Rounded(NamedTuple):
    """A size in bytes: `scale` times the product of `dims`, each rounded up to a multiple of its own."""

    scale: int
    dims: tuple[int, ...]
    multiples: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.scale * prod(map(_up, self.dims, self.multiples))


Size = int | tuple[Rounded, ...]  # in bytes; the parts say how it follows from shapes
Scratch = Callable[..., Size]

# Operations that call cuBLAS, whose workspace comes from the allocator.
GEMMS = {
    aten.mm.default, aten.mm.out, aten.addmm.default, aten.addmm.out, aten.addmm_.default, aten.bmm.default,
    aten.bmm.out, aten.baddbmm.default, aten.baddbmm.out, aten.addmv.default, aten.mv.default, aten.dot.default,
    aten._scaled_mm.default,
}  # fmt: skip
for _name in ("dtype", "dtype_out"):  # mm(..., out_dtype=), torch >= 2.8
    for _packet in (aten.mm, aten.addmm, aten.bmm, aten.baddbmm):
        if hasattr(_packet, _name):
            GEMMS.add(getattr(_packet, _name))


# Operations that allocate their last output first: dropout_cuda in Dropout.cu makes the mask before the result.
MADE_LAST_FIRST = {aten.native_dropout.default}


def blas_workspace_bytes(capability: tuple[int, int], config: str | None = None) -> int:
    """Bytes of one cuBLAS workspace; torch keeps one per handle (host thread) and stream.

    `parseChosenWorkspaceSize` in aten/src/ATen/cuda/CublasHandlePool.cpp: the default is ":4096:2:16:8" (KiB), and
    4096 * 8 KiB on sm90 and sm100; CUBLAS_WORKSPACE_CONFIG overrides it. Since torch 2.8 cublasLt shares it.
    """
    config = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "") if config is None else config
    pairs = re.findall(r":(\d+):(\d+)", config)
    if pairs:
        return sum(int(size) * int(count) for size, count in pairs) * KIB
    if capability[0] in (9, 10):
        return 4096 * 8 * KIB
    return (4096 * 2 + 16 * 8) * KIB


def scratch_size(func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], *, device: str) -> Size:
    """What an operation allocates and frees internally, in addition to its outputs."""
    rule = _SCRATCH_ANYWHERE.get(func) or (_SCRATCH.get(func) if device == "cuda" else None)
    return rule(*args, **kwargs) if rule is not None else 0


def rounded_outputs(func: OpOverload, args: Sequence[object]) -> dict[int, tuple[Rounded, ...]]:
    """The outputs of an operation that have a dimension rounded up, by number."""
    if func is not aten._scaled_dot_product_efficient_attention.default:
        return {}
    assert isinstance(args[0], torch.Tensor)
    return {1: (Rounded(4, tuple(args[0].shape[:3]), (1, 1, 32)),)}  # logsumexp, kAlignLSE in attention.cu


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _flash_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object, **__: object
) -> Size:
    """mha_bwd in flash_api.cpp: fp32 dq accumulator and softmax sums, and full-head dk and dv under grouped queries."""
    batch, heads, length, dim = q.shape
    key_heads, key_length = k.shape[1], k.shape[2]
    rounded = _up(dim, 32) if dim <= 192 else 256
    sums = Rounded(4 * (rounded + 1), (batch, heads, length), (1, 1, 128))
    if key_heads == heads:
        return (sums,)
    return sums, Rounded(2 * dim * k.element_size(), (batch, heads, key_length), (1, 1, 1))


def _flash_backward_of_tokens(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, sums: torch.Tensor,
    starts_q: torch.Tensor | None = None, *_: object, **__: object,
) -> Size:  # fmt: skip
    """`_flash_backward` for heads inside of tokens; mha_varlen_bwd rounds its buffers up by 128 rows a sequence."""
    if starts_q is None:
        return _flash_backward(grad, q.transpose(1, 2), k.transpose(1, 2), v)
    tokens, heads, dim = q.shape
    rounded = _up(dim, 32) if dim <= 192 else 256
    scale, sequences = 4 * (rounded + 1), starts_q.shape[0] - 1
    buffers = Rounded(scale, (heads, tokens), (1, 1)), Rounded(128 * scale, (heads, sequences), (1, 1))
    if k.shape[1] == heads:
        return buffers
    return *buffers, Rounded(2 * dim * k.element_size(), (heads, k.shape[0]), (1, 1))


def _efficient_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object, **__: object
) -> Size:
    """_efficient_attention_backward in attention_backward.cu: delta, and fp32 gradient accumulators."""
    batch, heads, length, dim = q.shape
    rows = (batch, heads, length)
    return Rounded(4, (*rows, dim), (1, 1, 64, 32)), Rounded(4, rows, (1, 1, 1))


def _cudnn_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object, **__: object
) -> Size:
    """run_cudnn_SDP_bprop in MHA.cpp asks cuDNN for its workspace: an fp32 dq accumulator and sums (an estimate)."""
    batch, heads, length, dim = q.shape
    rows = (batch, heads, length)
    return Rounded(4 * dim, rows, (1, 1, 64)), Rounded(8, rows, (1, 1, 1))


def _embedding_backward(grad: torch.Tensor, indices: torch.Tensor, num_weights: int, *_: object, **__: object) -> int:
    """embedding_backward_cuda_kernel in EmbeddingBackwardKernel.cu; no scratch up to 3072 indices.

    Sorted and original indices, four index arrays, and fp32 partial sums for each segment of NROWS_PER_THREAD = 10.
    """
    count, dim = indices.numel(), grad.shape[-1]
    if count <= 3072:
        return 0
    segments = min(count, num_weights)
    partial_segments = count // 10 + segments
    index_bytes = indices.element_size()
    return 4 * partial_segments * _up(dim, 32) + index_bytes * (4 * count + 2 * segments + partial_segments)


def _softmax(self: torch.Tensor, *_: object, **__: object) -> Size:
    """host_softmax in SoftMax.cu and log_softmax_cpu_out in SoftMax.cpp: a view with gaps is first made contiguous."""
    if self.is_contiguous():
        return 0
    return (Rounded(self.element_size(), tuple(self.shape), (1,) * self.dim()),)


def _softmax_backward(grad: torch.Tensor, output: torch.Tensor, *_: object, **__: object) -> Size:
    """softmax_backward_cuda_out in SoftMax.cu: `grad * output`, in the type of both, is a tensor of its own."""
    size = torch.promote_types(grad.dtype, output.dtype).itemsize
    return (Rounded(size, tuple(output.shape), (1,) * output.dim()),)


def _multinomial(self: torch.Tensor, num_samples: int, replacement: bool = False, **_: object) -> Size:
    """multinomial in Distributions.cpp: without replacement, or of one sample, exponential noise of the whole size."""
    if replacement and num_samples > 1:
        return 0
    return (Rounded(self.element_size(), tuple(self.shape), (1,) * self.dim()),)


def _pow_of_number(self: object, exponent: torch.Tensor, **_: object) -> int:
    """pow_Scalar_out in Pow.cpp: the number becomes a tensor of one element."""
    return torch.result_type(self, exponent).itemsize  # type: ignore[call-overload, no-any-return]


def _sort_pairs(self: torch.Tensor, *_: object, **__: object) -> int:
    """cub's double buffers for keys and values in a segmented sort: about one copy of each (an estimate)."""
    return self.numel() * (self.element_size() + 8)


_SCRATCH_ANYWHERE: dict[OpOverload, Scratch] = {  # also of the CPU's kernels
    aten._softmax.default: _softmax,
    aten._log_softmax.default: _softmax,
}
_SCRATCH: dict[OpOverload, Scratch] = {
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._flash_attention_backward.default: _flash_backward_of_tokens,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten._softmax_backward_data.default: _softmax_backward,
    aten._softmax_backward_data.out: _softmax_backward,
    aten.multinomial.default: _multinomial,
    aten.pow.Scalar: _pow_of_number,
    aten.sort.default: _sort_pairs,
    aten.sort.stable: _sort_pairs,
}
