"""The figures that README, docs and CHANGELOG tell, and those of them that have no row: README.md has the rule."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from experiments.acceptance import page
from experiments.acceptance.parts import PARTS

HERE = Path(__file__).parent
ROOT = page.ROOT
CHANGELOG = ROOT / "CHANGELOG.md"
LOG = ROOT / "experiments" / "LOG.md"
# What is outside of the rule: blocks of code and outputs, tables that a program puts in, words between backquotes.
_OUTSIDE = re.compile(r"```.*?```|<!-- table:.*?<!-- /table -->", re.DOTALL)
_QUOTED = re.compile(r"`[^`\n]*`")
_UNITS = {
    "percent": r"%",
    "time": r"(?:ms|s|min|minutes?|seconds?|hours?)(?!\w)|秒|毫秒|分钟|小时",
    "factor": r"(?<=\d)x(?!\w)|times(?!\w)|倍",
}
_NUMBER = r"(?<![\w.,-])[+-]?(\d+(?:,\d{3})*(?:\.\d+)?)"
_UNIT = "|".join(f"(?P<{kind}>{pattern})" for kind, pattern in _UNITS.items())
# A figure, and those before it that share its unit: "0.03 to 0.21 %", "8 and 31 %".
_FIGURE = re.compile(rf"(?:{_NUMBER}(?:, | to | and | or | -> | 到 | 和 ))*{_NUMBER}\s?(?:{_UNIT})")
_EXPERIMENT = re.compile(r"experiments/[\w/-]+(?:\.\w+)?")


@dataclass(frozen=True, slots=True)
class Told:
    """One figure of a text: the page, the line on which its paragraph begins, its number and what it counts."""

    page: str
    line: int
    number: str
    kind: str  # of _UNITS

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.number} ({self.kind})"


def pages() -> list[Path]:
    """The pages under the rule."""
    return [ROOT / "README.md", ROOT / "README.zh-CN.md", *sorted((ROOT / "docs").rglob("*.md")), CHANGELOG]


def without_row(path: Path, text: str | None = None) -> list[Told]:
    """The figures of a page (or of `text` in its place) that have no row."""
    text = path.read_text(encoding="utf-8") if text is None else text
    name = path.relative_to(ROOT).as_posix()
    for phrase in unmeasured().get(name, ()):
        text = text.replace(phrase, re.sub(r"\d", "", phrase))
    text = _OUTSIDE.sub(lambda found: "\n" * found[0].count("\n"), text)
    parts = _parts(text, r"(?<=\n)(?=- )" if path == CHANGELOG else r"\n[ \t]*\n")
    return [one for line, part in parts for one in _missing(name, line, part)]


def _parts(text: str, between: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each paragraph of a page, or entry of the CHANGELOG."""
    line = 1
    for part in re.split(f"({between})", text):
        yield line, part
        line += part.count("\n")


def _missing(name: str, line: int, part: str) -> list[Told]:
    rows = [_page_rows(), _logged(part), *(_rows(where) for where in _EXPERIMENT.findall(part))]
    return [
        told
        for found in _FIGURE.finditer(_QUOTED.sub("", part))
        for number in re.findall(_NUMBER, found[0])
        if not any(_stands(told := Told(name, line, number, str(found.lastgroup)), text) for text in rows)
    ]


def _stands(one: Told, rows: str) -> bool:
    """Whether the figure stands in the rows: with its unit, or as a whole cell whose column names the unit."""
    number = rf"(?<![\d.,]){re.escape(one.number)}"
    shares = r"(?:(?:, | to | and | or | -> )[+-]?[\d.,]+)*"
    unit = rf"{number}{shares}\s?(?:{_UNITS[one.kind]})"
    factor = rf"|x {re.escape(one.number)}(?![\d.])" if one.kind == "factor" else ""
    return re.search(rf"{unit}|\|\s*[+-]?{number}\s*\|{factor}", rows) is not None


@functools.cache
def unmeasured() -> dict[str, dict[str, str]]:
    """{page: {a phrase: why its figure is no measured one of autofit's}}."""
    return dict(yaml.safe_load((HERE / "unmeasured.yaml").read_text(encoding="utf-8")))


@functools.cache
def logged() -> dict[str, str]:
    """{how an entry of the CHANGELOG begins: how the paragraph of LOG.md begins that has its figures}."""
    return dict(yaml.safe_load((HERE / "logged.yaml").read_text(encoding="utf-8")))


def _logged(entry: str) -> str:
    began = next((began for said, began in logged().items() if entry.startswith(f"- {said}")), None)
    return "" if began is None else next((text for text in log() if text.startswith(began)), "")


@functools.cache
def log() -> list[str]:
    """The paragraphs of LOG.md."""
    return re.split(r"\n[ \t]*\n|\n(?=- )", LOG.read_text(encoding="utf-8"))


@functools.cache
def _page_rows() -> str:
    """What was found, a line for each row of page.md; not its goals."""
    return "\n".join(one.found for part in PARTS for one in page.kept(part, page.made()))


@functools.cache
def _rows(where: str) -> str:
    """The rows of the tables of an experiment's file or folder."""
    path = ROOT / where
    files = [path] if path.is_file() else sorted(path.rglob("*.md")) if path.is_dir() else []
    lines = (line for file in files if file != LOG for line in file.read_text(encoding="utf-8").splitlines())
    return "\n".join(line for line in lines if line.startswith("|"))
