"""The fork server: imports torch, transformers, TRL and peft once, then forks a child for each call in milliseconds.

Its forks are safe because the server never computes and opens no database. It ends when the process that started it
ends; running children then continue to their end.

A call is one JSON line over a Unix socket: {"entry": "module:function", "argument", "cwd", "log", "env", "deadline_s",
"cancel"}; the child is killed once the file named by `cancel` exists. The reply is one JSON line with the Ending.
If the caller closes the connection before the reply, the child is killed.
"""

import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from autofit.errors import EnvironmentFault
from autofit.probing.supervise import Ending, computing_env, die_with_parent, keep


class ServerGone(EnvironmentFault):
    """No server accepted the call, so no part of it has run."""


class ForkServer:
    """Handle to the server. The constructor returns at once; the first call waits until the server is ready."""

    def __init__(self, folder: Path) -> None:
        self.log_path = folder / "fork_server.log"
        self._home = tempfile.TemporaryDirectory(prefix="autofit-")  # a socket's path has at most 107 characters
        self.socket_path = str(Path(self._home.name) / "warm")
        folder.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "autofit.probing.fork_server", self.socket_path],  # -P: not of cwd
                stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True, env=computing_env(),
            )  # fmt: skip

    def call(self, message: Mapping[str, object]) -> Ending:
        """Run the function named by `message` in a forked child; returns its Ending."""
        return call(self.socket_path, message, alive=lambda: self._process.poll() is None)

    def close(self) -> None:
        """Stop the server; running children continue."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.terminate()
        self._process.wait(timeout=30)
        self._home.cleanup()


def call(socket_path: str, message: Mapping[str, object], *, alive: object = None) -> Ending:
    """The Ending of one call. Raises ServerGone, or EnvironmentFault if the child's keeper was killed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        _connect(connection, socket_path, alive)
        connection.sendall(json.dumps(message).encode() + b"\n")
        reply = b""
        while not reply.endswith(b"\n"):
            part = connection.recv(65536)
            if not part:
                raise EnvironmentFault("the process that kept the probe was killed")
            reply += part
    return Ending(**json.loads(reply))


def _connect(connection: socket.socket, socket_path: str, alive: object) -> None:
    while True:
        try:
            connection.connect(socket_path)
            return
        except OSError as error:
            if not callable(alive):
                raise ServerGone(f"the fork server does not answer: {error.strerror}") from error
            if not alive():
                raise ServerGone("the fork server ended before it was ready; see fork_server.log") from error
            threading.Event().wait(0.05)


# -- the server's side ------------------------------------------------------------------------------------------------


def serve(socket_path: str) -> None:
    """Preload, then fork a keeper for each connection until standard input closes."""
    from autofit.probing.preload import preload

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the process that started the server handles Ctrl-C
    gc.disable()  # repeated collections of the imported modules would take a quarter of the time
    preload()
    gc.enable()
    gc.freeze()  # keeps the children's collections from copying shared memory pages
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(socket_path + ".new")
        listener.listen(64)
        os.rename(socket_path + ".new", socket_path)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for keepers; the kernel reaps them
        while True:
            ready, _, _ = select.select([listener, sys.stdin], [], [])
            if sys.stdin in ready:  # the starting process ended, perhaps killed before it could clean up
                shutil.rmtree(os.path.dirname(socket_path), ignore_errors=True)
                return
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _keep_call(connection)
            connection.close()


def _keep_call(connection: socket.socket) -> None:
    """In the keeper: fork the child, wait, reply, and exit."""
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        message = json.loads(connection.makefile("rb").readline())

        def start() -> int:
            pid = os.fork()
            if pid == 0:
                connection.close()
                _run_call(message)
            return pid

        ending = keep(start, deadline_s=message["deadline_s"], abandoned=lambda: _left(connection, message))
        connection.sendall(json.dumps(ending.to_json()).encode() + b"\n")
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _left(connection: socket.socket, message: Mapping[str, object]) -> bool:
    """Whether the caller closed the connection or created the `cancel` file."""
    if "cancel" in message and os.path.exists(str(message["cancel"])):
        return True
    ready, _, _ = select.select([connection], [], [], 0)
    return bool(ready) and connection.recv(1, socket.MSG_PEEK) == b""


def _run_call(message: Mapping[str, object]) -> None:
    """In the child: become the process that the call describes."""
    code = 1
    try:
        die_with_parent()
        _redirect(str(message["log"]))
        os.chdir(str(message["cwd"]))
        os.environ.update(cast(dict[str, str], message["env"]))
        module, function = str(message["entry"]).split(":")
        code = getattr(importlib.import_module(module), function)(message["argument"])
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def _redirect(log: str) -> None:
    nowhere, file = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(nowhere, 0)
    os.dup2(file, 1)
    os.dup2(file, 2)


if __name__ == "__main__":
    serve(sys.argv[1])
