"""Seconds of one attention kernel on one card: a roofline, corrected by what was measured near the same shape.

The forward of flash attention was measured (causal, with and without grouped queries), as was one step of decoding.
The rest follows from published ratios:

- backward: 2.5 times the FLOPs of the forward (FlashAttention-2, arXiv 2307.08691, section 3.2: five matrix products
  instead of two), at 63 instead of 73 % of the peak, both the best of the same paper (section 4.1, A100).
- memory-efficient attention (xformers' CUTLASS kernel, which takes masks): half the speed of flash attention (the
  same paper, section 4.1, "around 2x faster than FlashAttention and its CUTLASS version in xformers").
- torch's own flash attention is version 2; where the measured one is version 3, which a H100 has, the ratio of both is
  75 to 35 % of the peak (FlashAttention-3, arXiv 2407.08608, abstract). For later cards the same is assumed.

Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autofit.fakegpu.rates.gemm import Machine
from autofit.fakegpu.rates.grid import Floats, Grid

BACKWARD = 2.5 * 0.73 / 0.63
EFFICIENT = 2.0
VERSION_2_OF_3 = 0.75 / 0.35
FLOPS_FRAC = (
    0.5  # of the roofline that the corrections are relative to; any number gives the same seconds where measured
)
BANDWIDTH_FRAC = 0.8


def roofline(
    machine: Machine, batch: Floats, heads: Floats, key_heads: Floats, queries: Floats, keys: Floats, dim: Floats,
    *, share: float,
) -> Floats:  # fmt: skip
    """Seconds without a correction; `share` is the part of the scores that is computed, 0.5 if causal."""
    flops = 4.0 * batch * heads * queries * keys * dim * share
    moved = (2.0 * batch * heads * queries * dim + 2.0 * batch * key_heads * keys * dim) * machine.item_bytes
    return np.maximum(
        flops / (machine.flops_per_s * FLOPS_FRAC), moved / (machine.bandwidth_bytes_per_s * BANDWIDTH_FRAC)
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionTable:
    """A card's attention: the logarithms of measured over computed seconds, by (length, heads, queries a key, size).

    The heads are those of the whole batch, for decoding the key heads. `shortest_s` is the time of an empty kernel.
    """

    prefill: Grid
    decode: Grid
    shortest_s: float
    version: int  # of flash attention, as measured

    def seconds(
        self, machine: Machine, batch: Floats, heads: Floats, key_heads: Floats, queries: Floats, keys: Floats,
        dim: Floats, *, causal: bool, backward: bool, efficient: bool,
    ) -> Floats:  # fmt: skip
        """Seconds of one kernel of torch, one entry a shape."""
        batch, heads, key_heads = (np.maximum(np.asarray(x, float), 1.0) for x in (batch, heads, key_heads))
        queries, keys, dim = (np.maximum(np.asarray(x, float), 1.0) for x in (queries, keys, dim))
        group = np.maximum(heads / key_heads, 1.0)
        least = roofline(machine, batch, heads, key_heads, queries, keys, dim, share=0.5 if causal else 1.0)
        slower = (BACKWARD if backward else 1.0) * (EFFICIENT if efficient else 1.0)
        slower *= VERSION_2_OF_3 if self.version > 2 else 1.0
        many = slower * (self.shortest_s + least) * np.exp(self.prefill.at(keys, batch * heads, group, dim))
        one = (self.shortest_s + least) * np.exp(self.decode.at(keys, batch * key_heads, group, dim))
        return np.where(queries == 1.0, one, many)
