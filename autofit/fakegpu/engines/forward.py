"""Seconds of one forward pass of an engine, from the kernels that it launches, at any number of tokens.

Products and attention take the seconds measured on the card. vLLM compiles each part between them into one kernel:
a sum with a norm, rotary embedding with the norms of queries and keys, and the activation of the MLP; the cache is
written by a kernel of its own (vllm/compilation, RMSNorm and SiluAndMul of vllm/model_executor/layers).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from autofit.fakegpu.rates.collectives import CollectiveSeconds
from autofit.fakegpu.rates.kernels import Floats, KernelSeconds
from autofit.fakegpu.specs import GpuSpec, HostCosts

# The shape of a decoder-only transformer, as far as the time and the memory of its generation follow from it.


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """Sizes of a decoder. Of a mixture of experts, `intermediate` is that of one expert."""

    hidden: int
    layers: int
    heads: int
    key_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    experts: int = 0
    experts_per_token: int = 0
    shared_intermediate: int = 0  # of the experts that every token has
    dense_layers: int = 0  # of a mixture of experts: layers with one MLP, of `dense_intermediate`
    dense_intermediate: int = 0
    window: int | None = None  # tokens that the layers with a sliding window attend to
    window_layers: int = 0
    recurrent_layers: int = 0  # layers without a KV cache that grows
    latent: int = 0  # elements that vLLM keeps of a token in a layer of latent attention; 0: keys and values
    gated: bool = True  # whether the MLP has a gate beside its up projection
    weight_bytes: float = 2.0  # bytes of one weight of the layers

    @classmethod
    def of(cls, config: Any) -> Decoder:
        """From a transformers text config, or a mapping with the keys of its config.json."""

        def get(*names: str, default: Any = None) -> Any:
            for name in names:
                found = config.get(name) if isinstance(config, Mapping) else _of_layers(config, name)
                if found is not None:
                    return found
            return default

        heads = get("num_attention_heads", "n_head", "num_heads", default=1)
        hidden = get("hidden_size", "n_embd", "d_model", default=1)
        layers = get("num_hidden_layers", "n_layer", "num_layers", default=1)
        experts = get("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", default=0)
        dense = get("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)
        kinds = get("layer_types", default=None) or ()
        window = get("sliding_window")
        if not get("use_sliding_window", default=True):
            window = None
        windowed = sum("sliding" in kind for kind in kinds) if kinds else layers
        expert = get("moe_intermediate_size", default=dense)
        latent = get("kv_lora_rank", default=0) if get("model_type") != "minicpm3" else 0  # vLLM unpacks that one's
        sparse_step = get("decoder_sparse_step", default=1) or 1
        named = len(get("mlp_only_layers", default=()) or ())
        first_dense = get("first_k_dense_replace", "moe_layer_start_index", default=named)
        shared = get("multi_query", default=False) and not get("new_decoder_architecture", default=False)
        return cls(
            hidden=hidden, layers=layers, heads=heads,
            key_heads=get("num_key_value_heads", default=1 if shared else heads) or heads,
            head_dim=(0 if latent else get("head_dim", default=0)) or hidden // heads,
            intermediate=expert if experts else dense, vocab=get("vocab_size", default=1), experts=experts,
            experts_per_token=get("num_experts_per_tok", "top_k_experts", "moe_k", default=2) if experts else 0,
            shared_intermediate=_shared(get, expert) if experts else 0,
            dense_layers=(first_dense + (layers - first_dense) * (sparse_step - 1) // sparse_step) if experts else 0,
            dense_intermediate=dense if experts else 0,
            window=window, window_layers=windowed if window else 0,
            recurrent_layers=sum("linear" in kind or "mamba" in kind or "conv" in kind for kind in kinds),
            latent=latent + get("qk_rope_head_dim", default=0) if latent else 0,
            gated=get("model_type", default="") not in _UNGATED,
        )  # fmt: skip

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers that keep them, at 2 bytes an element."""
        return 2 * 2 * (self.layers - self.recurrent_layers) * self.key_heads * self.head_dim

    def vllm_bytes_per_token(self, ranks: int) -> int:
        """Bytes of one token in vLLM's cache on one of `ranks` cards.

        Every card keeps the whole vector of latent attention (MLAAttentionSpec: one head), and at least one head of
        keys and values.
        """
        if self.latent:
            return ITEM * (self.layers - self.recurrent_layers) * self.latent
        return self.kv_bytes_per_token // min(ranks, self.key_heads)

    def products(self, ranks: int) -> tuple[tuple[int, int], ...]:
        """(n, k) of the products of a layer's attention on one of `ranks` cards: queries, keys and values; output."""
        attention = self.heads * self.head_dim // ranks
        keys = max(1, self.key_heads // ranks) * self.head_dim
        return (attention + 2 * keys, self.hidden), (self.hidden, attention)


def _of_layers(config: Any, name: str) -> Any:
    """An attribute of a config; the mean over its layers where each has its own (Gemma 4's `head_dim`)."""
    if name not in (getattr(config, "per_layer_attributes", None) or ()):
        return getattr(config, name, None)
    values = [getattr(layer, name) for layer in config.per_layer_config]
    return sum(values) // len(values)


_UNGATED = ("gpt2", "gpt_neox", "opt", "phi", "bloom", "falcon", "gpt_neo", "gptj", "gpt_bigcode", "starcoder2",
            "apertus", "arcee")  # fmt: skip


def _shared(get: Any, expert: int) -> int:
    """The width of the experts that every token has."""
    width = get("shared_expert_intermediate_size", default=0)
    return int(width or (get("n_shared_experts", "moe_num_shared_experts", default=0) or 0) * expert)


ITEM = 2  # bytes of a half-precision element


@lru_cache(maxsize=64)
def kernel_seconds(spec: GpuSpec, costs: HostCosts) -> KernelSeconds:
    return KernelSeconds(spec, costs)


def facts_from_json(kept: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that every engine has, as objects: its card, the host's costs and its decoder."""
    return {
        "spec": GpuSpec.from_json(kept["spec"]), "costs": HostCosts(**kept["costs"]),
        "decoder": Decoder(**kept["decoder"]),
    }  # fmt: skip


class ForwardPasses(NamedTuple):
    """The work of passes, one entry a pass.

    `decoding` sequences have one token each, which attends to `context` tokens; `prefilling` sequences have `queries`
    tokens each, which attend to `keys` tokens on average.
    """

    decoding: Floats
    context: Floats
    prefilling: Floats
    queries: Floats
    keys: Floats

    @property
    def tokens(self) -> Floats:
        return self.decoding + self.prefilling * self.queries


@lru_cache(maxsize=16)
def collective_seconds(spec: GpuSpec) -> CollectiveSeconds:
    return CollectiveSeconds(spec)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """The forward pass of a `decoder` on one of `ranks` cards. `fused` says whether an engine has merged kernels.

    With `lora_rank` the products of attention and of a dense MLP have an adapter that is served beside them.
    """

    decoder: Decoder
    kernels: KernelSeconds
    ranks: int = 1
    fused: bool = True
    lora_rank: int = 0

    def layers_s(self, batch: ForwardPasses, rows: Floats) -> Floats:
        """Seconds of all layers on the card, with `rows` tokens in the products (a graph may be padded)."""
        decoder = self.decoder
        attention = self._attention(batch)
        products: Floats = sum((self.product(rows, n, k) for n, k in self._attention_products()), np.zeros_like(rows))
        merged, out = decoder.products(self.ranks)
        each = products + self._between(rows) + self._adapted(rows, *merged, 3) + self._adapted(rows, *out, 1)
        each = each + 2 * self._reduced(rows)
        dense = decoder.dense_layers if decoder.experts else decoder.layers
        total = decoder.layers * each + dense * self._mlp(rows, decoder.dense_intermediate or decoder.intermediate)
        if decoder.experts:
            total = total + (decoder.layers - dense) * self._experts(rows)
        return np.asarray(total + attention)

    def head_s(self, rows: Floats) -> Floats:
        """Seconds of the logits of `rows` tokens."""
        return self.product(rows, self.decoder.vocab // self.ranks, self.decoder.hidden, weight_bytes=ITEM)

    def product(self, m: Floats, n: int, k: int, *, weight_bytes: float | None = None) -> Floats:
        """Seconds of (m, k) x (k, n), whose weights come from memory."""
        weight = self.decoder.weight_bytes if weight_bytes is None else weight_bytes
        one = np.ones_like(m)
        told = self.kernels.measured(
            "products", "mm", np.stack([one, m, n * one, k * one]), rate=self.kernels.spec.half_flops_per_s,
            item_bytes=ITEM, causal=False,
        )  # fmt: skip
        moved = n * k * min(weight, ITEM) + (m * k + m * n) * ITEM
        if weight < ITEM:  # packed weights are read, unpacked, and multiplied by a kernel that reads less
            flops = 2.0 * m * n * k / (self.kernels.spec.half_flops_per_s * self.kernels.flops_frac)
            return np.maximum(np.maximum(flops, self.kernels.shortest_s), moved / self.kernels.bandwidth_bytes_per_s)
        return np.maximum(told, moved / self.kernels.bandwidth_bytes_per_s)

    def moving(self, nbytes: Floats, times: int = 1) -> Floats:
        """Seconds of `times` kernels that move `nbytes` each; few bytes are still in the cache."""
        return np.asarray(
            times * np.maximum(self.kernels.warm(nbytes / self.kernels.bandwidth_bytes_per_s), self.kernels.shortest_s)
        )

    # ------------------------------------------------------------------ the parts of a layer
    def _attention_products(self) -> tuple[tuple[int, int], ...]:
        merged, out = self.decoder.products(self.ranks)
        if self.fused:
            return merged, out
        keys = max(1, self.decoder.key_heads // self.ranks) * self.decoder.head_dim
        return (merged[0] - 2 * keys, merged[1]), (keys, merged[1]), (keys, merged[1]), out

    def _mlp(self, rows: Floats, intermediate: int) -> Floats:
        width, hidden = intermediate // self.ranks, self.decoder.hidden
        up = 2 if self.decoder.gated else 1
        into = self.product(rows, up * width, hidden) if self.fused else up * self.product(rows, width, hidden)
        acted = self.moving((up + 1) * rows * width * ITEM, 1 if self.fused else 2)
        adapters = self._adapted(rows, up * width, hidden, up) + self._adapted(rows, hidden, width, 1)
        return np.asarray(into + acted + self.product(rows, hidden, width) + adapters)

    def _adapted(self, rows: Floats, n: int, k: int, slices: int) -> Floats:
        """Seconds that adapters add to a product of (rows, k) x (k, n), which stands for `slices` merged ones.

        Three kernels: a float32 buffer is cleared, the inputs are multiplied into it, and it is multiplied into the
        outputs (vllm/lora/punica_wrapper/punica_gpu.py, add_lora_linear).
        """
        if not self.lora_rank:
            return np.zeros_like(rows)
        buffer = 4 * slices * rows * self.lora_rank
        weights = ITEM * self.lora_rank
        shrunk = ITEM * rows * k + slices * weights * k + buffer
        expanded = buffer + weights * n + 2 * ITEM * rows * n
        return self.moving(buffer) + self.moving(shrunk) + self.moving(expanded)

    def _reduced(self, rows: Floats) -> Floats:
        """The sum of a product's outputs over the cards that have parts of it, twice a layer (RowParallelLinear)."""
        if self.ranks == 1:
            return np.zeros_like(rows)
        told, nbytes = collective_seconds(self.kernels.spec), rows * self.decoder.hidden * ITEM
        return np.array([told.seconds("all_reduce", float(each), self.ranks) for each in nbytes])

    def _experts(self, rows: Floats) -> Floats:
        """A mixture's MLP: every expert that a token has is read once; routing is even."""
        decoder = self.decoder
        chosen = decoder.experts_per_token / decoder.experts
        touched = decoder.experts * -np.expm1(rows * np.log1p(-min(chosen, 1.0 - 1e-9)))
        weights = 3 * decoder.hidden * decoder.intermediate / self.ranks
        flops = 2.0 * rows * decoder.experts_per_token * weights
        rate = self.kernels.spec.half_flops_per_s * self.kernels.flops_frac
        moved = (touched * weights * decoder.weight_bytes) / self.kernels.bandwidth_bytes_per_s
        routed = rows * decoder.experts_per_token
        width = decoder.intermediate // self.ranks
        shared = self._mlp(rows, decoder.shared_intermediate) if decoder.shared_intermediate else 0.0
        return np.asarray(
            np.maximum(np.maximum(flops / rate, moved), 2 * self.kernels.shortest_s)
            + self.moving(3 * routed * width * ITEM) + self.moving(2 * routed * decoder.hidden * ITEM)
            + self.moving(rows * decoder.experts * ITEM, 3) + shared
        )  # fmt: skip

    def _between(self, rows: Floats) -> Floats:
        """Norms, rotary embedding and the write to the cache of one layer."""
        decoder = self.decoder
        hidden, keys = decoder.hidden, 2 * decoder.key_heads * decoder.head_dim / self.ranks
        merged = decoder.heads * decoder.head_dim / self.ranks + keys
        norms = self.moving(4 * rows * hidden * ITEM, 2 if self.fused else 6)
        rotary = self.moving(2 * rows * merged * ITEM, 1 if self.fused else 8)
        return np.asarray(norms + rotary + self.moving(2 * rows * keys * ITEM))

    def _attention(self, batch: ForwardPasses) -> Floats:
        decoder = self.decoder
        full = decoder.layers - decoder.recurrent_layers - decoder.window_layers
        total = full * self._attention_of(batch)
        if decoder.window_layers:
            window = float(decoder.window or 0)
            seen = batch._replace(context=np.minimum(batch.context, window), keys=np.minimum(batch.keys, window))
            total = total + decoder.window_layers * self._attention_of(seen)
        return np.asarray(total)

    def _attention_of(self, batch: ForwardPasses) -> Floats:
        """Seconds of one layer's attention, of decoding and of prefilling sequences by a kernel each."""
        one = np.ones_like(batch.decoding)
        decoder = self.decoder
        # To decode, all heads of latent attention share the one vector of a token.
        heads, dim = (1, decoder.latent / 2) if decoder.latent else (decoder.key_heads, decoder.head_dim)
        decode = self._kernel(batch.decoding, one, batch.context, heads, dim)
        queries = np.maximum(batch.queries, 2.0)
        prefill = self._kernel(batch.prefilling, queries, batch.keys, decoder.key_heads, decoder.head_dim)
        return np.asarray(np.where(batch.decoding > 0, decode, 0.0) + np.where(batch.prefilling > 0, prefill, 0.0))

    def _kernel(self, sequences: Floats, queries: Floats, keys: Floats, key_heads: int, dim: float) -> Floats:
        one, heads = np.ones_like(queries), max(1, self.decoder.heads // self.ranks)
        of = np.stack([sequences, heads * one, max(1, key_heads // self.ranks) * one, queries, keys, dim * one])
        rate = self.kernels.spec.half_flops_per_s  # the engine's kernels are those that were measured
        return self.kernels.measured("attention", "engine", of, rate=rate, item_bytes=ITEM, causal=False)


# -- continuous batching of transformers ------------------------------------------------------------------------------
# Facts are those of transformers 5.23 (`generation/continuous_batching`), with scaled-dot-product attention. Every
# step packs its tokens into one row, copies the keys and values of all running sequences out of the cache, repeats
# them for grouped queries, and attends to all of them under a dense mask. The model's own kernels are launched one by
# one from Python. The cache takes `max_memory_percent` of the memory that torch has not reserved; a new one is made
# for each generation and freed after it.

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
        """Bytes that the cache and its tensors may take, and do, if torch holds `held` bytes."""
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
        """Number of waves until all sequences had a place in the cache; 0 if it is too small for one."""
        at_once = self.cache_tokens(held, len(prompts)) // (max(prompts) + tokens)
        return math.ceil(len(prompts) / at_once) if at_once else 0

    def added_s(self, prompts: Sequence[int], tokens: int, held: float) -> float:
        """Seconds of a generation beside `tokens` steps of the model: prompts, attention, and further waves."""
        waves = max(1, self.waves(prompts, tokens, held))
        at_once, mean = math.ceil(len(prompts) / waves), sum(prompts) / len(prompts)
        steps = np.array([0.113, 0.5, 0.887]) * tokens  # Gauss-Legendre nodes
        weights = np.array([5, 8, 5]) / 18
        each = self._paged_s(at_once * np.ones(3), at_once * (mean + steps + 1.0))
        attention = float(weights @ each) * tokens * waves
        launches = LAUNCHES * self.decoder.layers * self.costs.launch_s
        return self._prompts_s(sum(prompts)) + attention + tokens * (waves * launches + (waves - 1) * self.step_s)

    def _prompts_s(self, total: int) -> float:
        """Seconds of all prompts, in steps of `STEP_TOKENS`."""
        whole, rest = divmod(total, STEP_TOKENS)
        sizes = np.array([float(size) for size in [STEP_TOKENS] * bool(whole) + [rest] * bool(rest)])
        often = np.array([whole] * bool(whole) + [1] * bool(rest), float)
        none = np.zeros_like(sizes)
        each = self._forward.layers_s(ForwardPasses(none, none, none, none, none), sizes) + self._paged_s(sizes, sizes)
        return float(often @ each)

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
