"""Buffers of torch's reductions on a card: a long one is split between blocks, which leave partial results in memory.

Follows `setReduceConfig` in aten/src/ATen/native/cuda/Reduce.cuh, on the dimensions as `TensorIterator` orders and
joins them (aten/src/ATen/TensorIterator.cpp). How many blocks there are depends on the card's multiprocessors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

_WARP, _MOST_THREADS = 32, 512  # of a block: mnt_wrapper
_LEAST_VALUES, _MOST_VALUES = 16, 256  # that a thread reduces
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class _Dim:
    size: int
    into: int  # stride of the output, in bytes: 0 where the dimension is reduced
    out_of: int  # stride of the input, in bytes


@lru_cache(maxsize=4096)
def split_buffers(
    shape: tuple[int, ...], strides: tuple[int, ...], reduced: tuple[int, ...], *, itemsize: int, offset: int,
    partial_bytes: int, processors: int, threads: int,
) -> tuple[int, ...]:  # fmt: skip
    """Bytes of the buffers that a reduction of `reduced` dimensions takes at once; none where it is not split.

    `offset` is the input's first element in its storage, `partial_bytes` the size of a partial result, `threads` those
    that fit on each of the card's multiprocessors. Elements that a thread reads at once along a reduced dimension do
    not matter: what is split is long enough for whole blocks anyway.
    """
    if not shape or not prod(shape):
        return ()
    dims = _joined(_ordered(list(_dims(shape, strides, reduced, itemsize))))
    found: tuple[int, ...] = ()
    for part, first in _indexed_by_32_bits(dims, offset * itemsize):
        buffers = _of_one_launch(part, first, itemsize, partial_bytes, processors, threads)
        found = max(found, buffers, key=sum)
    return found


def _dims(shape: Sequence[int], strides: Sequence[int], reduced: Sequence[int], itemsize: int) -> Iterator[_Dim]:
    """The dimensions, last first: the output is contiguous, with strides of 0 along reduced dimensions."""
    step = itemsize
    for i in range(len(shape) - 1, -1, -1):
        yield _Dim(shape[i], 0 if i in reduced else step, strides[i] * itemsize if shape[i] != 1 else 0)
        step *= 1 if i in reduced else shape[i]


def _ordered(dims: list[_Dim]) -> list[_Dim]:
    """`TensorIteratorBase::reorder_dimensions`: reduced dimensions first, then by strides."""
    for i in range(1, len(dims)):
        at = i
        for before in range(i - 1, -1, -1):
            order = _order(dims[before], dims[at])
            if order > 0:
                dims[before], dims[at] = dims[at], dims[before]
                at = before
            elif order < 0:
                break
    return dims


def _order(a: _Dim, b: _Dim) -> int:
    if (a.into == 0) != (b.into == 0):
        return 1 if b.into == 0 else -1
    for mine, other in ((a.into, b.into), (a.out_of, b.out_of)):
        if mine == 0 or other == 0:
            continue
        if mine != other:
            return -1 if mine < other else 1
        if a.size > b.size:
            return 1
    return 0


def _joined(dims: Sequence[_Dim]) -> list[_Dim]:
    """`TensorIteratorBase::coalesce_dimensions`: neighbours that one stride runs through become one."""
    joined = list(dims[:1])
    for dim in dims[1:]:
        last = joined[-1]
        follows = (last.size * last.into, last.size * last.out_of) == (dim.into, dim.out_of)
        if last.size == 1 or dim.size == 1 or follows:
            kept = dim if last.size == 1 else last
            joined[-1] = replace(kept, size=last.size * dim.size)
        else:
            joined.append(dim)
    return joined


def _indexed_by_32_bits(dims: list[_Dim], first: int) -> Iterator[tuple[list[_Dim], int]]:
    """The parts of a reduction that each index at most 2**31 bytes, and the first byte of each."""
    reach = [1 + sum((dim.size - 1) * stride(dim) for dim in dims) for stride in (_into, _out_of)]
    if prod(dim.size for dim in dims) <= _INT32_MAX and max(reach) <= _INT32_MAX:
        yield dims, first
        return
    at = max(range(len(dims)), key=lambda i: (dims[i].size - 1) * max(dims[i].into, dims[i].out_of))
    half = dims[at].size // 2
    for size, moved in ((half, 0), (dims[at].size - half, half * dims[at].out_of)):
        yield from _indexed_by_32_bits([*dims[:at], replace(dims[at], size=size), *dims[at + 1 :]], first + moved)


def _into(dim: _Dim) -> int:
    return dim.into


def _out_of(dim: _Dim) -> int:
    return dim.out_of


def _of_one_launch(
    dims: Sequence[_Dim], first: int, itemsize: int, partial_bytes: int, processors: int, threads: int
) -> tuple[int, ...]:
    outputs = prod(dim.size for dim in dims if dim.into)
    inputs = prod(dim.size for dim in dims) // outputs
    reduced = sum(not dim.into for dim in dims)
    along = reduced == len(dims) or dims[0].out_of < dims[reduced].out_of  # the reduced dimension moves fastest
    fastest = dims[0].out_of if along else dims[reduced].out_of
    wide, high, of_outputs = (inputs, outputs, 1) if along else (outputs, inputs, 1)
    if fastest == itemsize and not along:
        of_outputs = _output_vector(dims, reduced, first, itemsize)
        wide //= of_outputs
    width, height = _block(wide, high, _MOST_THREADS // of_outputs)
    taken = width if along else 1  # inputs that are reduced at once
    if -(-inputs // taken) < min(height * 16, _MOST_VALUES):
        return ()
    taken *= height
    grid = -(-(outputs // of_outputs) // (1 if along else width))
    blocks = processors * (threads // (width * height))
    values = -(-inputs // taken)
    if values < _MOST_VALUES or grid > blocks:
        return ()
    parts = max(min(-(-blocks // grid), -(-values // _LEAST_VALUES)), -(-values // _MOST_VALUES))
    if parts < 2:
        return ()
    return partial_bytes * outputs * parts * (1 if along else width * of_outputs), 4 * grid


def _output_vector(dims: Sequence[_Dim], reduced: int, first: int, itemsize: int) -> int:
    """`get_output_vec_size`: the outputs of one thread, as the addresses are aligned."""
    vector = 4
    others = (dim.out_of // itemsize for i, dim in enumerate(dims) if i != reduced)
    for number in (first // itemsize, dims[reduced].size, *others):
        while number % vector:
            vector //= 2
    return vector


def _block(wide: int, high: int, most: int) -> tuple[int, int]:
    """`set_block_dimension`: threads of a block along both directions."""
    width, height = (1 << max(size, 1).bit_length() - 1 if size < most else most for size in (wide, high))
    across = min(width, _WARP)
    height = min(height, most // across)
    return min(width, most // height), height
