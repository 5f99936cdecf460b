"""The commands: `--help` has each, and the README's table has the same."""

import argparse
import re
from pathlib import Path

from autofit.cli import _COMMANDS
from autofit.commands.arguments import parser

README = Path(__file__).parents[1] / "README.md"


def commands_of_help() -> dict[str, str]:
    """{command: the sentence that `autofit --help` has for it}."""
    (nested,) = [a for a in parser()._actions if isinstance(a, argparse._SubParsersAction)]
    return {str(choice.dest): str(choice.help) for choice in nested._choices_actions}


def commands_of_readme() -> set[str]:
    """The commands in the first cells of the README's table."""
    cells = re.findall(r"^\| (`autofit (?:\\\||[^|])*)\|", README.read_text(encoding="utf-8"), re.MULTILINE)
    named = (name.removeprefix("autofit ").split()[0] for cell in cells for name in re.findall(r"`([^`]+)`", cell))
    return {name for name in named if not name.startswith("-")}


def test_every_command_of_the_help_has_its_function_and_a_sentence() -> None:
    found = commands_of_help()
    assert set(found) == set(_COMMANDS)
    assert all(text[0].islower() and len(text) > 20 for text in found.values()), found


def test_the_readme_lists_the_commands_of_the_help() -> None:
    assert commands_of_readme() == set(commands_of_help())
