"""Bytes/s of a kernel that memory bounds, by the pattern in which it reads and writes. Needs no torch.

Kernels that stream reach the card's achieved bandwidth. Others work out an address for each element, which takes
instructions of the multiprocessors: these reach what the same number of multiprocessors reached where it was measured,
or what streaming does if that is less.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Pattern = Literal["streaming", "cast", "strided", "cat", "gather", "scatter", "one_block"]
# GB/s of one multiprocessor, learned from half of Liger-Kernel's measurements of plain torch
# (experiments/rates/bandwidth.py, which tells the other half). No gather, scatter or loss was measured on the H100.
# `one_block` is the loss of targets, 8 bytes each, that one block works off: the time of waiting for memory.
PER_MULTIPROCESSOR: Mapping[str, dict[Pattern, float]] = {
    "a100_sxm": {"cast": 13.8, "strided": 7.0, "cat": 16.0, "gather": 5.8, "scatter": 3.7, "one_block": 0.16},
    "h100_sxm": {"cast": 15.1, "strided": 14.4, "cat": 14.7},
}
_MEASURED = {"a100_sxm": "a100_sxm"}  # all newer cards: h100_sxm


def bandwidth(pattern: Pattern, rates: str, streaming: float, sm_count: int, slowdown: float) -> float:
    """Bytes/s on a card that has the rates named `rates` and streams at `streaming` bytes/s."""
    if pattern == "streaming":
        return streaming
    of = PER_MULTIPROCESSOR[_MEASURED.get(rates, "h100_sxm")]
    per_multiprocessor = of.get(pattern, PER_MULTIPROCESSOR["a100_sxm"][pattern])
    working = 1 if pattern == "one_block" else sm_count
    return min(streaming, per_multiprocessor * 1e9 * working / slowdown)
