"""TRL's RewardTrainer from a recipe: as `trl reward` builds it, or on worst-case data with random weights."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import trl.trainer.reward_trainer as trl_reward
from datasets import Dataset
from transformers import AutoModelForSequenceClassification
from trl import RewardTrainer

from autofit.recipe.trl_config import TrlConfig

from .common import fitted, lengths, limit_of, prepared_longest, probed, real, samples_per_step, train_rows

PHASES = {"_save_checkpoint": "save"}
QUIET: dict[str, object] = {}
MODEL = AutoModelForSequenceClassification
_SIDES = ("chosen_ids", "rejected_ids")


class _Prepared(RewardTrainer):  # type: ignore[misc]
    """Trains on rows that TRL has tokenised before."""

    def _prepare_dataset(self, dataset: Dataset, *_: object, **__: object) -> Dataset:
        return dataset


def build(config: TrlConfig, *, worst_case: Mapping[str, Any] | None = None) -> RewardTrainer:
    """The trainer of `config`, as TRL's own script makes it; with `worst_case`, random weights on its one row."""
    if worst_case is None:
        return real(RewardTrainer, config)
    return probed(_Prepared, trl_reward, config, _row(config, worst_case))


def tokens_per_step(config: TrlConfig, worst_case: Mapping[str, Any]) -> int:
    """Tokens of both answers that one optimizer step of one rank trains on, at full length."""
    row = _row(config, worst_case)
    return samples_per_step(config) * sum(len(row[side]) for side in _SIDES)


def worst_case(config: TrlConfig) -> tuple[Dataset, dict[str, Any]]:
    """The pair with the longest answer among those that TRL keeps (it drops what is over `max_length`)."""
    kinds = {"answers": ("chosen", "rejected"), "tokens": _SIDES}
    raw = train_rows(config, "Reward", kinds)
    limit = config.training.max_length
    rows = prepared_longest(RewardTrainer, trl_reward, config, raw, None)
    chosen, rejected = (lengths(rows, side) for side in _SIDES)
    longer = np.maximum(chosen, rejected)
    index = int(np.lexsort((chosen + rejected, longer))[-1])
    longest, dropped = int(longer[index]), len(raw) - len(rows)
    facts = {"num_rows": len(raw), "longest_tokens": longest, "max_length": limit, "cut": dropped > 0}
    return rows.select([index]), facts


def _row(config: TrlConfig, worst_case: Mapping[str, Any]) -> dict[str, Any]:
    """The longest pair; under another `max_length` than the recipe's, a pair that no kept one can exceed."""
    row = dict(worst_case["rows"][0])
    limit, own = limit_of(config, worst_case), worst_case["max_length"]
    for side in _SIDES:
        count = len(row[side])
        longer = limit is not None and own is not None and limit > own and worst_case["cut"]
        if limit is not None and (count > limit or longer):
            row[side] = fitted(row[side], limit)
    return row
