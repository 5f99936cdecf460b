"""Continuous batching of transformers: the memory that its paged cache takes, and what its attention adds to a step.

Facts are those of transformers 5.23 (`generation/continuous_batching`), with scaled-dot-product attention. Every step
packs its tokens into one row, copies the keys and values of all running sequences out of the cache, repeats them for
grouped queries, and attends to all of them under a dense mask. The model's own kernels are launched one by one from
Python. The cache takes `max_memory_percent` of the memory that torch has not reserved; a new one is made for each
generation and freed after it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from autofit.fakegpu.engines.forward import ITEM, Batch, Decoder, Forward, facts_from_json, kernel_seconds
from autofit.fakegpu.rates.products import Floats
from autofit.fakegpu.specs import GpuSpec, HostCosts

STEP_TOKENS = 8192  # PagedAttentionMemoryHandler._default_max_batch_tokens
LAUNCHES = 8  # further launches a layer: writes and reads of the cache, and the repetition of keys and values


@dataclass(frozen=True, kw_only=True)
class PagedBatching:
    """Continuous batching of a `decoder` on the card `spec`, with `share` of the memory that is left (0 to 1)."""

    spec: GpuSpec
    costs: HostCosts
    decoder: Decoder
    share: float
    step_s: float = 0.0  # seconds of one traced step of the model, without its cache

    # ------------------------------------------------------------------ memory
    def cache_bytes(self, held: Floats | float) -> Floats:
        """Bytes that the cache and its tensors may take if torch holds `held` bytes, all of which are taken."""
        return np.asarray(self.share * np.maximum(0.0, self.spec.capacity_bytes - np.asarray(held, float)))

    def cache_tokens(self, held: float, sequences: int) -> int:
        """Tokens that the cache holds (`PagedAttentionMemoryHandler.infer_max_batch_tokens_and_num_sectors`)."""
        decoder, peak_heads = self.decoder, 2 * self.decoder.heads + self.decoder.key_heads
        row = decoder.hidden * ITEM + 4 * decoder.vocab
        width = decoder.hidden + (decoder.heads + 2 * decoder.key_heads + peak_heads) * decoder.head_dim
        fixed = sequences * row + STEP_TOKENS * (ITEM * width + STEP_TOKENS * ITEM)
        token = decoder.kv_bytes_per_token + peak_heads * decoder.head_dim * ITEM + 8 + STEP_TOKENS * ITEM
        return max(0, int((float(self.cache_bytes(held)) - fixed) // token))

    # ------------------------------------------------------------------ seconds
    def waves(self, prompts: Sequence[int], tokens: int, held: float) -> int:
        """How often sequences are worked off until all had a place in the cache; 0 if not even one has."""
        at_once = self.cache_tokens(held, len(prompts)) // (max(prompts) + tokens)
        return math.ceil(len(prompts) / at_once) if at_once else 0

    def added_s(self, prompts: Sequence[int], tokens: int, held: float) -> float:
        """Seconds of a generation beside `tokens` steps of the model: prompts, attention, and further waves."""
        waves = max(1, self.waves(prompts, tokens, held))
        at_once, mean = math.ceil(len(prompts) / waves), sum(prompts) / len(prompts)
        steps = np.array([0.113, 0.5, 0.887]) * tokens  # Gauss-Legendre nodes
        weights = np.array([5, 8, 5]) / 18
        attention = float(weights @ self._attention_s(at_once * np.ones(3), mean + steps)) * tokens * waves
        launches = LAUNCHES * self.decoder.layers * self.costs.launch_s
        return self._prompts_s(sum(prompts)) + attention + tokens * (waves * launches + (waves - 1) * self.step_s)

    def _prompts_s(self, total: int) -> float:
        """Seconds of all prompts, in steps of `STEP_TOKENS`."""
        whole, rest = divmod(total, STEP_TOKENS)
        sizes = np.array([float(size) for size in [STEP_TOKENS] * bool(whole) + [rest] * bool(rest)])
        often = np.array([whole] * bool(whole) + [1] * bool(rest), float)
        none = np.zeros_like(sizes)
        each = self._forward.layers_s(Batch(none, none, none, none, none), sizes) + self._paged_s(sizes, sizes)
        return float(often @ each)

    def _attention_s(self, sequences: Floats, context: Floats) -> Floats:
        return self._paged_s(sequences, sequences * (context + 1.0))

    def _paged_s(self, queries: Floats, keys: Floats) -> Floats:
        """Seconds in all layers of `queries` tokens that attend to `keys` packed tokens under a mask."""
        decoder, forward, one = self.decoder, self._forward, np.ones_like(queries)
        row = decoder.key_heads * decoder.head_dim * ITEM
        copied = forward.moving(2.0 * keys * row, 2)
        if decoder.heads > decoder.key_heads:
            copied = copied + forward.moving(keys * (row + decoder.heads * decoder.head_dim * ITEM), 2)
        of = np.stack([one, decoder.heads * one, decoder.heads * one, np.maximum(queries, 2.0), keys,
                       decoder.head_dim * one])  # fmt: skip
        attended = forward.kernels.measured(
            "attention", "_scaled_dot_product_efficient_attention", of, rate=self.spec.half_flops_per_s,
            item_bytes=ITEM, causal=False,
        )  # fmt: skip
        mask = forward.moving(queries * keys * ITEM)
        layers = decoder.layers - decoder.recurrent_layers
        return np.asarray(layers * (copied + np.maximum(attended, mask)) + 2 * mask)

    @property
    def _forward(self) -> Forward:
        return Forward(decoder=self.decoder, kernels=kernel_seconds(self.spec, self.costs), fused=False)

    # ------------------------------------------------------------------ on disk
    def to_json(self) -> dict[str, object]:
        return {"continuous": True, **asdict(self)}

    @classmethod
    def from_json(cls, kept: Mapping[str, Any]) -> PagedBatching:
        return cls(**facts_from_json(kept), share=kept["share"], step_s=kept["step_s"])
