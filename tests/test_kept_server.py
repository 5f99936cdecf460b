"""The command that started MLflow's server ends with it; test_mlflow_pages.py has the server's end with the command."""

import time
from pathlib import Path

import command_line
import psutil
import pytest
from search_driver import made


@pytest.mark.slow
def test_ui_says_that_its_server_has_ended_by_itself(tmp_path: Path) -> None:
    made(tmp_path, 1)
    printed, said = tmp_path / "printed", tmp_path / "said"
    with printed.open("w") as out, said.open("w") as err:
        ui = command_line.start(tmp_path, "ui", "--dir", str(tmp_path), stdout=out, stderr=err)
    while not printed.read_text().startswith("all trials: http://127.0.0.1:"):
        assert ui.poll() is None, said.read_text()
        time.sleep(0.1)
    (keeper,) = [process for process in psutil.process_iter(["cmdline"]) if _keeps(process, tmp_path)]
    (mlflow,) = keeper.children()
    mlflow.kill()
    assert ui.wait(timeout=60) == 2
    assert "MLflow's server ended by itself, with exit code 9" in " ".join(said.read_text().split())


def _keeps(process: psutil.Process, folder: Path) -> bool:
    words = process.info["cmdline"] or []
    return "autofit.probing.supervise" in words and any(str(folder) in word for word in words)
