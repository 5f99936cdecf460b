"""Recipes as plain values, for tests that need no TRL."""

from autofit.recipe.recipe import Recipe


def grpo_recipe(**changes: object) -> Recipe:
    """A resolved GRPO recipe; `world_size`, `num_prompts` and TRL keys can be changed."""
    world_size = int(str(changes.pop("world_size", 1)))
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
        trainer="grpo", values=dict(changes), resolved=resolved, world_size=world_size,
        num_prompts=num_prompts if isinstance(num_prompts, int) else None,
    )  # fmt: skip
