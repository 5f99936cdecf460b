"""How a probe ended and what follows from it: read from types, never from the words of a message."""

import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import autofit.probing.job
import autofit.probing.launch
from autofit.errors import EnvironmentFault
from autofit.files import write_json
from autofit.probing.fork_server import ForkServer, ServerGone, call
from autofit.probing.job import classified
from autofit.probing.launch import Attempts, Launcher, Next, is_alive, what_next
from autofit.probing.result import Cause, ProbeRequest, ProbeResult, ProbeStatus
from autofit.probing.supervise import ProcessEnding, RanksEnded

LOST, FAILED, OOM = ProbeStatus.LOST, ProbeStatus.FAILED, ProbeStatus.OOM


def request_in(folder: Path, device: str = "cpu") -> ProbeRequest:
    return ProbeRequest(folder=folder, trainer="grpo", values={}, device=device, limit_bytes=None, worst_case=folder)


@pytest.mark.parametrize("cause", [None, *Cause])
def test_a_cause_travels_as_json_and_an_answer_of_before_there_were_causes_is_read(cause: Cause | None) -> None:
    result = ProbeResult(status=FAILED, device="cpu", reason="as it is", cause=cause)
    content = result.to_json()
    assert ProbeResult.from_json(content) == result
    del content["cause"]
    assert ProbeResult.from_json(content) == replace(result, cause=None)


@pytest.mark.parametrize(
    ("ending", "device", "status", "cause"),
    [
        (ProcessEnding(exit_code=-signal.SIGKILL, deadline_passed=True), "cpu", LOST, Cause.DEADLINE),
        (ProcessEnding(exit_code=-signal.SIGKILL, kernel_oom=True), "cpu", OOM, Cause.HOST_OOM),
        (ProcessEnding(exit_code=-signal.SIGKILL, kernel_oom=True), "cuda", LOST, Cause.HOST_OOM),
        (ProcessEnding(exit_code=-signal.SIGKILL), "cpu", LOST, Cause.KILLED),
        (ProcessEnding(exit_code=-signal.SIGTERM), "cpu", LOST, Cause.KILLED),
        (ProcessEnding(exit_code=-signal.SIGSEGV), "cpu", FAILED, Cause.CRASHED),
        (ProcessEnding(exit_code=3), "cpu", FAILED, Cause.EXITED),
        (ProcessEnding(exit_code=-signal.SIGKILL, deadline_passed=True, left_pid=7), "cuda", LOST, Cause.HANGS),
    ],
)
def test_each_ending_without_an_answer_has_its_cause(
    tmp_path: Path, ending: ProcessEnding, device: str, status: ProbeStatus, cause: Cause
) -> None:
    result = classified(ending, request_in(tmp_path, device))
    assert (result.status, result.cause) == (status, cause)
    assert result.oom_phase == ("load" if status is OOM else None)


@pytest.mark.parametrize("words", ["", "the deadline of 8 s passed", "no space left", "killed", "version", "full"])
@pytest.mark.parametrize(
    ("status", "cause", "follows"),
    [
        (LOST, Cause.KILLED, Next.REPEAT),
        (LOST, Cause.HOST_OOM, Next.REPEAT),
        (LOST, None, Next.REPEAT),
        (LOST, Cause.DEADLINE, Next.KEEP),
        (FAILED, Cause.RAISED, Next.KEEP),
        (FAILED, Cause.NO_SPACE, Next.MEND),
        (FAILED, Cause.NO_CARD, Next.MEND),
        (LOST, Cause.HANGS, Next.REPEAT),
        (OOM, Cause.HOST_OOM, Next.KEEP),
    ],
)
def test_rewording_a_reason_does_not_change_what_follows_from_a_result(
    tmp_path: Path, words: str, status: ProbeStatus, cause: Cause | None, follows: Next
) -> None:
    result = ProbeResult(status=status, device="cpu", reason=words, cause=cause)
    assert what_next(result, tmp_path, attempts=1) is follows
    assert what_next(result, tmp_path, attempts=2) is (Next.KEEP if follows is Next.REPEAT else follows)


def test_a_probe_lost_on_a_full_disk_is_not_repeated_before_there_is_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autofit.probing.launch, "is_full", lambda folder: True)
    result = ProbeResult(status=LOST, device="cpu", cause=Cause.KILLED)
    assert what_next(result, tmp_path, attempts=1) is Next.MEND
    assert what_next(replace(result, status=ProbeStatus.FIT, cause=None), tmp_path, attempts=1) is Next.KEEP


def test_the_attempts_at_a_trial_are_numbered_and_found_again(tmp_path: Path) -> None:
    attempts = Attempts(home=tmp_path / "probes", name="trial-0001")
    made = [attempts.new_folder() for _ in range(11)]
    assert Attempts(home=tmp_path / "probes", name="trial-0001").folders() == made
    assert made[-1].name == "trial-0001-11"
    assert Attempts(home=tmp_path / "probes", name="trial-0002").folders() == []


@pytest.mark.parametrize("words", ["it does not answer", "gone"])
def test_a_call_that_no_server_took_is_started_here_and_one_that_was_taken_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    def fault(error: EnvironmentFault) -> ProcessEnding:
        def failing(socket_path: str, message: object) -> RanksEnded:
            raise error

        monkeypatch.setattr(autofit.probing.job, "call_ranks", failing)
        request = replace(request_in(tmp_path), server_socket="gone")
        return autofit.probing.job._keep(request, "cpu-0", request)

    monkeypatch.setattr(
        autofit.probing.job, "keep_ranks", lambda *_, **__: RanksEnded(endings=(ProcessEnding(exit_code=7),))
    )
    assert fault(ServerGone(words)).exit_code == 7
    assert fault(EnvironmentFault(words)).exit_code == -signal.SIGKILL


def test_a_socket_that_nobody_listens_on_is_a_server_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(ServerGone, match="does not answer"):
        call(str(tmp_path / "no-such-socket"), {})


_SUBMITS = """
import os, signal, sys
from pathlib import Path
from autofit.probing.launch import Launcher
from autofit.probing.result import ProbeRequest
Launcher().submit(ProbeRequest.read(Path(sys.argv[1])))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_the_job_of_a_simulated_probe_is_a_fork_that_outlives_a_killed_search(
    tmp_path: Path, fork_server: ForkServer
) -> None:
    assert fork_server.is_ready()
    asked = replace(request_in(tmp_path / "one", "sim:l4"), trainer="none:here", server_socket=fork_server.socket_path)
    asked.folder.mkdir()
    write_json(asked.request_path, asked.to_json())
    killed = subprocess.run([sys.executable, "-c", _SUBMITS, str(asked.request_path)], cwd=tmp_path)
    assert killed.returncode == -signal.SIGKILL
    assert is_alive(asked.folder)
    launcher, until = Launcher(), time.monotonic() + 60
    while (result := launcher.result(asked.folder)) is None and time.monotonic() < until:
        time.sleep(0.02)
    assert result is not None
    assert (result.status, result.cause) == (FAILED, Cause.RAISED)
    assert "none" in result.reason
    assert not list((asked.folder / "job").glob("*.pkl"))  # submitit would leave them
    while is_alive(asked.folder) and time.monotonic() < until:
        time.sleep(0.02)
    assert not is_alive(asked.folder)


def test_a_simulated_probe_whose_server_is_gone_is_started_by_submitit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    monkeypatch.setattr(autofit.probing.launch, "start_job", lambda folder, *_, **__: started.append(folder))
    asked = replace(request_in(tmp_path, "sim:l4"), server_socket=str(tmp_path / "none"))
    Launcher().submit(asked)
    assert started == [tmp_path]
