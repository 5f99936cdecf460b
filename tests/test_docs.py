"""The pages beside the code: their commands exist, their outputs are true, and so are their links and figures."""

import os
import re
import shlex
from pathlib import Path

import pytest
import yaml

import autofit
from autofit.commands.arguments import parser
from docs import outputs, picture, tables

ROOT = Path(__file__).parents[1]
SITE = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
PAGES = ("README.md", "CONTRIBUTING.md", "AGENTS.md", "skills/autofit/SKILL.md",
         "autofit/fakegpu/README.md", "trainers/README.md", "README.zh-CN.md", *SITE)  # fmt: skip
TRANSLATED = {"README.md": "README.zh-CN.md", "docs/index.md": "docs/zh/index.md",
              "docs/guides/verl.md": "docs/zh/verl.md",
              "docs/guides/llama-factory.md": "docs/zh/llama-factory.md"}  # fmt: skip
WITH_OUTPUTS = [page.relative_to(ROOT).as_posix() for page in outputs.pages()]


def commands(page: str) -> list[str]:
    """The commands in backticks or code blocks that a reader could type: `autofit NAME ...`, without placeholders."""
    text = (ROOT / page).read_text("utf-8").replace("\\\n", " ")
    blocks = "\n".join(re.findall(r"```(?:bash|console)?\n(.*?)```", text, re.DOTALL))
    inline = re.findall(r"`(autofit [a-z][^`\n]*)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    found = [*inline, *re.findall(r"^(?:\$ )?(autofit [a-z][^\n#]*)", blocks, re.MULTILINE)]
    return [line.strip() for line in found if not re.search(r"[A-Z]{3,}|\[|\.\.\.|·", line)]


def shown(page: str) -> list[outputs.Command]:
    """The commands of a page's console blocks with what stands behind them."""
    blocks = outputs.BLOCK.findall((ROOT / page).read_text("utf-8"))
    return [command for block in blocks for command in outputs.commands(block)]


@pytest.mark.parametrize(("page", "line"), [(page, line) for page in PAGES for line in commands(page)])
def test_a_command_of_a_page_is_one_that_autofit_takes(page: str, line: str) -> None:
    parser().parse_args(shlex.split(line)[1:])


@pytest.mark.parametrize("page", PAGES)
def test_a_link_of_a_page_leads_to_a_file(page: str) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", (ROOT / page).read_text("utf-8"))
    assert [link for link in links if not ((ROOT / page).parent / link).exists()] == []


def test_the_skill_says_what_it_is_for_and_is_short() -> None:
    text = (ROOT / "skills/autofit/SKILL.md").read_text()
    assert re.match(r"---\nname: autofit\ndescription: .{80,}\n---\n", text)
    assert text.count("\n") < 200


def test_the_site_lists_every_page_and_no_other() -> None:
    def pages(entry: object) -> list[str]:
        nested = entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else None
        return [str(entry)] if nested is None else [page for part in nested for page in pages(part)]

    listed = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"])
    assert sorted(f"docs/{page}" for page in listed) == SITE


@pytest.mark.parametrize("page", WITH_OUTPUTS)
def test_a_command_with_an_output_can_be_run_again(page: str) -> None:
    """Its files stand in the page or in docs/examples, or a command before it writes them."""
    text = (ROOT / page).read_text("utf-8")
    assert len(outputs.MADE.findall(text)) == 1
    there = {title for title, _ in outputs.FILE.findall(text)} | {p.name for p in outputs.EXAMPLES.iterdir()}
    for command in shown(page):
        program, *words = command.words
        assert program in ("autofit", "cat") or [program, *words] == ["echo", "$?"]
        needed = {word for word in words if word.endswith((".yaml", ".sh", ".py"))}
        written = {words[place + 1] for place, word in enumerate(words) if word in ("--out", "--plot", "--html")}
        assert needed - written <= there, command.line
        there |= written
        assert command.shown or "--write-only" in words, f"{command.line} has no output: python docs/outputs.py {page}"
        assert len(outputs.part_of(command.line, command.shown).splitlines()) == len(command.shown.splitlines())


@pytest.mark.parametrize("page", WITH_OUTPUTS)
def test_a_file_in_a_page_is_that_of_the_examples(page: str) -> None:
    for title, content in outputs.FILE.findall((ROOT / page).read_text("utf-8")):
        assert (outputs.EXAMPLES / title).read_text("utf-8") == content


def test_an_output_is_what_a_terminal_of_80_columns_shows(tmp_path: Path) -> None:
    files = dict(outputs.FILE.findall((ROOT / "docs/commands.md").read_text("utf-8")))
    (tmp_path / "verl.yaml").write_text(files["verl.yaml"])
    said, code = outputs.run(["autofit", "explain", "verl.yaml"], tmp_path)
    assert code == 1
    assert max(map(len, said.splitlines())) <= outputs.COLUMNS
    assert "error: ppo_micro_batch_size_per_gpu 7 must divide" in said
    said, code = outputs.run(["autofit", "estimate", "--gpu", "a1000"], tmp_path)
    assert code == 2
    assert said.startswith("autofit: ")


def test_a_block_is_read_as_commands_and_their_outputs() -> None:
    block = "$ autofit check a.yaml \\\n    --gpu h100  # the last 1 lines\nfits\n$ echo $?\n0\n"
    first, second = outputs.commands(block)
    assert first.words == ["autofit", "check", "a.yaml", "--gpu", "h100"]
    assert outputs.part_of(first.line, "one\ntwo\n") == "two\n"
    assert (first.shown, second.line, second.shown) == ("fits\n", "echo $?", "0\n")
    with pytest.raises(ValueError, match="must begin with"):
        list(outputs.commands("autofit check\n"))


def test_noise_of_a_machine_is_no_difference() -> None:
    said = "48 candidates in {s}; study-{h}-trial-4, used (UTC) {d}\nsamples; {s}\n"
    one = outputs.compared(said.format(s="31.9 s", h="f6ccdd", d="2026-11-25"))
    assert one == outputs.compared(said.format(s="1m2 s", h="00ffaa", d="2027-01-01"))
    assert one != outputs.compared(said.format(s="31.9 GB", h="f6ccdd", d="2026-11-25"))


@pytest.mark.parametrize("page", SITE)
def test_a_table_of_a_page_is_that_of_its_file(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    assert tables.with_tables(text) == text, "python docs/tables.py"


def test_the_page_of_python_has_every_public_name_where_it_is_defined() -> None:
    shown = re.findall(r"^::: (\S+)\.(\w+)$", (ROOT / "docs/api.md").read_text("utf-8"), re.MULTILINE)
    assert set(autofit.__all__) <= {name for _, name in shown}
    for module, name in shown:
        source = (ROOT / f"{module.replace('.', '/')}.py").read_text("utf-8")
        assert re.search(rf"^(?:def|class) {name}\b", source, re.MULTILINE), f"{module} defines no {name}"


def headings(text: str) -> list[int]:
    """The levels of a page's headings, in order."""
    return [len(marks) for marks in re.findall(r"^(#+) ", without_blocks(text), re.MULTILINE)]


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def code(text: str) -> list[str]:
    """The code of a page: its blocks in order without comments, the words in backticks in any order."""
    blocks = [re.sub(r" *#.*", "", block) for block in re.findall(r"^```.*?^```$", text, re.DOTALL | re.MULTILINE)]
    return [*blocks, *sorted(re.findall(r"`([^`\n]+)`", without_blocks(text)))]


def figures(text: str) -> list[str]:
    """The numbers in a page's sentences and tables, in any order; what stands in code or a link is not one."""
    words = re.sub(r"`[^`\n]*`|\]\([^)]*\)", "", without_blocks(text))
    return sorted(re.findall(r"(?<![A-Za-z\d.])\d[\d,.]*(?<![,.])", words))


@pytest.mark.parametrize(("english", "chinese"), TRANSLATED.items())
def test_a_translated_page_has_the_same_headings_code_and_figures(english: str, chinese: str) -> None:
    one, other = ((ROOT / page).read_text("utf-8") for page in (english, chinese))
    assert headings(one) == headings(other)
    assert code(one) == code(other)
    assert figures(one) == figures(other)


@pytest.mark.parametrize(("name", "texts"), picture.TEXTS.items())
def test_the_picture_has_the_figures_of_the_search(name: str, texts: dict[str, str | tuple[str, ...]]) -> None:
    found = picture.trials((ROOT / "docs/commands.md").read_text("utf-8"))
    assert {picture.BATCH % trial.micro_batch for trial in found} == {0}
    assert (ROOT / f"docs/img/split{name}.svg").read_text("utf-8") == picture.picture(found, texts)


@pytest.mark.slow
def test_outputs_of_the_commands_page_are_those_of_today(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks of the commands page; `nox -s outputs` runs all of them."""
    text = (ROOT / "docs/commands.md").read_text("utf-8")
    blocks = [b.group() for b in outputs.BLOCK.finditer(text) if re.search(r"\$ autofit (check|explain) ", b.group())]
    files = re.findall(r"^```yaml title=.*?^```$", text, re.DOTALL | re.MULTILINE)
    page = "\n".join([*files, *blocks])
    assert len(blocks) == 2
    monkeypatch.setenv("AUTOFIT_CACHE", os.environ.get("AUTOFIT_CACHE", str(tmp_path)))
    assert outputs.compared(outputs.with_outputs(page)) == outputs.compared(page)
