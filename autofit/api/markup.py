"""The few pieces of HTML that a report is made of. Every text is escaped: names and reasons come from users."""

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Html:
    """Text that is HTML already."""

    text: str


Text = str | Html


def escaped(text: Text) -> str:
    """`text` as HTML; characters that HTML does not allow are left out."""
    if isinstance(text, Html):
        return text.text
    return html.escape("".join(c for c in text if c in "\n\t" or (ord(c) >= 32 and not 0xD800 <= ord(c) < 0xE000)))


def element(tag: str, *inner: Text, kind: str = "") -> Html:
    """<tag class="kind">inner</tag>."""
    of = f' class="{escaped(kind)}"' if kind else ""
    return Html(f"<{tag}{of}>{''.join(map(escaped, inner))}</{tag}>")


def joined(parts: Iterable[Text]) -> Html:
    """The parts one after another."""
    return Html("\n".join(map(escaped, parts)))


def bullets(lines: Iterable[Text]) -> Html:
    """A list; nothing for no lines."""
    items = [element("li", line) for line in lines]
    return element("ul", *items) if items else Html("")


def table(
    heads: Sequence[Text], rows: Iterable[Sequence[Text]], *, numbers: Sequence[int] = (), marked: Sequence[int] = (),
    caption: str = "",
) -> Html:  # fmt: skip
    """A table; `numbers` are the columns of figures, `marked` the rows that stand out."""
    head = element("tr", *(element("th", name) for name in heads))
    body = [_row(row, numbers, kind="winner" if line in marked else "") for line, row in enumerate(rows)]
    above = [element("caption", caption)] if caption else []
    whole = element("table", *above, element("thead", head), element("tbody", *body))
    return element("div", whole, kind="wide")


def _row(cells: Sequence[Text], numbers: Sequence[int], *, kind: str) -> Html:
    made = (element("td", cell, kind="number" if place in numbers else "") for place, cell in enumerate(cells))
    return element("tr", *made, kind=kind)
