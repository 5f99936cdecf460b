"""Both databases are born whole: made by several processes at once, or by one that is killed."""

import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from autofit.errors import EnvironmentFault
from autofit.tracking.database import make_whole, own_path
from autofit.tracking.runs import client, experiment_id
from autofit.tuning.locks import put_in_place, set_aside
from autofit.tuning.study import open_storage

pytestmark = pytest.mark.filterwarnings("ignore")


def write(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as database, database:
        for statement in statements:
            database.execute(statement)


def rows(path: Path, table: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as database:
        return database.execute(f"SELECT * FROM {table}").fetchall()


def test_a_maker_that_fails_leaves_the_old_database_and_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    write(path, "CREATE TABLE t (x)", "INSERT INTO t VALUES (1)")

    def fail(new: Path) -> None:
        write(new, "INSERT INTO t VALUES (2)")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        put_in_place(path, fail, update=True)
    assert rows(path, "t") == [(1,)]
    assert [p.name for p in tmp_path.iterdir()] == ["a.db"]
    put_in_place(path, lambda new: write(new, "INSERT INTO t VALUES (2)"), update=True)
    assert rows(path, "t") == [(1,), (2,)]


def test_a_journal_of_the_old_database_is_never_applied_to_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    path.write_bytes(b"half")
    (tmp_path / "a.db-journal").write_bytes(b"old")
    assert set_aside(path) == tmp_path / "a.db.broken-1"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.db.broken-1", "a.db.broken-1-journal"]
    path.write_bytes(b"half again")
    assert set_aside(path) == tmp_path / "a.db.broken-2"
    (tmp_path / "a.db-journal").write_bytes(b"left alone by a kill")
    put_in_place(path, lambda new: write(new, "CREATE TABLE t (x)"))
    assert not (tmp_path / "a.db-journal").exists()


@pytest.mark.parametrize("broken", ["half migrated", "no database", "a table that is in the way", "a name in no text"])
def test_a_broken_mlflow_database_is_set_aside_and_made_anew_with_one_sentence(tmp_path: Path, broken: str) -> None:
    path = own_path(tmp_path)
    if broken == "no database":
        path.write_bytes(b"this is no database" * 100)
    elif broken == "half migrated":
        write(path, "CREATE TABLE tags (x)", "CREATE TABLE _alembic_tmp_tags (x)")
    elif broken == "a table that is in the way":
        write(path, "CREATE TABLE alembic_version (version_num)", "CREATE TABLE runs (x)")
    else:
        write(path, "CREATE TABLE alembic_versions (version_num)")
        path.write_bytes(path.read_bytes().replace(b"TABLE alembic_versions", b"TABLE\xffalembic_versions"))
    said: list[str] = []
    make_whole(tmp_path, say=said.append)
    assert experiment_id(client(tmp_path), tmp_path, "law")
    assert (tmp_path / "mlflow.db.broken-1").exists()
    assert len(said) == 1
    assert "was broken" in said[0]
    make_whole(tmp_path, say=said.append)
    assert len(said) == 1


def test_a_database_of_a_newer_mlflow_is_left_as_it_is(tmp_path: Path) -> None:
    path = own_path(tmp_path)
    write(path, "CREATE TABLE alembic_version (version_num)", "INSERT INTO alembic_version VALUES ('ffffff123456')")
    before = path.read_bytes()
    with pytest.raises(EnvironmentFault, match="written by a newer MLflow"):
        client(tmp_path)
    assert path.read_bytes() == before


def test_a_database_that_the_user_names_is_left_to_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'own.db'}")
    make_whole(tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_empty_file_of_a_killed_first_search_becomes_the_studies_database(tmp_path: Path) -> None:
    (tmp_path / "studies.db").touch()
    assert open_storage(tmp_path, create=True).get_all_studies() == []
    assert open_storage(tmp_path).get_all_studies() == []


def drive(how: str, folder: Path, count: int) -> dict[str, list[object]]:
    driver = Path(__file__).with_name("birth_driver.py")
    done = subprocess.run([sys.executable, driver, how, folder, str(count)], capture_output=True, text=True, check=True)
    found: dict[str, list[object]] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_five_first_searches_at_once_all_find_their_study_and_their_experiment(tmp_path: Path) -> None:
    found = drive("together", tmp_path, 5)
    names = [f"study-{number}" for number in range(5)]
    assert found["codes"] == [0] * 5
    assert found["places"] == [
        {"studies": names, "experiments": ["Default", *names], "files": ["mlflow.db", "studies.db"]}
    ]


@pytest.mark.thorough
def test_killed_at_any_moment_of_the_creation_the_next_search_finds_or_makes_whole_databases(tmp_path: Path) -> None:
    found = drive("killed", tmp_path, 4)
    assert found["codes"] == [0] * 5
    for place in found["places"]:
        assert isinstance(place, dict)
        assert place["files"] == ["mlflow.db", "studies.db"]  # nothing had to be set aside
        assert "study-0" in place["studies"]
        assert "study-0" in place["experiments"]
