"""`autofit --help` and the completion of shells: every command, at every width, and nothing that is not there."""

import argparse
import shutil
import subprocess
from pathlib import Path

import pytest

from autofit.cli import _COMMANDS, main
from autofit.commands.arguments import parser
from autofit.commands.help import EXAMPLES, GROUPS, SHELLS, script


def options_of(command: str) -> list[str]:
    (nested,) = [a for a in parser()._actions if isinstance(a, argparse._SubParsersAction)]
    return [name for action in nested.choices[command]._actions for name in action.option_strings]


def test_every_command_is_in_one_group_with_two_examples() -> None:
    assert sorted(name for group in GROUPS.values() for name in group) == sorted(_COMMANDS)
    assert EXAMPLES.keys() == _COMMANDS.keys()


@pytest.mark.parametrize("command", sorted(_COMMANDS))
def test_the_examples_are_what_the_parser_takes(command: str) -> None:
    for example in EXAMPLES[command]:
        assert parser().parse_args(example.split()).command == command


@pytest.mark.parametrize("columns", [60, 80, 100, 120, 200])
def test_the_help_has_each_command_and_exit_code_within_the_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit):
        main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) < columns
    for name in _COMMANDS:
        assert any(line.startswith(f"  {name} ") for line in lines)
    for code in (0, 1, 2, 130):
        assert any(line.startswith(f"  {code} ") for line in lines)
    for name in _COMMANDS:
        with pytest.raises(SystemExit):
            main([name, "--help"])
        lines = capsys.readouterr().out.splitlines()
        long = [line for line in lines if len(line) >= columns]
        assert not [line for line in long if not line.strip().startswith(("autofit ", "--", "["))]  # no word is broken


@pytest.mark.parametrize("shell", SHELLS)
def test_the_completion_has_every_command_and_option(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    for command in _COMMANDS:
        assert command in text
        for option in options_of(command):
            fish = f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
            assert (fish if shell == "fish" else option) in text
    assert "==SUPPRESS==" not in text
    if shell != "bash":
        assert "(default: 20s; 0: none)" in text, "a colon within a sentence stays one"


@pytest.mark.parametrize(
    ("line", "proposed"),
    [
        (["che"], ["check"]),
        (["check", "--gp"], ["--gpu", "--gpus"]),
        (["check", "--gpu", "rtx409"], ["rtx4090"]),
        (["search", "--goal", "mem"], ["memory"]),
        (["init", ""], ["grpo", "sft", "dpo", "reward"]),
        (["check", ""], []),  # files, which bash proposes itself
        (["check", "run.yaml", "--set", ""], []),
    ],
)
def test_bash_completes_commands_options_and_values(line: list[str], proposed: list[str], tmp_path: Path) -> None:
    words = " ".join(f"'{word}'" for word in ["autofit", *line])
    asked = f"COMP_WORDS=({words}); COMP_CWORD={len(line)}; _autofit; echo ${{COMPREPLY[@]}}"
    file = tmp_path / "completion.sh"
    file.write_text(f"set -u\n{script(parser(), 'bash')}\n{asked}\n")
    done = subprocess.run(["bash", str(file)], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert sorted(done.stdout.split()) == sorted(proposed)


@pytest.mark.parametrize("shell", SHELLS)
def test_the_shell_can_read_the_completion(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    file = tmp_path / "completion"
    file.write_text(script(parser(), shell))
    subprocess.run([shell, "-n", str(file)], check=True)


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_every_quote_of_a_completion_is_closed(shell: str) -> None:
    for line in script(parser(), shell).splitlines():
        if not line.startswith("#"):
            assert line.replace("'\\''", "").count("'") % 2 == 0, line


def test_an_unknown_option_is_told_with_those_of_its_own_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "-o", "x"]) == 2  # `--to` is an option of export
    said = capsys.readouterr().err
    assert "--to" not in said
    assert "see `autofit init --help`" in said
    assert main(["check", "run.yaml", "--gpuu", "t4"]) == 2
    assert "the nearest valid one is '--gpu'" in capsys.readouterr().err
