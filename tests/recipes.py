"""Recipes as plain values, for tests that need no TRL."""

from pathlib import Path
from typing import Any

from autofit.plugin.protocol import Inspection, WorstCase
from autofit.plugin.registry import load
from autofit.recipe.keys import Tier
from autofit.recipe.launch import Launch
from autofit.recipe.recipe import Recipe
from autofit.trainers.keys import (
    ROLLOUTS,
    SAMPLES,
    TILE_TOKENS,
    dpo_tiers,
    grpo_tiers,
    hf_tiers,
    rloo_tiers,
    sample_tiers,
)

TIERS_OF = {
    "grpo": grpo_tiers,
    "rloo": rloo_tiers,
    "dpo": dpo_tiers,
    "sft": sample_tiers,
    "reward": sample_tiers,
    "hf": hf_tiers,
}


def trl_facts(trainer: str, resolved: dict[str, object], **facts: bool) -> dict[str, Any]:
    """What TRL's trainer of that name tells of a resolved recipe, as far as it needs no model: arguments of Recipe."""
    tiers: dict[str, Tier] = TIERS_OF[trainer](resolved, **facts)
    generates = trainer in ("grpo", "rloo")
    return {"keys": ROLLOUTS if generates else SAMPLES, "tiers": tiers, "tile_tokens": TILE_TOKENS}


def inspect(
    trainer: str, values: dict[str, object], device: str, worst_case: Path, prompt_tokens: int | None = None
) -> dict[str, object]:
    """What a trainer says of a recipe, as JSON."""
    asked = Inspection(device=device, worst_case=WorstCase(path=worst_case), prompt_tokens=prompt_tokens)
    return load(trainer).inspect(values, asked).to_json()


def grpo_recipe(**changes: object) -> Recipe:
    """A resolved GRPO recipe; `world_size`, `num_prompts` and TRL keys can be changed."""
    world_size = int(str(changes.pop("world_size", 1)))
    facts = {name: bool(changes.pop(name, False)) for name in ("balances_experts", "counts_padding")}
    num_prompts = changes.pop("num_prompts", None)
    resolved: dict[str, object] = {
        "model_name_or_path": "m", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4,
        "steps_per_generation": 4, "num_generations": 4, "max_completion_length": 64, "num_iterations": 1,
        "gradient_checkpointing": True, "attn_implementation": None, "loss_type": "grpo", "use_peft": True,
        "lora_r": 16, "lora_alpha": 32, "load_in_4bit": False, "load_in_8bit": False, "scale_rewards": "group",
        "top_entropy_quantile": 1.0, "generation_batch_size": 16,
    }  # fmt: skip
    resolved |= changes
    return Recipe(
        trainer="grpo", values=dict(changes), resolved=resolved, launch=Launch(ranks=world_size), model="m",
        **trl_facts("grpo", resolved, **facts),
        num_prompts=num_prompts if isinstance(num_prompts, int) else None,
    )  # fmt: skip
