"""The kept server: a fork server that outlives its command, and forks the next commands as well as their calls.

A request is one JSON line. Besides the calls of the fork server (autofit.probing.fork_server) there are
{"command": [...]}, which comes with four descriptors (standard input, output and error, the working folder) and is
answered by {"ready": true}; nothing runs before the caller says "go", so a caller that does not wait runs the command
itself, and never twice. After that the caller sends signals, a byte each, and the reply is {"code"} or {"signal"}.
{"hold": true} keeps the server while the connection is open, {"ask": "status" or "stop"} is answered at once.

It ends after some minutes without a request, or when a module that it has imported, or the environment, has changed.
It never computes, opens no database and starts no CUDA, as a fork server.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

from autofit.files import stamp
from autofit.probing import kept_place

IDLE_S = 300.0
GO = b"go\n"
_LOOKS_EVERY_S = 5.0
_REQUEST_WITHIN_S = 10.0
_READY_WITHIN_S = 6.0  # of a server that may still import; a command that does so itself takes longer
_MOST_BYTES = 2**22  # of a request: an environment has at most 2 MB
# What commands import besides what the fork server has: their own modules, the database, tables, datasets' readers.
_OF_COMMANDS = (
    "autofit.cli", "autofit.api.estimating", "autofit.api.searching", "autofit.api.card_advice",
    "rich.console", "rich.table", "rich.status", "scipy.io", "autofit.recipe.findings",
    "autofit.cluster.nodes", "datasets.streaming", "datasets.packaged_modules.json.json",
    "datasets.packaged_modules.cache.cache", "datasets.packaged_modules.arrow.arrow",
)  # fmt: skip
_OF_PACKAGES = ("site-packages", "dist-packages")
_FORWARDED = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH,
    signal.SIGTSTP, signal.SIGCONT,
)  # fmt: skip
_OF_GROUP = (signal.SIGINT, signal.SIGQUIT, signal.SIGSTOP, signal.SIGCONT)  # a terminal sends these to all
_here: str | None = None  # the socket of the server that forked this command


# -- what a command, or a notebook, does with it ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Held:
    """A kept server that stays alive while this is open."""

    path: str
    connection: socket.socket | None

    def close(self) -> None:
        """Release the server, so that it may end."""
        if self.connection is not None:
            self.connection.close()


def hold() -> Held | None:
    """The kept server for the calls of this process; None if it is absent, unasked for, or stale."""
    if _here is not None:
        return Held(_here, None)
    path = kept_place.socket_path() if kept_place.is_asked_for() else None
    connection = kept_place.connected(path) if path is not None else None
    if connection is None or path is None:
        return None
    if asked(connection, {"hold": True}).get("held") is True:
        return Held(str(path), connection)
    connection.close()
    return None


def ask(path: Path, what: str) -> dict[str, Any]:
    """The answer of the server at `path` to "status" or "stop"; {} if there is none."""
    connection = kept_place.connected(path)
    if connection is None:
        return {}
    with connection:
        return asked(connection, {"ask": what})


def is_here() -> bool:
    """True if this process is a command that a kept server forked."""
    return _here is not None


def run_there(argv: list[str]) -> int | None:
    """The exit code of the command `argv`, run by the kept server with this process' terminal, folder and environment.

    None if no server took it, or it was killed before the command ended: then it is to be run here. A command that
    ended by a signal ends this process the same way.
    """
    path = kept_place.socket_path() if kept_place.is_allowed() else None
    connection = kept_place.connected(path, wait_s=_READY_WITHIN_S) if path is not None else None
    if connection is None:
        return None
    with connection, contextlib.suppress(OSError, ValueError):
        ignored = [int(number) for number in _FORWARDED if signal.getsignal(number) is signal.SIG_IGN]
        if not is_taken(connection, argv, Path(), streams=(0, 1, 2), ignored=ignored):
            return None
        with _forwarding(connection):
            go(connection)
            ended = json.loads(_line(connection) or b"{}")
        if (number := ended.get("signal")) is not None:
            if number != signal.SIGKILL:
                signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        return cast("int | None", ended.get("code"))
    return None


def is_taken(
    connection: socket.socket, argv: Sequence[str], folder: Path, *, streams: Sequence[int], ignored: Sequence[int] = ()
) -> bool:
    """True if the server takes the command `argv`, in `folder`, with these descriptors as its streams.

    It waits for `go`, and replies with the end. Signals in `ignored` are kept from the command.
    """
    place = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        _send(connection, {"command": argv, "env": dict(os.environ), "ignored": ignored}, [*streams, place])
    finally:
        os.close(place)
    return json.loads(_line(connection) or b"{}").get("ready") is True


def go(connection: socket.socket) -> None:
    """Let a command that the server has taken begin."""
    connection.settimeout(None)
    connection.sendall(GO)


@contextlib.contextmanager
def _forwarding(connection: socket.socket) -> Iterator[None]:
    """Context in which the signals of this process are forwarded to the command."""

    def forward(number: int, _: object) -> None:
        with contextlib.suppress(OSError):
            if number == signal.SIGTSTP:  # Ctrl-Z: the command first, then this process
                connection.sendall(bytes([signal.SIGSTOP]))
                os.kill(os.getpid(), signal.SIGSTOP)
            else:
                connection.sendall(bytes([number]))

    before = {number: signal.getsignal(number) for number in _FORWARDED}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, forward)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _send(connection: socket.socket, request: Mapping[str, object], descriptors: list[int]) -> None:
    data = json.dumps(request).encode() + b"\n"
    sent = socket.send_fds(connection, [data], descriptors)
    connection.sendall(data[sent:])


def asked(connection: socket.socket, request: Mapping[str, object]) -> dict[str, Any]:
    """The answer to a request; {} if the server fails to give one in time."""
    try:
        connection.sendall(json.dumps(request).encode() + b"\n")
        return cast("dict[str, Any]", json.loads(_line(connection) or b"{}"))
    except (OSError, ValueError):
        return {}


def _line(connection: socket.socket) -> bytes:
    """The next line; b"" if the other end closed. Reads a byte at a time: later bytes belong to another reader."""
    line = b""
    while not line.endswith(b"\n"):
        part = connection.recv(1)
        if not part:
            return b""
        line += part
    return line


# -- the server's side ------------------------------------------------------------------------------------------------

KeepCall = Callable[[socket.socket, Mapping[str, Any]], None]


def stay(path: str, *, began_s: float, keep_call: KeepCall, listens: Callable[[], None] = lambda: None) -> None:
    """Serve at `path` until some idle minutes have passed, or a file of an imported module has changed.

    `began_s` is when this process started to import: a module that was changed since may be imported half. `listens` is
    called once a command finds the server.
    """
    sys.stdout.flush()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    os.close(nowhere)
    os.chdir("/")
    kept_place.forget_the_terminal()
    with contextlib.suppress(OSError), _listening(Path(path)) as listener:
        listens()
        for name in _OF_COMMANDS:
            with contextlib.suppress(Exception):  # then the command imports it, and reports the error
                importlib.import_module(name)
        gc.freeze()
        marks = _marks()
        if any(mark is None or mark[1] > began_s * 1e9 for mark in marks.values()):
            return
        _Server(Path(path), marks, keep_call).serve(listener)


@contextlib.contextmanager
def _listening(path: Path) -> Iterator[socket.socket]:
    """A socket that listens at `path`, in place of the servers of this Python's other environments.

    It does so before the imports of commands: a command that is given meanwhile waits for them, and not for its own.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        beside = f"{path}.{os.getpid()}"
        mask = os.umask(0o177)
        listener.bind(beside)
        os.umask(mask)
        listener.listen(64)
        _stop_others(path)
        os.rename(beside, path)
        own = _inode(path)
        try:
            yield listener
        finally:
            if _inode(path) == own:
                path.unlink(missing_ok=True)


def _stop_others(path: Path) -> None:
    """Only the newest environment has a server: each takes some hundred megabytes."""
    python = path.name.partition("-")[0]
    for other in kept_place.sweep():
        if other.name.startswith(f"{python}-") and not other.suffix:
            ask(other, "stop")


def _marks() -> dict[str, tuple[int, int] | None]:
    """{file: (bytes, when it was changed)} of every imported module, and of folders in which packages are installed.

    Libraries ask once which others are there: after `pip install deepspeed` the next command must not hear "missing".
    """
    files = {_file_of(module) for module in list(sys.modules.values())}
    found = {file: stamp(file) for file in files if isinstance(file, str) and os.path.isabs(file)}
    return found | {folder: stamp(folder) for folder in sys.path if os.path.basename(folder) in _OF_PACKAGES}


def _file_of(module: object) -> object:
    """The `__file__` of a module, if it has one; one that is loaded on use stays unloaded (MLflow takes 0.7 s)."""
    try:
        return object.__getattribute__(module, "__dict__").get("__file__")
    except AttributeError:  # no module, but what one has put in its place
        return getattr(module, "__file__", None)


class _Server:
    def __init__(self, path: Path, marks: Mapping[str, tuple[int, int] | None], keep_call: KeepCall) -> None:
        self._path, self._marks, self._keep_call = path, marks, keep_call
        self._children: set[int] = set()
        self._held: list[socket.socket] = []
        self._commands = 0
        self._began, self._used = time.monotonic(), time.monotonic()
        self._stopping = False

    def serve(self, listener: socket.socket) -> None:
        """Answer as long as there is a reason to stay."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        own = _inode(self._path)
        while self._stays(own):
            watched: list[socket.socket] = [listener, *self._held]
            ready = select.select(watched, [], [], _LOOKS_EVERY_S)[0]
            with contextlib.suppress(ChildProcessError):
                while pid := os.waitpid(-1, os.WNOHANG)[0]:  # also one of the command that started this server
                    self._children.discard(pid)
            for connection in [one for one in ready if one is not listener]:  # held no longer
                self._held.remove(connection)
                connection.close()
            if listener in ready:
                self._accept(listener)

    def _stays(self, own: int | None) -> bool:
        busy = bool(self._children or self._held)
        if busy:
            self._used = time.monotonic()
        replaced = _inode(self._path) != own
        return busy or not (self._stopping or replaced or time.monotonic() - self._used > IDLE_S)

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with contextlib.suppress(OSError, ValueError, RecursionError):
            if kept_place.peer(connection)[1] == os.getuid() and self._answer(connection, listener):
                return
        connection.close()

    def _answer(self, connection: socket.socket, listener: socket.socket) -> bool:
        """True if the connection is kept open: a request is read, and answered here or by a fork."""
        connection.settimeout(_REQUEST_WITHIN_S)
        data, descriptors = _request(connection)
        connection.settimeout(None)
        self._used = time.monotonic()
        try:
            message = json.loads(data)
            if not isinstance(message, dict):
                raise ValueError("a request is an object")
            if "ask" in message:
                self._stopping = self._stopping or message["ask"] == "stop"
                _reply(connection, self._status())
            elif self._stopping and "entry" not in message:
                _reply(connection, {})
            elif "hold" in message:
                if self._is_current():
                    _reply(connection, {"held": True})
                    self._held.append(connection)
                    return True
            elif "command" not in message or self._is_current():
                self._commands += "command" in message
                self._children.add(self._fork(connection, listener, message, descriptors))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return False

    def _is_current(self) -> bool:
        """True if every imported module is as it was; else this server stops."""
        self._stopping = self._stopping or any(stamp(file) != mark for file, mark in self._marks.items())
        return not self._stopping

    def _status(self) -> dict[str, object]:
        return {
            "pid": os.getpid(), "python": sys.prefix, "commands": self._commands,
            "running": len(self._children) + len(self._held),
            "up_s": time.monotonic() - self._began, "idle_s": time.monotonic() - self._used, "ends_after_s": IDLE_S,
        }  # fmt: skip

    def _fork(
        self, connection: socket.socket, listener: socket.socket, message: Mapping[str, Any], descriptors: list[int]
    ) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            listener.close()
            for held in self._held:
                held.close()
            if "command" in message:
                _keep_command(connection, message, descriptors, str(self._path))
            else:
                self._keep_call(connection, message)
        finally:
            os._exit(0)


def _inode(path: Path) -> int | None:
    try:
        return os.stat(path).st_ino
    except OSError:
        return None


def _request(connection: socket.socket) -> tuple[bytes, list[int]]:
    """(the line of the request, the descriptors that came with it)."""
    data, descriptors, _, _ = socket.recv_fds(connection, 2**16, 4)
    while data and not data.endswith(b"\n"):
        part = connection.recv(2**16)
        data = b"" if not part or len(data) > _MOST_BYTES else data + part
    return data, list(descriptors)


def _reply(connection: socket.socket, answer: Mapping[str, object]) -> None:
    connection.sendall(json.dumps(answer).encode() + b"\n")


def _keep_command(connection: socket.socket, message: Mapping[str, Any], descriptors: list[int], path: str) -> None:
    """In the keeper: start the command when its caller says so, hand on its signals, and reply with its end."""
    os.setsid()
    _reply(connection, {"ready": True})
    connection.settimeout(_REQUEST_WITHIN_S)
    if _line(connection) != GO:
        return
    connection.settimeout(None)
    keeper = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)  # the server ignores SIGINT: one that comes now waits
    pid = os.fork()
    if pid == 0:
        connection.close()
        _run_command(message, descriptors, keeper, path)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)
    for descriptor in descriptors:
        os.close(descriptor)
    handle, line = os.pidfd_open(pid), connection.fileno()
    while True:
        ready, _, _ = select.select([handle, line], [], [])
        if handle in ready:
            break
        numbers = connection.recv(64)
        if not numbers:  # the caller was killed
            os.kill(pid, signal.SIGKILL)
            break
        for number in numbers:
            (os.killpg if number in _OF_GROUP else os.kill)(pid, number)
    os.close(handle)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    _reply(connection, {"signal": -code} if code < 0 else {"code": code})


def _run_command(message: Mapping[str, Any], descriptors: list[int], keeper: int, path: str) -> NoReturn:
    """In the child: become the command that the caller would have run."""
    code = 130
    try:
        code = _code_of(message, descriptors, keeper, path)
        with contextlib.suppress(BaseException):
            cast(Any, threading)._shutdown()  # waits for threads, as the end of a process does
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
    finally:  # Ctrl-C between these lines must not go on into what the server does
        os._exit(code)


def _code_of(message: Mapping[str, Any], descriptors: list[int], keeper: int, path: str) -> int:
    """The exit code of the command, which is run here."""
    from autofit.probing.supervise import die_with_parent

    global _here
    code = 1
    try:
        os.setpgid(0, 0)
        die_with_parent(keeper)
        folder = descriptors[3]
        for number, descriptor in enumerate(descriptors[:3]):
            os.dup2(descriptor, number)
        os.fchdir(folder)
        for descriptor in descriptors:
            os.close(descriptor)
        os.environ.clear()
        os.environ.update(message["env"])
        for number in _FORWARDED:
            signal.signal(number, signal.SIG_IGN if number in message["ignored"] else signal.SIG_DFL)
        if signal.SIGINT not in message["ignored"]:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
        sys.argv = ["autofit", *message["command"]]
        for stream in (sys.stdout, sys.stderr):
            cast(Any, stream).reconfigure(line_buffering=stream is sys.stderr or stream.isatty())
        atexit._clear()  # what the server would do at its end
        _here = path
        kept_place.ask_for_one()
        code = importlib.import_module("autofit.cli").main(message["command"])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except KeyboardInterrupt:  # before the command had begun to catch it
        code = 130
    except BaseException:
        traceback.print_exc()
    return code
