"""Made-up samples in place of data that are not on this machine, with the columns that the script reads."""

import builtins
import functools
import io
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from autofit.errors import ConfigError, option, quoted
from autofit.scripts.columns import SPLITS, Columns

ROWS = 2560  # enough for two steps of most batches; every second one is shorter, so batches are padded as real ones
_NAMED = 6  # columns that a note names
_WRITERS = ("to_json", "to_csv", "to_parquet", "save_to_disk")  # of a dataset
_READERS = ("read_json", "read_csv", "read_parquet")  # of pandas


class MadeUp:
    """Rows of `tokens` tokens; `names` tells what they stand for. What is written of them lies below `folder`."""

    def __init__(self, columns: Columns, tokens: int | None, folder: Path, note: Callable[[str], None]) -> None:
        self.columns, self.folder, self._tokens, self._note = columns, folder, tokens, note
        self.names: list[str] = []
        self._written: dict[str, str] = {}

    def rows(self, name: str) -> list[dict[str, object]]:
        """Rows that stand for the data `name`. Raises ConfigError where their length is not given."""
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
        if self.names and longest and self._tokens and not 0.95 < longest / self._tokens < 1.05:
            self._note(f"of samples of {self._tokens:,} tokens the script made sequences of up to {longest:,}; where "
                       "yours are longer or shorter, change --prompt-tokens")  # fmt: skip

    def dataset(self, name: str) -> Any:
        """The same as a dataset."""
        import datasets

        rows = self.rows(name)
        return datasets.Dataset.from_list(rows[:2]).select([0, 1] * (len(rows) // 2))

    def place(self, path: Any) -> Any:
        """Where a file that made-up rows are written into lies: nothing of the user's is written over."""
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
        """The column that the script asked for in vain, by the error that it raised; None where it did not."""
        if not self.names or not isinstance(error, KeyError | ValueError) or not error.args:
            return None
        plain = r"'?([A-Za-z_]\w*)'?$|" if isinstance(error, KeyError) else ""
        found = re.match(rf"{plain}Column (?:name )?\W*(\w+)\W* not in the dataset", str(error.args[0]))
        name = None if found is None else next(group for group in found.groups() if group)
        return None if name in {None, *self.columns.names, *SPLITS} else name


@contextmanager
def stood_in(made: MadeUp, own: Callable[[str], bool]) -> Iterator[None]:
    """Context in which data that are not on this machine are `made` up; `own` tells the script's own files."""
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
            return _as_asked(made.dataset(str(path) if files is None else _words(files)), named)

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
    names = {*SPLITS, *files} if isinstance(files := named.get("data_files"), Mapping) else SPLITS
    kind = datasets.IterableDatasetDict if named.get("streaming") else datasets.DatasetDict
    return kind(dict.fromkeys(names, rows))


def _missing(name: str) -> str:
    return (
        f"the data of {quoted(name, 80)} are not on this machine, and a script sees no network here; load them once "
        f"outside, or give {option('prompt-tokens', 'N')} before the script: samples of N tokens then stand in"
    )
