"""The line of a long step: what is done and about how long it takes, on a terminal of any width and nowhere else."""

import os
import pty
import re
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import tiny

from autofit.api.events import Progress
from autofit.commands.common import SCREEN, Bar, ProgressStep, keep_pace, paces, say

WORDS = "simulating the recipe"
DRIVER = """
import sys, time
from autofit.commands.common import Bar
bar = Bar("check", "r.yaml")
bar.begin("reading the recipe")
time.sleep(0.4)
bar.begin("looking for changes", most_s=20)
print("trying one change, said beside the bar", file=sys.stderr)
time.sleep(0.6)
bar.end()
print("the verdict")
"""


def in_terminal(command: list[str], columns: int, **environment: str) -> str:
    """What a pseudo-terminal of `columns` shows of `command`."""
    ours, theirs = pty.openpty()
    size = {"COLUMNS": str(columns), "LINES": "40", "TERM": "xterm", "NO_COLOR": "1"}
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, **size, **environment},
        start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    said = b""
    with suppress(OSError):  # Linux says EIO at the terminal's end
        while new := os.read(ours, 4096):
            said += new
    os.close(ours)
    process.wait(60)
    return said.decode()


def frames(text: str) -> list[str]:
    """The lines that the terminal showed one after the other, without what moves the cursor."""
    return [one for one in re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)) if one.strip()]


def test_a_step_says_how_long_it_takes_yet_by_the_last_time_or_by_its_limit() -> None:
    def line(**known: float) -> str:
        return ProgressStep(words=WORDS, began_s=10.0, **known).line(13.0, width=80)

    assert line(last_s=12.0) == "[#####...............] simulating the recipe, 3 s, about 9 s left"
    assert line(most_s=20.0) == "[###.................] simulating the recipe, 3 s, at most 17 s left"
    assert line(last_s=2.0).endswith("] simulating the recipe, 3 s, more than the last 2 s")
    assert re.fullmatch(r"\[\.*#\.*\] simulating the recipe, 3 s", line())


@pytest.mark.parametrize("width", [30, 60, 80, 100, 200])
def test_a_line_is_no_wider_than_the_terminal_and_drops_the_bar_first(width: int) -> None:
    shown = ProgressStep(words=WORDS, began_s=0.0).line(3.0, width=width)
    assert len(shown) <= width
    assert shown.endswith(f"{WORDS}, 3 s")


def test_the_seconds_of_the_last_time_are_kept_and_the_oldest_are_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "paces.json"
    for number in range(250):
        keep_pace(f"step {number}", number, path)
    known = paces(path)
    assert len(known) == 200
    assert (known["step 249"], "step 49" in known) == (249.0, False)
    path.write_text("{torn")
    assert paces(path) == {}
    keep_pace("step", 3.0, path)
    assert paces(path) == {"step": 3.0}


def test_nothing_is_drawn_where_stderr_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    bar = Bar("check", "r.yaml")
    bar.begin(WORDS)
    bar.end()
    assert capsys.readouterr() == ("", "")


def test_the_line_is_on_the_terminal_while_a_step_runs_beside_what_is_said(tmp_path: Path) -> None:
    text = in_terminal([sys.executable, "-c", DRIVER], 80, AUTOFIT_CACHE=str(tmp_path))
    shown = frames(text)
    assert any(re.fullmatch(r"\[\.*#\.*\] reading the recipe, 0 s", one.strip()) for one in shown)
    assert any(one.strip().endswith("looking for changes, 0 s, at most 20 s left") for one in shown)
    assert "trying one change, said beside the bar" in [one.strip() for one in shown]
    assert shown[-1].strip() == "the verdict"
    assert max(map(len, shown)) <= 80


TRIES = """
import time
from autofit.commands.common import Bar, say
bar = Bar("check", "r.yaml")
bar.begin("looking for changes", most_s=20)
for one in ("trying dtype float32 -> bfloat16", "--set dtype=bfloat16 fits: 9.00 GB"):
    bar.tell(one) or say(one)
    time.sleep(0.5)
bar.end()
print("set dtype=bfloat16: 9.00 GB")
"""


def test_a_change_that_is_tried_stands_above_the_line_until_the_result_says_it(tmp_path: Path) -> None:
    text = in_terminal([sys.executable, "-c", TRIES], 80, AUTOFIT_CACHE=str(tmp_path))
    shown = [one.strip() for one in frames(text)]
    assert {"trying dtype float32 -> bfloat16", "--set dtype=bfloat16 fits: 9.00 GB"} < set(shown)
    assert "\x1b[2K" in text[text.rindex("fits: 9.00 GB") :]  # erased
    assert shown[-1] == "set dtype=bfloat16: 9.00 GB"


def test_a_change_that_is_tried_is_a_line_where_stderr_is_no_terminal(tmp_path: Path) -> None:
    environment = {**os.environ, "AUTOFIT_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", TRIES], capture_output=True, text=True, env=environment, check=True)
    assert done.stderr == "trying dtype float32 -> bfloat16\n--set dtype=bfloat16 fits: 9.00 GB\n"


def test_a_line_said_while_the_bar_is_first_drawn_waits_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    thread = threading.Thread(target=say, args=("trying one change",))
    with SCREEN:
        thread.start()
        thread.join(0.05)
        assert capsys.readouterr().err == ""
    thread.join()
    assert capsys.readouterr().err == "trying one change\n"


@pytest.mark.slow
def test_check_draws_it_in_80_columns_and_leaves_the_verdict(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"model_name_or_path: {tiny.write_model(tmp_path / 'model')}\nmax_length: 24\n")
    options = ["--trainer", "sft", "--gpu", "h100", "--prompt-tokens", "24"]
    command = [sys.executable, "-m", "autofit", "check", str(recipe), *options]
    shown = frames(in_terminal(command, 80, AUTOFIT_CACHE=str(tmp_path / "cache"), AUTOFIT_SERVER="0"))
    for words in ("reading the recipe", WORDS):
        assert any(words in one for one in shown)
    assert any(one.startswith("fits: ") for one in shown)
    assert max(map(len, shown)) <= 80
    assert any(name.endswith("reading the recipe") for name in paces(tmp_path / "cache" / "paces.json"))


def test_a_search_s_line_goes_on_while_nothing_is_told_and_drops_a_trial_that_has_ended() -> None:
    told = Progress(done=1, probing=("trial 1: lora_r 8", "trial 2: lora_r 4"), best=None, elapsed_s=5.0, left_s=10.0)
    assert str(told.later(4.0)) == "1 done, probing trial 1, trial 2 | best none yet | 9.00 s, about 6.00 s left"
    assert str(told.later(20.0)).endswith("| 25.0 s")
    assert str(told.without(1)).startswith("2 done, probing trial 2 |")
    assert str(told.without(1).without(2)).startswith("3 done, probing ... |")
