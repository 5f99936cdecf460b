"""MLflow's own database: made whole, brought to this MLflow's version, or set aside when it is broken.

MLflow's schema takes about a second to make, in many steps; killed meanwhile, or made by two processes at once, it can
never be used again. So it is made under a lock, in another file, and renamed.
"""

import functools
import os
import re
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import alembic.util
import sqlalchemy.exc
from mlflow.exceptions import MlflowException
from mlflow.store.db import utils as mlflow_utils
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

from autofit.errors import EnvironmentFault, option
from autofit.tracking.follower import DATABASE
from autofit.tuning.locks import exclusive, is_there, put_in_place, set_aside

_utils: Any = mlflow_utils  # MLflow is not fully typed
_store: Any = SqlAlchemyStore
_LOCK_S = 120.0
_ARTIFACTS = re.compile(r"(file://.*?/mlartifacts)/")
_seen: dict[Path, int] = {}  # inodes of the databases that this process has opened
_BROKEN = (
    MlflowException, sqlalchemy.exc.SQLAlchemyError, alembic.util.CommandError, sqlite3.DatabaseError,
    UnicodeDecodeError,
)  # fmt: skip
_NO_DATABASE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def tracking_uri(folder: Path) -> str:
    """MLFLOW_TRACKING_URI, or the SQLite file beside the studies (apart from Optuna's own: both use alembic)."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{own_path(folder).resolve()}"


def own_path(folder: Path) -> Path:
    """MLflow's database beside the studies."""
    return folder / DATABASE


_to_stderr = functools.partial(print, file=sys.stderr, flush=True)


def make_whole(folder: Path, *, say: Callable[[str], None] = _to_stderr) -> bool:
    """Make MLflow's database of `folder` usable. True if a broken one was set aside, which `say` reports.

    A database that the user names with MLFLOW_TRACKING_URI is left as it is. Raises EnvironmentFault if it cannot be
    opened, or a newer MLflow wrote it.
    """
    if os.environ.get("MLFLOW_TRACKING_URI"):
        return False
    path = own_path(folder).resolve()
    mended = not _is_whole(path) and _make_or_mend(folder, path, say)
    _connect_anew(path)
    return mended


def _make_or_mend(folder: Path, path: Path, say: Callable[[str], None]) -> bool:
    with exclusive(folder / "locks", "mlflow-database", wait_s=_LOCK_S):
        if not is_there(path):
            put_in_place(path, functools.partial(_make, folder))
        elif not _is_whole(path):
            return _mend(folder, path, say)
    return False


def _connect_anew(path: Path) -> None:
    """Close this process's connections if another file is at `path` now: they would write to the one set aside."""
    inode = path.stat().st_ino
    if _seen.get(path) != inode:
        _follow_the_move(path)
    if _seen.setdefault(path, inode) != inode:
        _store._get_or_create_engine(f"sqlite:///{path}").dispose()
        _seen[path] = inode


def _follow_the_move(path: Path) -> None:
    """Let runs that were made before the studies' folder was moved, or copied, have their artifacts in it.

    MLflow keeps whole addresses: it would make the old folder again.
    """
    here = (path.parent / "mlartifacts").as_uri()
    try:
        with closing(sqlite3.connect(path, timeout=20)) as database, database:
            known = database.execute("SELECT DISTINCT artifact_location FROM experiments").fetchall()
            found = (_ARTIFACTS.match(str(location)) for (location,) in known)
            for old in {match[1] for match in found if match is not None} - {here}:
                for table, column in (("experiments", "artifact_location"), ("runs", "artifact_uri")):
                    database.execute(
                        f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE {column} LIKE ? || '/%'",  # noqa: S608
                        (here, len(old) + 1, old),
                    )
    except sqlite3.DatabaseError as error:
        raise EnvironmentFault(f"{path} cannot be used as a database: {error}") from error


def _mend(folder: Path, path: Path, say: Callable[[str], None]) -> bool:
    """Bring the database of an older MLflow up to date, or set a broken one aside (True) and make a new one."""
    version = _version(path)
    if version is not None and version not in _versions():
        raise EnvironmentFault(
            f"{path} was written by a newer MLflow (schema {version}); update MLflow, or choose another folder with "
            f"{option('dir')}"
        )
    try:
        put_in_place(path, functools.partial(_make, folder), update=True)
    except _BROKEN:
        aside = set_aside(path)
        put_in_place(path, functools.partial(_make, folder))
        say(
            f"MLflow's database {path} was broken, as after a kill during its creation; it is now {aside.name}, and a "
            f"new one is filled from the studies: `autofit sync --study NAME` copies each of them"
        )
        return True
    return False


def _make(folder: Path, path: Path) -> None:
    """All tables of this MLflow's version in `path`, which is new or of an older version."""
    uri = f"sqlite:///{path.resolve()}"
    engine = _utils.create_sqlalchemy_engine_with_retry(uri)
    try:
        if _utils._is_empty_database(engine):
            _utils._initialize_tables(engine)
        else:
            _utils._upgrade_db(engine)
    finally:
        engine.dispose()
    store = _store(uri, (folder / "mlartifacts").resolve().as_uri())  # makes the default experiment
    store.engine.dispose()


def _is_whole(path: Path) -> bool:
    return is_there(path) and _version(path) == _newest()


def _version(path: Path) -> str | None:
    """The version of the schema in `path`, if there is one. Raises EnvironmentFault if it is unreadable."""
    try:
        with closing(sqlite3.connect(path, timeout=20)) as database:
            row = database.execute("SELECT version_num FROM alembic_version").fetchone()
    except UnicodeDecodeError:  # in the names of tables, which SQLite shows as they are
        return None
    except sqlite3.DatabaseError as error:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        if code == sqlite3.SQLITE_ERROR or code in _NO_DATABASE:  # no such table, or no database at all
            return None
        raise EnvironmentFault(f"{path} cannot be used as a database: {error}") from error
    return None if row is None else str(row[0])


@functools.cache
def _newest() -> str:
    """The version of the installed MLflow's schema."""
    return str(_utils._get_latest_schema_revision())


@functools.cache
def _versions() -> frozenset[str]:
    """Every version of MLflow's schema up to the installed one's."""
    from alembic.script import ScriptDirectory

    script = ScriptDirectory.from_config(_utils._get_alembic_config(""))
    return frozenset(str(revision.revision) for revision in script.walk_revisions())
