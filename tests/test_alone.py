"""One process at a time trains a run: also where a keeper was killed early, or a command started a second job."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autofit.files import write_json
from autofit.probing.supervise import ProcessEnding
from autofit.promotion import job
from autofit.promotion.job import run_promoted

_CHILD = """
import os, time
from autofit.probing.supervise import die_with_parent
while {waits} and os.getppid() == {parent}:
    time.sleep(0.01)
die_with_parent()
print("goes on", os.environ.get("AUTOFIT_PARENT"))
"""
_PARENT = """
import os, subprocess, sys
from autofit.probing.supervise import computing_env
program = {child!r}.format(parent=os.getpid(), waits={waits})
child = subprocess.Popen([sys.executable, "-c", program], env=computing_env())
if not {waits}:
    child.wait()
"""


@pytest.mark.parametrize(("parent_dies", "said"), [(True, ""), (False, "goes on None\n")])
def test_a_child_ends_whose_parent_died_while_it_was_starting(parent_dies: bool, said: str) -> None:
    program = _PARENT.format(child=_CHILD, waits=parent_dies)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == (said, "")  # subprocess.run reads until the child has ended too


def requested(folder: Path) -> Path:
    path = folder / "request.json"
    write_json(path, {"folder": str(folder), "values": {}, "slots": ["cpu-0"], "cwd": str(folder)})
    return path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The trainings that jobs started; nothing is trained."""
    found = list[str]()
    monkeypatch.setattr(job, "_DYING_S", 0.0)
    monkeypatch.setattr(job, "listen", lambda _: None)

    def trains(path: Path, *_: object, **__: object) -> ProcessEnding:
        found.append(str(path))
        return ProcessEnding(exit_code=0)

    monkeypatch.setattr(job, "train_to_the_end", trains)
    return found


def test_a_second_job_of_a_run_leaves_it_to_the_first(tmp_path: Path, started: list[str]) -> None:
    request = requested(tmp_path)
    write_json(tmp_path / "started.json", {"pid": 1})
    with (tmp_path / "training.lock").open("w") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        run_promoted(str(request))
    assert started == []
    assert '"pid": 1' in (tmp_path / "started.json").read_text()
    run_promoted(str(request))
    assert started == [str(request)]
    assert str(os.getpid()) in (tmp_path / "started.json").read_text()


def test_a_job_that_comes_after_the_end_trains_nothing_again(tmp_path: Path, started: list[str]) -> None:
    request = requested(tmp_path)
    write_json(tmp_path / "final.json", {"steps": 3})
    run_promoted(str(request))
    assert started == []
