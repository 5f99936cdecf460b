"""The trainer `hf` with what older libraries did otherwise, for rows measured with them.

Read in PEFT 0.4 and 0.5 (`prepare_model_for_kbit_training`, `ModulesToSaveWrapper`), in Axolotl at dc71d8872, which
casts nothing back after `prepare_model_for_kbit_training`, and in transformers 4.46, 4.49 and 4.50, which first takes
a block for all weights, and gives it back, before it loads them (`caching_allocator_warmup`).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import transformers.modeling_utils as modeling

from autofit.trainers.hf import HfTrainer
from autofit.trainers.own_keys import OwnKeys
from autofit.trainers.trl_config import TrlConfig

NAME = "experiments.frontends.peaks.then:TRAINER"


@dataclass(frozen=True)
class Settings:
    """Keys of a recipe besides those of `hf`."""

    single_rest: bool = False  # what is not quantised (norms, embeddings, head) is held in float32
    half_kept: bool = False  # trained copies of whole modules have the model's dtype, as adapters had not
    weights_alone: bool = False  # no block for all weights is taken before they are loaded
    shifted_logits: str = ""  # the loss is of a copy of the logits, made after (float32) or before they become float32


class Then(OwnKeys, HfTrainer):  # type: ignore[misc]
    settings = Settings

    def probed(self, config: TrlConfig, worst_case: Mapping[str, Any]) -> Any:
        own = self.own(config)
        with loading(weights_alone=own.weights_alone):
            trainer = super().probed(config, worst_case)
        model = trainer.model
        shift(model, own.shifted_logits)
        for name, parameter in model.named_parameters():
            if own.half_kept and ".modules_to_save." in name:
                parameter.data = parameter.data.to(torch.bfloat16)
            elif own.single_rest and not _quantised(parameter):
                parameter.data = parameter.data.to(torch.float32)
        return trainer


def loading(*, weights_alone: bool) -> AbstractContextManager[object]:
    """Context in which transformers loads as it did before 4.50, if `weights_alone`."""
    return mock.patch.object(modeling, "caching_allocator_warmup") if weights_alone else nullcontext()


def shift(model: Any, dtype: str) -> None:
    """Give `model` a loss over a copy of the logits less the last token's, as its code of then had; no `dtype`: none.

    transformers before 4.48 copies float32 logits. Qwen's own modeling_qwen.py copies them in the model's dtype, and
    autocast makes them float32 for the cross-entropy.
    """
    if not dtype:
        return
    base = model.get_base_model() if hasattr(model, "get_base_model") else model

    def loss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **kwargs: Any) -> torch.Tensor:
        held = logits.float() if dtype == "float32" else logits
        shifted = held[..., :-1, :].contiguous().view(-1, vocab_size)
        wanted = labels[..., 1:].contiguous().view(-1)
        return torch.nn.functional.cross_entropy(shifted, wanted)

    base.loss_function = loss


def _quantised(parameter: torch.nn.Parameter) -> bool:
    """Whether bitsandbytes packs it; its 4 bits may be stored as bfloat16."""
    return getattr(parameter, "quant_state", None) is not None or not parameter.is_floating_point()


TRAINER = Then()
