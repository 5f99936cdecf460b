"""Made-up samples in place of a dataset that is not on this machine, with the columns that the script reads."""

import ast
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from unittest import mock

from autofit.errors import ConfigError, option, quoted

ROWS = 2560  # enough for two steps of most batches; every second one is shorter, so batches are padded as real ones
_ANSWERS = ("chosen", "rejected")
_CHATS = ("messages", "conversations", "conversation", "chat", "dialog")
_NUMBERS = re.compile(r"labels?$|score|rating|num_|.*_(id|count)$|id$")
_SPLITS = ("train", "test", "validation")
_OF_TOKENIZERS = {
    "input_ids", "attention_mask", "token_type_ids", "position_ids", "labels", "completion_mask",
}  # fmt: skip
_OF_REWARDS = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments"}
_COLUMN_METHODS = ("remove_columns", "rename_column", "select_columns", "cast_column")
_BY_TRAINER = {  # what a trainer reads of rows that the script gives it as they are
    ("DPO", "ORPO", "CPO", "Reward", "SimPO"): ("prompt", *_ANSWERS), ("GRPO", "RLOO"): ("prompt",),
}  # fmt: skip


@dataclass(frozen=True)
class Columns:
    """The columns that the Python code of a script reads of its dataset."""

    code: str

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Their names: those that it asks a row for, or that its rewards take, or else those of its trainer."""
        found = dict.fromkeys([*self._read(), *self._of_rewards()])
        of_trainer = next((names for kinds, names in _BY_TRAINER.items() if any(
            f"{kind}Trainer" in self.code for kind in kinds)), None)  # fmt: skip
        if of_trainer is not None and not set(of_trainer) & set(found):
            found |= dict.fromkeys(of_trainer)
        return tuple(name for name in found if name not in {*_SPLITS, *_OF_TOKENIZERS}) or ("text",)

    def row(self, tokens: int) -> dict[str, object]:
        """A row whose texts have `tokens` tokens in all, in words that every tokenizer has."""
        texts = [name for name in self.names if not _NUMBERS.match(name)]
        sides = [name for name in texts if name in _ANSWERS]
        share = max(1, tokens // max(1, len(texts) - len(sides) // 2))  # a pair has one answer or the other
        return {name: self._value(name, share) if name in texts else 0 for name in self.names}

    def _value(self, name: str, tokens: int) -> object:
        text = " ".join(["a"] * tokens)
        if name not in _CHATS:
            return text
        half = " ".join(["a"] * max(1, tokens // 2))
        who, what = ("from", "value") if re.search(r"""["']from["']""", self.code) else ("role", "content")
        people = ("human", "gpt") if who == "from" else ("user", "assistant")
        return [{who: person, what: half} for person in people]

    def _read(self) -> Iterator[str]:
        for node in ast.walk(ast.parse(self.code)):
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
                yield from _words([node.slice]) if isinstance(node.value, ast.Name | ast.Subscript) else ()
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                gets = node.func.attr == "get" and isinstance(node.func.value, ast.Name)
                yield from _words(node.args[:1]) if gets or node.func.attr in _COLUMN_METHODS else ()
            elif isinstance(node, ast.keyword) and node.arg in ("dataset_text_field", "text_column"):
                yield from _words([node.value])

    def _of_rewards(self) -> Iterator[str]:
        if "accuracy_reward" in self.code:  # TRL's own
            yield "solution"
        for node in ast.walk(ast.parse(self.code)):
            if isinstance(node, ast.FunctionDef) and any(each.arg == "completions" for each in node.args.args):
                yield from (each.arg for each in node.args.args if each.arg not in _OF_REWARDS)


def _words(nodes: Sequence[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value
        elif isinstance(node, ast.List | ast.Tuple):
            yield from _words(node.elts)


@contextmanager
def stood_in(columns: Columns, tokens: int | None, note: Callable[[str], None]) -> Iterator[None]:
    """Context in which `load_dataset` gives rows of `tokens` tokens for a dataset that is not on this machine."""
    import datasets

    original = datasets.load_dataset
    made: list[str] = []

    def load_dataset(path: Any, *rest: Any, **named: Any) -> Any:
        try:
            return original(path, *rest, **named)
        except (ConnectionError, datasets.exceptions.DatasetNotFoundError):
            if tokens is None:
                raise ConfigError(_missing(str(path))) from None
        if path not in made:
            made.append(path)
            note(f"the data of {path} are not on this machine: samples of {tokens:,} tokens with the columns "
                 f"{', '.join(columns.names)} stand in, and longer ones of yours would take more")  # fmt: skip
        two = [columns.row(length) for length in (tokens, max(1, tokens - 2))]
        rows = datasets.Dataset.from_list(two).select([0, 1] * (ROWS // 2))
        return _as_asked(rows, named)

    whole = datasets.Dataset.select

    def select(rows: Any, indices: Any, *rest: Any, **named: Any) -> Any:
        return whole(rows, [i for i in indices if i < len(rows)] if made else indices, *rest, **named)

    remove = datasets.Dataset.remove_columns

    def remove_columns(rows: Any, column_names: Any, *rest: Any, **named: Any) -> Any:
        names = [column_names] if isinstance(column_names, str) else list(column_names)
        kept = [name for name in names if name in rows.column_names] if made else names
        return remove(rows, kept, *rest, **named)

    with ExitStack() as patches:
        for module in [m for m in list(sys.modules.values()) if vars(m).get("load_dataset") is original]:
            patches.enter_context(mock.patch.object(module, "load_dataset", load_dataset))
        patches.enter_context(mock.patch.object(datasets.Dataset, "select", select))
        patches.enter_context(mock.patch.object(datasets.Dataset, "remove_columns", remove_columns))
        yield


def _as_asked(rows: Any, named: Mapping[str, Any]) -> Any:
    """`rows` as the splits that a call of `load_dataset` asks for."""
    import datasets

    split = named.get("split")
    if named.get("streaming"):
        rows = rows.to_iterable_dataset()
    if isinstance(split, list | tuple):
        return [rows for _ in split]
    if split is not None:
        return rows
    return datasets.DatasetDict(dict.fromkeys(_SPLITS, rows))


def _missing(name: str) -> str:
    return (
        f"the data of {quoted(name, 80)} are not on this machine, and a script sees no network here; load them once "
        f"outside, or give {option('prompt-tokens', 'N')} before the script: samples of N tokens then stand in"
    )
