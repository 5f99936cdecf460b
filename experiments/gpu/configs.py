"""The configurations of the campaign, in order of value, and the tiny ones that try it without a card.

First each thing that the README promises, then each law once, then the whole grid of one search, then the same laws at
other sizes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autofit.errors import ConfigError, nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One recipe, with random weights and samples of exactly `tokens` tokens (of the prompt, where it generates)."""

    name: str
    trainer: str
    model: str
    tokens: int
    values: Mapping[str, object]
    why: str
    # "bisect": its least capacity is searched for too; "grid": its bytes make targets; "search": these are searched for
    tags: tuple[str, ...] = field(default=())

    @property
    def samples(self) -> str:
        """The kind of its samples: the trainer's, and the objective's where it has several."""
        return f"hf {self.values.get('objective', 'sft')}" if self.trainer == "hf" else self.trainer


_ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA: dict[str, Any] = {"use_peft": True, "lora_r": 16, "lora_alpha": 32, "lora_target_modules": _ALL_LINEAR}
_BF16: dict[str, Any] = {"dtype": "bfloat16", "bf16": True}
_SMALL, _MIDDLE, _FOUR, _EIGHT = "Qwen/Qwen2.5-0.5B", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-4B", "Qwen/Qwen3-8B"
_EXPANDABLE: dict[str, Any] = {"env": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}

# Models that the catalogue does not have: shapes of our own.
OWN_MODELS: dict[str, dict[str, object]] = {
    "small-moe": {  # 32 experts, 4 of them for each token: 0.93 billion parameters, 0.20 active
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 32000, "hidden_size": 1024,
        "intermediate_size": 2816, "moe_intermediate_size": 704, "num_hidden_layers": 12, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 64, "num_experts": 32, "num_experts_per_tok": 4,
        "max_position_embeddings": 8192, "norm_topk_prob": True, "tie_word_embeddings": False,
    },
    "d16": {  # the shape of experiments/seeds/d16
        "model_type": "nanochat", "architectures": ["NanoChatForCausalLM"], "vocab_size": 65536, "hidden_size": 1024,
        "intermediate_size": 4096, "num_hidden_layers": 16, "num_attention_heads": 8, "num_key_value_heads": 8,
        "max_position_embeddings": 2048, "hidden_act": "relu2", "tie_word_embeddings": False,
    },
    "tiny": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 300, "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    },
    "wide": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 256,
        "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    },
}  # fmt: skip


def generating(
    name: str, model: str, prompt: int, completion: int, split: tuple[int, int, int], why: str, *,
    trainer: str = "grpo", k: int = 4, tags: tuple[str, ...] = (), **more: object,
) -> Config:  # fmt: skip
    """GRPO or RLOO; `split` is (micro-batch, gradient accumulation, steps per generation)."""
    micro, accumulation, chunk = split
    values: dict[str, object] = {
        "per_device_train_batch_size": micro, "gradient_accumulation_steps": accumulation,
        "steps_per_generation": chunk, "num_generations": k, "max_completion_length": completion,
        "gradient_checkpointing": True, "reward_funcs": ["get_soft_overlong_punishment"], **_BF16, **more,
    }  # fmt: skip
    return Config(name=name, trainer=trainer, model=model, tokens=prompt, values=values, why=why, tags=tags)


def samples(
    name: str, trainer: str, model: str, tokens: int, split: tuple[int, int], why: str, *, tags: tuple[str, ...] = (),
    **more: object,
) -> Config:  # fmt: skip
    """SFT, DPO or reward; `split` is (micro-batch, gradient accumulation)."""
    micro, accumulation = split
    scores = {"lora_task_type": "SEQ_CLS"} if trainer == "reward" and more.get("use_peft") else {}
    values: dict[str, object] = {
        "per_device_train_batch_size": micro, "gradient_accumulation_steps": accumulation,
        "gradient_checkpointing": True, "max_length": tokens + (8 if trainer == "reward" else 0), **_BF16, **scores,
        **more,
    }  # fmt: skip
    return Config(name=name, trainer=trainer, model=model, tokens=tokens, values=values, why=why, tags=tags)


_OFF: dict[str, Any] = {"gradient_checkpointing": False}
_8_2_2, _8_2_1 = (8, 2, 2), (8, 2, 1)
_R8 = LORA | {"lora_r": 8, "lora_alpha": 16}
_R64 = LORA | {"lora_r": 64, "lora_alpha": 128}

_FIRST = (
    generating("g1", _SMALL, 512, 128, _8_2_2, "GRPO with LoRA, small", **LORA),
    samples("s1", "sft", _MIDDLE, 2048, (4, 2), "SFT with LoRA", tags=("bisect",), **LORA),
    generating("g2", _SMALL, 512, 128, _8_2_2, "g1 without checkpointing", tags=("bisect",), **LORA, **_OFF),
    samples("d1", "dpo", _MIDDLE, 1024, (2, 2), "DPO with LoRA", tags=("bisect",), **LORA),
    samples("r1", "reward", _MIDDLE, 1024, (4, 2), "reward with LoRA", **LORA),
    generating("g4", _FOUR, 1024, 128, _8_2_1, "the built-in baseline", beta=0.04, **LORA),
    samples("s3", "sft", _SMALL, 2048, (4, 1), "full SFT: optimizer state"),
    samples("q1", "sft", _MIDDLE, 2048, (4, 1), "4-bit weights", load_in_4bit=True, **LORA),
    samples("o1", "sft", _SMALL, 2048, (4, 1), "8-bit Adam", optim="adamw_8bit"),
    samples("s2", "sft", _MIDDLE, 2048, (4, 2), "s1 without checkpointing", tags=("bisect",), **LORA, **_OFF),
    generating("p1", "Qwen/Qwen3-0.6B", 1024, 128, (8, 1, 1), "float32 with grouped queries: math attention",
                dtype="float32", bf16=False, **LORA),
    generating("x1", _SMALL, 512, 128, _8_2_2, "g1 with expandable segments", **LORA, **_EXPANDABLE),
)  # fmt: skip
_EACH_LAW = (
    generating("g5", _FOUR, 1024, 128, (4, 4, 4), "what a search finds at 40 GB", beta=0.04, **LORA, **_OFF),
    generating("g6", _EIGHT, 1024, 128, (16, 1, 1), "seed 000 before", beta=0.04, **LORA),
    generating("g7", _EIGHT, 896, 96, _8_2_1, "seed 000 after", beta=0.04, **_R8),
    samples("e1", "sft", _SMALL, 2048, (4, 1), "eager attention", attn_implementation="eager", **_OFF),
    samples("f1", "sft", _SMALL, 2048, (4, 1), "float32 weights under bfloat16 autocast", dtype="float32"),
    samples("m1", "sft", "small-moe", 2048, (4, 1), "a mixture of experts"),
    generating("c1", _SMALL, 256, 1024, (8, 1, 1), "a long completion: the cache grows 1024 times", **LORA),
    samples("o2", "sft", _MIDDLE, 1024, (2, 1), "paged 8-bit Adam", optim="paged_adamw_8bit"),
    generating("l1", _SMALL, 512, 128, _8_2_2, "RLOO with LoRA", trainer="rloo", **LORA),
    samples("r2", "reward", _SMALL, 1024, (8, 1), "full reward, no checkpointing", tags=("bisect",), **_OFF),
    samples("d2", "dpo", _SMALL, 1024, (4, 1), "full DPO: a reference model", **_OFF),
    samples("d3", "dpo", _MIDDLE, 1024, (2, 2), "the reference beforehand", precompute_ref_log_probs=True, **LORA),
    generating("q2", _MIDDLE, 512, 64, (8, 1, 1), "4-bit weights that generate", load_in_4bit=True, **LORA),
    samples("q3", "sft", _MIDDLE, 1024, (4, 1), "8-bit weights", load_in_8bit=True, **LORA),
    samples("a1", "sft", _SMALL, 2048, (4, 1), "Adafactor", optim="adafactor"),
    samples("x2", "sft", _MIDDLE, 2048, (4, 2), "s2 with expandable segments", **LORA, **_OFF, **_EXPANDABLE),
    samples("z1", "sft", "Qwen/Qwen3-14B", 2048, (1, 1), "does not fit on 80 GB: optimizer state"),
)
_OTHER_SIZES = (
    generating("g3", _MIDDLE, 512, 128, _8_2_2, "g1, larger", **LORA),
    samples("s4", "sft", _MIDDLE, 4096, (2, 2), "full SFT, longer"),
    samples("s5", "sft", "meta-llama/Llama-3.2-1B", 2048, (4, 1), "Llama", **LORA),
    samples("s6", "sft", "google/gemma-3-1b-pt", 2048, (2, 1), "Gemma: a large vocabulary, windows", **LORA),
    samples("s7", "sft", _EIGHT, 2048, (2, 2), "8B", **LORA),
    samples("s8", "sft", "mistralai/Mistral-7B-v0.1", 4096, (1, 2), "a sliding window", **LORA),
    generating("g8", _SMALL, 256, 256, (16, 1, 1), "full GRPO, groups of 8", k=8, **_OFF),
    generating("g9", _SMALL, 2048, 64, (4, 4, 4), "a long prompt", **LORA),
    generating("g10", _MIDDLE, 512, 64, (2, 8, 8), "many micro-batches", **LORA, **_OFF),
    generating("g11", _SMALL, 512, 128, _8_2_2, "rank 64", **_R64),
    generating("c2", _MIDDLE, 256, 512, (16, 1, 1), "a wide, long rollout", **LORA),
    generating("l2", _MIDDLE, 512, 64, (8, 1, 1), "RLOO, larger", trainer="rloo", **LORA),
    samples("s9", "sft", _MIDDLE, 512, (16, 1), "short and wide", **LORA, **_OFF),
    samples("s10", "sft", _MIDDLE, 8192, (1, 1), "long and narrow", **LORA),
    samples("s11", "sft", "Qwen/Qwen3-0.6B", 2048, (8, 1), "tied embeddings"),
    samples("m2", "sft", "small-moe", 1024, (8, 1), "experts with LoRA on attention",
             **LORA | {"lora_target_modules": _ALL_LINEAR[:4]}),
    samples("r3", "reward", _FOUR, 1024, (2, 1), "reward, larger", **LORA),
    samples("d4", "dpo", _FOUR, 1024, (1, 1), "DPO, larger", **LORA),
    generating("W000", _EIGHT, 1024, 128, (2, 8, 8), "the winner for seed 000 at 40 GB, as predicted", beta=0.04,
                use_peft=True, lora_r=16, lora_alpha=32, **_OFF, **_EXPANDABLE),
    generating("b002", "d16", 256, 256, (8, 32, 4), "seed 002 as it recommends", k=32, **_OFF),
    generating("W002", "d16", 256, 256, (32, 8, 1), "the winner for seed 002 at 32 GB, as predicted", k=32, **_OFF,
                **_EXPANDABLE),
)  # fmt: skip


def _grid() -> tuple[Config, ...]:
    """Every split of 16 samples, with and without checkpointing: the truth about one recipe's search.

    Of SFT: a grid of GRPO took a minute a configuration on the first card, whose host bounds the rollouts.
    """
    return tuple(
        samples(
            f"grid-{micro}-{int(keeps)}", "sft", _MIDDLE, 1024, (micro, 16 // micro), "the grid of a search",
            tags=("grid", "search") if (micro, keeps) == (4, True) else ("grid",), **LORA, gradient_checkpointing=keeps,
        )
        for micro in (1, 2, 4, 8, 16)
        for keeps in (True, False)
    )  # fmt: skip


_HOST = (
    samples("h1", "sft", _SMALL, 64, (1, 1), "the host's seconds: LoRA with almost no work", **LORA, **_OFF),
    samples("h2", "sft", _SMALL, 64, (1, 1), "the host's seconds: full, checkpointing"),
    samples("h3", "dpo", _SMALL, 64, (1, 1), "the host's seconds: DPO with LoRA, checkpointing", **LORA),
    samples("h4", "sft", _MIDDLE, 64, (1, 4), "the host's seconds: accumulation", **LORA),
    samples("h5", "sft", _SMALL, 64, (1, 1), "the host's seconds: float32 under autocast", dtype="float32", **_OFF),
)  # fmt: skip
CONFIGS = (*_FIRST, *_EACH_LAW, *_grid(), *_OTHER_SIZES, *_HOST)

# Only where vLLM is installed, and where there are two cards (gpu.ranks).
VLLM = generating("v1", _SMALL, 512, 128, _8_2_2, "g1 with vLLM on the same card", use_vllm=True, vllm_mode="colocate",
                  vllm_gpu_memory_utilization=0.3, **LORA)  # fmt: skip
TWO_RANKS = (
    samples("sft-2", "sft", _SMALL, 1024, (2, 1), "two ranks"),
    samples("dpo-2", "dpo", _SMALL, 512, (2, 1), "two ranks", **LORA),
    samples("reward-2", "reward", _SMALL, 512, (2, 1), "two ranks", **LORA),
)  # fmt: skip

_CPU: dict[str, Any] = {"bf16": False, "dtype": "float32"}
TINY = (
    samples("s1", "sft", "tiny", 32, (2, 2), "SFT", tags=("bisect", "grid"), **_CPU),
    generating("g1", "tiny", 16, 8, (4, 2, 2), "GRPO", **_CPU | {"use_peft": True, "lora_r": 4}),
    samples("d1", "dpo", "tiny", 32, (2, 2), "DPO", **_CPU),
    samples("r1", "reward", "tiny", 32, (2, 2), "reward", **_CPU),
    samples("w1", "sft", "wide", 256, (8, 1), "bytes of the split", tags=("grid", "search"), **_CPU, **_OFF),
)


def chosen(*, tiny: bool = False, only: tuple[str, ...] = ()) -> tuple[Config, ...]:
    """The campaign's configurations in order of value, or those named by `only`. Raises ConfigError for others."""
    usual = TINY if tiny else CONFIGS
    if not only:
        return usual
    known = {config.name: config for config in (*usual, *(() if tiny else (VLLM, *TWO_RANKS)))}
    if unknown := [name for name in only if name not in known]:
        near = nearest(unknown[0], known)
        raise ConfigError(f"--only takes names of experiments/gpu/configs.py; got {', '.join(unknown)}{near}")
    return tuple(known[name] for name in only)
