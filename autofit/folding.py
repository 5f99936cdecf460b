"""Tables on a narrow terminal, with all text and all words kept whole."""

from collections.abc import Iterator

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Column, Table
from rich.text import Text

from autofit.lines import wrapped

_NONE = "-"
_SHORT = 24  # characters of a text that stands among others in a line


class Folding(Table):
    """A table that shows each row as a block of lines where a terminal would cut a column off or break its words.

    With `narrow`, that table comes first where it has room. Below `from_width` columns the table itself is not shown.
    """

    def __init__(
        self, *, title: str | Text, narrow: "Folding | None" = None, from_width: int = 0, **options: object
    ) -> None:
        super().__init__(title=title, title_justify="left", **options)  # type: ignore[arg-type]
        self.narrow, self.from_width = narrow, from_width

    def has_room(self, width: int) -> bool:
        """True if the table is whole in `width` columns."""
        return width >= max(self.from_width, self._frame + sum(map(_least, self.columns)))

    @property
    def _frame(self) -> int:
        """Columns of a terminal beside the texts: a line and the blanks at each column, and a last line."""
        _, right, _, left = self.padding
        return (left + 1 + right) * len(self.columns) + 1

    def _set_widths(self, width: int) -> None:
        """Widths that keep words whole, which rich by itself ignores; the rest goes to columns with long lines."""
        spare = width - self._frame - sum(map(_least, self.columns))
        by_need = sorted(self.columns, key=lambda column: _most(column) - _least(column))
        for place, column in enumerate(by_need):
            more = min(_most(column) - _least(column), spare // (len(by_need) - place))
            column.width, spare = _least(column) + more, spare - more

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.has_room(options.max_width):
            self._set_widths(options.max_width)
            yield from super().__rich_console__(console, options)
        elif self.narrow is not None and self.narrow.has_room(options.max_width):
            yield self.narrow
        else:
            yield from self._blocks(options.max_width)

    def _blocks(self, width: int) -> Iterator[Text]:
        """A title, and for each row its first cell, its long texts a line each, and the others in one."""
        title = _text(self.title or "")
        yield from (Text(line, style="italic") for line in wrapped(title.plain, width))
        for row in zip(*(column.cells for column in self.columns), strict=True):
            (first, head), *rest = zip(self.columns, map(_text, row), strict=True)
            yield from _lines(" ".join(filter(None, (_name(first), _flat(head)))), width, "", style="bold")
            said = [(column, cell) for column, cell in rest if cell.plain.strip() not in ("", _NONE)]
            for column, cell in said:
                if not _is_short(column):
                    yield from _lines(": ".join(filter(None, (_name(column), _flat(cell)))), width, "  ")
            figures = [f"{_name(column)} {_flat(cell)}".strip() for column, cell in said if _is_short(column)]
            yield from _lines(", ".join(figures), width, "  ")


def _is_short(column: Column) -> bool:
    return column.justify == "right" or _most(column) <= _SHORT


def _lines(words: str, width: int, indent: str, *, style: str = "") -> list[Text]:
    if not words:
        return []
    lines = wrapped(indent + words, width)
    return [Text(line, style=style, no_wrap=True, overflow="ignore") for line in lines]


def _least(column: Column) -> int:
    """The least width of a column that keeps its words whole."""
    lines = _lines_of(column)
    words = lines if column.no_wrap else [word for line in lines for word in line.split()]
    return max(column.min_width or 0, max(map(cell_len, words), default=0))


def _most(column: Column) -> int:
    """The width in which every cell of a column is one line."""
    return max(_least(column), max(map(cell_len, _lines_of(column)), default=0))


def _lines_of(column: Column) -> list[str]:
    texts = [_text(column.header), *map(_text, column.cells)]
    return [line for text in texts for line in text.plain.splitlines()]


def _text(cell: object) -> Text:
    return cell if isinstance(cell, Text) else Text.from_markup(str(cell))


def _name(column: Column) -> str:
    return _flat(_text(column.header))


def _flat(cell: Text) -> str:
    return ", ".join(cell.plain.splitlines())
