"""The acceptance's page is that of its figures, a run keeps what it has made, and the texts' figures have a row."""

import sys
import tempfile
import time
from pathlib import Path

import pytest

from experiments.acceptance import __main__ as acceptance
from experiments.acceptance import page, told
from experiments.acceptance.figures import Figure
from experiments.acceptance.parts import PARTS, Part, chosen


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


def test_each_part_names_the_commit_that_made_it_and_those_older_than_the_code_are_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    if page.no_history():
        pytest.skip(page.no_history())
    made_by = {part.name: acceptance.commit_of(part) for part in PARTS}
    assert not [name for name, commit in made_by.items() if not commit]
    assert not page.unknown(list(made_by.values()))
    ages = {name: page.commits_since(commit) for name, commit in made_by.items()}
    told = ", ".join(f"{name} ({age})" for name, age in ages.items() if age)
    with capsys.disabled():
        print(f"\nresults older than the code they measure (commits since then): {told or 'none'}")


def test_an_unknown_commit_of_a_part_is_told_as_one(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "made", lambda: {"p": {"commit": "0" * 12}})
    assert "which this clone does not have" in acceptance.status(part(home, ""))
    assert page.unknown(["0" * 12]) == ["0" * 12]
    monkeypatch.setattr(page, "made", dict)
    monkeypatch.setattr(page, "last_commit", lambda part: ("", ""))
    assert acceptance.status(part(home, "")) == "p: not made yet"


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


@pytest.mark.parametrize("path", told.pages(), ids=lambda path: path.relative_to(told.ROOT).as_posix())
def test_each_figure_of_readme_docs_and_changelog_has_a_row(path: Path) -> None:
    assert not told.without_row(path), "experiments/acceptance/README.md has the rule"


@pytest.mark.parametrize("page_name", ["docs/guides/fill-the-card.md", "docs/zh/verl.md", "README.md", "CHANGELOG.md"])
@pytest.mark.parametrize(
    ("words", "numbers"),
    [
        ("It is 0.3 % off.", ["0.3"]),
        ("From 0.71 to 0.3% off, 12345 kept.", ["0.71", "0.3"]),
        ("An answer takes 7.31 s, then 613 ms.", ["7.31", "613"]),
        ("2.74x as fast, 31.7 times less, 误差 0.3 %，用 7.31 秒", ["2.74", "31.7", "0.3", "7.31"]),
        ("| bytes | 0.3 % |\n|---|---|", ["0.3"]),
        ("`--headroom 0.3 %` and `7.31 s`\n\n```\n0.3 %\n```", []),
    ],
)
def test_a_figure_without_a_row_is_found(page_name: str, words: str, numbers: list[str]) -> None:
    path = told.ROOT / page_name
    text = path.read_text() + f"\n\n- {words}\n"
    assert [one.number for one in told.without_row(path, text)] == numbers


def test_a_figure_stands_in_a_table_of_the_experiment_that_its_paragraph_names() -> None:
    path = told.ROOT / "docs" / "faq.md"
    there = "FSDP1 holds 36,226,226,688 bytes, +0.0128 % off (`experiments/two_cards/`)."
    assert not told.without_row(path, there)
    assert [one.number for one in told.without_row(path, there.replace("0.0128", "0.0129"))] == ["0.0129"]
    assert [one.number for one in told.without_row(path, there.replace("two_cards", "oracle"))] == ["0.0128"]


def test_each_phrase_that_is_no_measured_figure_stands_in_its_page_with_a_reason() -> None:
    for name, phrases in told.unmeasured().items():
        text = (told.ROOT / name).read_text()
        assert not [phrase for phrase, reason in phrases.items() if phrase not in text or not reason], name


def test_a_part_without_a_command_is_not_run(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = Part("stands", "a part", (), "gpu", lambda: [Figure("the number", "1")], 0, needs="a card")
    acceptance.run((one,), until=time.monotonic() + 60, again=True)
    assert not capsys.readouterr().out
    assert "(it needs a card): the results as they stand in experiments/gpu" in page.when(one, {})
