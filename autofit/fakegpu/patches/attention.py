"""Attention: the kernel that a card takes, flash-attn's included, and the tensors that it keeps."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Literal, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention.flex_attention import AuxOutput

from autofit.fakegpu.card import FakeGpu
from autofit.fakegpu.patches.redirect import Target, Undo, untouched

aten = torch.ops.aten
# scaled_dot_product_attention as a CUDA build runs it: the choice of kernel, and its allocations.
#
# On a fake tensor torch's C++ code chooses the math kernel, which stores the whole score matrix. This module follows
# `select_sdp_backend` in sdp_utils.cpp and `scaled_dot_product_attention` in attention.cpp (torch 2.13, dense tensors).
# With the choice of a kernel forced, both gave the same operations and bytes in 732 calls on fake tensors: all kernels,
# masks, lengths that are multiples of 8 or not, grouped queries, with and without gradients.

Kernel = Literal["flash", "efficient", "cudnn", "math"]
_SDPA = aten.scaled_dot_product_attention.default
_HALF = (torch.float16, torch.bfloat16)
_PRIORITY: tuple[Kernel, ...] = ("flash", "efficient", "math")


def attention_of_a_card(gpu: FakeGpu, undo: Undo) -> None:
    """Register the kernel of `aten::scaled_dot_product_attention` for CUDA tensors, until the undo.

    The dispatcher calls it for every name of the function and for every library's wrapper around it.
    """
    attention = Attention(gpu.spec.compute_capability, gpu.attention_kernels)
    gpu.tracer.composites[_SDPA] = attention  # inference mode leaves out the autograd keys
    library = torch.library.Library("aten", "IMPL")
    undo.add(library._destroy)
    library.impl("scaled_dot_product_attention", attention, "AutogradCUDA")


@dataclass(slots=True)
class Attention:
    """`scaled_dot_product_attention` on one card; counts the chosen kernels."""

    capability: tuple[int, int]
    chosen: dict[str, int] = field(default_factory=dict)
    instead: Callable[..., Any] | None = None  # tried first; NotImplemented for tensors that it does not take

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        if not isinstance(query, FakeTensor):
            whole = _SDPA.decompose(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
            return cast("torch.Tensor", whole)
        if self.instead is not None and attn_mask is None and not (is_causal or enable_gqa):
            out = self.instead(query, key, value, dropout_p, scale)
            if out is not NotImplemented:
                return cast("torch.Tensor", out)
        kernel = self.select(query, key, value, attn_mask, dropout_p=dropout_p, is_causal=is_causal, gqa=enable_gqa)
        self.chosen[kernel] = self.chosen.get(kernel, 0) + 1
        mask = _additive(attn_mask, query.dtype)
        if kernel == "math":
            return _math(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        if kernel == "flash":
            return _flash(query, key, value, dropout_p, is_causal, scale)
        needs_sums = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        if kernel == "efficient":
            if mask is not None:
                mask = _aligned(mask).expand(*query.shape[:3], key.shape[2])
            out = aten._scaled_dot_product_efficient_attention(
                query, key, value, mask, needs_sums, dropout_p, is_causal, scale=scale
            )
        else:
            out = aten._scaled_dot_product_cudnn_attention(
                query, key, value, mask, needs_sums, dropout_p, is_causal, False, scale=scale
            )
        return cast("torch.Tensor", out[0])

    def select(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, *,
        dropout_p: float, is_causal: bool, gqa: bool,
    ) -> Kernel:  # fmt: skip
        """The first kernel in torch's priority order that is enabled and supports these tensors."""
        if query.dim() != 4 or key.dim() != 4 or value.dim() != 4 or 0 in (*query.shape, *key.shape):
            return "math"
        flash = self._flash_can(query, key, value, mask, dropout_p, is_causal, gqa)
        usable: dict[Kernel, bool] = {
            "flash": torch._C._get_flash_sdp_enabled() and flash,
            "efficient": torch._C._get_mem_efficient_sdp_enabled() and self._efficient_can(query, key, value),
            "cudnn": torch._C._get_cudnn_sdp_enabled() and self._cudnn_can(query, key, value, mask, gqa),
            "math": True,
        }  # fmt: skip
        # check_prefer_cudnn_attention: cuDNN comes first on sm90 and sm100, unless the user has put it last
        first = self.capability in ((9, 0), (10, 0)) and os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1"
        order: tuple[Kernel, ...] = ("cudnn", *_PRIORITY) if first else _PRIORITY
        return next(kernel for kernel in order if usable[kernel])

    def _flash_can(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, dropout_p: float,
        is_causal: bool, gqa: bool,
    ) -> bool:  # fmt: skip
        dim = query.shape[-1]
        if query.dtype not in _HALF or self.capability < (8, 0) or mask is not None:
            return False
        if not dim == key.shape[-1] == value.shape[-1] or dim > 256 or not _heads_fit(query, key, gqa=gqa):
            return False
        if is_causal and query.shape[-2] != key.shape[-2]:
            return False
        grad = any(t.requires_grad for t in (query, key, value))
        consumer = self.capability in ((8, 6), (8, 9), (12, 0), (12, 1))
        return not (grad and consumer and (192 < dim <= 224 or (dim > 224 and dropout_p > 0)))

    def _efficient_can(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
        half = query.dtype in _HALF
        if query.dtype is torch.bfloat16 and self.capability < (8, 0):
            return False
        if query.dtype not in (*_HALF, torch.float32):
            return False
        # check_head_dim_size_mem_efficient: 16 bytes on sm80, 4 elements of half on sm70, one of float before tf32
        align = (8 if half else 4) if self.capability >= (8, 0) else (4 if half else 1)
        heads_fit = _heads_fit(query, key, gqa=False)  # no support for grouped queries: they use the math kernel
        return query.shape[-1] % align == 0 and value.shape[-1] % align == 0 and heads_fit

    def _cudnn_can(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, gqa: bool
    ) -> bool:
        dim = query.shape[-1]
        limit = 256 if self.capability in ((9, 0), (10, 0)) else 128
        if query.dtype not in _HALF or self.capability < (8, 0) or dim != value.shape[-1]:
            return False
        if mask is not None and mask.requires_grad:
            return False
        lengths_fit = query.shape[-2] > 1 and key.shape[-2] > 1
        return dim <= limit and dim % 8 == 0 and lengths_fit and _heads_fit(query, key, gqa=gqa)


def _heads_fit(query: torch.Tensor, key: torch.Tensor, *, gqa: bool) -> bool:
    same_batch = query.shape[0] == key.shape[0]
    if gqa:
        return same_batch and query.shape[1] % key.shape[1] == 0
    return same_batch and query.shape[1] == key.shape[1]


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float, is_causal: bool, scale: float
) -> torch.Tensor:
    dim = query.shape[-1]
    if dim % 8:  # pad_last_dim<8>
        query, key, value = (torch.nn.functional.pad(t, (0, 8 - dim % 8)) for t in (query, key, value))
    out = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    return cast("torch.Tensor", out[..., :dim] if dim % 8 else out)


def _math(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, dropout_p: float,
    is_causal: bool, scale: float | None, gqa: bool,
) -> torch.Tensor:  # fmt: skip
    """_scaled_dot_product_attention_math. torch's own code adds the mask out of place when the tensors are fake."""
    dtype, precise = query.dtype, query
    if dtype in _HALF and not torch._C._get_math_sdp_allow_fp16_bf16_reduction():
        precise, key, value = query.float(), key.float(), value.float()
    factor = abs(query.shape[-1] ** -0.5 if scale is None else scale) ** 0.5
    scaled = aten.mul.Scalar(precise, -factor if scale is not None and scale < 0 else factor)
    if is_causal:
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        mask = _additive(mask, scaled.dtype)
    keys, values = key, value
    if gqa and not query.shape[-3] == key.shape[-3] == value.shape[-3]:
        keys, values = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    weights = torch.matmul(scaled, aten.mul.Scalar(keys.transpose(-2, -1), factor))
    if mask is not None:
        weights.add_(mask)
    weights = torch._safe_softmax(weights, -1)
    if dropout_p > 0:
        weights = torch.dropout(weights, dropout_p, True)
    second = weights.to(dtype)  # its second output, that the caller drops; compilers evaluate it first
    out = torch.matmul(weights, values).to(dtype)
    del second
    return out


def _additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """convert_boolean_attn_mask: a bool mask is converted to the query's dtype, again in each layer."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    minus_infinity = torch.scalar_tensor(-float("inf"), dtype=dtype, device=mask.device)
    return torch.where(mask, 0.0, minus_infinity)


def _aligned(mask: torch.Tensor) -> torch.Tensor:
    """preprocess_mask: the efficient kernel needs strides of a multiple of 8 elements, else pad the rows and slice.

    A length that is a multiple of 8 with other strides gets 8 more, as in pad_bias.
    """
    *others, last = mask.stride()
    if last == 1 and not any(stride % 8 for stride in others):
        return mask
    length = mask.shape[-1]
    return torch.nn.functional.pad(mask, (0, 8 - length % 8))[..., :length]


# `attn_implementation: flash_attention_2` where flash-attn is not installed, as on a machine that has it.
#
# torch carries the same kernels (`aten::_flash_attention_forward` and its backward, from the flash-attn 2 sources),
# with the same saved tensors: q, k, v, the output and the log of the sums. Splitting the keys of a decode step over the
# card's processors, which takes a small buffer, is not simulated.

_NAME = "flash_attention_2"
_NOTE = (
    "flash-attn is not installed: flash_attention_2 was simulated by torch's copy of its kernels; a card without the "
    "package cannot run it"
)


def _stands_in(gpu: FakeGpu) -> bool:
    """True if a card of this kind could run flash-attn 2, which needs Ampere or later, and only the package lacks."""
    return gpu.mode == "cuda" and gpu.spec.compute_capability >= (8, 0) and find_spec("flash_attn") is None


def transformers_models(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    """Let models take flash_attention_2 although the package is missing."""
    owner = getattr(module, "PreTrainedModel", None)
    name = "_flash_attn_import_error"  # transformers 5; earlier ones ask in other ways, and refuse
    if owner is None or not hasattr(owner, name) or not _stands_in(gpu):
        return
    original = cast("Callable[..., None]", untouched(getattr(owner, name)))

    def check(model: object, flash_attn_version: int, **asked: object) -> None:
        if flash_attn_version != 2:
            original(model, flash_attn_version, **asked)

    yield owner, name, check, "flash-attn is imitated"


def transformers_kernels(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    """Hand out the imitated functions where transformers imports those of flash-attn."""
    if not hasattr(module, "_lazy_imports") or not _stands_in(gpu):
        return
    original = cast("Callable[..., object]", untouched(module._lazy_imports))

    def imports(implementation: str | None, *args: object, **kwargs: object) -> object:
        if implementation != _NAME:
            return original(implementation, *args, **kwargs)
        gpu.note(_NOTE)
        return flash_attn_func, flash_attn_varlen_func, None, module._pad_input, module._unpad_input

    yield module, "_lazy_imports", imports, "flash-attn is imitated"
    if hasattr(module, "_loaded_implementation"):
        yield module, "_loaded_implementation", None, "what is loaded inside must not outlive the block"


def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None, deterministic: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Attention of q, k and v, (batch, length, heads, dim)."""
    return _attention(q, k, v, None, None, q.shape[1], k.shape[1], dropout_p, softmax_scale, causal, window_size)


def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None, deterministic: bool = False, block_table: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attention within each sequence of q, k and v, (tokens of all sequences, heads, dim)."""
    sizes = int(max_seqlen_q), int(max_seqlen_k)
    return _attention(q, k, v, cu_seqlens_q, cu_seqlens_k, *sizes, dropout_p, softmax_scale, causal, window_size)


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts_q: torch.Tensor | None, starts_k: torch.Tensor | None,
    longest_q: int, longest_k: int, dropout_p: float, scale: float | None, causal: bool, window: tuple[int, int],
) -> torch.Tensor:  # fmt: skip
    dim = q.shape[-1]
    scale = dim**-0.5 if scale is None else scale
    if dim % 8:
        q, k, v = (torch.nn.functional.pad(t, (0, 8 - dim % 8)) for t in (q, k, v))
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    out = torch.ops.aten._flash_attention_forward(
        q, k, v, starts_q, starts_k, longest_q, longest_k, dropout_p, causal, False, scale=scale,
        window_size_left=window[0], window_size_right=window[1],
    )[0]  # fmt: skip
    return cast("torch.Tensor", out[..., :dim] if dim % 8 else out)


# -- flex attention ---------------------------------------------------------------------------------------------------
# As torch compiles it for a card: two Triton kernels, and what they keep. Read in torch 2.13,
# torch/_inductor/kernel/flex/flex_attention.py: the forward writes the output, in the layout of the queries, and
# float32 sums (batch, heads, queries); the backward one float32 number a query (`delta`) and the gradients, those of
# keys and values with their own number of heads.

_FLEX = "compile_friendly_flex_attention"  # transformers' own wrapper of torch.compile(flex_attention)
_FLEX_NOTE = (
    "flex attention: its kernels were not measured; seconds are those of torch's flash attention with a causal mask"
)

torch.library.define(
    "flex::flex_attention", "(Tensor query, Tensor key, Tensor value, bool is_causal) -> (Tensor, Tensor)"
)
torch.library.define(
    "flex::flex_attention_backward",
    "(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor sums, bool is_causal)"
    " -> (Tensor, Tensor, Tensor)",
)


def _flex_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.empty_like(query) if value.shape[-1] == query.shape[-1] else query.new_empty(
        (*query.shape[:3], value.shape[-1])
    )  # fmt: skip
    return out, query.new_empty(query.shape[:3], dtype=torch.float32)


def _flex_backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


torch.library.register_fake("flex::flex_attention", _flex_forward)
torch.library.register_fake("flex::flex_attention_backward", _flex_backward)


class _Flex(torch.autograd.Function):
    """(attention (B, H, T, D), the logarithms of the sums (B, H, T)), of shapes alone."""

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
    """Let the models' flex attention run on fakes, for which torch lacks a rule."""
    if not hasattr(module, _FLEX):
        return
    original = cast("Callable[..., object]", untouched(getattr(module, _FLEX)))

    def attention(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, training: bool = False, **options: Any
    ) -> object:
        if not isinstance(query, FakeTensor):
            return original(query, key, value, training=training, **options)
        gpu.note(_FLEX_NOTE)
        out, sums = _Flex.apply(query, key, value)  # type: ignore[no-untyped-call]
        if options.get("return_lse"):
            return out, sums
        wanted = options.get("return_aux")
        return out if wanted is None else (out, AuxOutput(lse=sums))

    yield module, _FLEX, attention, "torch has no rule for flex attention on fakes"
