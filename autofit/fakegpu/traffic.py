"""What a kernel reads from and writes to memory: how often each of its tensors, and in which pattern.

Without a rule below a kernel reads each argument once and writes its output once. The passes of the others are those of
torch's own kernels (aten/src/ATen/native/cuda):

- softmax (SoftMax.cu, PersistentSoftmax.cuh): the forward reads a row for its maximum, its sum and its result. The
  backward reads the gradient, that of softmax also the output, for a sum first. Short rows are still in the cache.
- layer_norm_kernel.cu: the forward reads its input for the statistics and for the result, the backward its input and
  the gradient twice, and a third time for the gradients of weight and bias.
- Loss (NLLLoss2d and Loss.cu): the loss reads one element a target; its gradient is filled with zeros first.
- A slice's gradient is filled with zeros first, and then a part of it is written.
- What is written in place is also read, unless it is only filled or copied to; an expanded tensor is read once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch._ops import OpOverload

from autofit.fakegpu.rates.bandwidth import Pattern

GATHERS = {"embedding", "index", "gather", "index_select"}  # their cost is the rows they return, not the whole input
# Bytes of a row that the next pass of a softmax still finds in the cache: on an A100, rows of 64 KiB are read once and
# of 128 KiB three times (experiments/rates/bandwidth.py).
_CACHED_ROW_BYTES = 1 << 16
_SCATTERS = {"embedding_dense_backward", "index_put", "index_put_", "_index_put_impl_", "index_add", "index_add_",
             "scatter_add", "scatter_add_", "scatter", "scatter_"}  # fmt: skip
# Times that each argument is read, of softmax by long rows.
_PASSES = {
    "_softmax": (3,), "_log_softmax": (3,), "_softmax_backward_data": (2, 2), "_log_softmax_backward_data": (2, 1),
    "native_layer_norm": (2,), "_fused_rms_norm": (2,), "native_layer_norm_backward": (3, 3),
    "_fused_rms_norm_backward": (3, 3), "nll_loss_forward": (0, 1), "nll_loss_backward": (0, 0, 1),
    "slice_backward": (2,), "select_backward": (2,),
}  # fmt: skip
_FILLS = {"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_"}
_COPIES = {"_to_copy", "clone", "copy_"}


Times = tuple[int, ...] | None  # reads or writes of each tensor; None is one of each


class Traffic(NamedTuple):
    """Reads or writes of each tensor of the arguments, then of the output, and the bytes of all; and their pattern."""

    times: tuple[int, ...]
    nbytes: int
    pattern: Pattern


def traffic(func: OpOverload, args: Sequence[object], out: object) -> Traffic:
    """The traffic of one kernel."""
    name = func._schema.name[6:]
    inputs, outputs = list(tensors(args)), list(tensors(out))
    if name in GATHERS:
        times = [0] * len(inputs) + [2] * len(outputs)
    else:
        pointwise = torch.Tag.pointwise in func.tags
        passes = _passes(name, inputs)
        written = _written(func, args)
        seen: set[int] = set()
        times = []
        for place, tensor in enumerate(inputs):
            reads = passes[place] if place < len(passes) else 1
            if pointwise and tensor.numel() > 1 and _is_expanded(tensor):
                reads = 0  # it stays in the cache
            if name in _FILLS and id(tensor) in written:
                reads = 0
            times.append(0 if id(tensor) in seen else reads + (id(tensor) in written))
            seen.add(id(tensor))
        times += [int(id(tensor) not in seen) for tensor in outputs]
    moved = sum(t.numel() * t.element_size() * n for t, n in zip((*inputs, *outputs), times, strict=True))
    return Traffic(tuple(times), moved, _pattern(func, name, inputs, outputs))


def _written(func: OpOverload, args: Sequence[object]) -> set[int]:
    """The arguments that the operator writes to; a fused optimizer is said to write gradients, but only reads them."""
    found: set[int] = set()
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name != "grads":
            found.update(id(tensor) for tensor in tensors(value))
    return found


def tensors(value: object) -> Iterator[torch.Tensor]:
    """The tensors of an argument or output, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)


def _passes(name: str, inputs: Sequence[torch.Tensor]) -> tuple[int, ...]:
    if "softmax" in name and inputs and inputs[0].dim():
        short = inputs[0].shape[-1] * inputs[0].element_size() <= _CACHED_ROW_BYTES
        return () if short else _PASSES.get(name, ())
    return _PASSES.get(name, ())


def _is_expanded(tensor: torch.Tensor) -> bool:
    repeated = prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride == 0)
    return repeated > 1


def _pattern(func: OpOverload, name: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> Pattern:
    if name in GATHERS:
        return "gather"
    if name == "nll_loss_forward":
        return "one_block"
    if name in _SCATTERS:
        return "scatter"
    if name == "cat":
        return "cat"
    if torch.Tag.pointwise not in func.tags and name not in _COPIES:
        return "streaming"
    whole = [tensor for tensor in (*outputs, *inputs) if tensor.dim()]
    if not whole:
        return "streaming"
    first = whole[0]
    laid_out = _layout(first)
    if not _is_dense(first) or any(t.shape != first.shape or _layout(t) != laid_out for t in whole[1:]):
        return "strided"
    return "cast" if len({t.dtype for t in whole}) > 1 else "streaming"


def _layout(tensor: torch.Tensor) -> list[int]:
    """The strides of the dimensions that have more than one element: no other stride is ever used."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements follow each other in memory, in some order of the dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True
