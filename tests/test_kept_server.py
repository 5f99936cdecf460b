"""MLflow's server ends with the command that started it, `kill -9` included."""

import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path

import command_line
import psutil
import pytest
from search_driver import main as drive
from search_driver import plan

from autofit.tracking.ui import server
from autofit.tuning.search import open_study


def _serve(folder: Path, told: Connection) -> None:
    with server(folder, port=None) as mlflow:
        told.send(mlflow.address)
        time.sleep(600)


@pytest.mark.slow
def test_a_killed_ui_takes_the_server_and_its_workers_along(tmp_path: Path) -> None:
    open_study(plan(tmp_path, 1))
    hears, tells = multiprocessing.Pipe(duplex=False)
    ui = multiprocessing.get_context("fork").Process(target=_serve, args=(tmp_path, tells))
    ui.start()
    assert hears.poll(90)
    assert hears.recv().startswith("http://127.0.0.1:")
    started = psutil.Process(ui.pid).children(recursive=True)
    assert len(started) >= 2  # the keeper and the server
    ui.kill()
    ui.join()
    _, alive = psutil.wait_procs(started, timeout=20)
    assert not alive


@pytest.mark.slow
def test_ui_says_that_its_server_has_ended_by_itself(tmp_path: Path) -> None:
    drive(tmp_path, 1, 0)
    printed, said = tmp_path / "printed", tmp_path / "said"
    with printed.open("w") as out, said.open("w") as err:
        ui = command_line.start(tmp_path, "ui", "--dir", str(tmp_path), stdout=out, stderr=err)
    while not printed.read_text().startswith("MLflow: http://127.0.0.1:"):
        assert ui.poll() is None, said.read_text()
        time.sleep(0.1)
    (keeper,) = [process for process in psutil.process_iter(["cmdline"]) if _keeps(process, tmp_path)]
    (mlflow,) = keeper.children()
    mlflow.kill()
    assert ui.wait(timeout=60) == 2
    assert "MLflow's server ended by itself, with exit code 9" in " ".join(said.read_text().split())


def _keeps(process: psutil.Process, folder: Path) -> bool:
    words = process.info["cmdline"] or []
    return "autofit.tracking.kept_server" in words and any(str(folder) in word for word in words)
