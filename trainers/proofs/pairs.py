"""The small trainings of gradient proofs of SFT, DPO and Reward: fixed rows of different lengths."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any

import trl
from datasets import Dataset
from trl import get_peft_config

from ..trl_config import TrlConfig
from .small_model import sample, tokenizer


def samples_per_step(config: TrlConfig) -> int:
    """Rows of one optimizer step, over all ranks."""
    training = config.training
    return int(training.per_device_train_batch_size * training.gradient_accumulation_steps) * config.ranks


def steps_of_a_round(config: TrlConfig) -> int:
    """1: no step depends on an earlier one."""
    return 1


def common_factor(configs: list[TrlConfig], most_samples: int) -> int:
    """The divisor of accumulation in all recipes, so that a step has at most `most_samples`.

    The smallest sufficient divisor, else the largest common one.
    """
    common = gcd(*(int(c.training.gradient_accumulation_steps) for c in configs))
    valid = [f for f in range(1, common + 1) if common % f == 0]
    wanted = [f for f in valid if samples_per_step(configs[0]) // f <= most_samples]
    return min(wanted, default=max(valid))


def shrunken(config: TrlConfig, factor: int) -> dict[str, object]:
    """The keys that make the recipe's step `factor` times smaller."""
    return {"gradient_accumulation_steps": config.training.gradient_accumulation_steps // factor}


def rows(config: TrlConfig, steps: int, *columns: str) -> Dataset:
    """Rows for `steps` optimizer steps, as text: each of `columns` except "prompt" is another answer to the prompt."""
    numbers = range(steps * samples_per_step(config))
    answers = [c for c in columns if c != "prompt"]
    found = {c: [_text(sample(i, j + i // 2 % 2).completion) for i in numbers] for j, c in enumerate(answers)}
    prompts = {"prompt": [_text(sample(i, 0).prompt) + " " for i in numbers]} if "prompt" in columns else {}
    return Dataset.from_dict(prompts | found)


def _text(tokens: tuple[int, ...]) -> str:
    """`tokens` as words of the small vocabulary, without an end token: TRL adds its own."""
    return " ".join(f"w{max(3, token)}" for token in tokens)


@dataclass(frozen=True)
class PairTraining:
    """The small training of one of TRL's trainers, with the settings that a fixed row asks for (`SAME`)."""

    trainer: str
    columns: tuple[str, ...]
    SAME: Mapping[str, object]

    samples_per_step = staticmethod(samples_per_step)
    steps_of_a_round = staticmethod(steps_of_a_round)
    common_factor = staticmethod(common_factor)
    shrunken = staticmethod(shrunken)

    def build(self, config: TrlConfig, steps: int) -> Any:
        """TRL's trainer over `steps` optimizer steps of fixed rows."""
        config.training.max_length = None  # a limit would drop or cut the fixed rows; TRL's SFT refuses it with padding
        return getattr(trl, self.trainer)(
            model=config.model.model_name_or_path, args=config.training, processing_class=tokenizer(),
            peft_config=get_peft_config(config.model), train_dataset=rows(config, steps, *self.columns),
        )  # fmt: skip


SFT = PairTraining(
    "SFTTrainer", ("prompt", "completion"),
    # Packing is off: it changes the rows, not the normalisation of the loss. The rows select the tokens of the loss.
    {
        "packing": False, "eval_packing": None, "assistant_only_loss": False, "chat_template_path": None,
        "dataset_kwargs": None, "activation_offloading": False, "eos_token": None, "pad_token": None,
    },
)  # fmt: skip
DPO = PairTraining(
    "DPOTrainer", ("prompt", "chosen", "rejected"),
    {
        "max_length": None, "padding_free": False, "activation_offloading": False, "disable_dropout": True,
        "pad_token": None,
    },
)  # fmt: skip
REWARD = PairTraining(
    "RewardTrainer", ("chosen", "rejected"),
    {
        "max_length": None, "activation_offloading": False, "disable_dropout": True, "chat_template_path": None,
        "eos_token": None, "pad_token": None,
    },
)  # fmt: skip
