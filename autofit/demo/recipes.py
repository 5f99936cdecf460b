"""The demo's recipes for `trl grpo --config`, as a practitioner would write them."""

from collections.abc import Mapping
from pathlib import Path

import yaml

RecipeValue = str | int | float | bool | list[str]
Recipe = Mapping[str, RecipeValue]

REWARD = "autofit.demo.rewards.chain_sum_reward"


def smollm2_recipe(*, model: Path, data: Path) -> Recipe:
    """GRPO with LoRA on one-digit sums: 16 completions of at most 12 tokens per step.

    A plausible first guess: TRL's own default of gradient checkpointing, and four micro-batches.
    Dropout is off, as its masks would differ between splits of the same batch.
    """
    return {
        "model_name_or_path": str(model),
        "dtype": "bfloat16",
        "dataset_name": str(data),
        "reward_funcs": [REWARD],
        "output_dir": "outputs/smollm2-chain-sum",
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "num_generations": 8,
        "max_completion_length": 12,
        "temperature": 0.8,
        "beta": 0.0,
        "loss_type": "dapo",
        "learning_rate": 5.0e-4,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 2,
        "max_steps": 30,
        "use_peft": True,
        "lora_r": 16,
        "lora_alpha": 32,
        "lora_dropout": 0.0,
        "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "bf16": True,
        "logging_steps": 1,
        "save_steps": 10,
        "report_to": "none",
        "seed": 42,
    }


def tiny_recipe(*, model: Path, data: Path, seed: int) -> Recipe:
    """GRPO on the tiny model: 256 completions of at most 5 characters per step."""
    return {
        "model_name_or_path": str(model),
        "dtype": "float32",
        "dataset_name": str(data),
        "reward_funcs": [REWARD],
        "output_dir": f"outputs/tiny-chain-sum-{seed}",
        "per_device_train_batch_size": 128,
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": False,
        "num_generations": 8,
        "max_completion_length": 5,
        "temperature": 1.0,
        "beta": 0.0,
        "loss_type": "dapo",
        "learning_rate": 1.0e-3,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 5,
        "max_steps": 100,
        "use_peft": True,
        "lora_r": 16,
        "lora_alpha": 32,
        "lora_dropout": 0.05,
        "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "bf16": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "seed": seed,
    }


def recipe_text(recipe: Recipe) -> str:
    """The recipe as YAML text, keys in the order of the functions above."""
    text: str = yaml.safe_dump(dict(recipe), sort_keys=False, default_flow_style=False, width=120)
    return text
