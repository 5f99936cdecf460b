"""What a gradient proof of SFT, DPO and Reward trains on: fixed rows of different lengths."""

from math import gcd
from typing import Any

from datasets import Dataset
from trl import get_peft_config

from ..trl_config import TrlConfig
from .samples import sample
from .small_model import tokenizer


def samples_per_step(config: TrlConfig) -> int:
    """Rows of one optimizer step."""
    training = config.training
    return int(training.per_device_train_batch_size * training.gradient_accumulation_steps)


def steps_of_a_round(config: TrlConfig) -> int:
    """One optimizer step: nothing is reused by the next."""
    return 1


def common_factor(configs: list[TrlConfig], most_samples: int) -> int:
    """By how much accumulation can be divided in all recipes, to hold `most_samples` or less: the least that suffices,
    or the most that there is."""
    common = gcd(*(int(c.training.gradient_accumulation_steps) for c in configs))
    valid = [f for f in range(1, common + 1) if common % f == 0]
    wanted = [f for f in valid if samples_per_step(configs[0]) // f <= most_samples]
    return min(wanted, default=max(valid))


def shrunken(config: TrlConfig, factor: int) -> dict[str, object]:
    """The keys that make the recipe's step `factor` times smaller."""
    return {"gradient_accumulation_steps": config.training.gradient_accumulation_steps // factor}


def rows(config: TrlConfig, steps: int, *columns: str) -> Dataset:
    """Rows for `steps` optimizer steps, as text: each of `columns` but "prompt" is another answer to the prompt."""
    numbers = range(steps * samples_per_step(config))
    answers = [c for c in columns if c != "prompt"]
    found = {c: [_text(sample(i, j + i // 2 % 2).completion) for i in numbers] for j, c in enumerate(answers)}
    prompts = {"prompt": [_text(sample(i, 0).prompt) + " " for i in numbers]} if "prompt" in columns else {}
    return Dataset.from_dict(prompts | found)


def _text(tokens: tuple[int, ...]) -> str:
    """Words of the small vocabulary; an end token is left to TRL, which adds its own."""
    return " ".join(f"w{max(3, token)}" for token in tokens)


def arguments(config: TrlConfig) -> dict[str, Any]:
    """What every one of these trainers is made with, but for its rows."""
    return {
        "model": config.model.model_name_or_path,
        "args": config.training,
        "processing_class": tokenizer(),
        "peft_config": get_peft_config(config.model),
    }
