"""Reward models of GRPO and RLOO in a probe: random weights, and every text at its full length.

TRL scores a whole rollout with each reward model at once. A simulated card has no weights and no text, and a probe on a
real one no trained answers; so the model comes from its config alone, and its tokenizer is replaced by one that gives
each text the tokens of the longest prompt and a full completion. A tokenizer of its own may make more of them.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from autofit.errors import ConfigError

from .common import random_model
from .trl_config import TrlConfig

_TOKEN, _PAD = 1, 0


class FullLength:
    """A tokenizer to TRL, which makes `tokens` tokens of any text or conversation."""

    pad_token_id = _PAD
    eos_token = pad_token = ""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def apply_chat_template(self, *_: object, **__: object) -> str:
        return ""

    def __call__(self, text: Sequence[str], **_: object) -> dict[str, torch.Tensor]:
        ids = torch.full((len(text), self._tokens), _TOKEN)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@contextmanager
def random_reward_models(module: ModuleType) -> Iterator[None]:
    """Context in which the trainer of `module` makes its reward models from their config, without a download."""
    original = module.AutoModelForSequenceClassification

    def from_pretrained(name: str, **kwargs: Any) -> Any:
        return random_model(name, AutoModelForSequenceClassification, **kwargs)

    module.AutoModelForSequenceClassification = SimpleNamespace(from_pretrained=from_pretrained)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.AutoModelForSequenceClassification = original  # type: ignore[attr-defined]


def tokenizers(rewards: Sequence[object], tokens: int) -> list[FullLength | None]:
    """The `reward_processing_classes` of a probe: one for each reward model (a name), None for a function."""
    return [FullLength(tokens) if isinstance(reward, str) else None for reward in rewards]


def check_reward_model(config: TrlConfig) -> None:
    """Raise ConfigError unless transformers can make the recipe's reward model and its weights match the recipe's."""
    name = config.script.reward_model_name_or_path
    weights, rewards = config.training.reward_weights, config.script.reward_funcs or []
    count = len(rewards) + bool(name)
    if weights is not None and len(weights) != count:
        raise ConfigError(
            f"reward_weights must have one number for each reward ({count}: reward_model_name_or_path first, if given, "
            f"then reward_funcs); got {len(weights)}: {weights}"
        )
    if not name:
        return
    try:
        found = AutoConfig.from_pretrained(name, trust_remote_code=bool(config.training.trust_remote_code))
        with torch.device("meta"):
            AutoModelForSequenceClassification.from_config(found)
    except (OSError, ValueError, KeyError) as error:
        problem = " ".join(str(error).split())[:200]
        folder = f"{name}/config.json" if os.path.isdir(name) else repr(name)
        raise ConfigError(
            f"reward_model_name_or_path must name a model that transformers can load to classify sequences; {folder} "
            f"cannot be: {problem}"
        ) from error
