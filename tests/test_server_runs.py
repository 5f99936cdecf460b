"""A full run on one machine beside its vLLM server: TRL's real client, a stand-in server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from served_runs import failure, folder_of_run
from test_slurm_promote import logs, steps, wait
from vllm_stand_in import servers_of, write_stand_in

from autofit.probing.supervise import ProcessEnding, RanksEnded, computing_env
from autofit.promotion.run_folder import ask_to_end
from autofit.promotion.server import Beside, start_keeper
from autofit.watching.events import EventKind, events_of


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`trl vllm-serve` and `vllm` for all that is started from here."""
    for line in write_stand_in(tmp_path / "stand-in"):
        key, _, value = line.removeprefix("export ").partition("=")
        monkeypatch.setenv(key, value.replace(f"${key}", os.environ.get(key, "")))


def started(folder: Path) -> subprocess.Popen[bytes]:
    """The job of the run."""
    (folder / "failed.json").unlink(missing_ok=True)
    program = f"from autofit.promotion.job import run_promoted; run_promoted({str(folder / 'request.json')!r})"
    return subprocess.Popen([sys.executable, "-c", program], cwd=folder)


def left(folder: Path) -> dict[int, str]:
    """{pid: command line} of the living processes of the run."""
    servers = {process.pid for process in servers_of(folder)}
    commands = {process.pid: " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])}
    return {pid: command for pid, command in commands.items() if str(folder) in command or pid in servers}


def wait_until_none_is_left(folder: Path) -> None:
    deadline = time.monotonic() + 60
    while processes := left(folder):
        assert time.monotonic() < deadline, f"left: {processes}\n{logs(folder)}"
        time.sleep(0.1)


def goes_on(folder: Path) -> bool:
    """Whether the run was resumed; a kill while a checkpoint is saved leaves it torn, and an older one is told."""
    return any(event.kind in (EventKind.RESUME, EventKind.CHECKPOINT) for event in events_of(folder))


@pytest.mark.slow
@pytest.mark.usefixtures("stand_in")
def test_a_run_on_one_machine_ends_with_its_server_also_after_a_kill_of_either(
    tiny_model: Path, tmp_path: Path
) -> None:
    folder = folder_of_run(tmp_path / "run", tiny_model, max_steps=60, save_steps=1)
    with started(folder) as job:
        wait(folder, lambda: steps(folder) >= 2)
        assert len(servers_of(folder)) == 2
        job.kill()
    wait_until_none_is_left(folder)
    with started(folder) as job:
        wait(folder, lambda: goes_on(folder))
        [keeper] = [p for p in psutil.Process(job.pid).children() if "autofit.promotion.server" in p.cmdline()]
        keeper.kill()
        job.wait(timeout=60)
    assert failure(folder) == f"the keeper of the vLLM server was killed; see {folder / 'server.log'}"
    wait_until_none_is_left(folder)


@pytest.mark.slow
def test_a_server_that_ends_or_never_answers_ends_the_run_before_it_trains(tiny_model: Path, tmp_path: Path) -> None:
    folder = folder_of_run(tmp_path / "run", tiny_model)
    with started(folder):  # TRL's own command, without vLLM
        pass
    assert re.fullmatch(
        r"the vLLM server ended with exit code 1 \(.*No module named 'vllm'\)*; see .*/server.log", failure(folder)
    )
    slow = folder_of_run(tmp_path / "slow", tiny_model, vllm_server_timeout=2)
    (slow / "trl").write_text("#!/bin/sh\necho loads\nsleep 1000\n")
    (slow / "trl").chmod(0o755)
    beside, took = at(slow, PATH=f"{slow}:{os.environ['PATH']}"), time.monotonic()
    assert beside.beside(_never)([{}]).alone == ProcessEnding(exit_code=0, abandoned=True)
    assert time.monotonic() - took < 10
    assert failure(slow) == (
        f"the vLLM server did not answer within 2 s (vllm_server_timeout) (loads); see {slow / 'server.log'}"
    )


def at(folder: Path, **env: str) -> Beside:
    path = folder / "request.json"
    return Beside(
        folder, "test", start=lambda post: start_keeper(path, post, cwd=str(folder), env=computing_env(**env))
    )


def _never(_: object) -> RanksEnded:
    raise AssertionError("nothing is trained before the server answers")


@pytest.mark.slow
@pytest.mark.usefixtures("stand_in")
def test_each_start_of_a_training_has_a_server_of_its_own(tiny_model: Path, tmp_path: Path) -> None:
    """As after an OOM: the next start may serve other settings."""
    folder = folder_of_run(tmp_path / "run", tiny_model)
    found: list[str] = []

    def train(environments: Sequence[dict[str, str]]) -> RanksEnded:
        found.append(environments[0]["AUTOFIT_VLLM_SERVER"])
        assert len(servers_of(folder)) == 2
        return RanksEnded(endings=(ProcessEnding(exit_code=0),))

    trained = at(folder).beside(train)
    trained([{}])
    assert not servers_of(folder)
    trained([{}])
    assert len(set(found)) == 2
    ask_to_end(folder)
    assert trained([{}]).alone == ProcessEnding(exit_code=0, abandoned=True)  # it waits for no server any more
    assert not servers_of(folder)
