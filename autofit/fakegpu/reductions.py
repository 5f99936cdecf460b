"""Buffers of torch's reductions on a card, and of the algorithms that it takes from NVIDIA's CUB.

A long reduction is split between blocks, which leave partial results in memory. Follows `setReduceConfig` in
aten/src/ATen/native/cuda/Reduce.cuh, on the dimensions as `TensorIterator` orders and joins them
(aten/src/ATen/TensorIterator.cpp). How many blocks there are depends on the card's multiprocessors.
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
    """Bytes of the buffers that a reduction of `reduced` dimensions takes at once; () if it stays whole.

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
    reach = [1 + sum((dim.size - 1) * stride(dim) for dim in dims) for stride in (_into, lambda dim: dim.out_of)]
    if prod(dim.size for dim in dims) <= _INT32_MAX and max(reach) <= _INT32_MAX:
        yield dims, first
        return
    at = max(range(len(dims)), key=lambda i: (dims[i].size - 1) * max(dims[i].into, dims[i].out_of))
    half = dims[at].size // 2
    for size, moved in ((half, 0), (dims[at].size - half, half * dims[at].out_of)):
        yield from _indexed_by_32_bits([*dims[:at], replace(dims[at], size=size), *dims[at + 1 :]], first + moved)


def _into(dim: _Dim) -> int:
    return dim.into


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


# -- CUB's algorithms -------------------------------------------------------------------------------------------------
# Sorts, prefix sums and selections. A size follows from the elements of a tile (CUB's tuning for compute capability
# 9.0) and from the state that CUB keeps for each tile. Each was compared with the sizes that the CUDA build of torch
# 2.13 asks for, without a card.

_ALIGNED, _EXTRA = 256, 255  # each part of a buffer; and what CUB asks for besides, to align the first
_DIGITS, _DIGIT_BITS = 256, 8
_SINGLE_TILE = 2304  # elements: 256 threads, 9 each, where a key or a value has 8 bytes
_SORT_TILES = {1: 3456, 2: 5632, 4: 5376, 8: 4608}  # elements, by the bytes of a key, with values of 8 bytes
_SCAN_TILES = {2: 3840, 4: 1920, 8: 896}  # by the bytes of a sum
_SELECT_TILE = 4224
_STATES_BESIDE = 32  # tiles before the first, which the others look back at
_REDUCE_SINGLE_TILE, _REDUCE_BLOCKS = 4096, 40  # 8 blocks of 256 threads on a multiprocessor, five times over


def sort_pairs_bytes(count: int, *, key_bytes: int, key_bits: int | None = None) -> int:
    """Of a radix sort of `count` keys with values of 8 bytes, by the lowest `key_bits` (default: all)."""
    if count <= _SINGLE_TILE:
        return 1
    passes = -(-(key_bits or 8 * key_bytes) // _DIGIT_BITS)
    copies = [count * key_bytes, count * 8] if passes > 1 else []
    tiles = -(-count // _SORT_TILES[key_bytes])
    # histograms of all passes, the tiles' looks back, what is sorted, and a counter
    return _whole([8 * _DIGITS * passes, 4 * _DIGITS * tiles, *copies, 1])


def sort_segments_bytes(count: int, *, key_bytes: int) -> int:
    """Of a sort within many segments of the same length: copies of the keys and of the values, of 8 bytes."""
    return _whole([count * key_bytes, count * 8])


def scan_bytes(count: int, *, sum_bytes: int) -> int:
    """Of prefix sums of `count` elements: the state of each tile."""
    states = -(-count // _SCAN_TILES[sum_bytes]) + _STATES_BESIDE
    if sum_bytes == 2:  # a status and two sums apart from each other
        return _whole([1, 4 * states, 2 * states, 2 * states])
    return _whole([1, 2 * sum_bytes * states])


def select_bytes(count: int) -> int:
    """Bytes of the selection of the flagged ones of `count` elements."""
    return _whole([1, 8 * (-(-count // _SELECT_TILE) + _STATES_BESIDE)])


def reduce_bytes(count: int, *, processors: int) -> int:
    """Of the sum of `count` elements: a number of 4 bytes for each block that may run."""
    return 1 if count <= _REDUCE_SINGLE_TILE else _whole([4 * _REDUCE_BLOCKS * processors])


def _whole(parts: list[int]) -> int:
    return sum(-(-part // _ALIGNED) * _ALIGNED for part in parts) + _EXTRA
