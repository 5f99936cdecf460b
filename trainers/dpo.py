"""TRL's DPOTrainer from a recipe: as `trl dpo` builds it, or on worst-case data with random weights for a probe."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import trl.trainer.dpo_trainer as trl_dpo
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import DPOTrainer

from autofit.fakegpu.patches.cuda_api import active_gpu
from autofit.plugin.protocol import EVALUATION, SampleLengths

from .common import (
    Counts,
    PreparedRows,
    fitted,
    lengths,
    prepared,
    prepared_longest,
    probed,
    real,
    samples_per_step,
    train_rows,
)
from .image_prompts import for_text
from .keys import COMPARED, dpo_tiers
from .rows import pad, place_of, shorter_pair
from .trl import SamplesTrainer
from .trl_config import TrlConfig

_SIDES = ("chosen_ids", "rejected_ids")


class _PreparedDpo(PreparedRows, DPOTrainer):  # type: ignore[misc]
    """Trains on rows already tokenised by TRL, and scores the reference on one micro-batch of them."""

    scoring_share = 0.0  # calls of `score_reference` per optimizer step of the real run

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._scored: dict[str, list[Any]] = {}  # {"train" or "eval": the pairs of a batch}
        super().__init__(*args, **kwargs)

    def _precompute_ref_logps(self, dataset: Dataset, name: str, batch_size: int) -> Dataset:
        self._scored[name] = [dataset[0]] * batch_size
        zeros = [0.0] * len(dataset)
        return dataset.add_column("ref_chosen_logps", zeros).add_column("ref_rejected_logps", zeros)

    def score_reference(self) -> None:
        """Score one micro-batch, as in TRL's pass over the dataset before training."""
        self._score("train")

    def score_evaluated(self) -> None:
        """Score one batch of the evaluation, as in TRL's pass over its dataset before training."""
        self._score("eval")

    def _score(self, name: str) -> None:
        scores = self.compute_ref_log_probs(
            self.ref_model or self.model, self._prepare_inputs(self.data_collator(self._scored[name]))
        )
        torch.cat(scores).cpu()

    def train(self, *args: Any, **kwargs: Any) -> Any:
        if self.args.precompute_ref_log_probs:
            if active_gpu() is None:  # the first pass of a process also loads kernels: the last one's seconds count
                self.score_reference()
            self.score_reference()
            if "eval" in self._scored:
                self.score_evaluated()
        return super().train(*args, **kwargs)


def _widths(rows: Dataset, of_answers: np.ufunc = np.maximum) -> Counts:
    """Tokens of each pair's prompt plus its longer (or by `np.minimum` its shorter) answer (rows,)."""
    prompt, *answers = (lengths(rows, name) for name in ("prompt_ids", *_SIDES))
    found: Counts = prompt + of_answers(*answers)
    return found


def _in_loss(prompt: Counts | int, answer: Counts | int, config: TrlConfig) -> Any:
    """Tokens of an answer that are left by TRL's truncation, and so counted by the loss."""
    limit = config.training.max_length
    if limit is None:
        return answer
    room = limit if config.training.truncation_mode == "keep_end" else np.maximum(0, limit - prompt)
    return np.minimum(answer, room)


def _with_loss(row: dict[str, Any], wanted: int, config: TrlConfig) -> dict[str, Any]:
    """`row` with `wanted` tokens in the loss at least: as long as before, of which less is prompt."""
    prompt = len(row["prompt_ids"])
    missing = wanted - sum(int(_in_loss(prompt, len(row[side]), config)) for side in _SIDES)
    more = min(prompt - 1, -(-missing // len(_SIDES)))
    if more <= 0:
        return row
    answers = {side: fitted(row[side], len(row[side]) + more) for side in _SIDES}
    return row | answers | {"prompt_ids": row["prompt_ids"][:-more]}


def _row(config: TrlConfig, worst_case: Mapping[str, Any]) -> dict[str, Any]:
    """The longest pair. Its prompt is cut if it fills `max_length`, as TRL would drop the pair.

    The loss counts as many of its tokens as of any pair: what is cut off the longest ones is their answer.
    """
    row = dict(worst_case["rows"][0])
    limit, own = config.training.max_length, worst_case["max_length"]
    answer = max(len(row[side]) for side in _SIDES)
    if limit is not None and len(row["prompt_ids"]) >= limit and config.training.truncation_mode == "keep_start":
        row["prompt_ids"] = row["prompt_ids"][: max(1, limit - answer)]
    wanted = worst_case["longest_uncut_tokens"] - len(row["prompt_ids"])
    if worst_case["cut"] and (limit is None or limit > own) and answer < wanted:
        row |= {side: fitted(row[side], wanted) for side in _SIDES}
    return _with_loss(row, worst_case.get("loss_tokens", 0), config)


def _scoring_share(config: TrlConfig, worst_case: Mapping[str, Any]) -> float:
    """Micro-batches scored in the pass before training, per optimizer step of the whole run."""
    training = config.training
    batch_size = training.precompute_ref_batch_size or training.per_device_train_batch_size
    return float(samples_per_step(config) / worst_case["times_trained"] / batch_size)


@contextmanager
def _weights_unhashed() -> Iterator[None]:
    """Context without the hash of the weights by which TRL names its file of reference scores: a probe keeps none."""
    original = trl_dpo.hash_module
    trl_dpo.hash_module = lambda _: ""
    try:
        yield
    finally:
        trl_dpo.hash_module = original


class DpoTrainer(SamplesTrainer):
    """`trl dpo`. The reference is scored within the update, or with `precompute_ref_log_probs` before training."""

    name = "dpo"
    phases = MappingProxyType({
        "score_reference": "scoring", "score_evaluated": EVALUATION, "_save_checkpoint": "save",
    })  # fmt: skip
    auto_class = AutoModelForCausalLM
    tiers = staticmethod(dpo_tiers)
    compared = (*COMPARED, "loss_type", "beta", "precompute_ref_log_probs")

    def real(self, config: TrlConfig) -> DPOTrainer:
        trainer = real(DPOTrainer, config)
        if config.script.ignore_bias_buffers:  # as in TRL's script
            buffers = trainer.model.named_buffers()
            trainer.model._ddp_params_and_buffers_to_ignore = [n for n, b in buffers if b.dtype == torch.bool]
        return trainer

    def probed(self, config: TrlConfig, worst_case: Mapping[str, Any]) -> DPOTrainer:
        with _weights_unhashed():
            trainer = probed(_PreparedDpo, trl_dpo, config, _row(config, worst_case), **for_text(config))
        trainer.scoring_share = _scoring_share(config, worst_case)
        pad(trainer, config, worst_case, partial(shorter_pair, limit=config.training.max_length))
        return trainer

    def tokens_per_step(self, config: TrlConfig, worst_case: Mapping[str, Any]) -> int:
        """Tokens of one optimizer step: prompt plus answer, for both answers of each pair."""
        row, limit = _row(config, worst_case), config.training.max_length
        widths = [len(row["prompt_ids"]) + len(row[side]) for side in _SIDES]
        return samples_per_step(config) * sum(w if limit is None else min(w, limit) for w in widths)

    def prepared(self, config: TrlConfig, rows: Dataset) -> Dataset:
        return prepared(DPOTrainer, trl_dpo, config, rows, **for_text(config))

    def widths(self, rows: Dataset) -> tuple[Counts, Counts]:
        return _widths(rows), _widths(rows) + _widths(rows, np.minimum)

    def worst_case(self, config: TrlConfig) -> tuple[Dataset, dict[str, Any], SampleLengths]:
        """(the worst-case pair, its facts, the lengths of all pairs).

        The worst pair is the largest after truncation, then before it, then the one with the longest answers.
        """
        raw = train_rows(config, "DPO", {"answers": ("chosen", "rejected")})
        training = config.training
        steps, epochs, limit = training.max_steps, training.num_train_epochs, training.max_length
        rows, largest = prepared_longest(DPOTrainer, trl_dpo, config, raw, _widths, **for_text(config))
        longer = _widths(rows)
        whole = np.minimum(longer, longer.max() if limit is None else limit)
        answers = lengths(rows, "chosen_ids") + lengths(rows, "rejected_ids")
        index = int(np.lexsort((answers, longer, whole))[-1])
        longest = int(longer.max())
        prompts, *sides = (lengths(rows, name) for name in ("prompt_ids", *_SIDES))
        facts = {
            "num_rows": len(raw), "longest_tokens": int(whole[index]), "max_length": limit,
            "cut": limit is not None and longest > limit, "longest_uncut_tokens": longest,
            "loss_tokens": int(sum(_in_loss(prompts, side, config) for side in sides).max()),
            "times_trained": epochs if steps <= 0 else samples_per_step(config) * steps / len(raw),
            **place_of(index, rows, raw, largest),
        }  # fmt: skip
        others = len(rows) < len(raw)
        told = SampleLengths.of(_widths(rows, np.minimum).tolist(), most=longest, others=others, sequences=2)
        return rows.select([index]), facts, told


TRAINER = DpoTrainer()
