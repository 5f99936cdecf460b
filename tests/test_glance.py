"""What is told of a study's and a trial's name before the imports of a second, in the words of the whole way."""

import os
import sqlite3
from pathlib import Path

import optuna
import pytest
from before_imports import refused

from autofit.cli import main
from autofit.errors import ConfigError
from autofit.promotion.promotion import choose
from autofit.tuning.frontier import Rule
from autofit.tuning.storage import check_names, database_of
from autofit.tuning.study import load_study, open_storage, trials_of

RULE: Rule = {"goal": "speed", "target_bytes": 0}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Studies `old`, used first, with three trials, and `new` with one."""
    storage = open_storage(tmp_path, create=True)
    for name, used, count in (("new", "2026-11-02", 1), ("old", "2026-11-01", 3)):
        study = optuna.create_study(study_name=name, storage=storage)
        study.set_user_attr("used", used)
        study.set_user_attr("trainer", "grpo")
        study.set_user_attr("foreseen", [{"name": "p2"}, {"name": "p3"}] if name == "old" else [])
        for _ in range(count):
            study.ask()
    return tmp_path


def glanced(folder: Path, study: str | None, trial: str | None = None) -> str:
    """The error of a glance; "" for none."""
    try:
        check_names(database_of(folder), study, trial)
    except ConfigError as error:
        return error.marked
    return ""


def test_a_glance_says_of_a_study_what_loading_it_says(folder: Path) -> None:
    for name in ("nosuch", "od", ""):
        with pytest.raises(ConfigError) as loaded:
            load_study(folder, name)
        assert glanced(folder, name) == loaded.value.marked
    assert [glanced(folder, name) for name in (None, "old", "new")] == ["", "", ""]


@pytest.mark.parametrize("study", [None, "old"])
def test_a_glance_says_of_a_trial_what_choosing_it_says(folder: Path, study: str | None) -> None:
    trials = trials_of(load_study(folder, study))
    assert len(trials) == (1 if study is None else 3)
    for asked in ("99", "bset", "", "-1", "1.0", "01"):
        with pytest.raises(ConfigError) as chosen:
            choose(trials, asked, RULE)
        assert glanced(folder, study, asked) == chosen.value.marked
    assert [glanced(folder, study, asked) for asked in ("best", "leanest", "0", None)] == [""] * 4


def test_the_points_without_a_probe_are_told_and_only_promote_takes_them(folder: Path) -> None:
    check_names(database_of(folder), "old", "p2", takes_points=True)
    for asked, takes in (("p2", False), ("p9", True)):
        with pytest.raises(ConfigError, match=r"\(now p2, p3\)"):
            check_names(database_of(folder), "old", asked, takes_points=takes)
    assert "(now none)" in glanced(folder, "new", "p1")


def test_what_a_glance_cannot_read_is_left_to_the_whole_way(folder: Path, tmp_path: Path) -> None:
    optuna.create_study(study_name="of another program", storage=open_storage(folder))
    assert glanced(folder, "nosuch") == ""
    with sqlite3.connect(tmp_path / "studies.db") as database:
        database.execute("DROP TABLE study_user_attributes")
    assert glanced(folder, "nosuch") == ""
    (tmp_path / "studies.db").write_bytes(b"no database" * 100)
    assert glanced(folder, "nosuch") == ""


@pytest.mark.parametrize(
    "command",
    [
        ["report", "--study", "nosuch"],
        ["promote", "7"],
        ["promote", "p7"],
        ["verify", "7"],
        ["export", "7", "--to", "verl"],
    ],
)
def test_a_wrong_name_is_told_before_the_imports(folder: Path, command: list[str]) -> None:
    said = refused(*command, "--dir", str(folder))
    assert "there is no study 'nosuch'" in said or "TRIAL must be" in said


def test_a_pipe_in_the_place_of_the_studies_is_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "studies.db")
    assert main(["report", "--study", "nosuch", "--dir", str(tmp_path)]) == 2
    assert "Traceback" not in capsys.readouterr().err
