"""The ranks of a training end together, whoever fails first and however."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from autofit.probing import supervise
from autofit.probing.supervise import RanksEnded, free_port, keep_ranks

_WAITS = "import time; time.sleep(100)"


class Ranks:
    """Small programs, one a rank."""

    def __init__(self, *programs: str) -> None:
        self.programs, self.pids = programs, dict[int, int]()

    def start(self, rank: int) -> int:
        process = subprocess.Popen([sys.executable, "-c", self.programs[rank]])
        process.returncode = 0  # the keeper waits for it
        self.pids[rank] = process.pid
        return process.pid

    def kept(self, **options: Any) -> RanksEnded:
        return keep_ranks(self.start, len(self.programs), **options)


def test_a_child_that_was_there_before_is_no_business_of_the_keeper() -> None:
    with subprocess.Popen([sys.executable, "-c", _WAITS]) as other:
        Ranks("", "raise SystemExit(3)").kept(grace_s=0.1)
        assert other.poll() is None
        other.kill()


def test_ranks_that_end_well_are_waited_for() -> None:
    ranks = Ranks("", "import time; time.sleep(0.3)", "")
    ended = ranks.kept()
    assert ended.first is None
    assert [ending.exit_code for ending in ended.endings] == [0, 0, 0]
    assert ended.worst.exit_code == 0


@pytest.mark.parametrize("program", ["raise SystemExit(3)", "import os; os.kill(os.getpid(), 9)"])
def test_one_that_fails_ends_the_others_after_their_grace(program: str) -> None:
    ranks, began = Ranks(_WAITS, program, _WAITS), time.monotonic()
    ended = ranks.kept(grace_s=0.5)
    assert time.monotonic() - began < 20
    assert ended.first == 1
    assert ended.worst.exit_code in (3, -signal.SIGKILL)
    assert not ended.worst.abandoned
    assert [ended.endings[rank].exit_code for rank in (0, 2)] == [-signal.SIGKILL] * 2
    assert all(ended.endings[rank].abandoned for rank in (0, 2))
    assert not any(psutil.pid_exists(pid) for pid in ranks.pids.values())


def test_a_rank_that_fails_by_itself_in_the_grace_is_not_the_first(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    follows = f"import os, time\nwhile not os.path.exists({str(gone)!r}): time.sleep(0.01)\nraise SystemExit(4)"
    leads = f"open({str(gone)!r}, 'w').close(); import os; os._exit(2)"
    ended = Ranks(leads, _WAITS).kept(grace_s=0.1)
    assert ended.first == 0
    ended = Ranks("", follows).kept(grace_s=5)
    assert [e.exit_code for e in ended.endings] == [0, 4]
    assert not any(e.abandoned for e in ended.endings)


def test_a_deadline_and_an_abandoned_call_kill_all() -> None:
    ended = Ranks(_WAITS, _WAITS).kept(deadline_s=0.3)
    assert all(e.deadline_passed and not e.abandoned for e in ended.endings)
    ended = Ranks(_WAITS, _WAITS).kept(abandoned=lambda: True)
    assert all(e.abandoned and not e.deadline_passed for e in ended.endings)
    assert ended.first is not None


def test_what_a_rank_started_is_killed_with_it(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    program = (
        f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {_WAITS!r}], start_new_session=True); "
        f"open({str(note)!r}, 'w').write(str(p.pid))"
    )
    Ranks(program).kept()
    assert not psutil.pid_exists(int(note.read_text()))


def test_a_free_port_can_be_listened_on() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port()))


@pytest.fixture
def deaf(monkeypatch: pytest.MonkeyPatch) -> None:
    """No signal ends a process, as one that hangs in a driver; a keeper waits for 0.3 s."""
    monkeypatch.setattr("os.kill", lambda pid, signal: None)
    monkeypatch.setattr(supervise, "KILLED_WITHIN_S", 0.3)


def kill(pid: int) -> None:
    """Kill without os.kill."""
    signal.pidfd_send_signal(os.pidfd_open(pid), signal.SIGKILL)


@pytest.mark.usefixtures("deaf")
def test_a_process_that_no_signal_ends_is_left_alone_and_named() -> None:
    waiting = subprocess.Popen([sys.executable, "-c", _WAITS])
    began = time.monotonic()
    ending = supervise.keep(lambda: waiting.pid, deadline_s=0.1)
    assert time.monotonic() - began < 20
    assert (ending.left_pid, ending.deadline_passed, ending.exit_code) == (waiting.pid, True, -signal.SIGKILL)
    kill(waiting.pid)
    waiting.wait()


@pytest.mark.usefixtures("deaf")
def test_ranks_that_no_signal_ends_are_left_alone_and_one_is_named() -> None:
    ranks = Ranks(_WAITS, "raise SystemExit(3)")
    ended = ranks.kept(grace_s=0.1)
    assert (ended.first, ended.worst.exit_code, ended.worst.left_pid) == (1, 3, ranks.pids[0])
    assert [ending.left_pid for ending in ended.endings] == [ranks.pids[0], None]
    kill(ranks.pids[0])
