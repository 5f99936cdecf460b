"""MLflow's server ends with the command that started it, `kill -9` included."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from search_driver import main as drive
from search_driver import plan

from autofit.tuning.search import open_study

_SERVES = """
import sys, time
from pathlib import Path
from autofit.tracking.ui import server
with server(Path(sys.argv[1]), port=None) as mlflow:
    print(mlflow.address, flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_a_killed_ui_takes_the_server_and_its_workers_along(tmp_path: Path) -> None:
    open_study(plan(tmp_path, 1))
    command = [sys.executable, "-c", _SERVES, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as ui:
        assert ui.stdout is not None
        address = ui.stdout.readline()
        assert address.startswith("http://127.0.0.1:")
        started = psutil.Process(ui.pid).children(recursive=True)
        assert len(started) >= 2  # the keeper and the server
        ui.kill()
    _, alive = psutil.wait_procs(started, timeout=20)
    assert not alive


@pytest.mark.slow
def test_ui_says_that_its_server_has_ended_by_itself(tmp_path: Path) -> None:
    drive(tmp_path, 1, 0)
    command = [sys.executable, "-m", "autofit", "ui", "--dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as ui:
        assert ui.stdout is not None
        assert ui.stdout.readline().startswith("MLflow: http://127.0.0.1:")
        (keeper,) = psutil.Process(ui.pid).children()
        (mlflow,) = keeper.children()
        mlflow.kill()
        _, said = ui.communicate(timeout=60)
    assert ui.returncode == 2
    assert "MLflow's server ended by itself, with exit code 9" in " ".join(said.split())
