"""Buffers of the algorithms that torch takes from NVIDIA's CUB: sorts, prefix sums and selections.

A size follows from the elements of a tile (CUB's tuning for compute capability 9.0) and from the state that CUB keeps
for each tile. Each was compared with the sizes that the CUDA build of torch 2.13 asks for, without a card.
"""

from __future__ import annotations

_ALIGNED, _EXTRA = 256, 255  # each part of a buffer; and what CUB asks for besides, to align the first
_DIGITS, _DIGIT_BITS = 256, 8
_SINGLE_TILE = 2304  # elements: 256 threads, 9 each, where a key or a value has 8 bytes
_SORT_TILES = {1: 3456, 2: 5632, 4: 5376, 8: 4608}  # elements, by the bytes of a key, with values of 8 bytes
_KEYS_TILE = 5760  # of keys of 8 bytes alone
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
    return _onesweep_bytes(count, passes, _SORT_TILES[key_bytes], copies)


def sort_segment_numbers_bytes(count: int) -> int:
    """Of a radix sort of `count` pairs of a segment's number, below 128, and an index, as keys of 8 bytes."""
    return 1 if count <= _SINGLE_TILE else _onesweep_bytes(count, 1, _KEYS_TILE, [])


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
    """Of the selection of those of `count` elements that have a flag."""
    return _whole([1, 8 * (-(-count // _SELECT_TILE) + _STATES_BESIDE)])


def reduce_bytes(count: int, *, processors: int) -> int:
    """Of the sum of `count` elements: a number of 4 bytes for each block that may run."""
    return 1 if count <= _REDUCE_SINGLE_TILE else _whole([4 * _REDUCE_BLOCKS * processors])


def _onesweep_bytes(count: int, passes: int, tile: int, copies: list[int]) -> int:
    """Histograms of all passes, the tiles' looks back and a counter, beside `copies` of what is sorted."""
    tiles = -(-count // tile)
    return _whole([8 * _DIGITS * passes, 4 * _DIGITS * tiles, *copies, 1])


def _whole(parts: list[int]) -> int:
    return sum(-(-part // _ALIGNED) * _ALIGNED for part in parts) + _EXTRA
