"""The command that started MLflow's server ends with it; test_mlflow_pages.py has the server's end with the command."""

import os
import time
from pathlib import Path

import command_line
import psutil
import pytest
from search_driver import made

from autofit.probing import kept_server


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


def test_ctrl_c_after_the_command_has_ended_does_not_go_on_into_what_the_server_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(kept_server, "_code_of", lambda *_: 2)
    monkeypatch.setattr("contextlib.suppress", interrupted)
    pid = os.fork()
    if pid == 0:
        try:
            kept_server._run_command({}, [], 0, str(tmp_path))
        finally:
            os._exit(99)  # it went on
    monkeypatch.undo()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2
