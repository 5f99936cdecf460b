"""A real Postgres on this machine for tests: on loopback and a socket, in a folder of its own, for an ordinary user."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

PASSWORD = "p%40ss-4f1c9e77"  # of the role ann, as a URL writes it
SECRET = "p@ss-4f1c9e77"


def _bin() -> Path | None:
    """Where Debian, or the PATH, has Postgres's programs; the newest version."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: int(path.parts[4]))
    on_path = shutil.which("postgres")
    return found[-1].parent if found else Path(on_path).parent if on_path else None


def missing() -> str | None:
    """What this machine lacks for a Postgres of its own; None where it has all."""
    if _bin() is None:
        return "postgres is not installed (apt-get install postgresql)"
    try:
        import psycopg2  # noqa: F401
    except ImportError:
        return "psycopg2 is not installed (pip install 'psycopg2-binary>=2.9.9')"
    return None


@dataclass(frozen=True, slots=True)
class Server:
    """A running Postgres. The role `autofit` owns it, `ann` has a password and may make tables, `reader` may read."""

    folder: Path
    port: int

    def url(self, database: str, *, user: str = "ann", password: str = PASSWORD) -> str:
        secret = f":{password}" if password else ""
        return f"postgresql://{user}{secret}@127.0.0.1:{self.port}/{database}"

    def sql(self, statement: str, database: str = "postgres") -> str:
        """What a statement of the owner prints."""
        done = subprocess.run(self.psql(statement, database), capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, (statement, done.stderr)
        return done.stdout.strip()

    def psql(self, statement: str, database: str) -> list[str]:
        """The command that runs a statement as the owner."""
        to = ["-h", str(self.folder), "-p", str(self.port), "-U", "autofit"]
        return [str(_program("psql")), "-XqtA", *to, "-c", statement, database]

    @contextmanager
    def full(self, database: str) -> Iterator[None]:
        """Move `database` to a disk of its own, which is full for as long as the block lasts."""
        disk = self.folder / "disk"
        disk.mkdir()
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "none", str(disk)], check=False)
        if mounted.returncode:
            pytest.skip("a disk of its own needs the right to mount one")
        shutil.chown(disk, "postgres", "postgres")
        self.sql(f"CREATE TABLESPACE small LOCATION '{disk}'")
        try:
            self._move(database, "small")
            with suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
                while filler.write(bytes(2**16)):
                    pass
            yield
        finally:
            (disk / "filler").unlink(missing_ok=True)
            self._move(database, "pg_default")
            self.sql("DROP TABLESPACE small")
            subprocess.run(["umount", str(disk)], check=True)

    def _move(self, database: str, tablespace: str) -> None:
        self.sql(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{database}'")
        self.sql(f'ALTER DATABASE "{database}" SET TABLESPACE {tablespace}')

    def new_database(self, name: str) -> str:
        """The URL, with ann's password, of a new empty database, which `reader` may connect to."""
        self.sql(f'CREATE DATABASE "{name}" OWNER ann')
        return self.url(name)

    def start(self) -> None:
        options = f"-k {self.folder} -p {self.port} -c listen_addresses=127.0.0.1 -c fsync=off"
        _as_postgres(
            "pg_ctl", "-D", str(self.folder / "data"), "-w", "-l", str(self.folder / "log"), "-o", options, "start"
        )

    def stop(self, how: str = "fast") -> None:
        _as_postgres("pg_ctl", "-D", str(self.folder / "data"), "-m", how, "-w", "stop")

    def kill(self) -> None:
        """`kill -9` of the server and its sessions."""
        server = psutil.Process(int((self.folder / "data" / "postmaster.pid").read_text().split()[0]))
        everyone = [server, *server.children(recursive=True)]
        for process in everyone:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs(everyone, timeout=10)
        (self.folder / "data" / "postmaster.pid").unlink(missing_ok=True)


def _program(name: str) -> Path:
    where = _bin()
    assert where is not None
    return where / name


def _as_postgres(name: str, *arguments: str) -> None:
    """Run a program of Postgres, which refuses root, as the user postgres."""
    as_user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups", "--"] if os.geteuid() == 0 else []
    done = subprocess.run(
        [*as_user, str(_program(name)), *arguments], cwd="/", check=False, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=90,
    )  # fmt: skip
    assert done.returncode == 0, (name, done.stderr)


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@contextmanager
def server() -> Iterator[Server]:
    """A Postgres that ends with the block. Only its owner needs no password."""
    folder = Path(tempfile.mkdtemp(prefix="autofit-postgres-", dir="/tmp"))  # the socket's path must be short
    try:
        if os.geteuid() == 0:
            shutil.chown(folder, "postgres", "postgres")
        folder.chmod(0o755)
        _as_postgres("initdb", "-D", str(folder / "data"), "-U", "autofit", "--auth=trust", "--no-sync", "--locale=C",
                     "-E", "UTF8")  # fmt: skip
        hba = "local all autofit trust\nhost all all 127.0.0.1/32 scram-sha-256\n"
        (folder / "data" / "pg_hba.conf").write_text(hba)
        made = Server(folder, _free_port())
        made.start()
        try:
            made.sql(f"CREATE ROLE ann LOGIN PASSWORD '{SECRET}'")
            made.sql(f"CREATE ROLE reader LOGIN PASSWORD '{SECRET}' IN ROLE pg_read_all_data")
            yield made
        finally:
            if (folder / "data" / "postmaster.pid").exists():
                made.stop("immediate")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def wait_until(true: object, *, within_s: float = 20.0) -> None:
    """Wait until `true()` is; fails after `within_s`."""
    deadline = time.monotonic() + within_s
    while not true():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)
