"""In-place accumulation of gradients that meet at one tensor, which autograd does for real tensors but not for fakes.

`InputBuffer::accumulate` in torch/csrc/autograd/input_buffer.cpp adds into the first gradient if it is dense and has no
other owner, but never into a tensor subclass such as a fake. So when the engine adds two fakes and is the only owner of
the first, the sum takes over the memory of the first.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch._subclasses.fake_tensor import FakeTensor

from autofit.fakegpu.tracer import Tracer, in_backward

aten = torch.ops.aten
# Reference counts of a tensor and of its storage when the engine is the only owner and calls this code (torch 2.13; a
# test compares the result with the CPU allocator). With any other count the sum gets its own memory.
_TENSOR_REFERENCES, _STORAGE_REFERENCES = 4, 2


def accumulation_in_place(tracer: Tracer) -> None:
    """Let the sum of two gradients reuse the memory of the first whenever autograd would add in place."""

    def add(args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        shortcut = tracer.shortcut
        first = args[0]
        taken = isinstance(first, FakeTensor) and _by_engine() and _held_by_engine(first)
        out = shortcut.run(aten.add.Tensor, args, kwargs) if shortcut else aten.add.Tensor(*args, **kwargs)
        if taken:
            sum_, held = cast("torch.Tensor", out), cast("torch.Tensor", first)
            if (sum_.shape, sum_.dtype) == (held.shape, held.dtype):
                tracer.memory.take_over(sum_, held)
        return out

    if hasattr(torch.Tensor, "_use_count"):
        tracer.handlers[aten.add.Tensor] = add


def _by_engine() -> bool:
    """Whether the caller is the C++ engine itself; a backward written in Python has its own frame."""
    if not in_backward() or torch.is_grad_enabled():
        return False
    return sys._getframe(4).f_code.co_name == "_engine_run_backward"  # here, add, _run, __torch_dispatch__


def _held_by_engine(tensor: torch.Tensor) -> bool:
    count = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    return tensor._use_count() == _TENSOR_REFERENCES and count == _STORAGE_REFERENCES and dense  # type: ignore[attr-defined]
