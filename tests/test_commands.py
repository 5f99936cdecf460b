"""The commands: `--help` and the table of docs/commands.md have each, and signals end them as Ctrl-C does."""

import argparse
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from autofit import cli, start
from autofit.cli import _COMMANDS
from autofit.commands.arguments import parser
from autofit.commands.common import say, show_fact, terminate_like_interrupt
from autofit.tuning.study import open_storage

PAGE = Path(__file__).parents[1] / "docs" / "commands.md"


def commands_of_help() -> dict[str, str]:
    """{command: the sentence that `autofit --help` has for it}."""
    (nested,) = [a for a in parser()._actions if isinstance(a, argparse._SubParsersAction)]
    return {str(choice.dest): str(choice.help) for choice in nested._choices_actions}


def commands_of_the_page() -> set[str]:
    """The commands in the first cells of the page's table."""
    cells = re.findall(r"^\| (`autofit (?:\\\||[^|])*)\|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    named = (name.removeprefix("autofit ").split()[0] for cell in cells for name in re.findall(r"`([^`]+)`", cell))
    return {name for name in named if not name.startswith("-")}


def test_every_command_of_the_help_has_its_function_and_a_sentence() -> None:
    found = commands_of_help()
    assert set(found) == set(_COMMANDS)
    assert all(text[0].islower() and len(text) > 20 for text in found.values()), found


def test_the_page_lists_the_commands_of_the_help() -> None:
    assert commands_of_the_page() == set(commands_of_help())


def test_a_line_of_progress_is_one_write_so_that_those_of_threads_do_not_run_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[str] = []
    stream = SimpleNamespace(isatty=lambda: False, write=written.append, flush=lambda: None)
    monkeypatch.setattr(sys, "stderr", stream)
    say("trying dtype float32 -> bfloat16")
    assert written == ["trying dtype float32 -> bfloat16\n"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_command_ends_as_by_an_interrupt(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)}
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    try:
        terminate_like_interrupt()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    finally:
        for n, handler in kept.items():
            signal.signal(n, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_ctrl_c_that_comes_in_a_destructor_is_not_lost(number: signal.Signals) -> None:
    program = f"""
import os, signal
from autofit.commands.common import terminate_like_interrupt
from autofit.tuning.study import open_storage

class Dropping:
    def __del__(self):
        os.kill(os.getpid(), {int(number)})

signal.signal(signal.SIGINT, signal.default_int_handler)
terminate_like_interrupt()
try:
    Dropping()
    signal.pause()
except KeyboardInterrupt:
    print("heard")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("heard\n", "")


def test_a_ctrl_c_that_comes_in_a_destructor_ends_every_command() -> None:
    program = """
import os, signal, sys
from autofit import cli

class Dropping:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)

def sync(options):
    Dropping()
    signal.sigtimedwait([], 20.0)
    return 0

signal.signal(signal.SIGINT, signal.default_int_handler)
cli._COMMANDS["sync"] = sync
sys.exit(cli.main(["sync"]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (130, "autofit: interrupted; run the same command again to go on\n")


@pytest.mark.parametrize(("came", "ends"), [(True, 130), (False, 1)])
def test_an_import_that_makes_another_error_of_a_ctrl_c_ends_as_by_it(came: bool, ends: int) -> None:
    """The initialisation of matplotlib's C++ module does: `ImportError: initialization failed`."""
    program = f"""
import contextlib, signal, sys
from autofit import cli

def sync(options):
    with contextlib.suppress(KeyboardInterrupt):
        if {came}:
            signal.raise_signal(signal.SIGINT)
    raise ImportError("initialization failed")

signal.signal(signal.SIGINT, signal.default_int_handler)
cli._COMMANDS["sync"] = sync
sys.exit(cli.main(["sync"]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == ends
    assert ("Traceback" in done.stderr) is not came


def test_a_fact_shows_no_character_that_moves_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    show_fact("tool", "verl, \x00\x1b[2J with fsdp\n\tsecond line")
    assert capsys.readouterr().out == "            tool: verl, \\x00\\x1b[2J with fsdp\n\tsecond line\n"


@pytest.mark.slow
@pytest.mark.parametrize("command", [["studies"], ["studies", "--json"]], ids=" ".join)
def test_an_output_that_is_full_is_one_line(command: list[str], tmp_path: Path) -> None:
    open_storage(tmp_path, create=True).engine.dispose()
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "autofit", *command, "--dir", str(tmp_path)], stdout=full, stderr=subprocess.PIPE,
            text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "autofit: the output cannot be written: No space left on device; what the command did is kept, so run it again"
    ]


@pytest.mark.parametrize("words", [["--help"], ["estimate", "--help"], ["--version"]], ids=" ".join)
def test_a_help_that_cannot_be_written_is_one_line(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert cli.main(words) == 2
    assert capsys.readouterr().err.startswith("autofit: the output cannot be written: No space left on device")


def test_ctrl_c_before_the_command_has_begun_is_an_interrupt_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "stranger_in", interrupted)
    assert cli.main(["studies"]) == 130
    assert capsys.readouterr().err == "autofit: interrupted; run the same command again to go on\n"
    monkeypatch.setattr(cli, "main", interrupted)
    monkeypatch.setattr(sys, "argv", ["autofit", "studies"])
    assert start.main() == 130


def test_a_folder_that_is_closed_to_the_user_is_told_from_one_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path / "studies"))

    monkeypatch.setattr(cli, "_check_working_folder", denied)
    assert cli.main(["studies"]) == 2
    assert "cannot write " in capsys.readouterr().err
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert cli.main(["studies"]) == 2
    assert "studies is closed to you: Permission denied; ask its owner" in capsys.readouterr().err
