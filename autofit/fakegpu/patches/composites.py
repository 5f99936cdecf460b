"""Operators that a CUDA build runs in other parts than this build does on fake tensors, made to run as on CUDA.

torch's dispatch tables say which: this build has no CUDA kernels, so an operator with a CUDA kernel and a composite for
other devices is taken apart before its call arrives here; and an operator without a CUDA kernel arrives here whole,
while a card runs its composite. `native_functions.yaml`, which torch ships in `torchgen`, says what a CUDA build has:
tests/fakegpu/test_composites.py compares both for all operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload

from autofit.fakegpu.undo import Undo

aten = torch.ops.aten

# CompositeImplicitAutograd here, with the temporaries of the composite; one kernel on CUDA.
OWN_KERNELS = ("silu_backward", "mish_backward", "_fused_rms_norm")
# CompositeExplicitAutograd on CUDA, with temporaries as large as an input; the others have none. Left whole, though
# they have some: _trilinear, soft_margin_loss and linear algebra, whose code reads or resizes what fakes do not have.
IN_PARTS = (
    "_safe_softmax", "logsumexp", "binary_cross_entropy_with_logits", "dist", "_euclidean_dist", "isinf", "ldexp",
    "mvlgamma", "_unsafe_masked_index", "_unsafe_masked_index_put_accumulate",
)  # fmt: skip


def kernels_of_cuda(undo: Undo) -> None:
    """Register a kernel for CUDA under each name of `OWN_KERNELS`, so that the dispatcher takes its derivatives.

    The kernel itself never runs: the call ends at the fake tensors, which follow its shapes.
    """
    library = torch.library.Library("aten", "IMPL")
    undo.add(library._destroy)
    for name in OWN_KERNELS:
        if hasattr(aten, name):
            library.impl(name, _never_runs, "CUDA")


def own_kernels() -> set[OpOverload]:
    """The operators of `OWN_KERNELS` in this torch."""
    return {getattr(aten, name).default for name in OWN_KERNELS if hasattr(aten, name)}


def in_parts() -> dict[OpOverload, Callable[..., object]]:
    """{operator of `IN_PARTS` in this torch: its composite}."""
    found: dict[OpOverload, Callable[..., object]] = {}
    for name in IN_PARTS:
        packet = getattr(aten, name, None)
        for overload in {"default", "Tensor"}.intersection(packet.overloads() if packet is not None else ()):
            function = getattr(packet, overload)
            found[function] = partial(function._op_dk, DispatchKey.CompositeExplicitAutograd)
    found[aten.logsumexp.default] = _logsumexp
    return found


def _logsumexp(x: torch.Tensor, dim: Sequence[int], keepdim: bool = False) -> torch.Tensor:
    """logsumexp_out_impl in ReduceOps.cpp: torch's own resizes its result, which fakes do not survive."""
    x = x if x.is_floating_point() or x.is_complex() else x.to(torch.get_default_dtype())
    largest = torch.amax(x, tuple(dim), keepdim=True)
    added = largest if keepdim else torch.squeeze(largest, tuple(dim) or tuple(range(x.dim())))
    added.masked_fill_(added.abs() == float("inf"), 0)
    return torch.sum((x - largest).exp_(), tuple(dim), keepdim=keepdim).log_().add_(added)


def _never_runs(*args: object, **kwargs: object) -> object:
    raise RuntimeError("a simulated card has no kernels; this operator was called without fake tensors")
