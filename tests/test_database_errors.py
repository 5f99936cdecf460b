"""Errors of the database of studies: what failed is said, and a whole file is never to be moved away."""

import sqlite3
from pathlib import Path

import pytest
import sqlalchemy.exc

from autofit.errors import EnvironmentFault
from autofit.tuning.study import database_errors

DETAILS = {  # extended codes: their lowest byte is the kind
    "SQLITE_IOERR_WRITE": sqlite3.SQLITE_IOERR_WRITE, "SQLITE_IOERR_FSYNC": sqlite3.SQLITE_IOERR_FSYNC,
    "SQLITE_ERROR": sqlite3.SQLITE_ERROR, "SQLITE_PROTOCOL": sqlite3.SQLITE_PROTOCOL,
    "SQLITE_FULL": sqlite3.SQLITE_FULL, "SQLITE_CORRUPT": sqlite3.SQLITE_CORRUPT,
}  # fmt: skip


@pytest.mark.parametrize("name", DETAILS)
def test_only_a_file_that_is_no_database_is_to_be_moved_away(name: str, tmp_path: Path) -> None:
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = DETAILS[name]
    with pytest.raises(EnvironmentFault) as raised, database_errors(tmp_path):
        raise sqlalchemy.exc.OperationalError("INSERT", {}, error)
    said = str(raised.value)
    assert said.startswith(f"{tmp_path / 'studies.db'} cannot be used as a database: disk I/O error; ")
    assert ("move the file away" in said) == (name == "SQLITE_CORRUPT")
    assert ("a quota is used up" in said) == name.startswith("SQLITE_IOERR")
