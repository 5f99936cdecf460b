"""The fork server: imports torch, transformers, TRL and peft once, then forks a child for each call in milliseconds.

Its forks are safe because the server never computes, opens no database and starts no CUDA; if an import starts CUDA
all the same, the server begins again without imports, and each child imports by itself. It ends when the process that
started it ends; running children then continue to their end.

A call is one JSON line over a Unix socket: {"entry": "module:function", "argument", "cwd", "log", "env", "deadline_s",
"cancel"}; the child is killed once the file named by `cancel` exists. With "ranks", a list of such keys for each, there
is a child a rank, kept together. The reply is one JSON line with RanksEnded.
If the caller closes the connection before the reply, the child is killed. With "detached" the reply is {"pid"}, once
the child has begun, which the caller does not keep from then on.

A server that was asked to stay (autofit.probing.kept_place) does not end with its starter: the next command is its
child, and that command's calls are answered by it too (autofit.probing.kept_server).
"""

import atexit
import contextlib
import ctypes
import functools
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
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

from autofit.errors import AutofitError, ConfigError, EnvironmentFault
from autofit.files import ScratchFolder, keep_small
from autofit.hardware.nvml import visible_gpus
from autofit.probing import kept_place, kept_server
from autofit.probing.supervise import ProcessEnding, RanksEnded, die_with_parent, keep_ranks, trial_env

_COLD = "cold"  # argument of a server that imports nothing
LOG = "fork_server.log"
_MOVES_WITHIN_S = 1.0
_INSIDE = "AUTOFIT_INSIDE"  # in the environment of a process that imports the recipe's own code
_IMPORTS_CODE = ("autofit.probing.prepare", "autofit.probing.worker", "autofit.forecast.worker")
_PRELOADED = (
    "torch", "numpy", "transformers", "datasets", "peft", "accelerate", "transformers.models.auto.modeling_auto",
    "transformers.trainer", "autofit.plugin.transformers_run", "autofit.probing.worker", "autofit.probing.prepare",
    "autofit.probing.simulated", "autofit.forecast.worker",
)  # fmt: skip
_STAYS = "stays="  # before the socket of a server that outlives its starter
# What torchrun tells a rank: accelerate would wait for the others. Whoever starts ranks gives them their own.
_OF_RANKS = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


class ServerGone(EnvironmentFault):
    """Every server refused the call, so all of it is still to be run."""


class ForkServer:
    """Handle to the server. The constructor returns at once; the first call waits until the server is ready.

    Raises ConfigError in a process that imports the recipe's own code, which would start one process after the other.
    Where one is kept, it is that one, and a new one is left behind for the next command (kept_place.is_asked_for).
    """

    def __init__(self, folder: Path, *, own: ScratchFolder | None = None) -> None:
        self.log_path = self.log_at_last = folder / LOG
        self._own = own  # deleted with the server
        self._process: subprocess.Popen[bytes] | None = None
        self._home: ScratchFolder | None = None
        if os.environ.get(_INSIDE):
            raise ConfigError('a file that autofit imports calls autofit; put that under if __name__ == "__main__":')
        folder.mkdir(parents=True, exist_ok=True)
        self._kept = kept_server.hold()
        if self._kept is not None:
            self.socket_path = self._kept.path
        else:
            self._start()

    def _start(self) -> None:
        self._home = ScratchFolder()  # a socket's path has at most 107 characters
        self.socket_path = str(self._home.path / "warm")
        stays = kept_place.socket_path() if kept_place.is_asked_for() else None
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "autofit.probing.fork_server", self.socket_path,  # -P: not of cwd
                 *([] if stays is None else [f"{_STAYS}{stays}"])],
                stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
                env={name: value for name, value in trial_env().items() if name not in _OF_RANKS},
            )  # fmt: skip
        self._stays = stays is not None

    def call(self, message: Mapping[str, object]) -> ProcessEnding:
        """Run the function named by `message` in a forked child; returns its Ending."""
        if self._kept is not None:
            try:
                return call(self.socket_path, message)
            except ServerGone:  # it was killed
                self._kept = None
                self._start()
        return call(self.socket_path, message, alive=self._lives)

    def _lives(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def is_ready(self) -> bool:
        """True if the server has started; waits until it has, or has failed to."""
        while self._kept is not None or self._lives():
            if Path(self.socket_path).exists():
                return True
            threading.Event().wait(0.05)
        return False

    def close(self) -> None:
        """Stop the server, unless it stays; running children continue."""
        if self._own is not None:
            if self.log_at_last != self.log_path and self.log_path.exists():
                with contextlib.suppress(OSError), self.log_at_last.open("ab") as log:
                    log.write(self.log_path.read_bytes())
            self._own.close()
        if self._kept is not None:
            self._kept.close()
        if self._process is not None:
            stays = self._stays and Path(self.socket_path).exists()  # it is ready, and moves once its input closes
            if self._process.stdin is not None:
                self._process.stdin.close()
            if stays:
                self._wait_for_its_move()
                return
            self._process.terminate()
            self._process.wait(timeout=30)
        if self._home is not None:
            self._home.close()

    def _wait_for_its_move(self) -> None:
        """Wait until the staying server is at the place where the next command looks, for at most the usual time.

        It deletes its first folder then: hundredths of a second, and a command that is given meanwhile would start one.
        """
        until = time.monotonic() + _MOVES_WITHIN_S
        while Path(self.socket_path).exists() and self._lives() and time.monotonic() < until:
            time.sleep(0.005)


_begun: list[ForkServer] = []  # by `begin`, and not taken yet


def begin() -> None:
    """Start the server that `server_for` will give, so that it imports while this process imports its own modules.

    Only for a command that may leave a server behind: a test or a job starts one when it needs it.
    """
    if kept_place.is_asked_for() and not _begun:
        folder = ScratchFolder("begun-")
        _begun.append(ForkServer(folder.path, own=folder))
        atexit.register(_close_begun)


def _close_begun() -> None:
    while _begun:
        _begun.pop().close()


def server_for(folder: Path) -> ForkServer:
    """The server that was begun, or else a new one; its log is in `folder`, of one that was begun when it is closed."""
    if not _begun:
        return ForkServer(folder)
    folder.mkdir(parents=True, exist_ok=True)
    server = _begun.pop()
    server.log_at_last = folder / LOG
    return server


def call(socket_path: str, message: Mapping[str, object], *, alive: object = None) -> ProcessEnding:
    """The Ending of one call. Raises ServerGone, or EnvironmentFault if the child's keeper was killed."""
    return call_ranks(socket_path, message, alive=alive).alone


def call_ranks(socket_path: str, message: Mapping[str, object], *, alive: object = None) -> RanksEnded:
    """The ends of the children of one call with "ranks". Raises as `call` does."""
    return RanksEnded.from_json(_answer(socket_path, message, alive))


def detach(socket_path: str, message: Mapping[str, object]) -> int:
    """The pid of a child that runs the function named by `message`, and outlives this process. Raises as `call`."""
    return int(_answer(socket_path, {**message, "detached": True}, None)["pid"])


def _answer(socket_path: str, message: Mapping[str, object], alive: object) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        _connect(connection, socket_path, alive)
        reply = b""
        try:
            connection.sendall(json.dumps(message).encode() + b"\n")
            while not reply.endswith(b"\n"):
                part = connection.recv(65536)
                if not part:
                    raise EnvironmentFault("the process that kept the probe was killed")
                reply += part
        except ConnectionError as error:  # it was killed before it had read the call
            raise ServerGone("the fork server was killed") from error
    return cast(dict[str, Any], json.loads(reply))


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


def serve(socket_path: str, *, preloads: bool = True, stays: str | None = None) -> None:
    """Preload, then fork a keeper for each connection until standard input closes; then go on at `stays`, if given."""
    began_s = time.time()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the process that started the server handles Ctrl-C
    if preloads:
        _preload()
        if _cuda_started(sys.modules["torch"].cuda):  # no fork of this process could use the card
            print("an import started CUDA: each child imports by itself", file=sys.stderr, flush=True)
            os.execv(sys.executable, [sys.executable, "-P", "-m", "autofit.probing.fork_server", socket_path, _COLD])  # noqa: S606
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(socket_path + ".new")
        listener.listen(64)
        os.rename(socket_path + ".new", socket_path)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for keepers; the kernel reaps them
        while True:
            ready, _, _ = select.select([listener, sys.stdin], [], [])
            if sys.stdin in ready:  # the starting process ended, perhaps killed before it could clean up
                break
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _keep_call(connection, json.loads(connection.makefile("rb").readline()))
            connection.close()
    left = functools.partial(shutil.rmtree, os.path.dirname(socket_path), ignore_errors=True)
    if stays is not None:
        kept_server.stay(stays, began_s=began_s, keep_call=_keep_call, listens=left)
    left()


def _preload() -> None:
    """Import what probes, inspections and forecasts need."""
    from importlib.metadata import entry_points
    from unittest import mock

    from autofit.plugin import registry
    from autofit.plugin.lean import lean_imports

    with lean_imports():
        import torch

        # 0.1 s: every trainer is looked up twice among the entry points of every installed package
        looked_up = mock.patch("autofit.plugin.registry.entry_points", functools.cache(entry_points))
        with _cards_from_the_driver(torch.cuda), looked_up:
            _import_object_detection()
            for name in _PRELOADED:
                importlib.import_module(name)
            _leave_out_scipy()
            for name in registry.names():
                try:
                    registry.load(name)
                except AutofitError as error:  # raised when that trainer is requested
                    print(f"trainer {name}: {error}", file=sys.stderr, flush=True)
    gc.freeze()  # keeps the children's collections from copying shared memory pages


def _import_object_detection() -> None:
    """Import transformers' losses with a stand-in for scipy's `linear_sum_assignment`.

    Those of object detection call it; all of `scipy.optimize` (0.3 s) would be imported for it.
    """
    name = "scipy.optimize"
    if name in sys.modules:
        return

    def linear_sum_assignment(*args: Any, **kwargs: Any) -> Any:
        return importlib.import_module(name).linear_sum_assignment(*args, **kwargs)

    stand_in = ModuleType(name)
    vars(stand_in)["linear_sum_assignment"] = linear_sum_assignment
    sys.modules[name] = stand_in
    try:
        importlib.import_module("transformers.loss.loss_utils")
    finally:
        del sys.modules[name]


def _leave_out_scipy() -> None:
    """Let datasets replace functions of scipy in the module that reads a file only where scipy was imported.

    It imports scipy.io (0.2 s) for that in each process that reads a dataset; a module not imported has no name there.
    """
    streaming = importlib.import_module("datasets.streaming")
    replaced = getattr(streaming, "patch_submodule", None)
    if replaced is None:  # a version that does otherwise
        return

    def patch_submodule(module: ModuleType, target: str, *args: Any, **options: Any) -> Any:
        if target.partition(".")[0] in sys.modules:
            return replaced(module, target, *args, **options)
        return SimpleNamespace(start=lambda: None)

    vars(streaming)["patch_submodule"] = patch_submodule


@contextlib.contextmanager
def _cards_from_the_driver(cuda: Any) -> Iterator[None]:
    """Context in which torch counts cards and reads their capability by NVML, which leaves CUDA unstarted.

    bitsandbytes, which peft imports, asks whether there is a card, and every card for its capability to choose its
    library. MIG slices are counted by CUDA even where torch asks NVML for the number of cards
    (torch.cuda._device_count_nvml), and so are all cards by `is_available`.
    """
    from_cuda, count, available = cuda.get_device_capability, cuda.device_count, cuda.is_available
    try:
        cards = visible_gpus()
    except ConfigError:  # told where a card is chosen
        cards = ()

    def capability(device: Any = None) -> tuple[int, int]:
        index = device.idx if isinstance(device, cuda.device) else device
        asked = cards[index or 0 :][:1] if index is None or isinstance(index, int) else ()
        known = asked[0].compute_capability if asked else None
        return known or cast(tuple[int, int], from_cuda(device))

    if cards:  # without, an AMD card may be there
        cuda.get_device_capability, cuda.device_count = capability, lambda: len(cards)
        cuda.is_available = lambda: True
    try:
        yield
    finally:
        cuda.get_device_capability, cuda.device_count, cuda.is_available = from_cuda, count, available


def _cuda_started(cuda: Any) -> bool:
    """True if CUDA was started in this process: before cuInit the driver rejects every question."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return bool(cuda.is_initialized())
    answers = driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == 0  # else CUDA_ERROR_NOT_INITIALIZED
    return bool(answers or cuda.is_initialized())


def _keep_call(connection: socket.socket, message: Mapping[str, Any]) -> None:
    """In the keeper: fork the child, wait, reply, and exit."""
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        keeper, calls = os.getpid(), [{**message, **own} for own in message.get("ranks", [{}])]
        detached = "detached" in message

        def start(rank: int) -> int:
            pid = os.fork()
            if pid == 0:
                connection.close()
                _run_call(calls[rank], keeper)
            if detached:
                tell({"pid": pid})
            return pid

        def left() -> bool:
            keep_small([str(one["log"]) for one in calls])
            return not detached and _left(connection, message)

        def tell(answer: Mapping[str, object]) -> None:
            connection.sendall(json.dumps(answer).encode() + b"\n")

        ended = keep_ranks(start, len(calls), deadline_s=message["deadline_s"], abandoned=left)
        if not detached:
            tell(ended.to_json())
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _left(connection: socket.socket, message: Mapping[str, object]) -> bool:
    """True if the caller closed the connection or created the `cancel` file."""
    if "cancel" in message and os.path.exists(str(message["cancel"])):
        return True
    ready, _, _ = select.select([connection], [], [], 0)
    return bool(ready) and connection.recv(1, socket.MSG_PEEK) == b""


def _run_call(message: Mapping[str, object], keeper: int) -> None:
    """In the child: become the process that the call describes."""
    code = 1
    try:
        die_with_parent(keeper)
        _redirect(str(message["log"]))
        os.chdir(str(message["cwd"]))
        os.environ.update(cast(dict[str, str], message["env"]))
        module, function = str(message["entry"]).split(":")
        if module in _IMPORTS_CODE:
            as_inside()
        code = getattr(importlib.import_module(module), function)(message["argument"]) or 0
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def as_inside() -> None:
    """Mark that this process, and those that it starts, import the recipe's own code, which may not call autofit."""
    os.environ[_INSIDE] = "1"


def _redirect(log: str) -> None:
    nowhere, file = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(nowhere, 0)
    os.dup2(file, 1)
    os.dup2(file, 2)
    cast(Any, sys.stdout).reconfigure(line_buffering=True)  # the last words of a process that ends by os._exit


if __name__ == "__main__":
    places = [word.removeprefix(_STAYS) for word in sys.argv[2:] if word.startswith(_STAYS)]
    serve(sys.argv[1], preloads=_COLD not in sys.argv[2:], stays=next(iter(places), None))
