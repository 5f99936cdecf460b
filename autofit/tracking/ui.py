"""`autofit ui`: MLflow's server for the studies' folder, on loopback, and the address of the compare page."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from autofit.errors import ConfigError, EnvironmentFault
from autofit.tracking.study_mirror import client, experiment_id, tracking_uri, trial_run_ids
from autofit.tuning.frontier import baseline, pareto_front
from autofit.tuning.study import load_study, trials_of

_START_S = 60.0
_MOST_COMPARED = 50  # with more runs the page is unreadable, and the address too long for browsers


def compare_path(folder: Path, study_name: str | None) -> str:
    """The path of MLflow's compare page for the front and the baseline; of the experiment if it has only one run."""
    study = load_study(folder, study_name)
    trials = trials_of(study)
    api = client(folder)
    experiment = experiment_id(api, folder, study.study_name)
    base = baseline(trials)
    shown = [*pareto_front(trials), *([base] if base is not None and base.result is not None else [])]
    numbers = {t.number for t in shown}
    if len(numbers) < 2:  # a front of one trial: compare it with the other trials
        numbers |= {t.number for t in [t for t in trials if t.result is not None][:_MOST_COMPARED]}
    found = trial_run_ids(api, folder, study.study_name, sorted(numbers))
    if len(found) < 2:
        return f"/#/experiments/{experiment}/runs?workflowType=machine_learning"
    return f"/#/compare-runs?runs={quote(json.dumps(found))}&experiments={quote(json.dumps([experiment]))}"


@contextmanager
def server(folder: Path, *, port: int | None) -> Iterator[str]:
    """Run MLflow's server for `folder`; yields its address, and stops it by pid. ConfigError if the port is in use."""
    port = _free_port() if port is None else port
    if _in_use(port):
        raise ConfigError(f"--port {port} is in use on this machine; choose another port or omit --port")
    env = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    command = [
        sys.executable, "-P", "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
        "--backend-store-uri", tracking_uri(folder), "--default-artifact-root", str((folder / "mlartifacts").resolve()),
    ]  # fmt: skip
    with (folder / "ui.log").open("wb") as log:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    address = f"http://127.0.0.1:{port}"
    try:
        _wait_until_up(address, process, folder / "ui.log")
        yield address
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _in_use(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False
