"""The trainer `hf` on samples of many lengths, as a training draws them, in place of the longest in every micro-batch.

A training's live bytes are at their most with the longest sample, and its reserved bytes are not: cached blocks of one
length seldom serve another, so the allocator asks for more, until it has enough for any order of lengths.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset

from autofit.trainers import hf_training
from autofit.trainers.common import random_weights, samples_per_step
from autofit.trainers.hf import HfTrainer, _row
from autofit.trainers.hf_training import made
from autofit.trainers.own_keys import OwnKeys
from autofit.trainers.rows import with_tokens
from autofit.trainers.trl_config import TrlConfig
from experiments.frontends.peaks.rows import Part
from experiments.frontends.peaks.then import loading, shift

NAME = "experiments.frontends.peaks.mixed:TRAINER"


@dataclass(frozen=True)
class Settings:
    """Keys of a recipe besides those of `hf`."""

    sample_tokens: str  # the samples' lengths, in order, with commas between
    weights_alone: bool = False  # as in then.py
    shifted_logits: str = ""  # as in then.py


class Mixed(OwnKeys, HfTrainer):  # type: ignore[misc]
    settings = Settings

    def probed(self, config: TrlConfig, worst_case: Mapping[str, Any]) -> Any:
        longest = _row(config, worst_case)
        own = self.own(config)
        drawn = [int(text) for text in own.sample_tokens.split(",")]
        count = samples_per_step(config) * int(config.training.world_size) * (config.training.max_steps + 1)
        rows = [with_tokens(longest, drawn[place % len(drawn)], first=False) for place in range(count)]
        with random_weights(hf_training), loading(weights_alone=own.weights_alone):
            trainer = made(config, Dataset.from_list(rows))
        shift(trainer.model, own.shifted_logits)
        return trainer


def draw(parts: Sequence[Part], *, count: int, most: int | None, seed: int = 0) -> tuple[int, ...]:
    """`count` lengths of a mixture of datasets, each a log-normal law of its mean and deviation between its ends.

    Samples of more than `most` tokens are left out, as ms-swift does.
    """
    rng = random.Random(seed)
    found: list[int] = []
    while len(found) < count:
        _, mean, deviation, low, high = rng.choices(parts, [part[0] for part in parts])[0]
        spread = math.sqrt(math.log(1 + (deviation / mean) ** 2))
        tokens = round(math.exp(rng.gauss(math.log(mean) - spread**2 / 2, spread)))
        if low <= tokens <= min(high, most or high):
            found.append(tokens)
    return tuple(found)


def packs(parts: Sequence[Part], *, count: int, most: int, together: int, seed: int = 0) -> tuple[int, ...]:
    """`count` rows' tokens as ms-swift packs samples of `parts` to `most`: the longest first, each where it fits.

    It packs `together` samples at a time; the last row of them, which is not full, is packed again with the next ones.
    """
    lengths = iter(draw(parts, count=together * (count + 1), most=most, seed=seed))
    found: list[int] = []
    left: list[int] = []
    while len(found) < count:
        rows: list[list[int]] = []
        for tokens in sorted([*left, *itertools.islice(lengths, together)], reverse=True):
            fits = next((row for row in rows if sum(row) + tokens <= most), None)
            if fits is None:
                rows.append([tokens])
            else:
                fits.append(tokens)
        left = rows.pop()
        found += [sum(row) for row in rows]
    return tuple(found[:count])


TRAINER = Mixed()
