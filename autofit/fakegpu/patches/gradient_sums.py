"""What autograd does in place for real tensors, not for fakes: adding gradients that meet, scattering into zeros.

`InputBuffer::accumulate` in torch/csrc/autograd/input_buffer.cpp adds into the first gradient if it is dense and has no
other owner, but never into a tensor subclass such as a fake. So when the engine adds two fakes and is the only owner of
the first, the sum takes over the memory of the first. Likewise the backwards of gather, indexing, max, topk and
masked_select (torch/csrc/autograd/FunctionsManual.cpp) write into new zeros, for a subclass into a copy of them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from autofit.fakegpu.autograd import launched_by_autograd
from autofit.fakegpu.tracer import Handler, Tracer

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
    for function in _INTO_ZEROS:
        tracer.handlers[function] = _into_zeros(tracer, function)


_INTO_ZEROS = (
    aten.scatter_add.default, aten.index_put.default, aten.scatter.src, aten.index_add.default,
    aten.masked_scatter.default, aten.put.default,
)  # fmt: skip


def _into_zeros(tracer: Tracer, function: OpOverload) -> Handler:
    """A backward's `zeros.scatter_add(...)`, whose result takes over the memory of the zeros."""

    def run(args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        shortcut = tracer.shortcut
        taken = isinstance(args[0], FakeTensor) and _by_engine() and _only_tensor_of_its_storage(args[0])
        out = shortcut.run(function, args, kwargs) if shortcut else function(*args, **kwargs)
        if taken:
            tracer.memory.take_over(cast("torch.Tensor", out), cast("torch.Tensor", args[0]))
        return out

    return run


def _by_engine() -> bool:
    """Whether the caller is the C++ engine itself; a backward written in Python has its own frame."""
    if not launched_by_autograd():
        return False
    return sys._getframe(4).f_code.co_name == "_engine_run_backward"  # here, the handler, _run, __torch_dispatch__


def _held_by_engine(tensor: torch.Tensor) -> bool:
    dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    counted = tensor._use_count() == _TENSOR_REFERENCES  # type: ignore[attr-defined]
    return counted and _only_tensor_of_its_storage(tensor) and dense


def _only_tensor_of_its_storage(tensor: torch.Tensor) -> bool:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) == _STORAGE_REFERENCES
