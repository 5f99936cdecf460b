"""Optuna's storage on a Postgres server, with waits while it is away, a role that only reads, and a driver's lock."""

import contextlib
import functools
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import psycopg2
import sqlalchemy.exc
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.storages import RDBStorage
from optuna.trial import TrialState
from sqlalchemy import URL, Connection, NullPool, event, inspect, text
from sqlalchemy.exc import DBAPIError

from autofit.errors import ConfigError, EnvironmentFault, option
from autofit.tuning.storage import CALLS, Database, cause_of, me

AWAY_S = 60.0  # longest wait for a server that is restarted
_QUIET_S = 2.0  # a wait as short needs no word
_LOCK_S = 60  # longest wait for rows or tables that another session has locked
_MAKING = 0x6175746F666974  # the advisory lock under which Optuna's tables are made
# SQLSTATE: connection lost, shut down, starting, too many connections, serialization failure, deadlock.
_PASSING = ("08", "57P", "53300", "40001", "40P01")
_DENIED, _READ_ONLY, _DISK_FULL, _LOCKED = "42501", "25006", "53100", "55P03"
_log = logging.getLogger("autofit")
_said: set[str] = set()  # databases that were named before the first connection
T = TypeVar("T")


def _connect_args(url: URL) -> dict[str, Any]:
    """Name of each connection, and timeouts that make a dead network an error; the URL's own values come first."""
    ours: dict[str, Any] = {
        "application_name": f"autofit {me()[:40]} pid {os.getpid()}", "connect_timeout": 10, "keepalives_idle": 20,
        "keepalives_interval": 5, "keepalives_count": 4, "tcp_user_timeout": 30_000,
    }  # fmt: skip
    return {name: value for name, value in ours.items() if name not in url.query}


def connection_to(database: Database) -> sqlalchemy.Connection:
    """A connection of its own, which commits each statement."""
    assert database.url is not None
    if database.remembered and str(database) not in _said:
        _said.add(str(database))
        _log.warning("the studies of %s are in %s, as its storage.json says", database.folder, database)
    return sqlalchemy.create_engine(
        database.url, connect_args=_connect_args(database.url), poolclass=NullPool, isolation_level="AUTOCOMMIT"
    ).connect()


def passes(error: BaseException) -> bool:
    """True if `error` is of a server that is away, or busy, for a moment: the same statement may succeed later."""
    found = cause_of(error)
    if not isinstance(found, psycopg2.Error):
        return False
    if found.pgcode is None:  # no answer of the server: there was no connection, or it broke
        return isinstance(found, psycopg2.OperationalError | psycopg2.InterfaceError)
    return str(found.pgcode).startswith(_PASSING)


def postgres_advice(error: BaseException | None, database: Database) -> str:
    """Advice on the error, from the server's SQLSTATE."""
    code = getattr(error, "pgcode", None)
    user = "this role" if database.url is None or database.url.username is None else f"role {database.url.username}"
    if code == _DENIED:
        return f"{user} lacks a right there: have it granted to it, or name another role with {option('storage')}"
    if code == _READ_ONLY:
        return f"the server only reads (a standby?): name the primary with {option('storage')}"
    if code == _DISK_FULL:
        return "free some space on the server and run the same command again: no finished trial is lost"
    if code == _LOCKED:
        return "run the same command again once the other session has ended; no trial is lost"
    if error is None or passes(error):
        return (
            "check the server, and the user and password (PGPASSWORD, ~/.pgpass), and run the same command again: no "
            "trial is lost"
        )
    return f"choose another database with {option('storage')}"


def _patient(method: Callable[..., T]) -> Callable[..., T]:
    """`method`, repeated for up to a minute while the server is away."""

    @functools.wraps(method)
    def call(self: "PatientStorage", *args: object, **kwargs: object) -> T:
        began, said = time.monotonic(), False
        while True:
            try:
                found = method(self, *args, **kwargs)
                if said:
                    _log.warning("%s is back", self.database)
                return found
            except (StorageInternalError, sqlalchemy.exc.DBAPIError) as error:
                away_s = time.monotonic() - began
                if not passes(error) or away_s > AWAY_S:
                    raise
                if not said and away_s > _QUIET_S:
                    reason = str(cause_of(error)).strip().partition("\n")[0]
                    _log.warning("waiting up to %.0f s for %s: %s", AWAY_S, self.database, reason)
                    said = True
                time.sleep(0.5)

    return call


class PatientStorage(RDBStorage):
    """RDBStorage that outlives a restart of its server. Each call is one transaction, so that it can be repeated."""

    def __init__(self, database: Database, *, make_tables: bool) -> None:
        assert database.url is not None
        self.database = database
        super().__init__(
            database.url.render_as_string(hide_password=False),
            engine_kwargs={
                "pool_size": 1, "max_overflow": 2, "pool_pre_ping": True,
                "connect_args": _connect_args(database.url),
            },
            skip_compatibility_check=True, skip_table_creation=not make_tables,
        )  # fmt: skip
        self.engine.dispose()  # its first connection has no limit yet
        event.listen(self.engine, "connect", _limit_waits)

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Sequence[float] | None = None) -> bool:
        """As Optuna's; if the server stopped between the commit and its answer, the repeated call counts as done."""
        first = True

        def told() -> bool:
            nonlocal first
            again, first = not first, False
            try:
                return RDBStorage.set_trial_state_values(self, trial_id, state, values)
            except UpdateFinishedTrialError:
                if not again:
                    raise
                return True

        return _patient(lambda _: told())(self)


def _limit_waits(connection: Any, _: object) -> None:
    """Limit the time that a statement waits for a lock of another session."""
    with connection.cursor() as cursor:
        cursor.execute(f"SET lock_timeout = '{_LOCK_S}s'")
    connection.commit()


for _name in CALLS:
    if _name not in vars(PatientStorage):
        setattr(PatientStorage, _name, _patient(getattr(RDBStorage, _name)))


def open_postgres(database: Database, *, create: bool) -> PatientStorage:
    """The storage of a shared database; `create` makes Optuna's tables if they are missing, and wants to write.

    Raises ConfigError for a database without them otherwise. A role that can only read is enough without `create`.
    """
    with connection_to(database) as connection:
        there = inspect(connection).has_table("alembic_version")
        if not there and not create:
            raise ConfigError(
                f"there are no studies in {database}; run `autofit search` first, or name another {option('storage')}"
            )
        if there and create:
            _check_writes(connection, database)
        if create and not there:
            connection.execute(text(f"SET lock_timeout = '{_LOCK_S}s'"))
            connection.execute(text("SELECT pg_advisory_lock(:key)"), {"key": _MAKING})  # until this connection ends
            PatientStorage(database, make_tables=True).engine.dispose()
    return PatientStorage(database, make_tables=False)


def _check_writes(connection: sqlalchemy.Connection, database: Database) -> None:
    role, writes, standby = connection.execute(
        text(
            "SELECT current_user, has_table_privilege('studies', 'INSERT') AND has_table_privilege('trials', 'INSERT'),"
            " pg_is_in_recovery()"
        )
    ).one()
    if standby or not writes:
        why = "the server is a standby, which only reads" if standby else f"role {role} can only read"
        raise EnvironmentFault(
            f"a search must write to {database}, but {why}; name another role or server with {option('storage')}, or "
            "look at its studies with `autofit studies` and `autofit report`"
        )


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
            f"or choose another study with {option('study')}"
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
