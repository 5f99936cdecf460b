"""TRL's SFTTrainer from a recipe: as `trl sft` builds it, or on worst-case data with random weights for a probe."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import trl.trainer.sft_trainer as trl_sft
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import SFTTrainer

from autofit.errors import ConfigError
from autofit.plugin.protocol import Inspection, SampleLengths

from .common import (
    Counts,
    PreparedRows,
    documents,
    fitted,
    lengths,
    limit_of,
    prepared,
    prepared_longest,
    probed,
    real,
    samples_per_step,
    split,
    train_rows,
)
from .image_prompts import for_text, has_images, longest_row, note_of, processor_of, simulated_only, with_an_image
from .images import no_room
from .inspection import hashed, keep
from .keys import COMPARED
from .offline import or_stated
from .rows import pad, place_of, shorter_sample
from .trl import SamplesTrainer, TrlRun
from .trl_config import TrlConfig

_IGNORED = -100  # label of a token that the loss ignores


class _PreparedSft(PreparedRows, SFTTrainer):  # type: ignore[misc]
    """Trains on rows already tokenised by TRL."""


def _packing(config: TrlConfig) -> list[object] | None:
    """Function that packs the rows, their limit and the way; None without packing."""
    training = config.training
    return [training.max_length, training.packing_strategy] if training.packing else None


def _loss_tokens(rows: Dataset) -> int | None:
    """The most tokens of a row that the loss counts; None if it counts all."""
    if "labels" not in rows.column_names:
        return None
    most = 0
    for batch in rows.select_columns(["labels"]).with_format("arrow").iter(1000):
        labels = batch["labels"].combine_chunks()
        counted = np.concatenate([[0], np.cumsum(labels.flatten().to_numpy(zero_copy_only=False) != _IGNORED)])
        ends = np.cumsum(labels.value_lengths().to_numpy(zero_copy_only=False))
        most = max(most, int(np.diff(counted[np.concatenate([[0], ends])]).max()))
    return most


def _counted(labels: list[int], tokens: list[int], wanted: int) -> list[int]:
    """`labels` of which `wanted` at least are counted by the loss: the first of those that are not become `tokens`."""
    missing = wanted - sum(label != _IGNORED for label in labels)
    made = list(labels)
    for place, label in enumerate(labels):
        if missing <= 0:
            break
        if label == _IGNORED:
            made[place], missing = tokens[place], missing - 1
    return made


def _slowest(rows: Dataset, counts: Counts) -> int:
    """Index of the longest row; of packed ones, that whose samples attend to the most tokens."""
    longest = (counts == counts.max()).nonzero()[0].tolist()
    if "seq_lengths" in rows.column_names:
        packs = rows.select(longest)["seq_lengths"]
        squares = [sum(length * length for length in pack) for pack in packs]
        return int(longest[squares.index(max(squares))])
    return int(longest[0])


def _row(config: TrlConfig, worst_case: Mapping[str, Any], *, evaluated: bool = False) -> dict[str, Any]:
    """The longest row under the candidate's `max_length`; of full length if the recipe's `max_length` cut it.

    The loss counts as many of its tokens as of any row: what is cut off the longest ones is often their answer. A row
    that is `evaluated` may be packed where those that are trained are not.
    """
    row = dict(worst_case["rows"][0])
    limit = limit_of(config, worst_case)
    count = len(row["input_ids"])
    packing = _packing(config)  # rows that this packing did not make are filled up
    full = worst_case["cut"] or (packing is not None and packing != worst_case.get("packed"))
    full = full or (evaluated and bool(config.training.eval_packing))
    if limit is not None and (count > limit or full):
        count = limit
    end = config.training.truncation_mode == "keep_end" and count < len(row["input_ids"])
    row.setdefault("labels", row["input_ids"])
    for name in ("input_ids", "labels"):
        row[name] = row[name][-count:] if end else fitted(row[name], count)
    if all(label == _IGNORED for label in row["labels"]):  # TRL drops such a row; another row may be as long
        row["labels"] = row["input_ids"]
    row["labels"] = _counted(row["labels"], row["input_ids"], worst_case.get("loss_tokens") or 0)
    if "seq_lengths" in row:
        row["seq_lengths"] = documents(row["seq_lengths"], count)
    return row


class SftRun(TrlRun):
    """A run of SFT, whose loss is a mean over the tokens of a whole optimizer step."""

    weighs_samples_alike = True


class SftTrainer(SamplesTrainer):
    """`trl sft`."""

    name = "sft"
    run_class = SftRun
    auto_class = AutoModelForCausalLM
    compared = (
        *COMPARED,
        "loss_type",
        "padding_free",
    )

    def real(self, config: TrlConfig) -> SFTTrainer:
        return real(SFTTrainer, config)

    def longest(self, config: TrlConfig, inspection: Inspection) -> dict[str, object]:
        processor = processor_of(config)
        if processor is None:
            return super().longest(config, inspection)
        with or_stated(inspection):
            rows = split(config)
        made_up = inspection.prompt_tokens is not None
        text_only = config.training.packing or config.training.padding_free  # TRL refuses images with either
        sees_images = has_images(rows) or (made_up and not text_only)
        if not sees_images and (text_only or not inspection.simulated):
            return super().longest(config, inspection)
        text = config.training.dataset_text_field
        column = text if made_up or text in rows.column_names else "messages"
        simulated_only(inspection)
        if column not in rows.column_names:
            raise ConfigError(f"SFT on images needs a column messages; the dataset has {', '.join(rows.column_names)}")
        row, tokens, _ = longest_row(with_an_image(rows, processor) if made_up else rows, processor, column)
        limit = config.training.max_length
        of_images = sum(map(processor.vision.tokens, row["images"]))
        if limit is not None and of_images > limit:
            raise no_room(limit, of_images)
        longest = tokens if limit is None else min(tokens, limit)
        lengths_of = SampleLengths.of([longest], most=longest)
        row = {"messages": row[column], "images": row["images"]}
        facts = {
            "num_rows": len(rows), "longest_tokens": longest, "max_length": limit, "cut": longest != tokens,
            "images": len(row["images"]), "lengths": lengths_of.to_json(),
        }  # fmt: skip
        keep(Dataset.from_list([row]), facts, inspection.worst_case)
        note = note_of(processor, row, made_up=made_up)
        return {
            "longest_sample_tokens": longest, "content_hash": hashed(repr((facts, row))), "notes": (note,),
            "images": facts["images"],
        }  # fmt: skip

    def probed(self, config: TrlConfig, worst_case: Mapping[str, Any]) -> SFTTrainer:
        if "images" in worst_case:
            row = dict(worst_case["rows"][0])
            return probed(SFTTrainer, trl_sft, config, row, processing_class=processor_of(config))
        config.training.assistant_only_loss = False  # the labels already select the tokens of the loss
        row, evaluated = _row(config, worst_case), _row(config, worst_case, evaluated=True)
        trainer = probed(_PreparedSft, trl_sft, config, row, evaluated=evaluated, **for_text(config))
        pad(trainer, config, worst_case, shorter_sample)
        return trainer

    def tokens_per_step(self, config: TrlConfig, worst_case: Mapping[str, Any]) -> int:
        if "images" in worst_case:
            limit = limit_of(config, worst_case)
            longest = int(worst_case["longest_tokens"])
            return samples_per_step(config) * min(longest, limit or longest)
        return samples_per_step(config) * len(_row(config, worst_case)["input_ids"])

    def prepared(self, config: TrlConfig, rows: Dataset) -> Dataset:
        return prepared(SFTTrainer, trl_sft, config, rows, **for_text(config))

    def worst_case(self, config: TrlConfig) -> tuple[Dataset, dict[str, Any], SampleLengths]:
        """(the longest row after TRL's tokenisation, truncation and packing; its facts; the lengths of all rows)."""
        text = config.training.dataset_text_field
        kinds = {
            "text": (text,), "conversations": ("messages",), "conversations, older form": ("conversations",),
            "prompts with an answer": ("prompt", "completion"), "tokens": ("input_ids",),
        }  # fmt: skip
        raw = train_rows(config, "SFT", kinds)
        limit = config.training.max_length
        rows, largest = prepared_longest(
            SFTTrainer, trl_sft, config, raw, lambda found: lengths(found, "input_ids"), **for_text(config)
        )
        counts = lengths(rows, "input_ids")
        longest, index = int(counts.max()), _slowest(rows, counts)
        facts = {"num_rows": len(raw), "longest_tokens": longest, "max_length": limit, "cut": longest == limit}
        facts["packed"] = _packing(config)
        if (of_loss := _loss_tokens(rows)) is not None:
            facts["loss_tokens"] = of_loss
        facts |= place_of(
            index, rows, raw, largest, mixed=bool(config.training.shuffle_dataset),
            packed=bool(config.training.packing),
        )  # fmt: skip
        others = len(rows) < len(raw) and not config.training.packing
        filled = config.training.packing and config.training.packing_strategy == "wrapped"
        return (
            rows.select([index]),
            facts,
            SampleLengths.of(counts.tolist(), most=longest, others=others, filled=filled),
        )


TRAINER = SftTrainer()
