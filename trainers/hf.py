"""A plain `transformers.Trainer` from a recipe: what LLaMA-Factory, Axolotl, ms-swift and most scripts train with.

A causal model's own loss makes the logits of all tokens of a micro-batch, in float32; TRL's trainers never do. The keys
are those of `transformers.TrainingArguments` and TRL's `ModelConfig`, and a few for the loss and the batches
(hf_script.HfConfig).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import AutoModelForCausalLM

from autofit.errors import ConfigError
from autofit.fakegpu.patches.cuda_api import active_gpu
from autofit.plugin.protocol import Facts, Inspection, SampleLengths
from autofit.recipe.keys import evaluates

from . import hf_training
from .common import (
    LARGEST,
    Counts,
    dataset_name,
    documents,
    fitted,
    largest_rows,
    lengths,
    one_batch,
    random_weights,
    repeated,
    samples_per_step,
    short,
    split,
    train_rows,
)
from .hf_data import KINDS, SIDES, Row, packed, shorter, tokenised
from .hf_ebft import Strides
from .hf_script import SAMPLES, TOKENS
from .hf_training import architecture_of, made, tokenizer_of
from .keys import COMPARED, hf_tiers
from .keys import SAMPLES as SAMPLES_KEYS
from .rows import pad, place_of
from .trl import SamplesTrainer, TrlRun
from .trl_config import TrlConfig

# with a model beside, or without logits of all tokens: each candidate is traced
_OTHER_OBJECTIVES = ("gkd", "embed", "rerank", "diffusion", "ebft")


def _not_evaluated(resolved: Mapping[str, object]) -> tuple[str, ...]:
    """The note of a recipe whose evaluation is not simulated."""
    if resolved["objective"] == "ebft":
        return ("evaluation is not simulated with objective ebft, whose loss trains by itself",)
    if resolved["sequence_parallel_size"] != 1:
        return ("evaluation is not simulated where ranks share their samples",)
    return ()


class HfTrainer(SamplesTrainer):
    """A plain `transformers.Trainer`, for one of many objectives."""

    name = "hf"
    keys = replace(SAMPLES_KEYS, sharers="sequence_parallel_size")
    auto_class = AutoModelForCausalLM
    tile_tokens = None
    tiers = staticmethod(hf_tiers)
    compared = (*COMPARED, "objective", "value_head", "num_labels", "beta", "simpo_gamma", "nll_weight",
                "float32_logits", "pad_to_max_length", "trainable_layers", "layer_modules",
                "extra_modules", "spread_layers", "trains_rest",
                "added_layers", "peft_adapter", "bottleneck", "reft_rank", "temperature", "negatives", "word_scores",
                "mask_token", "ebft")  # fmt: skip

    def parse(self, values: Mapping[str, object], *, overrides: Mapping[str, object]) -> TrlConfig:
        config = super().parse(values, overrides=overrides)
        training, count = config.training, config.training.trainable_layers
        if count is not None and config.model.use_peft:
            raise ConfigError(
                f"trainable_layers: {count} trains layers of the model, and use_peft: true adapters beside them; "
                "omit one of them"
            )
        if training.peft_adapter is not None and not config.model.use_peft:
            raise ConfigError("peft_adapter is used in place of LoRA; it needs use_peft: true")
        Strides.of(training.ebft or {})
        if training.host_experts and not config.model.use_peft:
            raise ConfigError("host_experts are frozen but for adapters beside them; it needs use_peft: true")
        if training.qat is not None and config.model.use_peft:
            raise ConfigError("qat trains whole models; omit use_peft or qat")
        for key in ("bottleneck", "reft_rank"):
            if getattr(training, key) is not None and config.model.use_peft:
                raise ConfigError(f"what {key} adds is trained alone; omit use_peft or {key}")
        if training.added_layers is not None and config.model.use_peft:
            raise ConfigError("added_layers are trained alone; omit use_peft or added_layers")
        mixed = training.adapter_dtype not in (None, config.model.dtype)
        partly = count is not None or training.added_layers is not None
        if partly and mixed and not (training.bf16 or training.fp16):
            raise ConfigError(
                f"layers in {training.adapter_dtype} train beside frozen ones in {config.model.dtype} under autocast "
                "only; set bf16: true, or adapter_dtype to the same type"
            )
        return config

    def architecture(self, config: TrlConfig) -> Any:
        return architecture_of(config)

    def inspect(self, values: Mapping[str, object], inspection: Inspection) -> Facts:
        facts = super().inspect(values, inspection)
        other = any(
            facts.resolved[key] is not None
            for key in ("trainable_layers", "added_layers", "peft_adapter", "qat", "bottleneck", "reft_rank")
        )
        apart = facts.resolved["sequence_parallel_size"] != 1 or bool(facts.resolved["host_experts"])
        apart = apart or facts.resolved["expert_parallel_size"] != 1
        other = other or apart or facts.resolved["objective"] in _OTHER_OBJECTIVES
        unseen = _not_evaluated(facts.resolved) if evaluates(facts.resolved) else ()
        return replace(facts, forecasts=facts.forecasts and not other, notes=(*facts.notes, *unseen))

    def run(self, trainer: Any, config: TrlConfig, tokens_per_step: int | None = None) -> TrlRun:
        run = super().run(trainer, config, tokens_per_step)
        run.samples_per_step /= config.training.sequence_parallel_size  # each rank's share of them
        run.weighs_samples_alike = config.training.objective in TOKENS
        return run

    def real(self, config: TrlConfig) -> Any:
        for key, usual in (
            ("sequence_parallel_size", 1),
            ("expert_parallel_size", 1),
            ("host_experts", False),
            ("engine_share", 0.0),
        ):
            if getattr(config.training, key) != usual:
                raise ConfigError(f"{key} is simulated and not run; train with the tool that has it")
        tokenizer = tokenizer_of(config)
        evaluation = split(config, evaluation=True) if config.training.eval_strategy != "no" else None
        return made(
            config, self._rows(config, split(config), tokenizer), tokenizer=tokenizer,
            evaluation=None if evaluation is None else self._rows(config, evaluation, tokenizer),
        )  # fmt: skip

    def probed(self, config: TrlConfig, worst_case: Mapping[str, Any]) -> Any:
        with random_weights(hf_training):
            row = _row(config, worst_case)
            evaluated = None if _not_evaluated(config.resolved) else one_batch(row, config)
            trainer = made(config, repeated(row, config), evaluation=evaluated)
        if (gpu := active_gpu()) is not None and config.training.engine_share:  # vLLM's share is of the whole card
            gpu.memory.allocate(int(config.training.engine_share * gpu.spec.capacity_bytes), "vLLM", "vLLM")
        trainer.repeats_one_row = trainer.masks_all = True
        if not config.training.packing:
            pad(trainer, config, worst_case, shorter)
        return trainer

    def tokens_per_step(self, config: TrlConfig, worst_case: Mapping[str, Any]) -> int:
        """Tokens of one optimizer step; both answers of each pair."""
        row = _row(config, worst_case)
        sides = ("input_ids",) if "input_ids" in row else tuple(f"{side}_ids" for side in SIDES)
        fixed = config.training.max_length if config.training.pad_to_max_length else 0
        tokens = [max(len(row[side]), fixed) for side in sides]
        if config.training.objective == "rerank":
            tokens += tokens[1:] * (config.training.negatives - 1)
        size = int(config.training.sequence_parallel_size)
        return samples_per_step(config) * sum(tokens) // size

    def prepared(self, config: TrlConfig, rows: Dataset) -> Dataset:
        return self._rows(config, rows, tokenizer_of(config))

    def widths(self, rows: Dataset) -> tuple[Counts, Counts]:
        return _tokens(rows, np.maximum), _tokens(rows, np.add)

    def worst_case(self, config: TrlConfig) -> tuple[Dataset, dict[str, Any], SampleLengths]:
        """(the longest row after truncation and packing, its facts, the lengths of all rows).

        The longest pair is that with the longest answer: both are padded to it.
        """
        training, limit = config.training, int(config.training.max_length)
        raw = train_rows(config, "The trainer hf", KINDS[training.objective])
        tokenizer = tokenizer_of(config)
        rows, largest = raw, None
        if len(raw) > LARGEST and not training.packing:
            largest = largest_rows(raw)
            rows = self._rows(config, raw.select(largest), tokenizer)
            if int(_tokens(rows, np.maximum).max()) < limit:
                largest = None
        if largest is None:
            rows = self._rows(config, raw, tokenizer)
        longer = _tokens(rows, np.maximum)
        index = int(np.lexsort((_tokens(rows, np.add), longer))[-1])
        longest = limit if training.packing or training.pad_to_max_length else int(longer[index])
        facts: dict[str, Any] = {
            "num_rows": len(raw), "longest_tokens": longest, "max_length": limit, "cut": int(longer[index]) >= limit,
            **place_of(index, rows, raw, largest, packed=bool(training.packing)),
        }  # fmt: skip
        if training.objective not in SAMPLES:
            shorter_ones = _tokens(rows, np.add) - longer
            lengths_of = SampleLengths.of(shorter_ones.tolist(), most=int(longer[index]), others=largest is not None,
                                    sequences=2)  # fmt: skip
        else:
            counts = [limit] if training.packing else longer.tolist()
            lengths_of = SampleLengths.of(counts, most=max(counts), others=largest is not None)
        return rows.select([index]), facts, lengths_of

    def _rows(self, config: TrlConfig, rows: Dataset, tokenizer: Any) -> Dataset:
        """`rows` as the trainer trains on them. Raises ConfigError."""
        training = config.training
        try:
            found = tokenised(rows, tokenizer, objective=training.objective, max_length=training.max_length)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"the samples of {dataset_name(config)} cannot be tokenised: {short(error)}") from error
        return packed(found, training.max_length) if training.packing else found


def _tokens(rows: Dataset, of_answers: np.ufunc) -> Counts:
    """Tokens of each row, or `of_answers` (np.maximum, np.add) of the answers of each pair (rows,)."""
    if "input_ids" in rows.column_names:
        return lengths(rows, "input_ids")
    found: Counts = of_answers(*(lengths(rows, f"{side}_ids") for side in SIDES))
    return found


def _row(config: TrlConfig, worst_case: Mapping[str, Any]) -> Row:
    """The longest row under the candidate's `max_length`; of full length if the recipe's own cut it, or if packed."""
    row = dict(worst_case["rows"][0])
    limit = int(config.training.max_length)
    grows = bool(worst_case["cut"]) or config.training.packing
    for ids, labels in (("input_ids", "labels"), *((f"{side}_ids", f"{side}_labels") for side in SIDES)):
        if ids in row and (len(row[ids]) > limit or grows):
            row |= {name: fitted(row[name], limit) for name in (ids, labels)}
    if config.training.packing:
        row["seq_lengths"] = documents(row.get("seq_lengths") or [len(worst_case["rows"][0]["input_ids"])], limit)
    return row


TRAINER = HfTrainer()
