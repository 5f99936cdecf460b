"""A database that another process has locked: the wait says who, and the error gives no advice that loses data."""

import contextlib
import logging
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from search_driver import plan

from autofit.errors import EnvironmentFault
from autofit.tuning import study
from autofit.tuning.locks import holder_of, wait_until_free
from autofit.tuning.search import open_study

_HOLDS = """
import sqlite3, sys
database = sqlite3.connect(sys.argv[1], isolation_level=None)
database.execute("BEGIN EXCLUSIVE")
print("held", flush=True)
sys.stdin.readline()
"""


@contextlib.contextmanager
def held(path: Path) -> Iterator[int]:
    """Another process has locked `path`; yields its pid."""
    command = [sys.executable, "-c", _HOLDS, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "held\n"
        yield process.pid
        process.stdin.close()


def test_a_wait_names_the_holder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sqlite3.connect(tmp_path / "x.db").execute("CREATE TABLE t (a)")
    with caplog.at_level(logging.WARNING, "autofit"), held(tmp_path / "x.db") as pid:
        assert f"(pid {pid})" in holder_of(tmp_path / "x.db")
        wait_until_free(tmp_path / "x.db", most_s=3.0)
    assert f"(pid {pid}) has locked" in caplog.text


def test_a_free_database_is_not_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "autofit"):
        wait_until_free(tmp_path / "x.db", most_s=60.0)
    assert not caplog.text
    assert holder_of(tmp_path / "x.db") == "another process"
    assert str(os.getpid()) not in holder_of(tmp_path / "x.db")


def test_a_study_that_stays_locked_is_not_to_be_moved_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_study(plan(tmp_path, 1))
    monkeypatch.setattr(study, "_BUSY_S", 0.1)
    with held(tmp_path / "studies.db") as pid, pytest.raises(EnvironmentFault) as raised:
        open_study(plan(tmp_path, 1))
    assert f"(pid {pid}) has locked it" in str(raised.value)
    assert "move" not in str(raised.value)
