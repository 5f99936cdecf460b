"""The micro-batches of a `transformers.Trainer`: what those so far took, and which samples are to come. Loads torch.

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
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from transformers import TrainerCallback


class Gauge(Protocol):
    """Reads the bytes of the device that trains (`autofit.watching.memory.CudaGauge`)."""

    @property
    def capacity_bytes(self) -> int: ...
    def allocated_bytes(self) -> int: ...
    def window_bytes(self) -> int: ...
    def outside_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One micro-batch that was trained."""

    number: int  # among those of this start, from 0
    sequences: int  # of its longest forward with gradients; 0: not seen
    width: int  # their padded tokens
    before_bytes: int  # held when it began, above those when its optimizer step began: gradients of others
    working_bytes: int  # its peak above the bytes held when it began


class MicroBatches(TrainerCallback):  # type: ignore[misc]
    """Notes the micro-batches of a training in `taken`, from the first one, until `stop`.

    A look at an embedding's input tells their shape; under torch.compile there is no look, as it would split the graph.
    """

    def __init__(self, trainer: Any, gauge: Gauge) -> None:
        self._gauge = gauge
        self._count = self._step_bytes = self._own_bytes = 0
        self._shape = (0, 0)
        self._taken: list[MicroBatch] = []
        self._stopped = False
        compiled = getattr(trainer.args, "torch_compile", False)
        self._handle = None if compiled else _embeddings(trainer.model, self._look)
        trainer.add_callback(self)

    def taken(self) -> list[MicroBatch]:
        """Those since the last call."""
        found, self._taken = self._taken, []
        return found

    def stop(self) -> None:
        """Stop looking."""
        self._stopped = True
        if self._handle is not None:
            self._handle.remove()

    def on_step_begin(self, *_: object, **__: object) -> None:
        if not self._stopped:
            self._step_bytes = self._own_bytes = self._gauge.allocated_bytes()
            self._gauge.window_bytes()

    def on_substep_end(self, *_: object, **__: object) -> None:
        self._note()

    def on_pre_optimizer_step(self, *_: object, **__: object) -> None:
        self._note()

    def _note(self) -> None:
        if self._stopped:
            return
        before, working = self._own_bytes - self._step_bytes, self._gauge.window_bytes() - self._own_bytes
        self._taken.append(MicroBatch(self._count, *self._shape, before, working))
        self._count, self._shape, self._own_bytes = self._count + 1, (0, 0), self._gauge.allocated_bytes()

    def _look(self, module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        if torch.is_grad_enabled() and arguments and arguments[0].dim() == 2:
            shape = tuple(arguments[0].shape)
            if shape[0] * shape[1] > self._shape[0] * self._shape[1]:
                self._shape = shape


def _embeddings(model: Any, look: Any) -> Any:
    """The handle of a look at the tokens that the model is given, if it has an embedding of tokens."""
    try:
        found = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    return found.register_forward_pre_hook(look) if isinstance(found, torch.nn.Module) else None


Counts = npt.NDArray[np.int64]
_READING_S = 2.0  # most seconds for counting the tokens of prompts, and as many for the order
_ROWS = 10_000  # rows that are read at once
_CHUNK = 256  # micro-batches between two looks at the clock
_PAIRS = ("chosen_ids", "rejected_ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochBatches:
    """The micro-batches of the epoch at work, in their order, from its first one: an entry each."""

    longest: Counts  # tokens of the longest sample (with prompts only: of the longest prompt)
    total: Counts  # tokens of all its samples
    row: Counts  # the longest sample's row in the training set, from 0
    samples: Counts


def visits_of(trainer: Any, *, epoch: int, most: int) -> EpochBatches | None:
    """The first `most` micro-batches of an epoch, if their lengths and order are known before they train."""
    rows, loader = trainer.train_dataset, trainer.callback_handler.train_dataloader
    lengths = lengths_of(rows, trainer)
    sampler = getattr(loader, "batch_sampler", None)
    if lengths is None or len(lengths) == 0 or sampler is None:
        return None
    order = _order(sampler, rows, epoch=epoch, most=most)
    return None if not order else joined(order, lengths)


def joined(order: Sequence[Sequence[int]], lengths: Counts) -> EpochBatches:
    """The micro-batches that have the rows of `order`, of samples of `lengths` tokens."""
    samples = np.array([len(batch) for batch in order])
    flat = np.array([row for batch in order for row in batch])
    starts = np.concatenate(([0], np.cumsum(samples)[:-1]))
    tokens = lengths[flat]
    longest = np.maximum.reduceat(tokens, starts)
    batch = np.repeat(np.arange(len(order)), samples)
    places = np.flatnonzero(tokens == longest[batch])
    first = places[np.unique(batch[places], return_index=True)[1]]
    return EpochBatches(longest=longest, total=np.add.reduceat(tokens, starts), row=flat[first], samples=samples)


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
        return _first_batches(twin, most)
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


def _is_known_ahead(sampler: Any) -> bool:
    """True if a sampler has its order, or random numbers, of its own; others draw from torch's when an epoch begins."""
    own = getattr(sampler, "generator", None) is not None or any(hasattr(sampler, n) for n in ("initial_seed", "seed"))
    return own or isinstance(sampler, torch.utils.data.SequentialSampler)


def _innermost(sampler: Any) -> Any:
    """The sampler that chooses rows, below those that make batches and shares of ranks of them."""
    while True:
        below = getattr(sampler, "sampler", None) or getattr(sampler, "batch_sampler", None)
        if below is None:
            return sampler
        sampler = below


def _first_batches(batches: Iterable[Sequence[int]], most: int) -> list[list[int]]:
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
    """Tokens of each row of a training set, as the collator leaves them (rows,); None if only training shows them.

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
