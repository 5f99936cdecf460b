"""Commands as forks of one process that has imported what they need: 25 to 150 ms of processor time each.

It speaks the protocol of a kept server (autofit.probing.kept_server), whose code runs the command, but keeps each one
itself and looks at no module again. Simulations are answered by a kept server of the product's own.
"""

import contextlib
import gc
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from autofit.probing import kept_place, kept_server

_MODULES = (
    "autofit.cli", "autofit.api.estimating", "autofit.api.searching", "autofit.api.card_advice",
    "autofit.api.results", "autofit.api.promoting", "autofit.api.pipeline", "autofit.api.pipeline",
    "autofit.api.monitoring", "autofit.api.monitoring", "autofit.api.job_list", "autofit.api.verl",
    "autofit.trainers.early", "autofit.tracking.database", "autofit.tracking.study_mirror", "autofit.tracking.ui",
    "autofit.recipe.findings", "autofit.cluster.nodes", "autofit.proof",
    "autofit.promotion.stages", "autofit.frontends.reading", "autofit.frontends.writing", "autofit.web.server",
    "autofit.web.simulator", "autofit.web.server", "autofit.watching.guards", "autofit.fakegpu.calibrate",
    "autofit.fakegpu.device", "rich.console", "rich.table", "rich.status", "rich._emoji_codes", "pygments",
    "alembic.command", "optuna.storages._rdb.models", "mlflow", "mlflow.tracking", "email.policy",
    "mlflow.store.tracking.sqlalchemy_store", "importlib_metadata", "sqlalchemy.dialects.sqlite",
)  # fmt: skip
_START_S, _ENDS_S = 300.0, 90.0
# A fork of 330 MB copies its table of pages: 27 ms of processor time with its end, and 14 where pages are of 2 MB.
_HUGE_PAGES = {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def serve(path: str, kept: str) -> None:
    """Run the commands that come to the socket `path`, one after another; their simulations are run at `kept`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in _MODULES:
        importlib.import_module(name)
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as listener, mock.patch.object(os, "setsid"):  # once is all a process can
        listener.bind(path)
        listener.listen()
        while True:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                data, descriptors = kept_server._request(connection)
                kept_server._keep_command(connection, json.loads(data), descriptors, kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class Signalled:
    """A signal that a command gets some seconds after its start."""

    number: int
    after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Forks:
    """The sockets of such a process and of a kept server, and the environment that their commands are given."""

    own: Path
    kept: Path
    env: Mapping[str, str]

    def call(
        self, words: Sequence[str], home: Path, *, server: Path | None = None, cache: Path, most_s: float,
        signalled: Signalled | None = None,
    ) -> tuple[int, str]:  # fmt: skip
        """(exit code, output) of a command that `server` (this process by default) runs in the folder `home`.

        It gets Ctrl-C after `most_s` seconds. A command that a signal ended has minus its number as code; -1 is one
        that did not end, and -2 one whose server told no end.
        """
        env = {**os.environ, **self.env, "AUTOFIT_CACHE": str(cache), "HOME": str(home), "COLUMNS": "100"}
        request = {"command": list(words), "env": env, "ignored": []}
        with tempfile.TemporaryFile() as told, socket.socket(socket.AF_UNIX) as connection:
            at, nothing = os.open(home, os.O_PATH), os.open(os.devnull, os.O_RDONLY)
            try:
                connection.settimeout(_ENDS_S)
                connection.connect(str(server or self.own))
                data = json.dumps(request).encode("utf-8", "surrogatepass") + b"\n"
                sent = socket.send_fds(connection, [data], [nothing, told.fileno(), told.fileno(), at])
                connection.sendall(data[sent:])
                if b"ready" not in connection.recv(64):
                    return -2, "the server did not take it"
                connection.sendall(kept_server.GO)
                answer = _answer(connection, signalled or Signalled(number=signal.SIGINT, after_s=most_s))
            except TimeoutError:
                answer = {"code": -1}
            except OSError as error:
                return -2, str(error)
            finally:
                os.close(at)
                os.close(nothing)
            told.seek(0)
            said = told.read().decode(errors="replace")
        return int(answer.get("code", -int(answer.get("signal", 2)))), said


def _answer(connection: socket.socket, signalled: Signalled) -> dict[str, Any]:
    connection.settimeout(signalled.after_s)
    try:
        return _read(connection)
    except TimeoutError:
        connection.sendall(bytes([signalled.number]))
        connection.settimeout(_ENDS_S)
    return _read(connection)


def _read(connection: socket.socket) -> dict[str, Any]:
    found = connection.recv(4096)
    return dict(json.loads(found)) if found else {}


@contextlib.contextmanager
def forking(more: Mapping[str, str] = {}) -> Iterator[Forks]:
    """Such a process and a kept server of its own, which end with the context; `more` variables are set for both."""
    own = Path(tempfile.mkdtemp(prefix="w-", dir="/tmp"))  # a socket's path has at most 107 characters
    kept, forks = own / "kept", own / "forks"
    (own / "first").mkdir()  # the server deletes it when it goes over to `kept`
    path = os.pathsep.join(dict.fromkeys(filter(None, sys.path)))
    env = {"TMPDIR": str(own), "AUTOFIT_SERVER": "1", "PYTHONPATH": path, **more}
    with (
        _process(own, env, "autofit.probing.fork_server", str(own / "first/warm"), f"stays={kept}"),
        _process(own, env | _HUGE_PAGES, "storm.forks", str(forks), str(kept)) as process,
    ):
        try:
            with _held(kept):
                while not forks.exists():
                    assert process.poll() is None, (own / "storm.forks.log").read_text()
                    time.sleep(0.1)
                yield Forks(own=forks, kept=kept, env=env)
        finally:
            shutil.rmtree(own, ignore_errors=True)


@contextlib.contextmanager
def _process(own: Path, env: Mapping[str, str], module: str, *words: str) -> Iterator["subprocess.Popen[bytes]"]:
    with (own / f"{module}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *words], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True, cwd=own, env={**os.environ, **env},
        )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def _held(kept: Path) -> Iterator[None]:
    """Context in which the kept server does not end for want of requests."""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        connection = kept_place.connected(kept, wait_s=_START_S)
        if connection is not None:
            with connection:
                assert kept_server.asked(connection, {"hold": True}) == {"held": True}, "it is of other code"
                yield
            return
        time.sleep(0.1)
    raise AssertionError(kept.with_name("autofit.probing.fork_server.log").read_text())


if __name__ == "__main__":
    serve(*sys.argv[1:])
