"""TRL's RewardTrainer from a recipe: as `trl reward` builds it, or on worst-case data with random weights."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import trl.trainer.reward_trainer as trl_reward
from datasets import Dataset
from transformers import AutoModelForSequenceClassification
from trl import RewardTrainer

from autofit.errors import ConfigError
from autofit.plugin.protocol import SampleLengths

from .common import (
    Counts,
    PreparedRows,
    fitted,
    lengths,
    limit_of,
    prepared,
    prepared_longest,
    probed,
    real,
    samples_per_step,
    train_rows,
)
from .keys import COMPARED
from .rows import pad, place_of, shorter_pair
from .trl import SamplesTrainer
from .trl_config import TrlConfig

_SIDES = ("chosen_ids", "rejected_ids")


class _Prepared(PreparedRows, RewardTrainer):  # type: ignore[misc]
    """Trains on rows already tokenised by TRL."""


def _row(config: TrlConfig, worst_case: Mapping[str, Any]) -> dict[str, Any]:
    """The longest pair; if `max_length` differs from the recipe's, an upper bound of all pairs that TRL keeps."""
    row = dict(worst_case["rows"][0])
    limit, own = limit_of(config, worst_case), worst_case["max_length"]
    for side in _SIDES:
        count = len(row[side])
        longer = limit is not None and own is not None and limit > own and worst_case["cut"]
        if limit is not None and (count > limit or longer):
            row[side] = fitted(row[side], limit)
    return row


class RewardModelTrainer(SamplesTrainer):
    """`trl reward`."""

    name = "reward"
    auto_class = AutoModelForSequenceClassification
    compared = (
        *COMPARED,
        "center_rewards_coefficient",
    )

    def parse(self, values: Mapping[str, object], *, overrides: Mapping[str, object]) -> TrlConfig:
        config = super().parse(values, overrides=overrides)
        task = config.model.lora_task_type
        if config.model.use_peft and task != "SEQ_CLS":
            raise ConfigError(
                f"lora_task_type must be SEQ_CLS for a reward model with LoRA, or PEFT takes it for a language model; "
                f"got {task} ({'given' if 'lora_task_type' in values else 'the default of TRL'}); set "
                "lora_task_type: SEQ_CLS"
            )
        return config

    def real(self, config: TrlConfig) -> RewardTrainer:
        return real(RewardTrainer, config)

    def probed(self, config: TrlConfig, worst_case: Mapping[str, Any]) -> RewardTrainer:
        trainer = probed(_Prepared, trl_reward, config, _row(config, worst_case))
        pad(trainer, config, worst_case, shorter_pair)
        return trainer

    def tokens_per_step(self, config: TrlConfig, worst_case: Mapping[str, Any]) -> int:
        """Tokens of one optimizer step: both answers of each pair."""
        row = _row(config, worst_case)
        return samples_per_step(config) * sum(len(row[side]) for side in _SIDES)

    def prepared(self, config: TrlConfig, rows: Dataset) -> Dataset:
        return prepared(RewardTrainer, trl_reward, config, rows)

    def widths(self, rows: Dataset) -> tuple[Counts, Counts]:
        chosen, rejected = (lengths(rows, side) for side in _SIDES)
        return np.maximum(chosen, rejected), chosen + rejected

    def worst_case(self, config: TrlConfig) -> tuple[Dataset, dict[str, Any], SampleLengths]:
        """(the pair with the longest answer, its facts, the lengths of all pairs), of those that TRL keeps.

        It drops pairs over `max_length`.
        """
        kinds = {"answers": ("chosen", "rejected"), "tokens": _SIDES}
        raw = train_rows(config, "Reward", kinds)
        limit = config.training.max_length
        rows, largest = prepared_longest(RewardTrainer, trl_reward, config, raw, None)
        chosen, rejected = (lengths(rows, side) for side in _SIDES)
        longer = np.maximum(chosen, rejected)
        index = int(np.lexsort((chosen + rejected, longer))[-1])
        longest, dropped = int(longer[index]), len(raw) - len(rows)
        facts = {"num_rows": len(raw), "longest_tokens": longest, "max_length": limit, "cut": dropped > 0}
        facts |= place_of(index, rows, raw, largest)
        shorter = np.minimum(chosen, rejected).tolist()
        return rows.select([index]), facts, SampleLengths.of(shorter, most=longest, sequences=2)


TRAINER = RewardModelTrainer()
