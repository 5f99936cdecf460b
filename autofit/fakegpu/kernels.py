"""Properties of kernels beyond the tensors that they take and return: one entry of `KERNELS` for each operator.

FLOPs that torch's counter does not know, passes over an argument, and the pattern of reads and writes. A kernel without
an entry has the FLOPs of torch's counter, reads each argument once and writes its output once. Operations that are
several kernels on a card are not here: `Tracer.in_parts` runs their parts. Collectives are at the end: the bytes moved,
between how many cards, and who waits.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, cast

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils.flop_counter import flop_registry

from autofit.fakegpu.rates.collectives import Collective
from autofit.fakegpu.rates.kernels import Pattern, family, sizes
from autofit.fakegpu.scratch import Rounded, is_dense, named

aten = torch.ops.aten
KIB = 1 << 10


Times = tuple[int, ...] | None  # reads or writes of each tensor; None is one of each


class Kernel(NamedTuple):
    """One operator's kernel."""

    flops: Callable[[Sequence[Any]], int] | None = None  # of the arguments; None: as torch's counter has it
    int8: bool = False  # its products are of int8
    reads: tuple[int, ...] = ()  # times that each argument is read; once where it says nothing
    by_rows: bool = False  # those times hold for long rows; short ones stay in the cache
    pattern: Pattern | None = None  # None: by shapes and strides
    fills: bool = False  # it overwrites its output in place, unread
    copies: bool = False  # element by element, as a pointwise operator


# Operations that call cuBLAS, whose workspace comes from the allocator.
GEMMS = {
    aten.mm.default, aten.mm.out, aten.addmm.default, aten.addmm.out, aten.addmm_.default, aten.bmm.default,
    aten.bmm.out, aten.baddbmm.default, aten.baddbmm.out, aten.addmv.default, aten.mv.default, aten.dot.default,
    aten._scaled_mm.default,
    aten.mm.dtype, aten.mm.dtype_out, aten.addmm.dtype, aten.addmm.dtype_out, aten.bmm.dtype, aten.bmm.dtype_out,
    aten.baddbmm.dtype, aten.baddbmm.dtype_out,
}  # fmt: skip


FACTORS = {"mm": 0, "bmm": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1}  # place of the first factor in the arguments


def product_name(name: str, args: Sequence[object]) -> str:
    """The operation's name; of a product that adds up rows, with a word for that.

    The gradient of a weight of 2,048 rows over 2,048 tokens has the shapes of the gradient of its input, and only one
    of the two grows with the tokens.
    """
    place = FACTORS.get(name)
    if place is None:
        return name
    first = cast("torch.Tensor", args[place])
    return f"{name} over rows" if first.shape[-1] > 1 and first.stride()[-1] != 1 else name


# Operations with outputs that only dropout has, and the number of those that they always have: attention.cu leaves the
# random numbers' seed and offset undefined without.
WITHOUT_DROPOUT = {aten._scaled_dot_product_efficient_attention.default: 2}


# Operations that allocate their last output first: dropout_cuda in Dropout.cu makes the mask before the result.
MADE_LAST_FIRST = {aten.native_dropout.default}


def blas_workspace_bytes(capability: tuple[int, int]) -> int:
    """Bytes of one cuBLAS workspace; torch keeps one per handle (host thread) and stream.

    `parseChosenWorkspaceSize` in aten/src/ATen/cuda/CublasHandlePool.cpp: the default is ":4096:2:16:8" (KiB), and
    4096 * 8 KiB on sm90 and sm100; CUBLAS_WORKSPACE_CONFIG overrides it. Since torch 2.8 cublasLt shares it.
    """
    pairs = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if pairs:
        return sum(int(size) * int(count) for size, count in pairs) * KIB
    if capability[0] in (9, 10):
        return 4096 * 8 * KIB
    return (4096 * 2 + 16 * 8) * KIB


def kernel_of(func: OpOverload) -> Kernel:
    """The entry of an operator, an empty one if it has none."""
    return KERNELS.get(func._schema.name, _PLAIN)


def rounded_outputs(func: OpOverload, args: Sequence[object]) -> dict[int, tuple[Rounded, ...]]:
    """The outputs of an operation that have a dimension rounded up, by number."""
    if func is not aten._scaled_dot_product_efficient_attention.default:
        return {}
    assert isinstance(args[0], torch.Tensor)
    return {1: (Rounded(4, tuple(args[0].shape[:3]), (1, 1, 32)),)}  # logsumexp, kAlignLSE in attention.cu


# ---------------------------------------------------------------------- FLOPs
def flops(func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], out: object) -> int:
    """FLOPs of one kernel, a causal attention's as those of a whole one."""
    known = kernel_of(func).flops
    if known is not None:
        return known(args)
    name, shapes = func._schema.name[6:], [tuple(a.shape) for a in args if isinstance(a, torch.Tensor)]
    kind = family(name, shapes)
    if kind == "products":
        return 2 * prod(sizes(name, shapes))
    if kind == "attention":
        batch, heads, _, queries, keys, dim = sizes(name, shapes)
        products = 5 if name.endswith("_backward") else 2  # backward, the scores are computed once more
        return 2 * products * batch * heads * queries * keys * dim
    count = flop_registry.get(func._overloadpacket)
    if count is None:
        return 0
    try:
        return int(count(*args, **kwargs, out_val=out))
    except (AssertionError, TypeError, ValueError, IndexError):
        return 0  # a shape that the registry does not support: only bytes bound the time


def _grouped_mm(args: Sequence[object]) -> int:
    """Experts' products: rows of all groups times the other matrix of each, or (both 2-D) sums over each group."""
    a, b = cast("torch.Tensor", args[0]), cast("torch.Tensor", args[1])
    whole = _product(a, b.shape[-1])
    return whole // a.shape[0] if a.dim() == 3 and b.dim() == 2 else whole


def _of_heads(query: object, key: object) -> int:
    """FLOPs of one product of queries and keys, (batch, heads, length, dim), of all pairs even if causal."""
    q, k = cast("torch.Tensor", query), cast("torch.Tensor", key)
    return 2 * q.numel() * k.shape[2]


def _scores(query: object, key: object, starts_q: object, starts_k: object, longest_k: object) -> int:
    """FLOPs of one product of queries and keys, (..., heads, dim), of all pairs even if causal, as torch counts them.

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


# ---------------------------------------------------------------------- reads and writes
# Bytes of a row that the next pass of a softmax still finds in the cache: on an A100, rows of 64 KiB are read once and
# of 128 KiB three times (experiments/rates/bandwidth.py).
_CACHED_ROW_BYTES = 1 << 16
_HALF_BYTES = 2  # an address takes as long to work out for an element of two bytes as for one of four
_OF_A_COPY = 2  # large tensors: one read, one written
_OF_LISTS = "aten::_foreach_", "aten::_fused_"  # multi_tensor_apply.cuh


class Traffic(NamedTuple):
    """Reads or writes of each tensor of the arguments, then of the output, and the bytes of all; and their pattern."""

    times: tuple[int, ...]
    nbytes: int
    pattern: Pattern


def traffic(func: OpOverload, args: Sequence[object], out: object) -> Traffic:
    """The traffic of one kernel: by default, each argument read once and the output written once.

    What is written in place is also read, unless it is only filled or copied to; an expanded tensor is read once.
    """
    kernel = kernel_of(func)
    inputs, outputs = list(tensors(args)), list(tensors(out))
    if kernel.pattern == "gather":
        times = [0] * len(inputs) + [2] * len(outputs)
    else:
        pointwise = torch.Tag.pointwise in func.tags
        passes = kernel.reads if _reads_again(kernel, inputs) else ()
        written = _written(func, args)
        seen: set[int] = set()
        times = []
        for place, tensor in enumerate(inputs):
            reads = passes[place] if place < len(passes) else 1
            if pointwise and tensor.numel() > 1 and _is_expanded(tensor):
                reads = 0  # it stays in the cache
            if kernel.fills and id(tensor) in written:
                reads = 0
            times.append(0 if id(tensor) in seen else reads + (id(tensor) in written))
            seen.add(id(tensor))
        times += [int(id(tensor) not in seen) for tensor in outputs]
    moved = sum(t.numel() * t.element_size() * n for t, n in zip((*inputs, *outputs), times, strict=True))
    return Traffic(tuple(times), moved, _pattern(kernel, func, inputs, outputs))


def _written(func: OpOverload, args: Sequence[object]) -> set[int]:
    """The arguments that the operator writes to; a fused optimizer's schema adds gradients, which it only reads."""
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


def _reads_again(kernel: Kernel, inputs: Sequence[torch.Tensor]) -> bool:
    """True if the kernel's passes over an argument each read memory: the short rows of a softmax are in the cache."""
    if not kernel.by_rows or not inputs or not inputs[0].dim():
        return True
    return inputs[0].shape[-1] * inputs[0].element_size() > _CACHED_ROW_BYTES


def _is_expanded(tensor: torch.Tensor) -> bool:
    repeated = prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride == 0)
    return repeated > 1


def _pattern(
    kernel: Kernel, func: OpOverload, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> Pattern:
    if kernel.pattern == "cat":
        if all(tensor.is_contiguous() for tensor in inputs):
            return "cat_whole"
        return "cat_halves" if outputs[0].element_size() <= _HALF_BYTES else "cat"
    if kernel.pattern is not None:
        return kernel.pattern
    if func._schema.name.startswith(_OF_LISTS):
        return "tensors"
    if torch.Tag.pointwise not in func.tags and not kernel.copies:
        return "streaming"
    whole = [tensor for tensor in (*outputs, *inputs) if tensor.dim()]
    if not whole:
        return "streaming"
    first = whole[0]
    laid_out = _layout(first)
    if not is_dense(first.shape, first.stride()) or any(
        t.shape != first.shape or _layout(t) != laid_out for t in whole[1:]
    ):
        large = sum(tensor.numel() == first.numel() and not _is_expanded(tensor) for tensor in whole)
        return "strided_halves" if first.element_size() <= _HALF_BYTES and large <= _OF_A_COPY else "strided"
    widened = all(tensor.element_size() < first.element_size() for tensor in whole[1:])
    return "cast" if widened and len(whole) > 1 else "streaming"


def _layout(tensor: torch.Tensor) -> list[int]:
    """The strides of the dimensions that have more than one element: the only ones in use."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


# ---------------------------------------------------------------------- the table
_PLAIN = Kernel()
KERNELS: dict[str, Kernel] = {
    **named("embedding index gather index_select", Kernel(pattern="gather")),  # the rows they return, not the whole
    **named(
        "index_put index_put_ _index_put_impl_ index_add index_add_ scatter_add scatter_add_ scatter scatter_",
        Kernel(pattern="scatter"),
    ),
    **named("fill_ zero_ normal_ uniform_ random_ bernoulli_ exponential_", Kernel(fills=True)),
    **named("_to_copy clone", Kernel(copies=True)),
    "aten::copy_": Kernel(copies=True, fills=True),
    "aten::cat": Kernel(pattern="cat"),
    "aten::embedding_dense_backward": Kernel(pattern="scatter"),
    # SoftMax.cu, PersistentSoftmax.cuh: the forward reads a row for its maximum, its sum and its result. The backward
    # reads the gradient, that of softmax also the output, for a sum first. Short rows are still in the cache.
    **named("_softmax _log_softmax", Kernel(reads=(3,), by_rows=True)),
    "aten::_softmax_backward_data": Kernel(reads=(2, 2), by_rows=True),
    "aten::_log_softmax_backward_data": Kernel(reads=(2, 1), by_rows=True),
    # layer_norm_kernel.cu: the forward reads its input for the statistics and for the result, the backward its input
    # and the gradient twice, and a third time for the gradients of weight and bias.
    **named("native_layer_norm _fused_rms_norm", Kernel(reads=(2,))),
    **named("native_layer_norm_backward _fused_rms_norm_backward", Kernel(reads=(3, 3))),
    # NLLLoss2d and Loss.cu: the loss reads one element a target; its gradient is filled with zeros first.
    "aten::nll_loss_forward": Kernel(reads=(0, 1), pattern="one_block"),
    "aten::nll_loss_backward": Kernel(reads=(0, 0, 1)),
    **named("slice_backward select_backward", Kernel(reads=(2,))),  # filled with zeros first, then a part is written
    "aten::_grouped_mm": Kernel(flops=_grouped_mm),
    "transformers::grouped_mm_fallback": Kernel(flops=_grouped_mm),  # a loop of products on cards before Ampere
    "transformers::grouped_mm_fallback_backward": Kernel(flops=lambda args: 2 * _product(args[0], args[1].shape[-1])),
    "aten::_flash_attention_forward": Kernel(flops=lambda args: 2 * _scores(*(args[n] for n in (0, 1, 3, 4, 6)))),
    "aten::_flash_attention_backward": Kernel(flops=lambda args: 5 * _scores(*(args[n] for n in (1, 2, 6, 7, 9)))),
    "flex::flex_attention": Kernel(flops=lambda args: 2 * _of_heads(args[0], args[1])),  # patches/attention.py
    "flex::flex_attention_backward": Kernel(flops=lambda args: 5 * _of_heads(args[1], args[2])),
    # the fused kernels, which read the packed weight
    **dict.fromkeys(
        ("bitsandbytes::gemm_4bit", "bitsandbytes::gemv_4bit"), Kernel(flops=lambda args: _product(args[0], args[2][0]))
    ),
    # Tensor cores multiply int8 at twice the rate of 16-bit floats on each card since Turing (NVIDIA's data sheets: T4
    # 130 of 65 TFLOP/s, A100 624 of 312, L40S 733 of 366, H100 1,979 of 989).
    "bitsandbytes::int8_linear_matmul": Kernel(
        flops=lambda args: _product(args[0], cast("torch.Tensor", args[1]).shape[0]), int8=True
    ),
}


# -- collectives as torch.distributed's operators name them -----------------------------------------------------------

NAMESPACES = {"c10d", "_c10d_functional"}
# Operator: (kind, the argument that is the whole message; -1 is the output). A reduction to one card and a message to
# one card move as many bytes through the slowest link as a broadcast; gather and scatter as an all-gather.
_OPERATIONS: dict[str, tuple[Collective, int]] = {
    "c10d::allreduce_": ("all_reduce", 0), "c10d::allreduce_coalesced_": ("all_reduce", 0),
    "c10d::reduce_": ("broadcast", 0), "c10d::broadcast_": ("broadcast", 0),
    "c10d::send": ("broadcast", 0), "c10d::recv_": ("broadcast", 0),
    "c10d::allgather_": ("all_gather", 0), "c10d::allgather_coalesced_": ("all_gather", 0),
    "c10d::_allgather_base_": ("all_gather", 0), "c10d::allgather_into_tensor_coalesced_": ("all_gather", 0),
    "c10d::gather_": ("all_gather", 0), "c10d::scatter_": ("all_gather", 1),
    "c10d::reduce_scatter_": ("reduce_scatter", 1), "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "c10d::alltoall_base_": ("alltoall", 1), "c10d::alltoall_": ("alltoall", 1),
    "c10d::barrier": ("all_reduce", 0),
    "_c10d_functional::all_reduce": ("all_reduce", 0), "_c10d_functional::all_reduce_": ("all_reduce", 0),
    "_c10d_functional::all_reduce_coalesced": ("all_reduce", 0),
    "_c10d_functional::all_reduce_coalesced_": ("all_reduce", 0),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", -1),
    "_c10d_functional::all_gather_into_tensor_out": ("all_gather", -1),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all_gather", -1),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional::reduce_scatter_tensor_out": ("reduce_scatter", 0),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "_c10d_functional::all_to_all_single": ("alltoall", 0),
    "_c10d_functional::broadcast": ("broadcast", 0), "_c10d_functional::broadcast_": ("broadcast", 0),
}  # fmt: skip
_TO_ONE = {"c10d::send", "c10d::recv_"}


class Call(NamedTuple):
    """One collective; with `waits`, the stream that it is called on goes on after its end."""

    kind: Collective
    tensors: list[torch.Tensor]
    ranks: int
    group: str
    waits: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the whole message."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)


def collective(func: OpOverload, args: Sequence[object], out: object) -> Call | None:
    """The collective that an operator is, if it is one; a wait for one is none."""
    name = func._schema.name
    if name not in _OPERATIONS:
        return None
    kind, place = _OPERATIONS[name]
    group = _group(func, args)
    ranks = min(group.size(), 2) if name in _TO_ONE else group.size()
    waits = func.namespace == "c10d" and not _is_asynchronous(func, args)
    return Call(kind, list(tensors(out if place < 0 else args[place])), ranks, group.group_name, waits)


def moved_by(
    func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], out: object
) -> tuple[Sequence[object], object]:
    """Reads and writes of a copy of FSDP2 into or out of a flat buffer, as (inputs, output).

    The copy before an all-gather writes only this rank's part of the buffer, its first output.
    """
    if func._schema.name == "fsdp::all_gather_copy_in":
        return args[:1], cast("tuple[object, ...]", out)[0]
    return args, kwargs.get("out")


def _group(func: OpOverload, args: Sequence[object]) -> torch.distributed.ProcessGroup:
    from torch._C._distributed_c10d import _resolve_process_group

    if func.namespace == "c10d":
        boxed = next(value for value in args if isinstance(value, torch.ScriptObject))
        return torch.distributed.ProcessGroup.unbox(boxed)
    named = args[[argument.name for argument in func._schema.arguments].index("group_name")]
    return _resolve_process_group(cast("Any", named)) if isinstance(named, str) else cast("Any", named)


def _is_asynchronous(func: OpOverload, args: Sequence[object]) -> bool:
    """The argument `async_op`, whose default is True."""
    names = [argument.name for argument in func._schema.arguments]
    at = names.index("async_op") if "async_op" in names else len(args)
    return bool(args[at]) if at < len(args) else True
