"""Database of a folder's studies: a SQLite file in it, or a Postgres that several people and machines share.

A password comes from libpq (PGPASSWORD, ~/.pgpass, PGSERVICE), from a URL, or from a file that holds a URL. It is never
written anywhere, and no text shows it.
"""

import contextlib
import errno
import getpass
import importlib.util
import json
import os
import re
import socket
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from autofit.errors import ConfigError, EnvironmentFault, nearest, option, quoted
from autofit.files import other_writers, read_json, regular_bytes, write_json

if TYPE_CHECKING:
    from sqlalchemy import URL

VARIABLE = "AUTOFIT_STORAGE"
_MLFLOW = "AUTOFIT_MLFLOW"  # 0: nothing is mirrored while it works; `autofit sync` does it later
# The methods by which Optuna asks a database.
CALLS = (
    "create_new_study", "delete_study", "set_study_user_attr", "set_study_system_attr", "get_study_id_from_name",
    "get_study_name_from_id", "get_study_directions", "get_study_user_attrs", "get_study_system_attrs",
    "get_all_studies", "_create_new_trial", "_set_trial_param", "set_trial_user_attr", "set_trial_system_attr",
    "set_trial_state_values", "get_trial", "_get_trials", "get_trial_user_attrs", "get_trial_system_attrs",
)  # fmt: skip
_WANTED = f"{option('storage')} must be postgresql://USER@HOST/DATABASE, or file:PATH of a file that holds such a URL"
_OTHERS = 0o077  # the bits of a file's mode that let others than its owner read or write it
_OTHER_SCHEMES = ("mysql", "sqlite", "mariadb", "oracle", "mssql", "redis", "http", "https", "journal")
_MOST_BYTES = 4096  # of a file with a URL
_given: dict[Path, str] = {}  # folder -> the database that this process was told to use for it


@dataclass(frozen=True, slots=True, kw_only=True)
class Database:
    """The database of the studies of `folder`. As text it is a path or a URL, less its password."""

    folder: Path
    url: "URL | None" = field(default=None, repr=False)  # of a Postgres; None is the file in the folder
    remembered: bool = False  # named by the folder's storage.json alone

    @property
    def path(self) -> Path:
        """The SQLite file."""
        return self.folder / "studies.db"

    def __str__(self) -> str:
        return str(self.path) if self.url is None else _bare(self.url, self.url.username)

    @property
    def home(self) -> str:
        """Place of its studies, in words."""
        return str(self.folder if self.url is None else self)

    def is_same_as(self, other: "Database") -> bool:
        """True if both are one database, whoever connects to it."""
        if self.url is None or other.url is None:
            return self.url is other.url
        return _bare(self.url, None) == _bare(other.url, None)


def check_there(database: Database) -> None:
    """Raise ConfigError if a folder lacks a file of studies; a Postgres is asked when it is opened."""
    if database.url is None and not database.path.exists():
        raise ConfigError(
            f"there are no studies in {database.folder}; run `autofit search` first, or point {option('dir')} at its "
            "folder"
        )


def _place(folder: Path) -> Path:
    """The absolute path of `folder`. Raises ConfigError where a database's address would name another file."""
    try:
        os.stat(folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ConfigError(
                f"the links of {quoted(str(folder))} lead to themselves; give another {option('dir')}"
            ) from error
    path = folder.resolve()
    if any(character in str(path) for character in "?{}") or unquote(str(path)) != str(path):
        raise ConfigError(
            f"{option('dir')}: a path with ?, {{, }} or %20 in it cannot name a database; got {quoted(str(path), 150)}"
        )
    return path


def mlflow_follows() -> bool:
    """True if searches and full runs are mirrored to MLflow while they work; AUTOFIT_MLFLOW=0 turns it off."""
    return os.environ.get(_MLFLOW, "1") not in ("0", "")


def use_storage(folder: Path, storage: str | None) -> None:
    """Use the database `storage`, if given, for the studies of `folder` in this process."""
    if storage is not None:
        _given[_place(folder)] = storage


def database_of(folder: Path) -> Database:
    """The database that --storage, AUTOFIT_STORAGE or the folder itself names; else the SQLite file in the folder.

    Raises ConfigError for a text that names no Postgres or a folder that no database can be in, and EnvironmentFault
    without a driver for it.
    """
    named = _given.get(_place(folder)) or os.environ.get(VARIABLE)
    storage = named or _followed(folder)
    return Database(folder=folder, url=None if storage is None else _url(storage), remembered=not named)


def keep_storage(database: Database) -> None:
    """Let later commands find `database` by its folder alone: its address is kept there, less its password."""
    if database.url is not None and _kept(database.folder) is None:
        write_json(_kept_path(database.folder), {"storage": _to_keep(database)})


def check_is_of(database: Database) -> None:
    """Raise ConfigError if the folder's studies are in another database: their probes would be taken for these."""
    folder, kept = database.folder, _kept(database.folder) if not _not_mine(database.folder) else None
    if kept is None and database.path.exists() and database.url is not None:
        raise ConfigError(
            f"the studies of {folder} are in {database.path}, so {database} cannot have more of them; choose "
            f"another folder with {option('dir')}, or omit {option('storage')} (and {VARIABLE})"
        )
    known = None if kept is None else Database(folder=folder, url=_url(kept))
    if known is not None and not known.is_same_as(database):
        raise ConfigError(
            f"the studies of {folder} are in {known}, and not in {database}; choose another folder with "
            f"{option('dir')}, or omit {option('storage')} (and {VARIABLE})"
        )


def shows_password(storage: str) -> bool:
    """True if the text of --storage has a password, which every user of the machine sees in its list of processes."""
    return re.search(r"://[^/@]*:[^@]*@", storage) is not None or "password=" in storage


def storage_option(folder: Path) -> str:
    """Option with which a proposed command, besides the folder, finds its database."""
    database = database_of(folder)
    return "" if database.url is None or (_kept(folder) and not _not_mine(folder)) else f" --storage '{database}'"


def me() -> str:
    """user@host of this process."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def child_environment(folder: Path) -> dict[str, str]:
    """The environment of a process that works on the same database as this one."""
    given = _given.get(folder.resolve())
    return {**os.environ, **({} if given is None else {VARIABLE: given})}


def _kept_path(folder: Path) -> Path:
    return folder / "storage.json"


def _kept(folder: Path) -> str | None:
    if not folder.is_dir():  # the write to the folder reports it
        return None
    try:
        found = read_json(_kept_path(folder))
        return None if found is None else str(found["storage"])
    except OSError as error:
        raise EnvironmentFault(
            f"cannot read {_kept_path(folder)}: {error.strerror}; choose another folder with {option('dir')}, or ask "
            "its owner"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise EnvironmentFault(
            f"{_kept_path(folder)} must name the database of the studies, but cannot be read; delete it and name the "
            f"database with {option('storage')}"
        ) from error


def _not_mine(folder: Path) -> str:
    """Others' rights on the folder's storage.json, in words: it may name a host of theirs. "" if there are none."""
    for path in (folder, _kept_path(folder)):
        try:
            who = other_writers(path)
        except OSError:  # there is none
            continue
        if who:
            return f"{path} {who}"
    return ""


def _followed(folder: Path) -> str | None:
    """The database that the folder's storage.json names. Raises ConfigError if others may have written it."""
    kept = _kept(folder)
    why = "" if kept is None else _not_mine(folder)
    if why:
        raise ConfigError(
            f"{_kept_path(folder)} names a database, and is not followed, as {why}: your password (PGPASSWORD) would "
            f"be sent to the host in it; name the database yourself with {option('storage')}"
        )
    return kept


def _to_keep(database: Database) -> str:
    """The text to keep: the file of a URL, as it has the password, or else the URL less its password."""
    given = _given.get(database.folder.resolve()) or os.environ.get(VARIABLE) or ""
    return f"file:{Path(given[5:]).resolve()}" if given.startswith("file:") else str(database)


def _bare(url: "URL", user: str | None) -> str:
    """`url` as text, with `user`, and its password removed."""
    return type(url).create("postgresql", user, None, url.host, url.port, url.database, url.query).render_as_string()


def _url(storage: str) -> "URL":
    """The URL that `storage` gives. Errors hide any part of it that may be a password."""
    from sqlalchemy import URL, make_url
    from sqlalchemy.exc import ArgumentError

    text = _read(Path(storage[5:]).expanduser()) if storage.startswith("file:") else storage.strip()
    scheme = text.partition(":")[0].partition("+")[0]
    if scheme not in ("postgresql", "postgres"):
        known = f"{scheme}:..." if scheme in _OTHER_SCHEMES else "another scheme"  # else it may be of a password
        got = known if ":" in text else "no scheme"
        raise ConfigError(f"{_WANTED}; got {got}; omit it for a SQLite file in the folder")
    try:
        found = make_url(text)
    except (ArgumentError, ValueError):
        raise ConfigError(
            f"{_WANTED}; what was given cannot be read as one (write @ / : in a password as %40 %2F %3A)"
        ) from None
    secret = found.password or found.query.get("password")
    rest = {key: value for key, value in found.query.items() if key != "password"}
    if "sslpassword" in rest:
        raise ConfigError(
            f"{option('storage')} must not have an sslpassword; use a key file without one, or a service of libpq"
        )
    if importlib.util.find_spec("psycopg2") is None:
        raise EnvironmentFault(
            f"{option('storage')} with Postgres needs a driver: pip install 'psycopg2-binary>=2.9.9'"
        )
    return URL.create(
        "postgresql+psycopg2", found.username, str(secret) if secret else None, found.host, found.port,
        found.database, rest,
    )  # fmt: skip


def _read(path: Path) -> str:
    """The URL in the file `path`, which its owner alone may read."""
    try:
        content, found = regular_bytes(path, most=_MOST_BYTES)
        text = content.decode("utf-8").strip()
    except (OSError, ValueError) as error:
        no_text = isinstance(error, UnicodeDecodeError)
        why = error.strerror if isinstance(error, OSError) else "it is no text" if no_text else f"it {error}"
        raise ConfigError(f"{option('storage')} file:{path} cannot be read: {why}; it must hold one URL") from error
    if found.st_mode & _OTHERS:
        raise ConfigError(
            f"others can read {path}, which may hold a password (mode {found.st_mode & 0o777:o}); run chmod 600 {path}"
        )
    return text


def cause_of(error: BaseException) -> BaseException | None:
    """The driver's own error under those of SQLAlchemy and Optuna."""
    from sqlalchemy.exc import DBAPIError

    cause = error if isinstance(error, DBAPIError) else error.__cause__ or error
    return cause.orig if isinstance(cause, DBAPIError) else cause


# -- names of studies and trials, looked up at once --------------------------------------------------------------------


NAMES = BEST, LEANEST = "best", "leanest"  # of trials, beside their numbers
_WAIT_S = 0.1  # for a writer; opening the database waits as long as it takes
_STUDIES = (
    "SELECT study_name, study_id FROM studies LEFT JOIN study_user_attributes AS kept USING (study_id) "
    "WHERE kept.key = 'used' ORDER BY kept.value_json"
)


def check_names(database: Database, study: str | None, trial: str | None = None, *, takes_points: bool = False) -> None:
    """Raise ConfigError if the file of studies, the named study (None: the one used last), or the trial is missing.

    `takes_points` is whether a point that is known by prediction only (p1) will do as well.
    """
    check_there(database)
    if database.url is not None or not database.path.is_file():
        return
    with contextlib.suppress(sqlite3.Error), contextlib.closing(_opened(database)) as file:
        found = dict(file.execute(_STUDIES))
        whole = len(found) == file.execute("SELECT count(*) FROM studies").fetchone()[0]
        if not found or not whole:  # others' are among them
            return
        if study is not None and study not in found:
            raise no_study(study, list(found), database)
        if trial is None or trial in NAMES:
            return
        number = found[study or list(found)[-1]]
        numbers = [str(n) for (n,) in file.execute("SELECT number FROM trials WHERE study_id = ?", (number,))]
        points = _points(file, number)
        if trial not in numbers and not (takes_points and trial in points):
            raise no_trial(trial, len(numbers), points)


def _opened(database: Database) -> sqlite3.Connection:
    return sqlite3.connect(f"{database.path.absolute().as_uri()}?mode=ro", uri=True, timeout=_WAIT_S)


def _points(file: sqlite3.Connection, study: int) -> list[str]:
    """The names of the unprobed points on the front of a study."""
    asked = "SELECT value_json FROM study_user_attributes WHERE study_id = ? AND key = 'foreseen'"
    return [point["name"] for (text,) in file.execute(asked, (study,)) for point in json.loads(text)]


def no_study(name: str, names: Sequence[str], database: Database) -> ConfigError:
    """The error of a missing study."""
    known = ", ".join(names)
    return ConfigError(f"there is no study {name!r} in {database.home}{nearest(name, names)}; there are: {known}")


def no_trial(asked: str, count: int, points: Sequence[str] | None = None) -> ConfigError:
    """The error of a trial missing in a study of `count` trials; `points` are known by prediction only."""
    now = "" if points is None else f" (now {', '.join(points) or 'none'})"
    point = f"; `autofit promote` probes a point of the front that no probe has reached{now}; then it has a number"
    return ConfigError(
        f"{option('trial')} must be {', '.join(f'`{name}`' for name in NAMES)} or the number of a trial of this "
        f"study (0 to {count - 1}); got {asked!r}{nearest(asked, list(NAMES))}{point if is_point(asked) else ''}"
    )


def is_point(name: str) -> bool:
    """True if `name` is that of a point which is known by prediction only."""
    return name.startswith("p") and name[1:].isdecimal()
