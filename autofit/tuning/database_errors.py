"""Errors of the studies' database, and damage to what it holds, as one clear line."""

import contextlib
import functools
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import sqlalchemy.exc
from optuna.exceptions import StorageInternalError
from optuna.storages import RDBStorage

from autofit.errors import AutofitError, EnvironmentFault, one_line
from autofit.files import cannot_write
from autofit.tuning.lock_holder import holder_of
from autofit.tuning.storage import CALLS, cause_of, database_of

# Of JSON, text, an enumeration or a structure that is not what was written.
_DAMAGED = (ValueError, LookupError, TypeError, AttributeError)
T = TypeVar("T")


@contextlib.contextmanager
def database_errors(folder: Path) -> Iterator[None]:
    """Turn errors of the database of the studies in `folder` into one clear EnvironmentFault."""
    try:
        yield
    except (sqlalchemy.exc.DBAPIError, StorageInternalError) as error:
        database, at_fault = database_of(folder), cause_of(error)
        if database.url is None:
            advice = _advice(at_fault, database.path)
        else:
            from autofit.tuning.postgres import postgres_advice

            advice = postgres_advice(at_fault, database)
        reason = str(at_fault).strip().partition("\n")[0]
        raise EnvironmentFault(f"{database} cannot be used as a database: {reason}; {advice}") from error
    except OSError as error:
        raise EnvironmentFault(cannot_write(database_of(folder).path, error)) from error


def _advice(error: BaseException | None, path: Path) -> str:
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK) & 0xFF  # its upper bytes are details
    if code == sqlite3.SQLITE_FULL:
        return "free some space and run the same command again: no finished trial is lost"
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return f"{holder_of(path)} has locked it: run the same command again once that has ended; no trial is lost"
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN):
        return "make the file writable or choose another folder with --dir"
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_OK):  # OK: a text that is not UTF-8
        return "move the file away, or choose another folder with --dir"
    if code == sqlite3.SQLITE_IOERR:
        return (
            f"the disk failed, or a quota is used up (see `quota`, `df {path.parent}`): mend that and run the same "
            f"command again; the file is left as it is"
        )
    return "run the same command again, or choose another folder with --dir; the file is left as it is"


def tell_errors(storage: RDBStorage, folder: Path) -> None:
    """Let every call of `storage` raise its errors, and damaged content, as one clear EnvironmentFault."""
    for name in CALLS:
        reads = name.lstrip("_").startswith("get")
        setattr(storage, name, _told(getattr(storage, name), folder, reads=reads))


def _told(call: Callable[..., T], folder: Path, *, reads: bool) -> Callable[..., T]:
    @functools.wraps(call)
    def told(*args: object, **kwargs: object) -> T:
        with database_errors(folder):
            try:
                return call(*args, **kwargs)
            except _DAMAGED as error:
                if not reads or isinstance(error, AutofitError):
                    raise
                raise damage(folder, error) from error

    return told


def damage(folder: Path, error: Exception) -> EnvironmentFault:
    """The error of a database whose content is not what was written."""
    database = database_of(folder)
    fix = "move the file away, or choose another folder with --dir"
    return EnvironmentFault(
        f"{database} is damaged: what it holds cannot be read ({type(error).__name__}: {one_line(str(error), 80)}); "
        f"{fix if database.url is None else 'restore it, or choose another database with --storage'}"
    )
