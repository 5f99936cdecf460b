"""The acceptance's page is that of its figures, a run keeps what it has made, and README's figures have a row in it."""

import re
import sys
import tempfile
import time
from pathlib import Path

import pytest

from experiments.acceptance import __main__ as acceptance
from experiments.acceptance import page
from experiments.acceptance.figures import Figure
from experiments.acceptance.parts import PARTS, Part, chosen

ROOT = Path(__file__).parents[1]
TITLES = {"8 %"}  # of a guide; not a claim


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(page, "MADE", tmp_path / "made.json")
    monkeypatch.setattr(page, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def part(folder: Path, code: str, minutes: float = 0.1) -> Part:
    """A part whose command is Python code that writes the file `found`."""
    program = f"import pathlib; found = pathlib.Path({str(folder / 'found')!r})\n{code}"
    return Part(
        "p", "a part", (sys.executable, "-c", program), "acceptance/parts.py",
        lambda: [Figure("the number", (folder / "found").read_text(), ">= 2", False)], minutes,
    )  # fmt: skip


def test_the_page_is_that_of_the_kept_figures() -> None:
    assert page.PAGE.read_text() == page.page(page.made()), "python -m experiments.acceptance page"


@pytest.mark.parametrize("one", PARTS, ids=lambda one: one.name)
def test_each_part_has_figures_with_a_claim(one: Part) -> None:
    figures = page.kept(one, page.made())
    assert figures
    assert len({figure.claim for figure in figures}) == len(figures)


def test_all_parts_together_take_an_hour_at_most() -> None:
    assert sum(one.minutes for one in PARTS) <= 60


def test_a_run_keeps_what_it_has_made_and_says_what_changed(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(code: str, *, again: bool = True, minutes: float = 1.0, takes: float = 0.1) -> str:
        acceptance.run((part(home, code, takes),), until=time.monotonic() + 60 * minutes, again=again)
        return capsys.readouterr().out

    assert "done in" in run("found.write_text('1')")
    assert "made by this code already" in run("found.write_text('9')", again=False)
    assert page.made()["p"]["figures"][0]["found"] == "1"
    said = run("import sys; print('yes\\nno\\n\\n', file=sys.stderr); sys.exit(3)")
    assert "failed with exit code 3: no (all that it said: " in said
    assert (home / "acceptance-p.log").read_text().startswith("yes")
    assert "left for the next run" in run("found.write_text('9')", takes=5.0)
    assert "done in" in run("found.write_text('2')")
    monkeypatch.setattr(page, "PARTS", (part(home, ""),))
    text = page.page(page.made())
    assert "- p: the number: 2 (goal >= 2)" in text
    assert "- p: the number: 1 -> 2" in text
    with pytest.raises(SystemExit, match="--only must be one of search, seeds"):
        chosen(["sed"])


def test_a_figure_of_readme_has_a_row() -> None:
    prose = re.sub(r"```.*?```", "", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    found = set(re.findall(r"\d[\d.]* (?:%|s|GB)(?![\w])", prose)) - TITLES
    rows = " ".join(one.found for part in PARTS for one in page.kept(part, page.made())).replace("%", " %")
    assert len(found) >= 4
    assert not {figure for figure in found if not re.search(rf"(?<![\d.]){re.escape(figure)}", rows)}
