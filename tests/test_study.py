"""The database of the studies: what it raises becomes one clear error, told by type and by code."""

import shlex
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy.exc
from matrix import one_at_a_time
from optuna.storages import RDBStorage
from search_driver import made

from autofit.api import planning, searching
from autofit.api.reading import drop
from autofit.cli import main
from autofit.errors import EnvironmentFault
from autofit.tuning.study import database_errors, load_study, open_storage


def _full(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA max_page_count=1")
    connection.execute("CREATE TABLE t (a)")


def _read_only(path: Path) -> None:
    path.touch()
    sqlite3.connect(f"file:{path}?mode=ro", uri=True).execute("CREATE TABLE t (a)")


def _not_there(path: Path) -> None:
    sqlite3.connect(path / "no" / "folder")


def _no_database(path: Path) -> None:
    path.write_bytes(b"no database" * 100)
    sqlite3.connect(path).execute("CREATE TABLE t (a)")


@pytest.mark.parametrize(
    ("break_it", "advice"),
    [(_full, "free some space"), (_read_only, "make the file writable"), (_not_there, "make the file writable"),
     (_no_database, "move the file away")],
)  # fmt: skip
@pytest.mark.parametrize("wrapped", [False, True])
def test_the_advice_follows_from_sqlites_code_and_not_from_its_words(
    tmp_path: Path, break_it: Callable[[Path], None], advice: str, wrapped: bool
) -> None:
    with pytest.raises(sqlite3.Error) as raised:
        break_it(tmp_path / "a.db")
    raised.value.args = ("reworded",)
    told = sqlalchemy.exc.DBAPIError("INSERT", {}, raised.value)
    error = optuna.exceptions.StorageInternalError("reworded as well") if wrapped else told
    error.__cause__ = told if wrapped else raised.value
    with pytest.raises(EnvironmentFault, match=f"reworded; {advice}"), database_errors(tmp_path):
        raise error


def test_a_database_of_another_optuna_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    optuna.create_study(study_name="s", storage=open_storage(tmp_path, create=True))
    monkeypatch.setattr(RDBStorage, "get_head_version", lambda self: "v9.9.9.a")
    with pytest.raises(EnvironmentFault, match=r"another version of Optuna.*optuna storage upgrade --storage sqlite"):
        load_study(tmp_path, None)


def test_what_is_no_fault_of_the_database_is_raised_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="version"), database_errors(tmp_path):
        raise RuntimeError("another version of something else")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The database of a study of two trials."""
    folder = tmp_path_factory.mktemp("whole")
    made(folder, 2)
    return folder / "studies.db"


@pytest.mark.parametrize(
    ("damage", "command"),
    one_at_a_time(
        [
            'UPDATE trial_params SET distribution_json = \'{"name": "CategoricalDistribution", "attributes": {}}\'',
            "UPDATE trial_user_attributes SET value_json = '{\"steps\" [1.0]}'",
            "UPDATE study_user_attributes SET value_json = '{' WHERE key = 'fingerprint'",
            "UPDATE trials SET state = 'COMPLEAT'",
            "UPDATE trials SET datetime_start = 'noon'",
            "UPDATE trial_values SET value_type = 'FINITF'",
            "UPDATE trial_user_attributes SET value_json = CAST(x'226122ff' AS TEXT)",
        ],
        ["report", "studies", "search", "sync"],
    ),
)
def test_damage_to_what_the_database_holds_is_one_clear_error(
    tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture[str], damage: str, command: str
) -> None:
    shutil.copy(whole, tmp_path)
    with sqlite3.connect(tmp_path / "studies.db") as database:
        database.execute(damage)
    database.close()
    if command == "search":
        with pytest.raises(EnvironmentFault) as raised:
            made(tmp_path, 3)
        said = str(raised.value)
    else:
        assert main([command, "--dir", str(tmp_path)]) == 2
        said = capsys.readouterr().err
    assert "studies.db" in said
    assert "move the file away, or choose another folder with --dir" in " ".join(said.split())


def test_damage_to_the_names_of_its_tables_is_one_clear_error(tmp_path: Path, whole: Path) -> None:
    (tmp_path / "studies.db").write_bytes(
        whole.read_bytes().replace(b"CREATE TABLE studies", b"CREATE TABLE\xffstudies")
    )
    with pytest.raises(EnvironmentFault, match="move the file away"):
        made(tmp_path, 2)


@pytest.mark.parametrize("name", ["a?b", "a{b", "a}b", "{0}", "a%20b"])
@pytest.mark.parametrize("command", ["report", "sync"])
def test_a_folder_that_no_address_can_name_is_refused_and_no_other_file_is_made(
    tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture[str], name: str, command: str
) -> None:
    (tmp_path / name).mkdir()
    shutil.copy(whole, tmp_path / name)
    assert main([command, "--dir", str(tmp_path / name)]) == 2
    assert "cannot name a database; got " in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    "name",
    [
        "~a#b 100%s;c&d\nu\u00fc%",
        *(
            pytest.param(name, marks=pytest.mark.thorough)
            for name in ["a#b", "100%", "a b;c&d", "~", "%s", "new\nline", "\u00fc"]
        ),
    ],
)
def test_other_odd_names_of_folders_are_taken(tmp_path: Path, whole: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    shutil.copy(whole, tmp_path / name)
    assert len(load_study(tmp_path / name, "law").trials) == 2
    assert main(["sync", "--dir", str(tmp_path / name)]) == 0
    assert (tmp_path / name / "mlflow.db").exists()


def test_a_link_that_leads_to_itself_is_one_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for command in (["report"], ["sync"], ["studies"], ["search", "--target-vram", "1GB"]):
        assert main([*command, "--dir", str(tmp_path / "loop")]) == 2
        assert "lead to themselves" in capsys.readouterr().err


def test_a_command_without_standard_streams_leaves_the_database_whole(tmp_path: Path, whole: Path) -> None:
    shutil.copy(whole, tmp_path)
    autofit = f"{shlex.quote(sys.executable)} -m autofit"
    done = subprocess.run(f"{autofit} sync --dir . <&- >&- 2>&-", shell=True, cwd=tmp_path, check=False)
    assert done.returncode == 0
    assert len(load_study(tmp_path, "law").trials) == 2


def test_a_connection_that_an_interrupt_closed_shows_no_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cursor: Any = sqlite3.connect(":memory:").cursor()
    cursor.connection.close()
    storage = open_storage(tmp_path, create=True)
    with storage.engine.connect() as connection:
        connection._safe_close_cursor(cursor)
    assert not caplog.records
    storage.engine.dispose()


@pytest.mark.slow
def test_the_database_is_made_beside_the_forecast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm: None, tiny_recipe: Path
) -> None:
    found: list[bool] = []

    def forecast(self: object, planned: planning.Planned) -> object:
        until = time.monotonic() + 30
        while not (database := planned.plan.folder / "studies.db").exists() and time.monotonic() < until:
            time.sleep(0.01)
        found.append(database.exists())
        drop(planned.scratch)
        raise EnvironmentFault("enough")

    monkeypatch.setattr(searching._Run, "_forecast", forecast)
    with pytest.raises(EnvironmentFault, match="enough"):
        searching.search(tiny_recipe, gpu="l4", folder=tmp_path / "studies", mlflow=False)
    assert found == [True]
