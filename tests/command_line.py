"""The `autofit` command as a process of its own, forked by a kept server that has the imports (3 to 6 s each).

The server is the product's own (autofit.probing.kept_server), one for each worker of pytest: it runs the command, its
calls of the fork server and its full runs (forked_runs.py). What the command starts has the environment of the session:
a test that changes it, or is of the start itself, runs `python -m autofit`.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from autofit.probing import kept_place, kept_server
from autofit.probing.supervise import computing_env

_START_S, _CALL_S = 120.0, 30.0
_held: socket.socket | None = None  # keeps the server
_home = Path()  # of the server, in the environment of the whole session
_env: Mapping[str, str] = {}


def session_begins(home: Path) -> None:
    """Note where the server is to be, and its environment."""
    global _home, _env
    _home, _env = home, computing_env()


def session_ends() -> None:
    """End the server, where one was started."""
    global _held
    if _held is not None:
        _held.close()
        _held = None
        kept_server.ask(_home / "commands", "stop")


class Started:
    """A command at work, with the methods of Popen that tests use."""

    def __init__(self, server: socket.socket) -> None:
        self._server = server
        self._answer = b""
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, minus the signal where one ended it; None while it works."""
        while self.returncode is None and select.select([self._server], [], [], 0)[0]:
            self._read()
        return self.returncode

    def wait(self, timeout: float = 400) -> int:
        """The exit code, once it has ended."""
        deadline = time.monotonic() + timeout
        while self.returncode is None:
            if not select.select([self._server], [], [], max(0.0, deadline - time.monotonic()))[0]:
                self.kill()
                raise TimeoutError(f"the command did not end within {timeout:.0f} s")
            self._read()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to the command, if it has not ended."""
        with contextlib.suppress(OSError):
            self._server.sendall(bytes([number]))

    def kill(self) -> None:
        """End it as SIGKILL does."""
        self.send_signal(signal.SIGKILL)

    def _read(self) -> None:
        part = self._server.recv(4096)
        assert part, "the kept server was killed"
        self._answer += part
        if self._answer.endswith(b"\n"):
            ended = json.loads(self._answer)
            self.returncode = -ended["signal"] if "signal" in ended else ended["code"]
            self._server.close()


def start(folder: Path, *words: str, stdout: IO[Any], stderr: IO[Any], stdin: IO[Any] | None = None) -> Started:
    """The command `words` at work in `folder`; without a `stdin` it reads nothing."""
    line = _reached(server(), within_s=_CALL_S)
    line.settimeout(_CALL_S)
    with open(os.devnull) as nothing:
        streams = [(stdin or nothing).fileno(), stdout.fileno(), stderr.fileno()]
        taken = kept_server.is_taken(line, words, folder, streams=streams)
    assert taken, "the kept server is of other code: it was changed while the tests ran"
    kept_server.go(line)
    return Started(line)


def run(folder: Path, *words: str, timeout: float = 400) -> "subprocess.CompletedProcess[str]":
    """The end of the command `words` in `folder`, and what it printed."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        code = start(folder, *words, stdout=out, stderr=err).wait(timeout=timeout)
        for stream in (out, err):
            stream.seek(0)
        return subprocess.CompletedProcess(words, code, out.read(), err.read())


def server() -> Path:
    """The socket of the server, which is started where it is not there."""
    global _held
    path = _home / "commands"
    if _held is None:
        command = [sys.executable, "-P", "-m", "forked_runs", str(_home / "warm" / "s"), str(path)]
        (_home / "warm").mkdir()
        with (_home / "commands.log").open("wb") as log:
            subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=_env
            )
        _held = _reached(path, within_s=_START_S)
        _held.settimeout(_CALL_S)
        assert kept_server.asked(_held, {"hold": True}) == {"held": True}
    return path


def _reached(path: Path, *, within_s: float) -> socket.socket:
    deadline = time.monotonic() + within_s
    while (found := kept_place.connected(path)) is None:
        assert time.monotonic() < deadline, path.with_suffix(".log").read_text()
        time.sleep(0.05)
    return found
