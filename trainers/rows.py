"""Rows of a training: how they are padded, and the place of the longest one in the first epoch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import AutoConfig

from autofit.fakegpu.specs import gpu_spec
from autofit.plugin.protocol import is_padded

from .common import documents, dtype_of
from .trl_config import TrlConfig

# Padding in the batches of a probe: samples of full length, and others a token shorter.

Row = dict[str, Any]


def unmasked_is_larger(config: TrlConfig, device: str) -> bool:
    """True if attention without a mask runs torch's math kernel: grouped queries on no kernel that takes them.

    transformers repeats the keys only where there is a mask, and only the flash kernel takes grouped queries: half
    precision, compute capability 8.0 and up (`use_gqa_in_sdpa`; can_use_flash_attention in sdp_utils.cpp, torch 2.13).
    """
    name, training = config.model.model_name_or_path, config.training
    model = AutoConfig.from_pretrained(
        name, revision=config.model.model_revision, trust_remote_code=bool(training.trust_remote_code)
    )
    text = model.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    if getattr(text, "num_key_value_heads", heads) == heads:
        return False
    if device.startswith("sim:") and gpu_spec(device.removeprefix("sim:")).compute_capability < (8, 0):
        return True
    half = training.bf16 or training.fp16 or dtype_of(config.model.dtype, model).itemsize == 2
    return not half


def padded(config: TrlConfig, worst_case: Mapping[str, Any]) -> bool:
    """True if the micro-batches of a probe have padding. A forecast says so itself."""
    stated = worst_case.get("padded")
    if stated is not None:
        return bool(stated)
    limit = getattr(config.training, "max_length", None)
    return is_padded(worst_case, int(config.training.per_device_train_batch_size), limit)


class Collator:
    """The trainer's own collator, on rows of which `shorter(row, place)` cuts all but the first.

    Where the `worst_case` says how long the others are (`Lengths.rest`) they are cut to that.
    """

    def __init__(
        self, collate: Callable[[list[Row]], Any], shorter: Callable[[Row, int], Row], worst_case: Mapping[str, Any]
    ) -> None:
        self._collate = collate
        self._shorter = shorter
        self._rest: int | None = worst_case.get("lengths", {}).get("rest")

    def __call__(self, rows: list[Row]) -> Any:
        cut = [self._shorter(row, place) for place, row in enumerate(rows)]
        if self._rest is not None:
            cut = [with_tokens(row, self._rest, first=place == 0) for place, row in enumerate(cut)]
        return self._collate(cut)


def pad(trainer: Any, config: TrlConfig, worst_case: Mapping[str, Any], shorter: Callable[[Row, int], Row]) -> None:
    """Let the batches of a probe have padding, of rows cut with `shorter`, if the worst ones have.

    A batch of the evaluation has more samples than a micro-batch, or fewer.
    """
    training, unpadded = config.training, trainer.data_collator
    collator = Collator(unpadded, shorter, worst_case)
    if padded(config, worst_case):
        trainer.data_collator = collator
    samples, limit = int(training.per_device_eval_batch_size), getattr(training, "max_length", None)
    evaluated = collator if is_padded(worst_case, samples, limit) else unpadded
    if config.evaluates and evaluated is not trainer.data_collator:
        _evaluate_with(trainer, evaluated)


def _evaluate_with(trainer: Any, collator: Any) -> None:
    """Let batches of the evaluation be made by `collator`, where the trainer has one collator for all."""
    original = trainer.get_eval_dataloader

    def loader(*args: Any, **kwargs: Any) -> Any:
        kept, trainer.data_collator = trainer.data_collator, collator
        try:
            return original(*args, **kwargs)
        finally:
            trainer.data_collator = kept

    trainer.get_eval_dataloader = loader


def with_tokens(row: Row, tokens: int, *, first: bool) -> Row:
    """A row cut to its last `tokens`; of a pair each answer with its prompt, and of the `first` the rejected one."""
    if "input_ids" in row:
        return row if first else {n: v[-tokens:] if isinstance(v, list) else v for n, v in row.items()}
    room = max(1, tokens - len(row.get("prompt_ids", ())))
    kept = ("prompt", "chosen") if first else ("prompt",)
    return {n: v if not isinstance(v, list) or n.startswith(kept) else v[-room:] for n, v in row.items()}


def shorter_sample(row: Row, place: int) -> Row:
    """A sample of SFT, without its last token if it is the second of its batch: the most of a batch that differs.

    Where rows are laid one after the other without padding, their sum is then no multiple of 8, which kernels with a
    mask pad it to, as it is of most batches.
    """
    if place != 1 or len(row["input_ids"]) < 2:
        return row
    cut = {name: list(value[:-1]) for name, value in row.items() if isinstance(value, list) and name != "seq_lengths"}
    if "seq_lengths" in row:
        cut["seq_lengths"] = documents(row["seq_lengths"], len(cut["input_ids"]))
    return row | cut


def shorter_pair(row: Row, place: int, limit: int | None = None) -> Row:
    """A pair of answers, each a token below its length within `limit`; of the first pair only the rejected one."""
    room = None if limit is None else max(1, limit - len(row.get("prompt_ids", ())))
    sides = ("chosen_ids", "rejected_ids") if place else ("rejected_ids",)
    return row | {side: row[side][: max(1, min(len(row[side]), room or len(row[side])) - 1)] for side in sides}


def shorter_prompts(tokenize: Callable[..., Any]) -> Callable[..., Any]:
    """`_tokenize_prompts` of a rollout, with all prompts but the first a token shorter."""

    def tokenized(*args: Any, **kwargs: Any) -> Any:
        found = list(tokenize(*args, **kwargs))
        found[0] = [ids if place == 0 or len(ids) < 2 else ids[1:] for place, ids in enumerate(found[0])]
        return tuple(found)

    return tokenized


# The place of a sample in the order of the first epoch, as the seed shuffles it.

_ROW, _INDEX, _COUNT = "row", "row_trained_on", "rows_trained_on"


def place_of(
    index: int, rows: Any, raw: Any, largest: Sequence[int] | None, *, mixed: bool = False, packed: bool = False
) -> dict[str, int | None]:
    """Place of sample `index` of the prepared `rows`: its row in the dataset `raw`, and in what is trained on.

    `largest` has the places in `raw` of `rows`, if only those were prepared. What is not known is None: the row where
    samples were dropped, or `mixed` by shuffling, and both places where samples are `packed`. The number of rows is
    that of the samples, packed or not.
    """
    if packed:
        return {_ROW: None, _INDEX: None, _COUNT: len(raw)}
    if largest is None:
        return {_ROW: index if len(rows) == len(raw) and not mixed else None, _INDEX: index, _COUNT: len(rows)}
    place = None if mixed else largest[index]
    return {_ROW: place, _INDEX: place, _COUNT: len(raw)}


def in_epoch(config: TrlConfig, facts: dict[str, Any]) -> dict[str, object]:
    """Facts on the place of a trainer's longest sample; takes `place_of` out of the `facts`."""
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
