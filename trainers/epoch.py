"""The place of a sample in the order of the first epoch, as the seed shuffles it."""

from collections.abc import Sequence
from typing import Any

import torch

from .trl_config import TrlConfig

_ROW, _INDEX, _COUNT = "row", "row_trained_on", "rows_trained_on"


def place_of(
    index: int, rows: Any, raw: Any, largest: Sequence[int] | None, *, mixed: bool = False
) -> dict[str, int | None]:
    """Where sample `index` of the prepared `rows` is: its row in the dataset `raw`, and in what is trained on.

    `largest` has the places in `raw` of `rows`, if only those were prepared. What is not known is None: the row where
    samples were dropped, or `mixed` by packing or shuffling.
    """
    if largest is None:
        return {_ROW: index if len(rows) == len(raw) and not mixed else None, _INDEX: index, _COUNT: len(rows)}
    place = None if mixed else largest[index]
    return {_ROW: place, _INDEX: place, _COUNT: len(raw)}


def in_epoch(config: TrlConfig, facts: dict[str, Any]) -> dict[str, object]:
    """What a trainer tells of its longest sample's place; takes `place_of` out of the `facts`."""
    row, index, count = (facts.pop(name) for name in (_ROW, _INDEX, _COUNT))
    place = None if index is None else _shuffled(config.training, index, count)
    return {"longest_row": row, "longest_place": place, "num_samples": count}


def _shuffled(training: Any, index: int, count: int) -> int | None:
    """The place of sample `index` of `count` in the first epoch; None for an order that the seed alone does not tell.

    Rollouts: TRL's RepeatSampler, unless `shuffle_dataset` is off. Others: transformers' random sampler, seeded by
    accelerate with `data_seed`, else with the seed. Both permute by torch's generator (TRL 1.16, transformers 5.23).
    """
    if hasattr(training, "num_generations"):
        shuffled, seed = training.shuffle_dataset, training.seed
    else:
        strategy = getattr(training, "train_sampling_strategy", "random")
        if strategy not in ("random", "sequential"):
            return None
        if strategy == "random" and not training.accelerator_config.use_seedable_sampler:
            return None
        shuffled, seed = strategy == "random", training.seed if training.data_seed is None else training.data_seed
    if not shuffled:
        return index
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return int((order == index).nonzero()[0, 0])
