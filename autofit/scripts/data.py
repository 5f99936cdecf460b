"""Made-up samples in place of missing data, with the columns that a script reads. Free of torch."""

import ast
import builtins
import functools
import io
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

from autofit.errors import ConfigError, option, quoted

SPLITS = ("train", "test", "validation")
_ANSWERS = ("chosen", "rejected")
_CHATS = ("messages", "conversations", "conversation", "chat", "dialog")
_TURN = {"role", "content", "from", "value"}  # of a chat: no columns
_OF_PIPELINES = {"generated_text", "summary_text", "translation_text"}  # what a pipeline gives
_NUMBERS = re.compile(r"labels?$|score|rating|num_|.*_(id|count)$|id$")
_OF_TOKENIZERS = {
    "input_ids", "attention_mask", "token_type_ids", "position_ids", "labels", "completion_mask",
}  # fmt: skip
_OF_REWARDS = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments"}
_COLUMN_METHODS = ("remove_columns", "rename_column", "select_columns", "cast_column")
_PROMPT = "prompt"
_REWARDS_OF_CHATS = r"""accuracy_reward|think_format_reward|\[0\]\[["']content["']\]"""  # they read turns
_WITH_ROLLOUTS = ("GRPO", "RLOO")
_BY_TRAINER = {  # what a trainer reads of rows that the script gives it as they are
    ("DPO", "ORPO", "CPO", "Reward", "SimPO"): ("prompt", *_ANSWERS), _WITH_ROLLOUTS: ("prompt",),
}  # fmt: skip


@dataclass(frozen=True)
class Columns:
    """The columns that the Python code of a script reads of its dataset, and `more` that it was seen to read."""

    code: str
    more: tuple[str, ...] = ()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Their names: those that it asks a row for, or that its rewards take, or else those of its trainer."""
        found = dict.fromkeys([*self._read(), *self._of_rewards()])
        if self._chats & set(found):
            found = dict.fromkeys(name for name in found if name not in _TURN)
        found |= dict.fromkeys(self.more)
        of_trainer = next((names for kinds, names in _BY_TRAINER.items() if any(
            f"{kind}Trainer" in self.code for kind in kinds)), None)  # fmt: skip
        if of_trainer is not None and not set(of_trainer) & set(found):
            found |= dict.fromkeys(of_trainer)
        return tuple(name for name in found if name not in {*SPLITS, *_OF_TOKENIZERS, *_OF_PIPELINES}) or ("text",)

    def row(self, tokens: int) -> dict[str, object]:
        """A row whose texts have `tokens` tokens in all, in words that every tokenizer has."""
        texts = [name for name in self.names if not _NUMBERS.match(name)]
        sides = [name for name in texts if name in _ANSWERS]
        parts = len(texts) - len(sides) // 2  # a pair has one answer or the other
        if any(f"{kind}Trainer" in self.code for kind in _WITH_ROLLOUTS):
            parts = 1  # the prompt is one column, and the others are for its rewards
        share = max(1, tokens // max(1, parts))
        return {name: self._value(name, share) if name in texts else 0 for name in self.names}

    def _value(self, name: str, tokens: int) -> object:
        if name not in self._chats:
            return " ".join(["a"] * tokens)
        if name == _PROMPT:
            return [{"role": "user", "content": " ".join(["a"] * tokens)}]
        half = " ".join(["a"] * max(1, tokens // 2))
        who, what = ("from", "value") if re.search(r"""["']from["']""", self.code) else ("role", "content")
        people = ("human", "gpt") if who == "from" else ("user", "assistant")
        return [{who: person, what: half} for person in people]

    @cached_property
    def _tree(self) -> ast.AST:
        return ast.parse(self.code)

    @cached_property
    def _chats(self) -> set[str]:
        """Names of columns that hold turns: the usual ones, and those whose items a function takes by number."""
        found = set(_CHATS)
        if re.search(_REWARDS_OF_CHATS, self.code) and not re.search(r"""["']prompt["']\s*:""", self.code):
            found.add(_PROMPT)  # which the script takes as it stands in the data
        if not re.search(r"""["'](role|from)["']""", self.code):
            return found
        for function in ast.walk(self._tree):
            if isinstance(function, ast.FunctionDef | ast.Lambda):
                rows = {each.arg for each in function.args.args}
                found |= {name for node in ast.walk(function) for name in _turns(node, rows)}
        return found.union(_ANSWERS) if found & set(_ANSWERS) else found

    def _read(self) -> Iterator[str]:
        settings = {name for node in ast.walk(self._tree) for name in _dicts(node)}
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
                row = isinstance(node.value, ast.Name) and node.value.id not in settings
                yield from _texts([node.slice]) if row or isinstance(node.value, ast.Subscript) else ()
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                of = node.func.value
                gets = node.func.attr == "get" and isinstance(of, ast.Name) and of.id not in settings
                yield from _texts(node.args[:1]) if gets or node.func.attr in _COLUMN_METHODS else ()
            elif isinstance(node, ast.keyword) and node.arg in ("dataset_text_field", "text_column"):
                yield from _texts([node.value])

    def _of_rewards(self) -> Iterator[str]:
        if "accuracy_reward" in self.code:  # TRL's own
            yield "solution"
        for node in ast.walk(self._tree):
            if isinstance(node, ast.FunctionDef) and any(each.arg == "completions" for each in node.args.args):
                yield from (each.arg for each in node.args.args if each.arg not in _OF_REWARDS)


def _dicts(node: ast.AST) -> Iterator[str]:
    """The names that a statement gives to a dict of its own, a file of settings or figures of metrics: no rows."""
    if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
        return
    value = node.value
    made = isinstance(value, ast.Call) and re.fullmatch(
        r"dict|vars|.*(asdict|safe_load|json\.loads?|\.compute|\.evaluate)", ast.unparse(value.func)
    )
    if isinstance(value, ast.Dict) or made:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def _turns(node: ast.AST, rows: set[str]) -> Iterator[str]:
    """The column X of `row["X"][0]` or `row["X"][:-1]`, of one of the `rows`."""
    if not (isinstance(node, ast.Subscript) and isinstance(node.value, ast.Subscript)) or _texts_of(node.slice):
        return
    inner = node.value
    if isinstance(inner.value, ast.Name) and inner.value.id in rows:
        yield from _texts_of(inner.slice)


def _texts_of(node: ast.AST) -> list[str]:
    return list(_texts([node]))


def _texts(nodes: Sequence[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value
        elif isinstance(node, ast.List | ast.Tuple):
            yield from _texts(node.elts)


ROWS = 2560  # enough for two steps of most batches; every second one is shorter, so batches are padded as real ones
_HELD_OUT = 256  # of a split that is not trained on: all of it may be evaluated before the first step
_NAMED = 6  # columns that a note names
_ASKS_CLASSES = re.compile(r"\.features\b.*\.(?:names|num_classes|int2str|str2int)\b")
_WRITERS = ("to_json", "to_csv", "to_parquet", "save_to_disk")  # of a dataset
_READERS = ("read_json", "read_csv", "read_parquet")  # of pandas


class MadeUp:
    """Rows of `tokens` tokens; `names` are those of the replaced data. Files written from them lie below `folder`."""

    def __init__(self, columns: Columns, tokens: int | None, folder: Path, note: Callable[[str], None]) -> None:
        self.columns, self.folder, self._tokens, self._note = columns, folder, tokens, note
        self.names: list[str] = []
        self.longest = 0  # tokens of the longest sequence that a model was given
        self._written: dict[str, str] = {}

    def rows(self, name: str) -> list[dict[str, object]]:
        """Rows that stand for the data `name`. Raises ConfigError if their length was not given."""
        if self._tokens is None:
            raise ConfigError(_missing(name)) from None
        if name not in self.names:
            self.names.append(name)
            first, more = self.columns.names[:_NAMED], self.columns.names[_NAMED:]
            columns = ", ".join(first) + (f" and {len(more)} more" if more else "")
            self._note(f"the data of {name} are not on this machine: samples of {self._tokens:,} tokens with the "
                       f"columns {columns} stand in, and longer ones of yours would take more")  # fmt: skip
        two = [self.columns.row(length) for length in (self._tokens, max(1, self._tokens - 2))]
        return two * (ROWS // 2)

    def tell(self, longest: int) -> None:
        """Note the tokens of the `longest` sequence that a model was given, where made-up rows were read."""
        self.longest = longest
        if self.names and longest and self._tokens and not 0.95 < longest / self._tokens < 1.05:
            self._note(f"of samples of {self._tokens:,} tokens the script made sequences of up to {longest:,}; where "
                       "yours are longer or shorter, change --prompt-tokens")  # fmt: skip

    def dataset(self, name: str) -> Any:
        """The same as a dataset."""
        import datasets

        rows = self.rows(name)
        found = datasets.Dataset.from_list(rows[:2])
        if _ASKS_CLASSES.search(self.columns.code):
            for label in (key for key in found.column_names if re.fullmatch("labels?", key)):
                found = found.cast_column(label, datasets.ClassLabel(num_classes=2))
        return found.select([0, 1] * (len(rows) // 2))

    def place(self, path: Any) -> Any:
        """Path for a file written from made-up rows: the user's own files are kept."""
        if not self.names or not isinstance(path, str | Path):
            return path
        whole = str(Path(path).absolute())
        return self._written.setdefault(whole, str(self.folder / f"written-{len(self._written)}{Path(path).suffix}"))

    def found(self, path: Any) -> Any:
        """`path`, or where it lies; of each within a list or dict."""
        if isinstance(path, Mapping):
            return {key: self.found(value) for key, value in path.items()}
        if isinstance(path, list | tuple):
            return [self.found(value) for value in path]
        return self._written.get(str(Path(path).absolute()), path) if isinstance(path, str | Path) else path

    def unknown_column(self, error: Exception) -> str | None:
        """The column that the script asked for in vain, by the error that it raised, if that is the cause."""
        if not self.names or not isinstance(error, KeyError | ValueError) or not error.args:
            return None
        plain = r"'?([A-Za-z_]\w*)'?$|" if isinstance(error, KeyError) else ""
        found = re.match(rf"{plain}Column (?:name )?\W*(\w+)\W* not in the dataset", str(error.args[0]))
        name = None if found is None else next(group for group in found.groups() if group)
        return None if name in {None, *self.columns.names, *SPLITS} else name


@contextmanager
def stood_in(made: MadeUp, own: Callable[[str], bool]) -> Iterator[None]:
    """Context in which missing data are `made` up; `own` recognises the script's own files."""
    with ExitStack() as patches:
        patches.enter_context(_datasets(made))
        patches.enter_context(_pandas(made))
        patches.enter_context(mock.patch.object(builtins, "open", _opened(made, own)))
        yield


@contextmanager
def _datasets(made: MadeUp) -> Iterator[None]:
    import datasets

    original, from_disk = datasets.load_dataset, datasets.load_from_disk
    missing = ConnectionError, FileNotFoundError, datasets.exceptions.DatasetNotFoundError

    def load_dataset(path: Any, *rest: Any, **named: Any) -> Any:
        files = named.get("data_files")
        if files is not None:
            named["data_files"] = made.found(files)
        try:
            return original(path, *rest, **named)
        except missing:
            return _as_asked(made.dataset(str(path) if files is None else _words(files)), named, made.columns.code)

    def load_from_disk(path: Any, *rest: Any, **named: Any) -> Any:
        try:
            return from_disk(made.found(path), *rest, **named)
        except missing:
            return made.dataset(str(path))

    whole, remove, mapped = datasets.Dataset.select, datasets.Dataset.remove_columns, datasets.Dataset.map
    skipped = datasets.IterableDataset.skip

    def select(rows: Any, indices: Any, *rest: Any, **named: Any) -> Any:
        if made.names:
            asked = list(itertools.islice(indices, ROWS))
            indices = [i for i in asked if i < len(rows)] or [i % max(1, len(rows)) for i in asked]
        return whole(rows, indices, *rest, **named)

    def skip(rows: Any, n: int) -> Any:  # of a stream, whose rows are all alike
        return rows if made.names else skipped(rows, n)

    def there(rows: Any, names: Any) -> Any:
        names = [names] if isinstance(names, str) else names
        return [name for name in names if name in rows.column_names] if made.names and names is not None else names

    def remove_columns(rows: Any, column_names: Any, *rest: Any, **named: Any) -> Any:
        return remove(rows, there(rows, column_names), *rest, **named)

    def map_rows(rows: Any, *rest: Any, **named: Any) -> Any:
        if "remove_columns" in named:
            named["remove_columns"] = there(rows, named["remove_columns"])
        if made.names or named.get("num_proc") == 1:
            named["num_proc"] = None  # a process of its own may wait for ever for what this one holds
        return mapped(rows, *rest, **named)

    with ExitStack() as patches:
        for function, instead in ((original, load_dataset), (from_disk, load_from_disk)):
            name = function.__name__
            for module in [m for m in list(sys.modules.values()) if vars(m).get(name) is function]:
                patches.enter_context(mock.patch.object(module, name, instead))
        for name, method in (("select", select), ("remove_columns", remove_columns), ("map", map_rows)):
            patches.enter_context(mock.patch.object(datasets.Dataset, name, method))
        patches.enter_context(mock.patch.object(datasets.IterableDataset, "skip", skip))
        for kind in (datasets.Dataset, datasets.DatasetDict):
            for name in (name for name in _WRITERS if hasattr(kind, name)):
                patches.enter_context(mock.patch.object(kind, name, _elsewhere(made, getattr(kind, name))))
            patches.enter_context(mock.patch.object(kind, "push_to_hub", mock.Mock(return_value=None)))
        yield


@contextmanager
def _pandas(made: MadeUp) -> Iterator[None]:
    import pandas  # type: ignore[import-untyped]

    def reading(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def read(path: Any, *rest: Any, **named: Any) -> Any:
            try:
                return original(made.found(path), *rest, **named)
            except (ConnectionError, FileNotFoundError):
                return pandas.DataFrame(made.rows(str(path)))

        return read

    with ExitStack() as patches:
        for name in _READERS:
            patches.enter_context(mock.patch.object(pandas, name, reading(getattr(pandas, name))))
        yield


def _elsewhere(made: MadeUp, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def write(rows: Any, path: Any, *rest: Any, **named: Any) -> Any:
        return original(rows, made.place(path), *rest, **named)

    return write


def _opened(made: MadeUp, own: Callable[[str], bool]) -> Callable[..., Any]:
    """`open`, which gives the script's own code made-up rows for a missing file of JSON."""
    original = builtins.open

    def opened(file: Any, mode: str = "r", *rest: Any, **named: Any) -> Any:
        try:
            return original(made.found(file) if isinstance(file, str | Path) else file, mode, *rest, **named)
        except FileNotFoundError:
            kind = Path(file).suffix if isinstance(file, str | Path) else None
            if kind not in (".json", ".jsonl") or not own(sys._getframe(1).f_code.co_filename):
                raise
            rows = made.rows(str(file))
        text = json.dumps(rows) if kind == ".json" else "".join(f"{json.dumps(row)}\n" for row in rows)
        return io.BytesIO(text.encode()) if "b" in mode else io.StringIO(text)

    return opened


def _words(files: Any) -> str:
    """The files that `load_dataset` is asked for, in words."""
    values = list(files.values()) if isinstance(files, Mapping) else files
    return ", ".join(str(each) for each in values) if isinstance(values, Sequence) and not isinstance(
        values, str) else str(values)  # fmt: skip


def _as_asked(rows: Any, named: Mapping[str, Any], code: str) -> Any:
    """`rows` as the splits that a call of `load_dataset` in the `code` asks for."""
    import datasets

    split = named.get("split")
    few = rows.select(range(_HELD_OUT)) if re.search(r"""["']train""", code) else rows

    def part(name: object) -> Any:
        return few if re.match(r"test|val|dev|eval", str(name)) else rows

    if named.get("streaming"):
        rows, few = rows.to_iterable_dataset(), few.to_iterable_dataset()
    if isinstance(split, list | tuple):
        return [part(name) for name in split]
    if split is not None:
        return part(split)
    names = {*SPLITS, *files} if isinstance(files := named.get("data_files"), Mapping) else SPLITS
    kind = datasets.IterableDatasetDict if named.get("streaming") else datasets.DatasetDict
    return kind({name: part(name) for name in names})


def _missing(name: str) -> str:
    return (
        f"the data of {quoted(name, 80)} are not on this machine, and a script sees no network here; load them once "
        f"outside, or give {option('prompt-tokens', 'N')} before the script: samples of N tokens then stand in"
    )
