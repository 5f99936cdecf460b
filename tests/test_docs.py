"""The pages beside the code: their commands exist, and so do the files that they link to."""

import re
import shlex
from pathlib import Path

import pytest

from autofit.commands.arguments import parser

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "AGENTS.md", "docs/how-it-predicts.md", "skills/autofit/SKILL.md",
         "autofit/fakegpu/README.md", "trainers/README.md")  # fmt: skip


def commands(page: str) -> list[str]:
    """The commands in backticks or code blocks that a reader could type: `autofit NAME ...`, without placeholders."""
    text = (ROOT / page).read_text()
    blocks = "\n".join(re.findall(r"```\n(.*?)```", text, re.DOTALL))
    inline = re.findall(r"`(autofit [a-z][^`\n]*)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    found = [*inline, *re.findall(r"^(autofit [a-z][^\n#]*)", blocks, re.MULTILINE)]
    return [line.strip() for line in found if not re.search(r"[A-Z]{3,}|\[|\.\.\.|·", line)]


@pytest.mark.parametrize(("page", "line"), [(page, line) for page in PAGES for line in commands(page)])
def test_a_command_of_a_page_is_one_that_autofit_takes(page: str, line: str) -> None:
    parser().parse_args(shlex.split(line)[1:])


@pytest.mark.parametrize("page", PAGES)
def test_a_link_of_a_page_leads_to_a_file(page: str) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", (ROOT / page).read_text())
    assert [link for link in links if not ((ROOT / page).parent / link).exists()] == []


def test_the_skill_says_what_it_is_for_and_is_short() -> None:
    text = (ROOT / "skills/autofit/SKILL.md").read_text()
    assert re.match(r"---\nname: autofit\ndescription: .{80,}\n---\n", text)
    assert text.count("\n") < 200
