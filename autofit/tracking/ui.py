"""`autofit ui`: MLflow's server for the studies' folder, on loopback, and the addresses of a study's pages."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from autofit.errors import ConfigError, EnvironmentFault
from autofit.probing.supervise import free_port
from autofit.tracking.database import tracking_uri
from autofit.tracking.runs import client, experiment_id, runs_of
from autofit.tracking.views import COMPARED, TABLE, run_path, runs_path
from autofit.tuning.study import load_study

_START_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """Paths of MLflow's pages of a study: the table of all trials, the charts that compare the front, the summary."""

    table: str
    compared: str
    summary: str | None  # with the picture of the front; None before the first trial


def pages(folder: Path, study_name: str | None) -> Pages:
    """The pages of the study in MLflow, as they are after `sync`."""
    study = load_study(folder, study_name)
    api = client(folder)
    experiment = experiment_id(api, folder, study.study_name)
    summary = runs_of(api, experiment, []).get("summary")
    return Pages(
        table=runs_path(experiment, TABLE),
        compared=runs_path(experiment, COMPARED),
        summary=None if summary is None else run_path(experiment, summary.info.run_id, "artifacts/front.png"),
    )


@dataclass(frozen=True, slots=True)
class MlflowServer:
    """MLflow's server at work."""

    address: str
    log: Path
    _keeper: "subprocess.Popen[bytes]"

    def wait(self) -> NoReturn:
        """Wait for ever, or raise EnvironmentFault once the server has ended by itself."""
        code = self._keeper.wait()
        raise EnvironmentFault(
            f"MLflow's server ended by itself, with exit code {code}: run the same command again; see {self.log}"
        )


@contextmanager
def server(folder: Path, *, port: int | None) -> Iterator[MlflowServer]:
    """Run MLflow's server for `folder`. It ends with this process, however that ends.

    Raises ConfigError if the port is in use.
    """
    port = free_port() if port is None else port
    if _in_use(port):
        raise ConfigError(f"--port {port} is in use on this machine; choose another port or omit --port")
    env = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    artifacts = str((folder / "mlartifacts").resolve())
    command = [
        sys.executable, "-P", "-m", "autofit.tracking.kept_server", "--host", "127.0.0.1", "--port", str(port),
        "--workers", "1", "--backend-store-uri", tracking_uri(folder), "--default-artifact-root", artifacts,
    ]  # fmt: skip
    log = folder / "ui.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True
        )
    address = f"http://127.0.0.1:{port}"
    try:
        _wait_until_up(address, process, log)
        yield MlflowServer(address, log, process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


def _wait_until_up(address: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise EnvironmentFault(f"MLflow's server ended with exit code {process.returncode}; see {log}")
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=2):  # noqa: S310  (loopback)
                return
        except OSError:
            time.sleep(0.1)
    raise EnvironmentFault(f"MLflow's server did not answer within {_START_S:.0f} s; see {log}")


def _in_use(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False
