"""Which samples each micro-batch of an epoch trains, and how many tokens the longest of them has. Loads torch.

Read from the trainer itself: the lengths from its prepared dataset, the order from a copy of its sampler. Nothing that
the training draws is used up.
"""

import copy
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Counts = npt.NDArray[np.int64]
_READING_S = 2.0  # most seconds for counting the tokens of prompts, and as many for the order
_ROWS = 10_000  # rows that are read at once
_CHUNK = 256  # micro-batches between two looks at the clock
_PAIRS = ("chosen_ids", "rejected_ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class Visits:
    """The micro-batches of the epoch at work, in their order, from its first one: an entry each."""

    longest: Counts  # tokens of the longest sample (with prompts only: of the longest prompt)
    total: Counts  # tokens of all its samples
    row: Counts  # the longest sample's row in the training set, from 0
    samples: Counts


def visits_of(trainer: Any, *, epoch: int, most: int) -> Visits | None:
    """The first `most` micro-batches of an epoch; None where lengths or order cannot be known before they train."""
    rows, loader = trainer.train_dataset, trainer.callback_handler.train_dataloader
    lengths = lengths_of(rows, trainer)
    sampler = getattr(loader, "batch_sampler", None)
    if lengths is None or len(lengths) == 0 or sampler is None:
        return None
    order = _order(sampler, rows, epoch=epoch, most=most)
    return None if not order else joined(order, lengths)


def joined(order: Sequence[Sequence[int]], lengths: Counts) -> Visits:
    """The micro-batches that have the rows of `order`, of samples of `lengths` tokens."""
    samples = np.array([len(batch) for batch in order])
    flat = np.array([row for batch in order for row in batch])
    starts = np.concatenate(([0], np.cumsum(samples)[:-1]))
    tokens = lengths[flat]
    longest = np.maximum.reduceat(tokens, starts)
    batch = np.repeat(np.arange(len(order)), samples)
    places = np.flatnonzero(tokens == longest[batch])
    first = places[np.unique(batch[places], return_index=True)[1]]
    return Visits(longest=longest, total=np.add.reduceat(tokens, starts), row=flat[first], samples=samples)


# ---------------------------------------------------------------------- the order
def _order(sampler: Any, rows: Any, *, epoch: int, most: int) -> list[list[int]]:
    """The rows of each micro-batch; empty where the order is drawn only when the epoch begins.

    In a thread of its own: what this thread has switched on in torch (a simulated card, a default device) is its own.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_drawn, sampler, rows, epoch, most).result()


def _drawn(sampler: Any, rows: Any, epoch: int, most: int) -> list[list[int]]:
    inner = _innermost(sampler)
    if not _is_known_ahead(inner):
        return []
    data = getattr(inner, "data_source", rows)
    twin = copy.deepcopy(sampler, {id(rows): rows, id(data): data})  # the data itself is not copied
    own = _innermost(twin)
    if hasattr(own, "set_epoch"):
        own.set_epoch(epoch)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()  # a sampler of one's own may draw
    try:
        return _taken(twin, most)
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


def _is_known_ahead(sampler: Any) -> bool:
    """Whether a sampler has its order, or random numbers, of its own; others draw from torch's when an epoch begins."""
    own = getattr(sampler, "generator", None) is not None or any(hasattr(sampler, n) for n in ("initial_seed", "seed"))
    return own or isinstance(sampler, torch.utils.data.SequentialSampler)


def _innermost(sampler: Any) -> Any:
    """The sampler that chooses rows, below those that make batches and shares of ranks of them."""
    while True:
        below = getattr(sampler, "sampler", None) or getattr(sampler, "batch_sampler", None)
        if below is None:
            return sampler
        sampler = below


def _taken(batches: Iterable[Sequence[int]], most: int) -> list[list[int]]:
    found: list[list[int]] = []
    drawn = iter(batches)
    deadline = None  # begins after the first micro-batches: a shuffle is drawn as a whole with the first one
    while len(found) < most and (deadline is None or time.monotonic() < deadline):
        chunk = [list(batch) for batch in islice(drawn, min(_CHUNK, most - len(found)))]
        found += chunk
        deadline = deadline or time.monotonic() + _READING_S
        if len(chunk) < _CHUNK:
            break
    return found


# ---------------------------------------------------------------------- the lengths
def lengths_of(rows: Any, trainer: Any) -> Counts | None:
    """Tokens of each row of a training set, as the collator leaves them (rows,); None where only training shows them.

    Prompts that the trainer tokenises by itself are counted in the order of their text's size, for two seconds at most:
    those that are not reached count 0 tokens, and are shorter texts than all that were.
    """
    if not hasattr(rows, "__len__"):  # a stream
        return None
    columns = set(getattr(rows, "column_names", None) or (rows[0] if _is_list(rows) else ()))
    limit = getattr(trainer.args, "max_length", None)
    found = _counted(rows, columns)
    if found is not None:
        return found if limit is None else np.minimum(found, limit)
    tokenizer = getattr(trainer, "processing_class", None)
    if "prompt" in columns and hasattr(trainer.args, "max_completion_length") and tokenizer is not None:
        return _prompt_tokens(rows, tokenizer, getattr(trainer.args, "chat_template_kwargs", None) or {})
    return None


def _is_list(rows: Any) -> bool:
    return isinstance(rows, list) and bool(rows) and isinstance(rows[0], Mapping)


def _counted(rows: Any, columns: set[str]) -> Counts | None:
    if columns.issuperset(_PAIRS):
        answers = np.maximum(*(_column_lengths(rows, side) for side in _PAIRS))
        return answers + _column_lengths(rows, "prompt_ids") if "prompt_ids" in columns else answers
    return _column_lengths(rows, "input_ids") if "input_ids" in columns else None


def _column_lengths(rows: Any, column: str) -> Counts:
    if isinstance(rows, list):
        return np.array([len(row[column]) for row in rows])
    parts = [
        batch[column].combine_chunks().value_lengths().to_numpy(zero_copy_only=False)
        for batch in rows.select_columns([column]).with_format("arrow").iter(_ROWS)
    ]
    return np.concatenate(parts).astype(np.int64)


def _prompt_tokens(rows: Any, tokenizer: Any, template: Mapping[str, Any]) -> Counts:
    prompts = [row["prompt"] for row in rows] if isinstance(rows, list) else rows["prompt"]
    sizes = np.array([_characters(prompt) for prompt in prompts])
    found = np.zeros(len(sizes), dtype=np.int64)
    deadline = time.monotonic() + _READING_S
    for index in np.argsort(-sizes, kind="stable").tolist():
        found[index] = _tokens(prompts[index], tokenizer, template)
        if time.monotonic() > deadline:
            break
    return found


def _characters(prompt: Any) -> int:
    if isinstance(prompt, str):
        return len(prompt)
    return sum(len(str(message.get("content") or "")) for message in prompt)


def _tokens(prompt: Any, tokenizer: Any, template: Mapping[str, Any]) -> int:
    if isinstance(prompt, str):
        return len(tokenizer(prompt)["input_ids"])
    text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False, **template)
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])
