"""`attn_implementation: flash_attention_2` where flash-attn is not installed, as on a machine that has it.

torch carries the same kernels (`aten::_flash_attention_forward` and its backward, from the flash-attn 2 sources), with
the same saved tensors: q, k, v, the output and the log of the sums. Splitting the keys of a decode step over the card's
processors, which takes a small buffer, is not simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.util import find_spec
from types import ModuleType
from typing import cast

import torch

from autofit.fakegpu.card import FakeGpu
from autofit.fakegpu.patches.redirect import untouched

Target = tuple[object, str, object, str]
_NAME = "flash_attention_2"
_NOTE = (
    "flash-attn is not installed: flash_attention_2 was simulated by torch's copy of its kernels; a card without the "
    "package cannot run it"
)


def _stands_in(gpu: FakeGpu) -> bool:
    """Whether a card of this kind could run flash-attn 2, which needs Ampere or later, and only the package lacks."""
    return gpu.mode == "cuda" and gpu.spec.compute_capability >= (8, 0) and find_spec("flash_attn") is None


def transformers_models(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    """Let models take flash_attention_2 without the package."""
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
