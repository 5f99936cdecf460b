"""Where jobs run: options, executor.yaml and arguments of the API, and what is refused in one line."""

from __future__ import annotations

import os
import pty
import select
import sys
from contextlib import suppress
from pathlib import Path

import command_line
import pytest

from autofit import Executor
from autofit.cli import main
from autofit.cluster.scheduler import LOCAL, executor_given, read_executor
from autofit.commands.arguments import parser
from autofit.commands.common import executor_option
from autofit.errors import ConfigError


def _asked(*options: str, command: str = "search") -> Executor:
    """What `autofit COMMAND` is told by these options, in the working directory."""
    return executor_option(parser().parse_args([command, "recipe.yaml", *options]))


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_options_of_slurm_ask_for_slurm_and_are_told_as_sbatch_has_them() -> None:
    options = "--partition gpu --gpus-per-node a100:2 --cpus-per-task 8 --time 2:00:00 --mem 64G --probes-per-job 4"
    more = ["--slurm", "exclusive", "--slurm", "comment=a=b", "--setup", "module load cuda", "--setup", "export A=1"]
    found = _asked(*options.split(), *more)
    assert found == Executor(
        kind="slurm", partition="gpu", gpus_per_node="a100:2", cpus_per_task=8, time="2:00:00", mem="64G",
        probes_per_job=4, slurm={"exclusive": True, "comment": "a=b"}, setup=("module load cuda", "export A=1"),
    )  # fmt: skip
    assert found.time_s == 7200
    assert executor_given({"partition": "gpu", "time": 90}, Path()).time_s == 5400, "minutes, as sbatch takes a number"
    assert _asked("--nodes", "2", command="promote").nodes == 2
    assert _asked() == LOCAL
    assert _asked("--executor", "debug").kind == "debug"


def test_options_win_over_the_file_and_other_options_of_sbatch_are_joined() -> None:
    Path("executor.yaml").write_text(
        "executor: slurm\npartition: long\ncpus-per-task: 4\nslurm: {reservation: r, comment: x, exclusive: false}\n"
    )
    found = _asked("--partition", "short", "--slurm", "comment=y")
    assert (found.kind, found.partition, found.cpus_per_task) == ("slurm", "short", 4)
    assert found.slurm == {"reservation": "r", "comment": "y"}
    assert _asked("--executor", "local") == LOCAL, "the file's options are Slurm's"
    assert executor_given({"partition": "short", "slurm": {"comment": "y"}}, Path()) == found
    assert executor_given(LOCAL, Path()) == LOCAL, "an Executor is complete"
    Path("executor.yaml").write_text("partition: long\n")
    assert _asked() == Executor(kind="slurm", partition="long")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--executor", "local", "--partition", "gpu"], "--partition is an option of Slurm"),
        (["--executor", "debug", "--slurm", "exclusive"], "--slurm is an option of Slurm"),
        (["--time", "tomorrow"], "tomorrow"),
        (["--time", "0:00:00"], "longer than 0"),
        (["--time", "9" * 400], "a duration must look like 90s"),
        (["--cpus-per-task", "0"], "cpus_per_task must be a whole number from 1"),
        (["--slurm", "output=/x"], "autofit sets output itself"),
        (["--slurm", "partition=x"], "give --partition"),
        (["--slurm", "a b=c"], "an option of sbatch has a long name"),
        (["--slurm", "comment="], "an option of sbatch has a long name"),
        (["--partition", ""], "partition must be one line of text"),
        (["--setup", "a\x00b"], "setup must be lines of shell"),
    ],
)
def test_a_wrong_option_is_one_line(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", "recipe.yaml", *options]) == 2
    text = capsys.readouterr().err
    assert said in text
    assert text.count("\n") == 1


WRONG = ["[1]", "{a: 1}", "null", "1.5", "true", "-3", "''", '"a\\nb"', "2020-01-01", "99999999999", "[[x]]", "yes: {}"]


@pytest.mark.parametrize("key", ["executor", "slurm", "setup", "nodes", "time", "mem", "partition", "partitoin", "7"])
@pytest.mark.parametrize("value", WRONG)
def test_whatever_a_file_has_it_is_read_or_refused_in_one_line(key: str, value: str) -> None:
    Path("executor.yaml").write_text(f"{key}: {value}\n")
    try:
        found = read_executor(None, {}, Path())
    except ConfigError as error:
        said = str(error)
    else:
        assert executor_given(found, Path()) == found
        return
    assert said.isprintable()
    assert len(said) < 300
    assert said.startswith("the executor file executor.yaml")


def test_a_file_that_is_none_and_a_time_that_yaml_reads_as_a_number_are_refused() -> None:
    Path("executor.yaml").write_text("time: 4:00:00\n")
    with pytest.raises(ConfigError, match=r"executor.yaml: time must be text, such as 4h"):
        _asked()
    Path("executor.yaml").unlink()
    Path("executor.yaml").symlink_to("nowhere")
    with pytest.raises(ConfigError, match="does not exist"):
        _asked()


def test_a_machine_without_slurm_says_so_before_the_recipe_is_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    for command in ("search", "promote", "run"):
        assert main([command, "x", "--executor", "slurm"]) == 2
        assert "needs Slurm's commands (sbatch," in capsys.readouterr().err


REWARD_THAT_STOPS = """
stopped = False

def share_of_t1(completions, **kwargs):
    global stopped
    if not stopped:
        stopped = True
        answer = 40
        breakpoint()
    return [1.0 for _ in completions]
"""


@pytest.mark.slow
def test_a_breakpoint_in_a_reward_stops_in_the_users_terminal(tiny_recipe: Path) -> None:
    (tiny_recipe.parent / "tiny_rewards.py").write_text(REWARD_THAT_STOPS)
    options = "--device cpu --target-vram 4GB --executor debug --trials 1 --no-confirm --no-advice --no-mlflow"
    ours, theirs = pty.openpty()
    with open(theirs, "r+b", buffering=0) as end:
        words = ["search", str(tiny_recipe), *options.split()]
        process = command_line.start(tiny_recipe.parent, *words, stdin=end, stdout=end, stderr=end)
    said, answered = b"", False
    with suppress(OSError):  # Linux says EIO at the terminal's end
        while select.select([ours], [], [], 240)[0] and (new := os.read(ours, 4096)):
            said += new
            if b"(Pdb)" in said and not answered:
                answered = True
                os.write(ours, b"p answer + 2\nc\n")
    text = said.decode(errors="replace")
    os.close(ours)
    assert process.wait(20) == 0, text
    assert "\n42\r\n" in text
    assert "trial 0" in text
