"""Configurations drawn by chance: every axis of a recipe on its own, so that what meets was chosen by nobody."""

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from gpu.configs import Config, generating, samples
from gpu.ranks import Ranks

from autofit.recipe.launch import Offload, Sharding

_MODELS = ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B", "meta-llama/Llama-3.2-1B", "google/gemma-3-1b-pt",
           "small-moe", "facebook/opt-350m", "EleutherAI/pythia-410m", "microsoft/phi-1_5")  # fmt: skip
_TOKENS = (96, 250, 512, 777, 1024, 1536, 2048)
_MICRO, _ACCUMULATION = (1, 2, 3, 4, 6, 8), (1, 2, 3)
_ALL_LINEAR: dict[str, Any] = {"use_peft": True, "lora_target_modules": "all-linear"}
_ADAPTERS: tuple[Mapping[str, Any], ...] = (
    {}, {}, {**_ALL_LINEAR, "lora_r": 8}, {**_ALL_LINEAR, "lora_r": 64, "lora_dropout": 0.05},
    {**_ALL_LINEAR, "lora_r": 16, "use_dora": True}, {**_ALL_LINEAR, "lora_r": 32, "load_in_4bit": True},
    {**_ALL_LINEAR, "lora_r": 16, "load_in_8bit": True}, {**_ALL_LINEAR, "lora_r": 128},
)  # fmt: skip
_DTYPES: tuple[Mapping[str, Any], ...] = (
    {}, {}, {"dtype": "float32"}, {"dtype": "float32", "bf16": False, "fp16": True}, {"dtype": "float32", "bf16": False}
)  # fmt: skip
_OPTIMIZERS = ("adamw_torch_fused", "adamw_torch", "adamw_8bit", "paged_adamw_32bit", "adafactor", "sgd", "lion_32bit")
_COMMON: tuple[Mapping[str, Any], ...] = (
    {}, {}, {"attn_implementation": "eager"}, {"max_grad_norm": 0.0}, {"gradient_checkpointing": False},
    {"gradient_checkpointing": False}, {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
    {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8},
)  # fmt: skip
_OF_TRAINER: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "sft": (
        {}, {"packing": True}, {"packing": True, "packing_strategy": "wrapped"}, {"loss_type": "nll"},
        {"loss_type": "dft"}, {"padding_free": True, "max_length": None}, {"neftune_noise_alpha": 5.0},
        {"activation_offloading": True},
    ),
    "dpo": (
        {}, {"precompute_ref_log_probs": True}, {"sync_ref_model": True}, {"loss_type": ["ipo"]},
        {"loss_type": ["sigmoid", "sft"]}, {"use_weighting": True}, {"padding_free": True, "max_length": None},
    ),
    "reward": ({}, {"center_rewards_coefficient": 0.01}),
    "hf": (
        {}, {"packing": True}, {"packing": True, "block_diagonal": True}, {"cut_cross_entropy": True},
        {"adapter_dtype": "float32"}, {"objective": "dpo"}, {"objective": "dpo", "float32_logits": True},
        {"objective": "kto"}, {"objective": "orpo", "nll_weight": 1.0}, {"objective": "simpo"},
        {"objective": "reward"}, {"objective": "classify", "num_labels": 3}, {"trainable_layers": 3},
    ),
    "grpo": (
        {}, {"beta": 0.04}, {"beta": 0.04, "sync_ref_model": True}, {"loss_type": "dapo"}, {"num_iterations": 2},
        {"top_entropy_quantile": 0.2}, {"importance_sampling_level": "sequence"},
    ),
    "rloo": ({}, {"beta": 0.04}, {"normalize_advantages": True}),
}  # fmt: skip
_SHARED: tuple[tuple[Sharding, bool, Offload], ...] = (  # ..., whether parameters are freed after the forward, offload
    ("ddp", True, "none"), ("ddp", True, "none"), ("fsdp1", True, "none"), ("fsdp1", False, "none"),
    ("fsdp2", True, "none"), ("fsdp2", True, "none"), ("fsdp2", False, "none"), ("fsdp2", True, "parameters"),
    ("zero1", True, "none"), ("zero2", True, "none"), ("zero2", True, "optimizer"), ("zero3", True, "none"),
    ("zero3", True, "parameters"),
)  # fmt: skip
_TRAINERS = ("sft", "sft", "hf", "hf", "dpo", "reward", "grpo", "grpo", "rloo")


def drawn(seed: int, count: int) -> tuple[Config, ...]:
    """Named SEED-0, SEED-1, ...; the first of them are the same for each `count`."""
    random = Random(seed)
    return tuple(_config(f"chance-{seed}-{number}", random) for number in range(count))


def drawn_on_ranks(seed: int, count: int) -> tuple[Ranks, ...]:
    """As `drawn`, each on two to four ranks."""
    random = Random(seed)
    return tuple(_on_ranks(f"ranks-{seed}-{number}", random) for number in range(count))


def _on_ranks(name: str, random: Random) -> Ranks:
    ranks, (sharding, reshards, offload) = random.choice((2, 2, 2, 3, 4)), random.choice(_SHARED)
    config = _config(name, random)
    return Ranks(config=config, ranks=ranks, sharding=sharding, reshard_after_forward=reshards, offload=offload)


def _config(name: str, random: Random) -> Config:
    trainer, model = random.choice(_TRAINERS), random.choice(_MODELS)
    axes = (random.choice(_ADAPTERS), random.choice(_DTYPES), random.choice(_COMMON),
            random.choice(_OF_TRAINER[trainer]), {"optim": random.choice(_OPTIMIZERS)})  # fmt: skip
    values: dict[str, Any] = {key: value for axis in axes for key, value in axis.items()}
    micro, accumulation, tokens = random.choice(_MICRO), random.choice(_ACCUMULATION), random.choice(_TOKENS)
    if trainer not in ("grpo", "rloo"):
        return samples(name, trainer, model, tokens, (micro, accumulation), _said(model, axes), **values)
    k, completion = random.choice((2, 4)), random.choice((16, 40, 64))
    return generating(name, model, tokens, completion, (micro * k, accumulation, accumulation), _said(model, axes),
                      trainer=trainer, k=k, **values)  # fmt: skip


def _said(model: str, axes: Sequence[Mapping[str, Any]]) -> str:
    pairs = [f"{key}={value}" for axis in axes for key, value in axis.items() if key != "lora_target_modules"]
    return f"{model.rpartition('/')[2]}, {', '.join(pairs)}"
