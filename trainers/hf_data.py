"""Tokens, packed rows and batches for a plain `transformers.Trainer`: what the scripts of such trainings do.

A sample is cut to `max_length` at its end and padded on the right, as LLaMA-Factory and Axolotl do.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset

from autofit.errors import ConfigError

from .hf_script import SAMPLES

IGNORED = -100  # label of a token that the loss ignores
SIDES = ("chosen", "rejected")
OTHER = "other_"  # prefix of a batch's tensors of KTO's other answers
_PAIRS: Mapping[str, tuple[str, ...]] = {"answers": SIDES, "tokens": ("chosen_ids", "rejected_ids")}
_SAMPLES: Mapping[str, tuple[str, ...]] = {
    "text": ("text",), "conversations": ("messages",), "prompts with an answer": ("prompt", "completion"),
    "tokens": ("input_ids",),
}  # fmt: skip
KINDS: Mapping[str, Mapping[str, tuple[str, ...]]] = {  # objective -> {format of its data: the columns}
    "sft": _SAMPLES, "asft": _SAMPLES,
    "dpo": _PAIRS, "reward": _PAIRS, "orpo": _PAIRS, "simpo": _PAIRS, "cpo": _PAIRS,
    "gkd": _SAMPLES, "diffusion": _SAMPLES, "ebft": _SAMPLES, "embed": _PAIRS, "rerank": _PAIRS,
    "classify": {"texts with a label": ("text", "label"), "tokens": ("input_ids",)},
    "label_tokens": {"tokens with labels": ("input_ids", "labels"), "tokens": ("input_ids",)},
    # The chosen answer is the sample, the rejected one another answer to its prompt, whatever the sample's rating
    "kto": {"rated answers": ("prompt", "completion", "label"), "tokens": ("chosen_ids", "rejected_ids")},
}  # fmt: skip

Row = dict[str, Any]
_ALSO = ("desirable", "label")  # what a row has beside its tokens


# -- tokens -----------------------------------------------------------------------------------------------------------


def tokenised(rows: Dataset, tokenizer: Any, *, objective: str, max_length: int) -> Dataset:
    """`rows` as tokens: input_ids and labels, or for pairs of answers those of each (chosen_ids, chosen_labels, ...).

    Messages go through the chat template. An answer to a prompt ends with the tokenizer's end token, and the loss is
    over answers where there is a prompt, else over all tokens.
    """
    read = _sample if objective in SAMPLES else _pair
    if objective == "kto" and "completion" in rows.column_names:
        rows = _with_other_answers(rows)

    def cut(row: Row) -> Row:
        found: Row = {name: tokens[:max_length] for name, tokens in read(row, tokenizer).items()}
        return found | {name: row[name] for name in _ALSO if name in row}

    return rows.map(cut, remove_columns=rows.column_names)


def _with_other_answers(rows: Dataset) -> Dataset:
    """Each rated answer beside the one to the row before, as LLaMA-Factory's and TRL's KTO pair them."""
    answers = list(rows["completion"])
    columns = {"prompt": list(rows["prompt"]), "chosen": answers, "rejected": answers[-1:] + answers[:-1]}
    return Dataset.from_dict(columns | {"desirable": [bool(label) for label in rows["label"]]})


def _sample(row: Row, tokenizer: Any) -> Row:
    if "input_ids" in row:
        ids, labels = row["input_ids"], row.get("labels") or row["input_ids"]
    elif "completion" in row:
        ids, labels = _answered(row["prompt"], row["completion"], tokenizer)
    else:
        ids = labels = _ids(row["messages"] if "messages" in row else row["text"], tokenizer)
    return {"input_ids": list(ids), "labels": list(labels)}


def _pair(row: Row, tokenizer: Any) -> Row:
    found: Row = {}
    for side in SIDES:
        if f"{side}_ids" in row:
            ids = row[f"{side}_ids"]
            labels = row.get(f"{side}_labels") or ids
        elif row.get("prompt") is not None:
            ids, labels = _answered(row["prompt"], row[side], tokenizer)
        else:
            ids = labels = _ids(row[side], tokenizer)
        found |= {f"{side}_ids": list(ids), f"{side}_labels": list(labels)}
    return found


def _answered(prompt: Any, answer: Any, tokenizer: Any) -> tuple[list[int], list[int]]:
    """(tokens, labels) of a prompt and its answer, both text or both messages."""
    if isinstance(prompt, list):
        asked = _templated(prompt, tokenizer, add_generation_prompt=True)
        whole = _templated([*prompt, *answer], tokenizer)
        first = list(tokenizer(asked, add_special_tokens=False)["input_ids"])
        rest = list(tokenizer(whole[len(asked) :], add_special_tokens=False)["input_ids"])
    else:
        first = list(tokenizer(prompt)["input_ids"])
        rest = list(tokenizer(answer, add_special_tokens=False)["input_ids"])
        if tokenizer.eos_token_id is not None and rest[-1:] != [tokenizer.eos_token_id]:
            rest.append(tokenizer.eos_token_id)
    return first + rest, [IGNORED] * len(first) + rest


def _ids(text: Any, tokenizer: Any) -> list[int]:
    if isinstance(text, list):
        return list(tokenizer(_templated(text, tokenizer), add_special_tokens=False)["input_ids"])
    return list(tokenizer(text)["input_ids"])


def _templated(messages: list[Mapping[str, Any]], tokenizer: Any, **options: bool) -> str:
    if tokenizer.chat_template is None:
        raise ConfigError("the samples are messages, but the model's tokenizer has no chat template; use plain text")
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))


# -- packed rows ------------------------------------------------------------------------------------------------------


def packed(rows: Dataset, max_length: int) -> Dataset:
    """Rows of up to `max_length` tokens made of whole samples, and the samples' lengths (seq_lengths).

    The longest samples are placed first, each in the fullest row that has room for it.
    """
    samples = [(list(row["input_ids"]), list(row["labels"])) for row in rows]
    order = sorted(range(len(samples)), key=lambda place: len(samples[place][0]), reverse=True)
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (tokens that still fit, the row), ascending
    for place in order:
        size = len(samples[place][0])
        found = bisect_left(rooms, (size, -1))
        room, number = rooms.pop(found) if found < len(rooms) else (max_length, len(bins))
        if number == len(bins):
            bins.append([])
        bins[number].append(place)
        insort(rooms, (room - size, number))
    return Dataset.from_list([_joined([samples[place] for place in one]) for one in bins])


def _joined(samples: Sequence[tuple[list[int], list[int]]]) -> Row:
    """Samples one after another; none of them predicts the first token of the next."""
    ids = [token for sample, _ in samples for token in sample]
    labels = [label for _, sample in samples for label in (IGNORED, *sample[1:])]
    return {"input_ids": ids, "labels": labels, "seq_lengths": [len(sample) for sample, _ in samples]}


def shorter(row: Row, place: int) -> Row:
    """A sample without its last token, unless it is the first of its batch; of the first pair only the rejected one."""
    kept = _ALSO if place else (*_ALSO, "input_ids", "labels", "chosen_ids", "chosen_labels")
    return {name: v if name in kept or len(v) < 2 else v[:-1] for name, v in row.items()}


# -- batches ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SampleCollator:
    """Collates samples into a batch (B, T), padded on the right.

    `width` is the length of every row where that is fixed, and `attends` says whether attention reads the padding up
    to it, as LLaMA-Factory's packing does.
    """

    padding: int  # the padding token
    multiple: int | None = None
    width: int | None = None
    attends: bool = False

    def __call__(self, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        return self.batch([(row["input_ids"], row["labels"]) for row in rows])

    def batch(self, samples: Sequence[tuple[list[int], list[int]]]) -> dict[str, torch.Tensor]:
        """The tensors of (tokens, labels) of each row."""
        read = self.width or max(len(ids) for ids, _ in samples)
        wide = rounded_up(read, self.multiple)
        seen = [self.width if self.width and self.attends else len(ids) for ids, _ in samples]
        return {
            "input_ids": torch.tensor([ids + [self.padding] * (wide - len(ids)) for ids, _ in samples]),
            "attention_mask": torch.tensor([[1] * count + [0] * (wide - count) for count in seen]),
            "labels": torch.tensor([labels + [IGNORED] * (wide - len(labels)) for _, labels in samples]),
        }


@dataclass(frozen=True, kw_only=True)
class Pairs(SampleCollator):
    """Collates pairs of answers: all chosen ones, then all rejected ones, in one batch (2B, T).

    `negatives` is how often a rejected one counts, for documents of which there are several of its length.
    """

    negatives: int = 1

    def __call__(self, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        sides = (SIDES[0], *(SIDES[1],) * self.negatives)
        return self.batch([(row[f"{side}_ids"], row[f"{side}_labels"]) for side in sides for row in rows])


@dataclass(frozen=True, kw_only=True)
class Labelled(SampleCollator):
    """Collates samples into a batch (B, T) with the label of each (B,): a class, or a number where there is one.

    With `tokens` each token has a class (B, T); what is none is the last one.
    """

    classes: int
    tokens: bool = False

    def __call__(self, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        if self.tokens:
            batch = super().__call__(rows)
            return batch | {"labels": batch["labels"].clamp(max=self.classes - 1)}
        kind = torch.float32 if self.classes == 1 else torch.long
        return super().__call__(rows) | {"labels": torch.tensor([row.get("label", 0) for row in rows], dtype=kind)}


class Rated(SampleCollator):
    """Collates samples of KTO into a batch (B, T), and another answer to each prompt into one of its own, `other_...`.

    Rows without a rating are desirable and undesirable by turns.
    """

    def __call__(self, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        own, other = (self.batch([(row[f"{side}_ids"], row[f"{side}_labels"]) for row in rows]) for side in SIDES)
        desirable = torch.tensor([row.get("desirable", place % 2 == 0) for place, row in enumerate(rows)])
        return own | {f"{OTHER}{name}": tensor for name, tensor in other.items()} | {"desirable": desirable}


@dataclass(frozen=True, kw_only=True)
class Blocks(SampleCollator):
    """Collates packed rows whose samples attend to themselves only, each from position 0.

    Kernels of flash attention read the positions of one long row (1, B x T). Others get a mask (B, 1, T, T) of `dtype`
    to be added to the scores, as LLaMA-Factory makes it for `neat_packing` (its data/collator.py).
    """

    dtype: torch.dtype
    flash: bool

    def __call__(self, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        batch = super().__call__(rows)
        del batch["attention_mask"]
        wide = batch["input_ids"].shape[1]
        documents = [list(_with_rest(row["seq_lengths"], wide)) for row in rows]
        positions = torch.tensor([[place for size in sizes for place in range(size)] for sizes in documents])
        if self.flash:
            return {name: tensor.view(1, -1) for name, tensor in batch.items()} | {
                "position_ids": positions.view(1, -1)
            }
        padding = [sum(row["seq_lengths"]) for row in rows]
        masks = [_mask(sizes, until, self.dtype) for sizes, until in zip(documents, padding, strict=True)]
        return batch | {"position_ids": positions, "attention_mask": torch.stack(masks).unsqueeze(1)}


def _with_rest(lengths: Sequence[int], wide: int) -> Iterator[int]:
    """The lengths of a row's samples, and of its padding."""
    yield from lengths
    if sum(lengths) < wide:
        yield wide - sum(lengths)


def _mask(documents: Sequence[int], until: int, dtype: torch.dtype) -> torch.Tensor:
    """(T, T): 0 where a token may attend to an earlier one of its sample, else the least number; padding to nothing."""
    wide = sum(documents)
    mask = torch.full((wide, wide), torch.finfo(dtype).min, dtype=dtype)
    begin = 0
    for size in documents:
        if begin < until:
            block = mask[begin : begin + size, begin : begin + size]
            block.triu_(1)
        begin += size
    return mask


def rounded_up(tokens: int, multiple: int | None) -> int:
    """`tokens`, or the next multiple."""
    return tokens if multiple is None else -(-tokens // multiple) * multiple


Collate = Callable[[Sequence[Row]], dict[str, torch.Tensor]]
