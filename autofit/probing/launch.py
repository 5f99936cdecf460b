"""Starts the jobs of probes through submitit, and finds them again. The only module that assumes one machine."""

import itertools
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil
import submitit

from autofit.errors import EnvironmentFault
from autofit.files import is_full, read_json, write_json
from autofit.probing.job import answered, cancel, run_probe
from autofit.probing.result import Cause, ProbeRequest, ProbeResult, ProbeStatus

_ATTEMPTS = 2  # a killed probe is repeated once


class Next(StrEnum):
    """The next action after the end of a probe."""

    KEEP = "keep"  # the result is final
    REPEAT = "repeat"  # the probe was killed; a second attempt may succeed
    FREE_SPACE = "free space"  # the disk is full: the user must free some space first


def what_next(result: ProbeResult, folder: Path, *, attempts: int) -> Next:
    """The next action after `result` of the probe in `folder`, attempt number `attempts` (from 1)."""
    if result.cause is Cause.NO_SPACE or (result.status is ProbeStatus.LOST and is_full(folder)):
        return Next.FREE_SPACE
    return Next.REPEAT if result.was_killed and attempts < _ATTEMPTS else Next.KEEP


def no_space_left(folder: Path) -> EnvironmentFault:
    return EnvironmentFault(f"no space left in {folder}; free some space and run the same command again")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempts:
    """The probe folders of one trial: NAME-1 in `home`, and NAME-2 if that probe was killed."""

    home: Path
    name: str

    def folders(self) -> list[Path]:
        """The existing folders, oldest first."""
        return list(itertools.takewhile(Path.exists, map(self._folder, itertools.count(1))))

    def new_folder(self) -> Path:
        """The folder of the next attempt."""
        folder = self._folder(len(self.folders()) + 1)
        folder.mkdir(parents=True)
        return folder

    def _folder(self, attempt: int) -> Path:
        return self.home / f"{self.name}-{attempt}"


class Launcher:
    """submitit's LocalExecutor: one job per probe, which calls `function` with the path of its request."""

    def __init__(self, function: Callable[[str], None] = run_probe) -> None:
        self._function = function

    def submit(self, request: ProbeRequest) -> None:
        """Write the request and start its job, unless an earlier simulated probe answers it."""
        write_json(request.request_path, request.to_json())
        if self._function is not run_probe or not answered(request):
            start_job(request.folder, self._function, str(request.request_path), timeout_s=request.deadline_s + 3600)

    def result(self, folder: Path) -> ProbeResult | None:
        """The answer in `folder`; a LOST one if the job ended without an answer; None while the job runs."""
        answer = _answer(folder)
        if answer is not None and (answer.wall_s is not None or not is_alive(folder)):
            return answer
        if is_alive(folder):
            return None
        answer = _answer(folder)  # may have been written between the two checks
        if answer is not None:
            return answer
        return _lost(folder, "the job ended without an answer")

    def run(self, request: ProbeRequest, *, poll_s: float = 0.02) -> ProbeResult:
        """The answer of one probe: submits it and waits."""
        self.submit(request)
        while (result := self.result(request.folder)) is None:
            time.sleep(poll_s)
        return result

    def cancel(self, folder: Path) -> None:
        """Stop the probe in `folder` and wait until its job is gone."""
        cancel(folder)
        deadline = time.monotonic() + 10
        while is_alive(folder) and time.monotonic() < deadline:
            time.sleep(0.02)


def _answer(folder: Path) -> ProbeResult | None:
    """The answer in `folder`; a LOST one where the file is no answer, and None where there is no file."""
    try:
        return ProbeResult.read(folder / "answer.json")
    except (ValueError, TypeError, KeyError, AttributeError):
        return _lost(folder, "the answer of the probe cannot be read")


def _lost(folder: Path, reason: str) -> ProbeResult:
    device = str((_note(folder / "request.json") or {}).get("device", ""))
    return ProbeResult(status=ProbeStatus.LOST, device=device, reason=reason, cause=Cause.KILLED)


def _note(path: Path) -> dict[str, object] | None:
    """The JSON object in `path`; None where there is none, or something else."""
    try:
        found = read_json(path)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def start_job(folder: Path, function: Callable[[str], None], argument: str, *, timeout_s: float) -> None:
    """Submit `function(argument)` as a job that outlives this process and ignores Ctrl-C; records it in `folder`."""
    python = f"{shlex.quote(sys.executable)} -P"  # a folder `autofit` where the user works is not ours
    executor = submitit.LocalExecutor(folder=folder / "job", python=python)
    # submitit counts a preemption within 10 minutes of the limit as a timeout, so the limit is well above the deadline.
    executor.update_parameters(timeout_min=max(11, int(timeout_s / 60) + 1), stderr_to_stdout=True)
    with _ignoring_interrupts():
        job = executor.submit(function, argument)
    create_time = _create_time(int(job.job_id))
    write_json(folder / "job.json", {"job_id": job.job_id, "create_time": create_time, "submitted": time.time()})


def is_alive(folder: Path) -> bool:
    """Whether the job recorded in `folder` is running, even if another process submitted it."""
    for name in ("started.json", "job.json"):
        note = _note(folder / name)
        if note is None or "create_time" not in note:
            continue
        pid = int(str(note.get("pid", note.get("job_id"))))
        created = _create_time(pid)
        if created is not None and note["create_time"] is not None:
            return abs(created - float(str(note["create_time"]))) < 1
        if name == "started.json":
            return False
    request = folder / "request.json"  # a process submitted it a moment ago and died before it could record the job
    return (
        request.exists()
        and not (folder / "job.json").exists()
        and not (folder / "started.json").exists()
        and time.time() - request.stat().st_mtime < 3
    )


def _create_time(pid: int) -> float | None:
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return None


@contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    """Context in which started children ignore Ctrl-C: the search itself decides which of its jobs to stop."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, old)
