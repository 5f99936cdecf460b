"""Folders that cannot be written, or not be read: one line each, for root on a read-only mount and for another user."""

import multiprocessing
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import command_line
import lawful
import pytest
import search_driver
from at_once import AtOnce

from autofit.cli import main
from autofit.tuning.search import Search, open_study
from autofit.tuning.study import open_storage

COMMANDS = (["report"], ["studies"], ["sync"], ["monitor", "--once"], ["promote", "best"], ["ui"])
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system and becomes another user: needs root")


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "none", tmp_path], capture_output=True)
    if mounted.returncode:
        pytest.skip("this container may not mount")
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", "--lazy", tmp_path], check=True)


@pytest.mark.parametrize(
    "command", [*COMMANDS, ["search", "--target-vram", "40GB", "--trials", "1"]], ids=lambda c: c[0]
)
def test_a_read_only_folder_is_one_line(
    command: list[str], read_only: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = read_only / "studies"
    folder.mkdir()
    open_storage(folder, create=True).engine.dispose()
    subprocess.run(["mount", "-o", "remount,ro", read_only], check=True)
    code = main([*command, "--dir", str(folder)])
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("autofit: ")]
    assert code in (0, 2)
    assert len(lines) == (code == 2)
    assert all(len(line) <= 310 for line in lines)
    if command[0] == "search":
        assert "Read-only file system; choose another place" in lines[0]


def _search(folder: Path) -> None:
    wanted = search_driver.plan(folder, 2)
    Search(wanted, open_study(wanted), server_socket=None, launcher=AtOnce(lawful.at_once)).run()


@pytest.mark.slow
def test_a_mirror_that_cannot_be_written_is_one_line(read_only: Path) -> None:
    # In processes of their own, which close all files.
    searching = multiprocessing.get_context("fork").Process(target=_search, args=(read_only,))
    searching.start()
    searching.join()
    assert searching.exitcode == 0
    assert command_line.run(read_only, "sync", "--dir", str(read_only)).returncode == 0
    with closing(sqlite3.connect(read_only / "mlflow.db")) as database, database:
        database.execute("DELETE FROM tags")  # so that there is something to write
    subprocess.run(["mount", "-o", "remount,ro", read_only], check=True)
    for command in ("sync", "ui"):
        done = command_line.run(read_only, command, "--dir", str(read_only))
        assert done.returncode == 2, command
        *before, said = done.stderr.splitlines()
        assert said.startswith("autofit: ")
        assert before == ["starting MLflow; this takes a while"] * (command == "ui")


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_folder_of_another_user_is_one_line(command: list[str], tmp_path: Path) -> None:
    folder, said = tmp_path / "studies", tmp_path / "said"
    folder.mkdir()
    open_storage(folder, create=True).engine.dispose()
    folder.chmod(0o700)
    said.touch()
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            out = os.open(said, os.O_WRONLY)
            os.dup2(out, 1)
            os.dup2(out, 2)
            sys.stdout = sys.stderr = os.fdopen(out, "w")
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            code = main([*command, "--dir", str(folder)])
            sys.stderr.flush()
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    text = said.read_text()
    assert code == 2, text
    assert text.startswith("autofit: ")
    words = "Permission denied; choose another ", "Permission denied; ask its owner", "there are no studies"
    assert any(one in text for one in words), text
    assert len(text.splitlines()) == 1
