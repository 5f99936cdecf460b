"""The recipes and spaces of the experiment: five recipes on three cards, from small ones to ones that never fit."""

from dataclasses import dataclass

import numpy as np
from law import SHAPES, Card, Columns, Shape, columns, predict

from autofit.forecast.predictions import Predictions
from autofit.recipe.keys import Tier
from autofit.recipe.recipe import Recipe
from autofit.space.knob import load_space
from autofit.space.space import Knob, Space
from autofit.trainers.keys import ROLLOUTS
from autofit.tuning.candidates import Floats, Grid

# The knobs of the default space whose effect the law knows.
_OF_THE_LAW = (
    "per_device_train_batch_size", "steps_per_generation", "gradient_checkpointing", "attn_implementation",
    "env.PYTORCH_CUDA_ALLOC_CONF", "lora_r", "max_completion_length", "num_generations", "quantization",
)  # fmt: skip
_MORE_KNOBS = (
    Knob(name="optim", tier="neutral", values=("adamw_torch", "adamw_torch_fused")),
    Knob(name="torch_compile", tier="neutral", values=(False, True)),
    Knob(name="torch_empty_cache_steps", tier="neutral", values=(None, 1)),
)
_FLASH = Knob(name="attn_implementation", tier="neutral", values=("sdpa", "eager", "flash_attention_2"))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeOf:
    """A recipe: its model, the split of its batch, and the lowest tier of its search."""

    name: str
    shape: str
    split: tuple[int, int, int]  # micro-batch, accumulation, steps_per_generation
    groups: int
    completion_tokens: int
    allow: Tier
    loss: str = "grpo"
    checkpointing: bool = True
    lora_r: int = 16


RECIPES = (
    RecipeOf(name="small, under-used", shape="0.5B", split=(4, 16, 16), groups=8, completion_tokens=512,
             allow="neutral"),
    RecipeOf(name="1.5B, long completions", shape="1.5B", split=(8, 12, 12), groups=8, completion_tokens=2048,
             allow="neutral"),
    RecipeOf(name="4B, dapo", shape="4B", split=(4, 8, 8), groups=4, completion_tokens=1024, allow="approximate",
             loss="dapo", lora_r=32),
    RecipeOf(name="8B, too large a micro-batch", shape="8B", split=(32, 2, 2), groups=8, completion_tokens=768,
             allow="neutral", checkpointing=False),
    RecipeOf(name="14B, anything goes", shape="14B", split=(4, 8, 8), groups=8, completion_tokens=1024,
             allow="recipe"),
)  # fmt: skip

OTHERS = (  # hold-out: no constant of the search was chosen on these
    RecipeOf(name="0.5B, bnpo", shape="0.5B", split=(16, 4, 4), groups=16, completion_tokens=1024, allow="approximate",
             loss="bnpo", lora_r=8),
    RecipeOf(name="1.5B, short completions", shape="1.5B", split=(2, 32, 32), groups=4, completion_tokens=256,
             allow="neutral", checkpointing=False),
    RecipeOf(name="4B, anything goes", shape="4B", split=(6, 16, 16), groups=12, completion_tokens=1536,
             allow="recipe"),
    RecipeOf(name="8B, fills a 4090", shape="8B", split=(2, 16, 16), groups=8, completion_tokens=512, allow="neutral",
             lora_r=64),
    RecipeOf(name="14B, fills an A100-40GB", shape="14B", split=(1, 64, 64), groups=16, completion_tokens=384,
             allow="approximate", loss="dr_grpo"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """A space and a target, as the search sees them: the grid, and the predictions if there are any."""

    name: str
    space: Space
    grid: Grid
    predictions: Predictions | None
    target_bytes: int


@dataclass(frozen=True, kw_only=True, eq=False)
class LawCase(Case):
    """A case with bytes and seconds from a law, for a model on a card."""

    known: Columns
    shape: Shape
    card: Card


def recipe_of(wanted: RecipeOf) -> Recipe:
    micro, accumulation, chunk = wanted.split
    resolved: dict[str, object] = {
        "model_name_or_path": wanted.shape, "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": accumulation, "steps_per_generation": chunk, "num_generations": wanted.groups,
        "generation_batch_size": micro * chunk, "max_completion_length": wanted.completion_tokens, "num_iterations": 1,
        "gradient_checkpointing": wanted.checkpointing, "attn_implementation": None, "loss_type": wanted.loss,
        "use_peft": True, "lora_r": wanted.lora_r, "lora_alpha": 2 * wanted.lora_r, "load_in_4bit": False,
        "load_in_8bit": False, "scale_rewards": "group", "top_entropy_quantile": 1.0, "optim": "adamw_torch",
        "torch_compile": False, "torch_empty_cache_steps": None,
    }  # fmt: skip
    return Recipe(trainer="grpo", values={}, resolved=resolved, keys=ROLLOUTS)


def case_of(wanted: RecipeOf, card: Card) -> LawCase:
    knobs = [k for k in load_space(None, trainer="grpo") if k.name in _OF_THE_LAW]
    knobs = [_FLASH if k.name == "attn_implementation" else k for k in knobs]
    knobs = [k if k.name != "quantization" else Knob(name=k.name, tier=k.tier, values=k.values,
             memory_ascending=k.memory_ascending, needs=("lora",)) for k in knobs]  # fmt: skip
    more = () if wanted.allow == "recipe" else _MORE_KNOBS
    space = Space.of(recipe_of(wanted), (*knobs, *more), allow=wanted.allow, device="cuda")
    grid = Grid.of(space)
    shape = SHAPES[wanted.shape]
    known = columns(space)
    floor, used, step, rollout = predict(known, shape, card)
    predictions = Predictions(candidates=grid.candidates, floor_bytes=floor, device_used_bytes=used, step_s=step,
                              rollout_s=rollout)  # fmt: skip
    return LawCase(name=f"{wanted.name} on {card.name}", space=space, known=known, shape=shape, card=card, grid=grid,
                   predictions=predictions, target_bytes=int(0.98 * card.capacity_bytes))  # fmt: skip


def optimum(case: Case, used: Floats, step: Floats) -> tuple[int, float] | None:
    """(index of the tier, seconds) of the exhaustive optimum by the winner rule, or None when nothing fits."""
    fits = used <= case.target_bytes
    if not fits.any():
        return None
    tier = int(case.grid.tiers[fits].min())
    return tier, float(np.min(step[fits & (case.grid.tiers == tier)]))
