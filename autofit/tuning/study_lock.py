"""One driver of a study on a shared database: an advisory lock of Postgres, which the server drops with its holder."""

import contextlib
import hashlib
from collections.abc import Iterator

from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from autofit.errors import ConfigError
from autofit.tuning.postgres import connection_to
from autofit.tuning.storage import Database

# An advisory lock with a 64-bit key is two halves in pg_locks. application_name is shown to every role.
_HOLDER = text("""
SELECT a.usename, a.application_name, a.client_addr FROM pg_locks l JOIN pg_stat_activity a USING (pid)
WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
AND (l.classid::bigint << 32) | l.objid::bigint = :key
""")


class StudyLock:
    """The lock of the study `name`, on a connection of its own. It ends with the process, however that ends."""

    def __init__(self, database: Database, name: str) -> None:
        self._database, self._name = database, name
        digest = hashlib.sha256(f"autofit study {name}".encode()).digest()
        self._key = {"key": int.from_bytes(digest[:8], "big") >> 1}  # a bigint is signed
        self._connection: Connection | None = None

    def take(self) -> None:
        """Take the lock. Raises ConfigError, with the holder's name, if another process has it."""
        connection = connection_to(self._database)
        if connection.execute(text("SELECT pg_try_advisory_lock(:key)"), self._key).scalar():
            self._connection = connection
            return
        found = connection.execute(_HOLDER, self._key).first()
        connection.close()
        holder = "it ended a moment ago" if found is None else _words(*found)
        raise ConfigError(
            f"another autofit process is working on {self._name} in {self._database}: {holder}; wait until it ends, "
            f"or choose another study with --study"
        )

    def keep(self) -> None:
        """Take the lock again if its connection broke, as by a restart of the server."""
        try:
            assert self._connection is not None
            self._connection.execute(text("SELECT 1"))
        except DBAPIError:
            self.release()
            self.take()

    def release(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(DBAPIError):
                self._connection.close()


def _words(role: str, name: str, address: str | None) -> str:
    return f"{name or 'an unnamed program'} (role {role}{f', from {address}' if address else ''})"


_held: list[StudyLock] = []  # of this process


@contextlib.contextmanager
def sole_driver(database: Database, name: str) -> Iterator[None]:
    """Hold the lock of the study `name`."""
    lock = StudyLock(database, name)
    lock.take()
    _held.append(lock)
    try:
        yield
    finally:
        _held.remove(lock)
        lock.release()


def keep_locks(*_: object) -> None:
    """See that this process still has its locks: before a new connection is used, as after a restart of the server."""
    for lock in _held:
        lock.keep()
