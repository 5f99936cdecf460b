"""Ctrl-C that comes while a job is started is neither lost nor half done."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from autofit.files import read_json
from autofit.probing.launch import holding_back_interrupts, start_job

BLOCKED = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))"


@pytest.fixture(params=[signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def ends(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    """A signal that a command answers with KeyboardInterrupt."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    kept = signal.signal(request.param, interrupt)
    yield request.param
    signal.signal(request.param, kept)


def test_a_signal_waits_until_the_job_is_noted(
    ends: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Executor:
        def __init__(self, **_: object) -> None: ...

        def update_parameters(self, **_: object) -> None: ...

        def submit(self, *_: object) -> object:
            os.kill(os.getpid(), ends)
            return SimpleNamespace(job_id=str(os.getpid()))

    monkeypatch.setattr("autofit.probing.launch.submitit.LocalExecutor", Executor)
    with pytest.raises(KeyboardInterrupt):
        start_job(tmp_path / "probe", print, "request.json", timeout_s=1)
    assert (read_json(tmp_path / "probe" / "job.json") or {})["job_id"] == str(os.getpid())


def test_nothing_is_left_of_it_and_a_child_never_gets_ctrl_c() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with holding_back_interrupts():
        child = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == "True"
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
