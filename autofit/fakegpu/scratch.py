"""Scratch memory of kernels: buffers that an operation takes and gives back, in addition to its outputs.

One entry of `SCRATCH` for each operator that has some; each rule names the function of torch's source that it follows,
and gives the bytes at the moment of their peak. `experiments/oracle/operators.md` compares them with torch's own
dispatch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil, prod
from typing import NamedTuple, TypeVar

import torch
from torch._ops import OpOverload

from autofit.fakegpu.reductions import (
    reduce_bytes,
    scan_bytes,
    select_bytes,
    sort_pairs_bytes,
    sort_segments_bytes,
    split_buffers,
)
from autofit.fakegpu.specs import GpuSpec

T = TypeVar("T")
_ALL = 1 << 40  # more than any dimension: one rounded up to its multiple is constant


class Rounded(NamedTuple):
    """A size in bytes: `scale` times the product of `dims`, each rounded up to a multiple of its own.

    0 up to a first dimension of `above`.
    """

    scale: float
    dims: tuple[int, ...]
    multiples: tuple[int, ...]
    above: int = 0

    @property
    def nbytes(self) -> int:
        return 0 if self.above and self.dims[0] <= self.above else self.most_bytes

    @property
    def most_bytes(self) -> int:
        """Those it would have without `above`."""
        return round(self.scale * prod(map(_up, self.dims, self.multiples)))


class Stepwise(int):
    """Bytes that change with shapes in leaps, as a number of blocks does, beyond any formula of the shapes."""


Buffer = int | tuple[Rounded, ...]  # its bytes; the parts say how they follow from shapes
Held = tuple[Buffer, ...]  # at the same time
Rule = Callable[..., Held]  # of the card and the operator's arguments


class Scratch(NamedTuple):
    """The scratch of one operator."""

    rule: Rule | None
    overloads: tuple[str, ...] = ("default",)  # that have it
    before: Rule | None = None  # bytes held, and given back, before that
    on_cpu: bool = False  # the CPU's kernel has it too
    copies: Rule | None = None  # of inputs: held from before there are results until the operation ends


def scratch_of(
    func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], *, device: str, spec: GpuSpec
) -> tuple[Held, ...]:
    """Bytes that an operation allocates and frees internally, in addition to its outputs, one after the other."""
    scratch = SCRATCH.get(func._schema.name)
    if scratch is None or func._overloadname not in scratch.overloads or not (scratch.on_cpu or device == "cuda"):
        return ()
    rules = filter(None, (scratch.before, scratch.rule))
    return tuple(rule(spec, *args, **kwargs) for rule in rules)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _whole(shape: Sequence[int], itemsize: int) -> Buffer:
    """A tensor of a shape."""
    return (Rounded(itemsize, tuple(shape), (1,) * len(shape)),)


def _copy_with_gaps(tensor: torch.Tensor) -> Held:
    """The copy of a tensor that has to be contiguous, unless it is."""
    return () if tensor.is_contiguous() else (_whole(tensor.shape, tensor.element_size()),)


class _View(NamedTuple):
    """Shape and layout of a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _View:
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, int(tensor.storage_offset()))

    @classmethod
    def new(cls, shape: Sequence[int], dtype: torch.dtype) -> _View:
        """A new tensor, contiguous."""
        strides = [1] * len(shape)
        for i in range(len(shape) - 2, -1, -1):
            strides[i] = strides[i + 1] * max(shape[i + 1], 1)
        return cls(tuple(shape), tuple(strides), dtype, 0)

    def cast(self, dtype: torch.dtype) -> _View:
        """A copy in another type, with the same strides if they are dense."""
        if is_dense(self.shape, self.strides):
            return self._replace(dtype=dtype, offset=0)
        return _View.new(self.shape, dtype)

    @property
    def whole(self) -> Buffer:
        return _whole(self.shape, self.dtype.itemsize)


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """True if the elements follow each other in memory, in some order of the dimensions."""
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


# ---------------------------------------------------------------------- attention
def _flash(
    spec: GpuSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float = 0.0, *_: object, **__: object
) -> Held:
    """set_params_splitkv in flash_api.cpp: partial results of keys that are split between blocks, of few queries."""
    batch, heads, length, dim = q.shape
    key_heads, key_length = k.shape[1], k.shape[2]
    if dropout:
        return ()
    if length == 1 and heads > key_heads and dim % 8 == 0:  # the queries of a group are one sequence
        heads, length = key_heads, heads // key_heads
    block = 256 if dim <= 64 else 128 if dim <= 128 else 64
    splits = _splits(batch * heads * -(-length // 64), 2 * spec.sm_count, -(-key_length // block))
    if splits == 1:
        return ()
    numbers = splits * batch * heads * length
    return Stepwise(4 * numbers), Stepwise(4 * _head_dim(dim) * numbers)


def _splits(blocks: int, processors: int, key_blocks: int) -> int:
    """num_splits_heuristic: the fewest parts that keep the processors at 85 % of what the best number does."""
    if blocks >= 0.8 * processors:
        return 1
    most = min(128, processors, key_blocks)
    whole = {n: -(-key_blocks // n) for n in range(1, most + 1)}
    waves = {n: blocks * n / processors for n in whole if n == 1 or whole[n] != whole[n - 1]}
    used = {n: wave / ceil(wave) for n, wave in waves.items()}
    return min(n for n, share in used.items() if share >= 0.85 * max(used.values()))


def _head_dim(dim: int) -> int:
    return _up(dim, 32) if dim <= 192 else 256


def _flash_backward(
    spec: GpuSpec, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    *_: object, **__: object,
) -> Held:  # fmt: skip
    """mha_bwd in flash_api.cpp: softmax sums, fp32 dq accumulator, and full-head dk and dv under grouped queries."""
    batch, heads, length, dim = q.shape
    key_heads, key_length = k.shape[1], k.shape[2]
    rows = (batch, heads, length)
    sums: Held = (Rounded(4, rows, (1, 1, 128)),), (Rounded(4 * _head_dim(dim), rows, (1, 1, 128)),)
    if key_heads == heads:
        return sums
    expanded = _whole((batch, heads, key_length), dim * k.element_size())
    return *sums, expanded, expanded


def _copy_of_heads(tensor: torch.Tensor) -> Held:
    """A tensor (batch, heads, length, dim) is made contiguous as (batch, length, heads, dim)."""
    view = _View.of(tensor)
    batch, heads, length, dim = view.shape
    wanted = _View.new((batch, length, heads, dim), tensor.dtype).strides
    have = tuple(view.strides[i] for i in (0, 2, 1, 3))
    same = all(size == 1 or a == b for size, a, b in zip((batch, length, heads, dim), have, wanted, strict=True))
    return () if same else (view.whole,)


def _flash_backward_of_tokens(
    spec: GpuSpec, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    sums: torch.Tensor, starts_q: torch.Tensor | None = None, *_: object, **__: object,
) -> Held:  # fmt: skip
    """`_flash_backward` for heads inside of tokens; mha_varlen_bwd rounds its buffers up by 128 rows a sequence."""
    if starts_q is None:
        whole = tuple(tensor.transpose(1, 2) for tensor in (grad, q, k, v, out))
        return *_copy_of_heads(whole[0]), *_copy_of_heads(whole[-1]), *_flash_backward(spec, *whole)
    tokens, heads, dim = q.shape
    sequences = starts_q.shape[0] - 1
    buffers = (
        *_copy_with_gaps(grad),
        *_copy_with_gaps(out),
        *(
            (Rounded(scale, (heads, tokens), (1, 1)), Rounded(128 * scale, (heads, sequences), (1, 1)))
            for scale in (4, 4 * _head_dim(dim))
        ),
    )
    if k.shape[1] == heads:
        return buffers
    expanded = _whole((heads, k.shape[0]), dim * k.element_size())
    return *buffers, expanded, expanded


def _efficient(spec: GpuSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object, **__: object) -> Held:
    """_efficient_attention_forward in attention.cu: fp32 sums of a 16-bit output whose heads are wider than a tile.

    The kernel keeps up to 128 numbers of a head in registers (kernel_forward.h, kNeedsOutputAccumulatorBuffer).
    """
    narrow = max(q.shape[-1], v.shape[-1]) <= 128
    return () if narrow or q.element_size() != 2 else (_whole(q.shape[:3], 4 * v.shape[-1]),)


def _efficient_backward(
    spec: GpuSpec, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object, **__: object
) -> Held:
    """_efficient_attention_backward in attention_backward.cu: delta, and fp32 sums of blocks of dq, each with a lock.

    Blocks are those of the kernels for compute capability 8.0 and later (kernel_backward.h). Of wide heads dk and dv
    are summed in memory too.
    """
    batch, heads, length, dim = q.shape
    rows = (batch, heads, length)
    if dim <= 64:
        sums: Buffer = (Rounded(4 * 64 + 16 / 64, rows, (1, 1, 64)),)
    elif dim <= 128 and q.element_size() == 2:
        sums = (Rounded(4 * 128 + 16 / 128, rows, (1, 1, 128)),)
    else:
        of_keys = Rounded(8 * _up(dim, 128), (batch, heads, k.shape[2]), (1, 1, 64))
        of_queries = Rounded((4 * 64 + 16 / 128) * -(-dim // 64), rows, (1, 1, 128))
        sums = (of_queries, of_keys) if dim > 128 else (of_queries,)
    return *_copy_of_heads(grad), _whole(rows, 4), sums


# ---------------------------------------------------------------------- reductions
def _split(spec: GpuSpec, view: _View, dims: Sequence[int], partial_bytes: int) -> Held:
    """gpu_reduce_kernel in Reduce.cuh."""
    buffers = split_buffers(
        view.shape, view.strides, tuple(sorted({dim % max(len(view.shape), 1) for dim in dims})),
        itemsize=view.dtype.itemsize, offset=view.offset, partial_bytes=partial_bytes, processors=spec.sm_count,
        threads=spec.threads_per_sm,
    )  # fmt: skip
    return tuple(map(Stepwise, buffers))


def _all_or(dim: object, tensor: torch.Tensor) -> Sequence[int]:
    """The dimensions that an argument `dim` means."""
    if isinstance(dim, int):
        return (dim,)
    return tuple(dim) if isinstance(dim, (list, tuple)) and dim else range(tensor.dim())


def _reduction(partial_bytes: Callable[[torch.dtype], int], *, dim_at: int = 0, casts: bool = False) -> Rule:
    """The rule of a reduction whose argument `dim` is number `dim_at` after the tensor."""

    def rule(spec: GpuSpec, self: torch.Tensor, *args: object, **kwargs: object) -> Held:
        dims = _all_or(args[dim_at] if len(args) > dim_at else kwargs.get("dim"), self)
        view, copy = _View.of(self), list[Buffer]()
        if casts and (dtype := _summed(self.dtype, kwargs.get("dtype"))) is not self.dtype:
            view = view.cast(dtype)
            copy.append(view.whole)
        return *copy, *_split(spec, view, dims, partial_bytes(view.dtype))

    return rule


def _summed(dtype: torch.dtype, wanted: object) -> torch.dtype:
    """The type that a sum reads, `make_reduction_from_out_ty` in ReduceOpsUtils.h: its result's, or half of float32."""
    whole = not (dtype.is_floating_point or dtype.is_complex)
    result = wanted if isinstance(wanted, torch.dtype) else torch.int64 if whole else dtype
    return dtype if result is torch.float32 and dtype in (torch.float16, torch.bfloat16) else result


def _of_all_in_order(partial_bytes: Callable[[torch.dtype], int]) -> Rule:
    """max, min and argmax of all elements: a tensor with gaps is first made contiguous (ReduceAllOps.cpp)."""

    def rule(spec: GpuSpec, self: torch.Tensor, dim: int | None = None, *_: object, **__: object) -> Held:
        view = _View.of(self)
        if dim is not None:
            return _split(spec, view, (dim,), partial_bytes(self.dtype))
        copy = _copy_with_gaps(self)
        view = _View.new(view.shape, view.dtype) if copy else view
        return *copy, *_split(spec, view, range(self.dim()), partial_bytes(self.dtype))

    return rule


# ---------------------------------------------------------------------- softmax and norms
def _norm_backward(
    spec: GpuSpec, grad: torch.Tensor, input: torch.Tensor, normalized: Sequence[int], *args: object, **__: object
) -> Held:
    """LayerNormBackwardKernelImplInternal in layer_norm_kernel.cu: of many short rows, sums of 32 rows each."""
    size = prod(normalized)
    rows = input.numel() // max(size, 1)
    wanted = sum(map(bool, args[-1][1:])) if isinstance(args[-1], (list, tuple)) else 0
    if rows <= 1 << 16 or size // 32 >= spec.sm_count // 2 or not wanted:
        return ()
    parts = _View.new((-(-rows // 32), size), input.dtype)
    summed = size * input.element_size()
    return *[parts.whole] * wanted, summed, *_split(spec, parts, (0,), max(4, input.element_size()))


# ---------------------------------------------------------------------- order
def _sort(spec: GpuSpec, self: torch.Tensor, dim: int = -1, *_: object, **__: object) -> Held:
    """sort_cuda_kernel in Sort.cpp: a row of indices; of long rows copies and CUB's buffers (SortStable.cu)."""
    if not self.dim() or not self.numel():
        return ()
    length, itemsize, count = self.shape[dim], self.element_size(), self.numel()
    if length <= 4096:
        return (8 * length,)
    dense = is_dense(self.shape, self.stride())
    copies = () if dense and self.stride(dim) == 1 else (count * itemsize, count * itemsize, 8 * count)
    rows = count // length
    if rows == 1 or length >= 1_000_000:
        return *copies, 8 * length, sort_pairs_bytes(length, key_bytes=itemsize)
    if rows < 128:
        return *copies, 8 * count, 8 * count, count * itemsize, sort_pairs_bytes(count, key_bytes=itemsize)
    return *copies, 8 * count, sort_segments_bytes(count, key_bytes=itemsize)


def _topk(spec: GpuSpec, self: torch.Tensor, k: int, dim: int = -1, *_: object, **__: object) -> Held:
    """mbtopk in TensorTopK.cu: long rows are searched by several blocks, each of 4 to 64 elements a thread."""
    if not self.dim() or not self.numel():
        return ()
    length = self.shape[dim]
    rows = self.numel() // length
    least = next(size for most, size in _SEARCHED_BY_BLOCKS if rows <= most)
    if length < least:
        return ()
    blocks_of_card = spec.sm_count * 6  # 40 registers a thread, 256 threads
    items = min(max(-(-self.numel() // (blocks_of_card * 256)), 4), 64)
    blocks = rows * -(-length // (256 * items))
    return (
        rows * self.element_size(), 8 * rows, 8 * rows, Stepwise(512 * blocks), 1024 * rows, Stepwise(4 * blocks),
        Stepwise(4 * blocks), Stepwise(scan_bytes(blocks, sum_bytes=8)),
    )  # fmt: skip


# should_use_multiblock: up to this number of rows, from this length on.
_SEARCHED_BY_BLOCKS = (
    (20, 20000), (40, 10000), (80, 8000), (199, 5000), (799, 3000), (4000, 800), (1 << 62, 400),
)  # fmt: skip


def _cumulated(spec: GpuSpec, self: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None, **_: object) -> Held:
    """scan_dim in ScanUtils.cuh: a copy in the type of the sums, and of one row CUB's prefix sums."""
    if not self.dim() or not self.numel():
        return ()
    view, copies = _View.of(self), list[Buffer]()
    wanted = dtype or (self.dtype if self.dtype.is_floating_point else torch.int64)
    if wanted is not self.dtype:
        view = view.cast(wanted)
        copies.append(view.whole)
    if view.strides != _View.new(view.shape, wanted).strides:
        copies.append(view.whole)
    if self.shape[dim] == self.numel():
        copies.append(scan_bytes(self.numel(), sum_bytes=wanted.itemsize))
    return tuple(copies)


# ---------------------------------------------------------------------- masks and indices
def nonzero_before(spec: GpuSpec, count: int) -> Held:
    """Bytes that `nonzero` of `count` elements holds before its result (Nonzero.cu): their number, and its sum."""
    return 4, Stepwise(reduce_bytes(count, processors=spec.sm_count))


def nonzero_beside(count: int) -> Held:
    """Bytes that `nonzero` holds beside its result: the number, and CUB's selection."""
    return 4, select_bytes(count)


def _by_segments(grad: torch.Tensor, indices: torch.Tensor, num_weights: int, *, above: int = 0) -> Held:
    """embedding_backward_cuda_kernel in EmbeddingBackwardKernel.cu.

    Sorted and original indices, the places of segments, their parts and where these begin, two counts, and fp32 sums of
    each part: a segment, the rows of one token, is split after 10 rows. Each row may be a segment. Nothing of it up to
    `above` indices.
    """
    count, dim, item = indices.numel(), grad.shape[-1], indices.element_size()
    rows = Rounded(1, (count,), (1,), above)
    segments = Rounded(num_weights / _ALL, (count,), (_ALL,), above) if count > num_weights else rows
    split = Rounded(0.1, (count - 9,), (10,), above - 9)

    def held(each: int, *sizes: Rounded) -> Buffer:
        return tuple(size._replace(scale=size.scale * each) for size in sizes)

    counts = (8, 8) if count > above else ()
    sums = held(item, segments, split), held(dim * max(4, grad.element_size()), segments, split)
    return *_copy_with_gaps(grad), *[held(item, rows)] * 5, *counts, *sums


def _index_put(
    spec: GpuSpec, self: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor,
    accumulate: bool = False, *_: object, **__: object,
) -> Held:  # fmt: skip
    """index_put_with_sort_kernel in Indexing.cu sorts accumulated values; a mask's rows are gone by then."""
    given = [index for index in indices if index is not None]
    masks = [index for index in given if index.dtype in (torch.bool, torch.uint8)]
    true = _true_in(masks[0], self, values) if masks and len(given) == 1 and masks[0] is indices[0] else None
    rows: Held = tuple(8 * (mask.numel() if true is None else true) * mask.dim() for mask in masks)
    longs: Held = tuple(8 * index.numel() for index in given if index.dtype is torch.int32)
    if not accumulate:
        number = values.numel() == 1 and values.device.type == "cpu"  # fills what the mask has (masked_fill)
        return () if number and masks else (*rows, *longs)
    dims = sum(index.dim() if index in masks else 1 for index in given)
    first = next(place for place, index in enumerate(indices) if index is not None)
    shapes = [(index.numel(),) if index in masks else index.shape for index in given]
    count = prod(torch.broadcast_shapes(*shapes)) if true is None else true
    slices = prod(self.shape[first + dims :])
    bits = max(1, ((self.numel() - 1) // max(slices, 1)).bit_length())
    whole = count * slices * prod(self.shape[:first])
    copied = values.numel() != whole or not values.is_contiguous()
    copy: Held = (whole * values.element_size(),) if copied else ()
    return *copy, *[8 * count] * 4, sort_pairs_bytes(count, key_bytes=8, key_bits=bits)


def _true_in(mask: torch.Tensor, self: torch.Tensor, values: torch.Tensor) -> int | None:
    """Number of true elements of a mask over the first dimensions, if `values` has a row for each."""
    has_rows = values.dim() == 1 + self.dim() - mask.dim() and values.shape[0] > 1
    return values.shape[0] if has_rows else None


def _isin(spec: GpuSpec, elements: torch.Tensor, tested: torch.Tensor, **_: object) -> Held:
    """isin_default_kernel_gpu in TensorCompare.cpp: each element against each of few tested ones, then any.

    Against many, the unique values of both are sorted: an estimate.
    """
    if tested.numel() >= 10 * elements.numel() ** 0.145:
        count = elements.numel() + tested.numel()
        return *[8 * count] * 3, sort_pairs_bytes(count, key_bytes=elements.element_size())
    pairs = _View.new((*elements.shape, tested.numel()), torch.bool)
    return prod(pairs.shape), elements.numel(), *_split(spec, pairs, (-1,), 1)


def _multinomial(spec: GpuSpec, self: torch.Tensor, num_samples: int, replacement: bool = False, **_: object) -> Held:
    """multinomial in Distributions.cpp: without replacement, or of one sample, exponential noise of the whole size.

    Least and largest input are there too, two answers about them, and the noise's argmax or topk.
    """
    if replacement and num_samples > 1:
        return ()
    item = self.element_size()
    checks: Held = (item, item, 1, 1)
    if num_samples == 1:
        return *checks, _whole(self.shape, item), *_split(spec, _View.of(self), (-1,), 16)
    return *checks, _whole(self.shape, item), num_samples * self.numel() // self.shape[-1] * item


# ---------------------------------------------------------------------- products
def _grouped_mm(
    spec: GpuSpec, a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor | None = None, *_: object, **__: object
) -> Held:
    """bf16bf16_grouped_gemm_impl_sm90_sm100 in GroupMM.cu: pointers, strides and sizes of the groups; and four
    descriptors of 128 bytes for each multiprocessor (known of compute capability 9.0 alone).
    """
    if a.dtype is not torch.bfloat16 or spec.compute_capability[0] != 9:
        return ()
    of_groups = offsets if offsets is not None and a.dim() == b.dim() == 2 else b if a.dim() == 2 else a
    groups = of_groups.shape[0]
    return 24 * _up(groups, 2) + 36 * groups, 512 * spec.sm_count


def _triangular(spec: GpuSpec, a: torch.Tensor, b: torch.Tensor, **_: object) -> Held:
    """triangular_solve_batched_cublas in BatchLinearAlgebraLib.cpp: pointers to the matrices of both.

    A loop takes up to 8 matrices of 64 rows or more.
    """
    batch, rows = prod(torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])), a.shape[-1]
    return () if batch <= 8 and rows >= 64 else (8 * batch, 8 * batch)


# ---------------------------------------------------------------------- the table
def named(names: str, entry: T) -> dict[str, T]:
    """The same entry of a table for several operators of torch."""
    return {f"aten::{name}": entry for name in names.split()}


_SUMS = ("default", "dim_IntList", "dim", "dim_int", "out")
_CHUNK = 65536  # elements of a tensor that one block of ForeachReduceOp.cu takes


def _chunks(tensors: Sequence[torch.Tensor]) -> int:
    """Partial results of a reduction of each of `tensors`, which all have as many as the largest has chunks."""
    return len(tensors) * max(-(-tensor.numel() // _CHUNK) for tensor in tensors)


def _float32_sums(dtype: torch.dtype) -> int:
    return max(4, dtype.itemsize)


def _largest(spec: GpuSpec, self: torch.Tensor, dim: int | None = None, *_: object, **__: object) -> Held:
    """max and min: of all elements the values alone, along a dimension with their places (16 bytes each, aligned)."""
    return _of_all_in_order(lambda dtype: dtype.itemsize if dim is None else 16)(spec, self, dim)


SCRATCH: dict[str, Scratch] = {
    **named("sum mean nansum prod", Scratch(_reduction(_float32_sums, casts=True), _SUMS)),
    **named("amax amin", Scratch(_reduction(lambda dtype: dtype.itemsize))),
    **named("any all", Scratch(_reduction(lambda dtype: 1), ("default", "dim", "dims"))),
    # WelfordData in SharedReduceOps.h: mean, squares, and two counts
    **named("var std var_mean std_mean", Scratch(_reduction(lambda d: 16 if d.itemsize <= 4 else 32), ("correction",))),
    "aten::aminmax": Scratch(_reduction(lambda dtype: 2 * dtype.itemsize)),
    "aten::linalg_vector_norm": Scratch(_reduction(_float32_sums, dim_at=1)),
    "aten::norm": Scratch(_reduction(_float32_sums, dim_at=1), ("Scalar", "ScalarOpt_dim")),
    **named("max min", Scratch(_largest, ("default", "dim"))),
    **named("argmax argmin", Scratch(_of_all_in_order(lambda dtype: 16))),  # a value and its index, aligned to 8 bytes
    "aten::_foreach_norm": Scratch(
        lambda _, self, *__, dtype=None: (_float32_sums(dtype or self[0].dtype) * _chunks(self),), ("Scalar",)
    ),
    "aten::_foreach_max": Scratch(lambda _, self: (self[0].element_size() * _chunks(self),)),
    **named("native_layer_norm_backward _fused_rms_norm_backward", Scratch(_norm_backward)),
    # group_norm_kernel.cu: fp32 moments of groups, a factor and a summand of channels; backward sums and a factor
    "aten::native_group_norm": Scratch(lambda _, x, weight, bias, batch, channels, size, groups, *__: (
        *(4 * batch * groups,) * (2 if x.element_size() < 4 else 0), *(4 * batch * channels,) * 2
    )),
    "aten::native_group_norm_backward": Scratch(
        lambda _, grad, x, mean, rstd, weight, batch, channels, size, groups, *__, **___:
        (*(4 * batch * channels,) * 3, *(4 * batch * groups,) * 2)
    ),
    # batch_norm_backward_cuda in Normalization.cu: two sums for each channel
    "aten::native_batch_norm_backward": Scratch(lambda _, grad, x, *__, **___: (4 * x.shape[1],) * 2),
    "aten::nll_loss_backward": Scratch(lambda _, grad, *__, **___: _copy_with_gaps(grad)),
    "aten::bincount": Scratch(lambda _, x, *__, **___: (x.element_size(),) * 2),  # least and largest (SummaryOps.cu)
    "aten::roll": Scratch(lambda _, x, *__, **___: _copy_with_gaps(x)),
    # normal_impl in DistributionTemplates.h: standard deviations of the same shape, times the draws
    "aten::normal": Scratch(lambda _, x, *__, **___: (_whole(x.shape, x.element_size()),), ("Tensor_float",)),
    # UnfoldBackward.cpp: the places along the dimension, up to the end of the last part
    "aten::unfold_backward": Scratch(
        lambda _, grad, sizes, dim, size, step: (8 * min(sizes[dim], (grad.shape[dim] - 1) * step + size),)
    ),
    "aten::renorm": Scratch(lambda _, x, p, dim, *__: (x.element_size() * x.shape[dim],)),  # norms, then factors
    # addmv_impl_cuda in Blas.cpp: cuBLAS rejects a vector whose elements are all one
    "aten::mv": Scratch(lambda _, x, vector: (
        (_whole(vector.shape, vector.element_size()),) if vector.stride(0) == 0 and vector.numel() > 1 else ()
    )),
    "aten::linalg_solve_triangular": Scratch(_triangular),
    # host_softmax in SoftMax.cu and log_softmax_cpu_out in SoftMax.cpp: a view with gaps is first made contiguous
    **named("_softmax _log_softmax", Scratch(lambda _, x, *__, **___: _copy_with_gaps(x), on_cpu=True)),
    # softmax_backward_cuda_out in SoftMax.cu: `grad * output`, in the type of both, is a tensor of its own
    "aten::_softmax_backward_data": Scratch(
        lambda _, grad, out, *__, **___: (_whole(out.shape, torch.promote_types(grad.dtype, out.dtype).itemsize),),
        ("default", "out"),
    ),
    "aten::sort": Scratch(_sort, ("default", "stable")),
    "aten::topk": Scratch(_topk),
    **named("cumsum cumprod logcumsumexp", Scratch(_cumulated)),
    "aten::embedding_dense_backward": Scratch(
        lambda _, grad, indices, count, *__, **___: _by_segments(grad, indices, count, above=3072)
    ),
    "aten::_embedding_bag_backward": Scratch(
        lambda _, grad, indices, offsets, bags, sizes, most, count, *__, **___: _by_segments(grad, indices, count)
    ),
    **named("index_put index_put_ _index_put_impl_ _unsafe_index_put", Scratch(_index_put)),
    # masked_scatter_cuda in IndexKernel.cpp: the prefix sums of the mask, which is expanded
    **named("masked_scatter masked_scatter_", Scratch(lambda _, x, mask, *__: (
        8 * x.numel(), *(() if mask.shape == x.shape and mask.is_contiguous() else (x.numel(),)),
        scan_bytes(x.numel(), sum_bytes=8),
    ))),
    "aten::isin": Scratch(_isin, ("Tensor_Tensor",)),
    "aten::multinomial": Scratch(_multinomial),
    # pow_Scalar_out in Pow.cpp: the number becomes a tensor of one element
    "aten::pow": Scratch(lambda _, x, exponent, **__: (torch.result_type(x, exponent).itemsize,), ("Scalar",)),
    "aten::_grouped_mm": Scratch(_grouped_mm),
    # conv_depthwise2d_cuda in DepthwiseConv2d.cu: a contiguous input and weight
    **named("convolution convolution_backward", Scratch(
        None, copies=lambda _, x, y, *__, **___: (*_copy_with_gaps(x), *_copy_with_gaps(y))
    )),
    "aten::_scaled_dot_product_flash_attention": Scratch(_flash),
    # _flash_attention_backward in attention_backward.cu makes gradient and output contiguous
    "aten::_scaled_dot_product_flash_attention_backward": Scratch(
        _flash_backward, copies=lambda _, grad, q, k, v, out, *__, **___: (*_copy_of_heads(grad), *_copy_of_heads(out))
    ),
    "aten::_flash_attention_backward": Scratch(_flash_backward_of_tokens),
    "aten::_scaled_dot_product_efficient_attention": Scratch(_efficient),
    # Delta of float32 is made by torch's own operators (kKernelComputesDelta): products, their sums, a copy of these.
    # They are smaller than what the kernel takes after them, which then finds no place in their memory.
    "aten::_scaled_dot_product_efficient_attention_backward": Scratch(
        _efficient_backward, before=lambda _, grad, q, *__, **___: (
            (_whole(q.shape, 4), *[_whole(q.shape[:3], 4)] * 2) if q.dtype is torch.float32 else ()
        ),
    ),
    # run_cudnn_SDP_bprop in MHA.cpp asks cuDNN for its workspace: an fp32 dq accumulator and sums (an estimate)
    "aten::_scaled_dot_product_cudnn_attention_backward": Scratch(lambda _, grad, q, *__, **___: (
        (Rounded(4 * q.shape[3], q.shape[:3], (1, 1, 64)), Rounded(8, q.shape[:3], (1, 1, 1))),
    )),
    # One float32 number a query and head (torch/_inductor/kernel/flex/flex_attention.py; patches/attention.py)
    "flex::flex_attention_backward": Scratch(lambda _, grad, query, *__, **___: (_whole(query.shape[:3], 4),)),
}  # fmt: skip
COPYING = {name: scratch.copies for name, scratch in SCRATCH.items() if scratch.copies is not None}
