"""The shape of a decoder-only transformer, as far as the time and the memory of its generation follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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
    gated: bool = True  # whether the MLP has a gate beside its up projection
    weight_bytes: float = 2.0  # bytes of one weight of the layers

    @classmethod
    def of(cls, config: Any) -> Decoder:
        """From a transformers text config, or a mapping with the keys of its config.json."""

        def get(*names: str, default: Any = None) -> Any:
            for name in names:
                found = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
                if found is not None:
                    return found
            return default

        heads = get("num_attention_heads", "n_head", default=1)
        hidden = get("hidden_size", "n_embd", "d_model", default=1)
        layers = get("num_hidden_layers", "n_layer", "num_layers", default=1)
        experts = get("num_local_experts", "num_experts", "n_routed_experts", default=0)
        dense = get("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)
        kinds = get("layer_types", default=None) or ()
        window = get("sliding_window")
        if not get("use_sliding_window", default=True):
            window = None
        windowed = sum("sliding" in kind for kind in kinds) if kinds else layers
        expert = get("moe_intermediate_size", default=dense)
        sparse_step = get("decoder_sparse_step", default=1) or 1
        first_dense = get("first_k_dense_replace", default=len(get("mlp_only_layers", default=()) or ()))
        return cls(
            hidden=hidden, layers=layers, heads=heads, key_heads=get("num_key_value_heads", default=heads) or heads,
            head_dim=get("head_dim", default=hidden // heads) or hidden // heads,
            intermediate=expert if experts else dense, vocab=get("vocab_size", default=1), experts=experts,
            experts_per_token=get("num_experts_per_tok", "top_k_experts", default=2) if experts else 0,
            shared_intermediate=_shared(get, expert) if experts else 0,
            dense_layers=(first_dense + (layers - first_dense) * (sparse_step - 1) // sparse_step) if experts else 0,
            dense_intermediate=dense if experts else 0,
            window=window, window_layers=windowed if window else 0,
            recurrent_layers=sum("linear" in kind or "mamba" in kind or "conv" in kind for kind in kinds),
            gated=get("model_type", default="") not in _UNGATED,
        )  # fmt: skip

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers that keep them, at 2 bytes an element."""
        return 2 * 2 * (self.layers - self.recurrent_layers) * self.key_heads * self.head_dim

    def products(self, ranks: int) -> tuple[tuple[int, int], ...]:
        """(n, k) of the products of a layer's attention on one of `ranks` cards: queries, keys and values; output."""
        attention = self.heads * self.head_dim // ranks
        keys = max(1, self.key_heads // ranks) * self.head_dim
        return (attention + 2 * keys, self.hidden), (self.hidden, attention)


_UNGATED = ("gpt2", "gpt_neox", "opt", "phi", "bloom", "falcon", "gpt_neo", "gpt_bigcode", "starcoder2")


def _shared(get: Any, expert: int) -> int:
    """The width of the experts that every token has."""
    width = get("shared_expert_intermediate_size", default=0)
    return int(width or (get("n_shared_experts", default=0) or 0) * expert)
