"""Commands as forks of one process that has imported what they need: 30 to 200 ms of processor time each.

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
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from autofit.probing import kept_place, kept_server

_MODULES = (
    "autofit.cli", "autofit.api.checking", "autofit.api.estimating", "autofit.api.searching", "autofit.api.card_advice",
    "autofit.api.listing", "autofit.api.promoting", "autofit.api.pipeline", "autofit.api.pipeline_stages",
    "autofit.api.monitoring", "autofit.api.snapshot_tables", "autofit.api.job_list", "autofit.api.verl",
    "autofit.trainers.early", "autofit.tracking.database", "autofit.tracking.study_mirror", "autofit.tracking.views",
    "autofit.tracking.promoted_run", "autofit.recipe.launch_findings", "autofit.cluster.nodes", "autofit.proof",
    "autofit.promotion.stages", "autofit.frontends.reading", "autofit.frontends.writing", "autofit.web.server",
    "autofit.web.simulator", "autofit.web.files", "autofit.watching.guards", "autofit.fakegpu.calibrate",
    "autofit.fakegpu.device", "rich.console", "rich.table", "rich.status", "rich._emoji_codes", "pygments",
    "alembic.command", "optuna.storages._rdb.models", "mlflow", "mlflow.tracking", "email.policy",
    "mlflow.store.tracking.sqlalchemy_store", "importlib_metadata", "sqlalchemy.dialects.sqlite",
)  # fmt: skip
_START_S = 300.0


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


@contextlib.contextmanager
def forking() -> Iterator[tuple[Path, Path]]:
    """(the socket of such a process, that of a kept server of its own), in an environment that ends with them."""
    own = Path(tempfile.mkdtemp(prefix="w-", dir="/tmp"))  # a socket's path has at most 107 characters
    kept, forks = own / "kept", own / "forks"
    (own / "first").mkdir()  # the server deletes it when it goes over to `kept`
    path = os.pathsep.join(dict.fromkeys(filter(None, sys.path)))
    with (
        mock.patch.dict(os.environ, {"TMPDIR": str(own), "AUTOFIT_SERVER": "1", "PYTHONPATH": path}),
        mock.patch.object(tempfile, "tempdir", str(own)),
        _process(own, "autofit.probing.fork_server", str(own / "first/warm"), f"stays={kept}"),
        _process(own, "storm.forks", str(forks), str(kept)) as process,
    ):
        try:
            with _held(kept):
                while not forks.exists():
                    assert process.poll() is None, (own / "storm.forks.log").read_text()
                    time.sleep(0.1)
                yield forks, kept
        finally:
            shutil.rmtree(own, ignore_errors=True)


@contextlib.contextmanager
def _process(own: Path, module: str, *words: str) -> Iterator["subprocess.Popen[bytes]"]:
    with (own / f"{module}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *words], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True, cwd=own,
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
