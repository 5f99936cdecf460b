"""The style of a report's page, and the HTML that it is made of. Every text is escaped: names come from users."""

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

STYLE = """
:root { color-scheme: light dark; --ink: #1a1c1f; --soft: #5b6168; --line: #d9dde1; --paper: #ffffff; --panel: #f6f7f8;
  --good: #00704f; --bad: #b3420a; --mark: #e3f3ec; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7e9eb; --soft: #a4abb2; --line: #3a3f45; --paper: #16181b;
  --panel: #1f2226; --good: #4fd0a4; --bad: #ff9a66; --mark: #1d3a31; }
  .picture svg { filter: invert(0.91) hue-rotate(180deg); } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1180px; padding: 24px 20px 60px; color: var(--ink); background: var(--paper);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 36px 0 8px; border-bottom: 1px solid var(--line); padding-bottom: 4px; }
h3 { font-size: 16px; margin: 22px 0 6px; }
p { margin: 6px 0; overflow-wrap: anywhere; }
.soft, caption { color: var(--soft); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); gap: 12px; margin: 18px 0; }
.tile { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: 12px 14px; }
.tile b { display: block; font-size: 22px; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: 13px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; min-width: 52em; font-size: 14px; font-variant-numeric: tabular-nums;
  margin: 8px 0 4px; }
caption { text-align: left; padding: 4px 0; }
th, td { text-align: left; vertical-align: top; padding: 6px 10px; border-bottom: 1px solid var(--line);
  overflow-wrap: break-word; }
td.number { white-space: nowrap; text-align: right; }
th { color: var(--soft); font-weight: 600; border-bottom-width: 2px; }
tr.winner td { background: var(--mark); }
.good { color: var(--good); font-weight: 600; }
.bad { color: var(--bad); font-weight: 600; }
code { font: 13px/1.4 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; }
.lines { white-space: pre-wrap; }
.picture { background: transparent; margin: 10px 0; }
.picture svg { width: 100%; height: auto; max-width: 1000px; }
ul { padding-left: 20px; margin: 6px 0; } li { margin: 3px 0; overflow-wrap: anywhere; }
@media print { body { max-width: none; } h2 { break-after: avoid; } tr { break-inside: avoid; } }
"""


@dataclass(frozen=True, slots=True)
class Html:
    """Text that is HTML already."""

    text: str


Text = str | Html


def escaped(text: Text) -> str:
    """`text` as HTML, less the characters that HTML forbids; a line stays whole at the arrow of a change."""
    if isinstance(text, Html):
        return text.text
    allowed = "".join(c for c in text if c in "\n\t" or (ord(c) >= 32 and not 0xD800 <= ord(c) < 0xE000))
    return html.escape(allowed.replace(" -> ", " → "))


def element(tag: str, *inner: Text, kind: str = "") -> Html:
    """<tag class="kind">inner</tag>."""
    of = f' class="{escaped(kind)}"' if kind else ""
    return Html(f"<{tag}{of}>{''.join(map(escaped, inner))}</{tag}>")


def joined(parts: Iterable[Text]) -> Html:
    """The parts one after another."""
    return Html("\n".join(map(escaped, parts)))


def bullets(lines: Iterable[Text]) -> Html:
    """A list; empty text for an empty `lines`."""
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
