"""Answers by processes of a warm fork server, each in a folder of its own that is deleted, and ended after its time."""

import contextlib
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Mapping
from pathlib import Path

from autofit.errors import EnvironmentFault
from autofit.files import Scratch
from autofit.probing.fork_server import ForkServer, ServerGone, call
from autofit.probing.supervise import ProcessEnding, computing_env
from autofit.web.question import Limits, Question

TOLD = "told.jsonl"  # file of an answer's lines (autofit.web.answering)
_LOOK_S = 0.05
_BEAT_S = 1.0
_MOST_KEPT = 4000  # of some 10 KB each
_AGAIN_S = (0.5, 2.0, 10.0)
_END_S = 5.0  # for which a process that was ended is waited for
_START_S = 10.0  # that an answer takes besides its simulations
Line = Mapping[str, object]

# Variables that a simulation gets of this process' environment; tokens and passwords are not among them.
_PASSED = (
    "PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "OMP_NUM_THREADS", "OMP_WAIT_POLICY",
    "TOKENIZERS_PARALLELISM", "PYTORCH_NVML_BASED_CUDA_CHECK", "PYTHONHASHSEED", "AUTOFIT_PARENT",
)  # fmt: skip


class WarmServer(ForkServer):
    """A fork server whose files are in `home`, with no hub, no home of the user's, no secrets, and bounded memory."""

    def __init__(self, home: Path, *, memory_bytes: int) -> None:
        self.socket_path = str(home / "warm" / "socket")
        (home / "warm").mkdir(exist_ok=True)
        Path(self.socket_path).unlink(missing_ok=True)  # of one before it that has died
        with (home / "server.log").open("ab") as log:
            self._server = subprocess.Popen(
                [sys.executable, "-P", "-m", "autofit.probing.fork_server", self.socket_path],
                stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True, cwd=home, env=_environment(home),
            )  # fmt: skip
        for kind, most in ((resource.RLIMIT_DATA, memory_bytes), (resource.RLIMIT_CORE, 0)):
            resource.prlimit(self._server.pid, kind, (most, most))

    @property
    def pid(self) -> int:
        """Its process, of which those of the simulations are forks."""
        return self._server.pid

    def call(self, message: Mapping[str, object]) -> ProcessEnding:
        return call(self.socket_path, message, alive=self.lives)

    def lives(self) -> bool:
        return self._server.poll() is None

    def is_ready(self) -> bool:
        """Whether it has loaded its libraries; waits until it has, or has failed to."""
        while self.lives() and not Path(self.socket_path).exists():
            try:
                self._server.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
        return self.lives()

    def close(self) -> None:
        if self._server.stdin is not None:
            self._server.stdin.close()
        self._server.terminate()
        self._server.wait(timeout=30)


class Shared(ForkServer):
    """A server that another process keeps: calls reach it, and `close` leaves it running."""

    def __init__(self, socket_path: str) -> None:
        self.socket_path = socket_path

    def call(self, message: Mapping[str, object]) -> ProcessEnding:
        return call(self.socket_path, message)

    def is_ready(self) -> bool:
        return True

    def close(self) -> None:
        """Nothing: it is another's."""


def _environment(home: Path) -> dict[str, str]:
    for name in ("cache", "hub", "tmp"):
        (home / name).mkdir(exist_ok=True)
    return {
        **{name: value for name, value in computing_env().items() if name in _PASSED},
        "HOME": str(home), "TMPDIR": str(home / "tmp"), "AUTOFIT_CACHE": str(home / "cache"),
        "HF_HOME": str(home / "hub"), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip


class Simulator:
    """A fork server, with a home that is deleted when it is closed: nothing of a question outlives the server."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._scratch = Scratch("web-")
        self._starting = threading.Lock()
        self._calls: set[_Call] = set()
        self._server = self._started()

    def __enter__(self) -> "Simulator":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all answers and the server, and delete what they wrote."""
        for calling in list(self._calls):
            calling.cancel()
        for calling in list(self._calls):
            calling.ended.wait(_END_S)
        self._server.close()
        until = time.monotonic() + _END_S  # simulations of an answer that was killed end a moment after it, and write
        while self.home.exists() and time.monotonic() < until:
            shutil.rmtree(self.home, ignore_errors=True)
            time.sleep(_LOOK_S)
        self._scratch.close()

    @property
    def home(self) -> Path:
        """The folder of all that its answers write."""
        return self._scratch.path

    @property
    def pid(self) -> int:
        """The process of which those of the answers are forks."""
        return self._server.pid

    def is_ready(self) -> bool:
        """Whether the libraries are loaded; waits until they are."""
        return self._server.is_ready()

    def answer(self, question: Question) -> Generator[Line | None, None, None]:
        """The lines of the answer as they are found, and None every second without one. Closing it ends the answer."""
        self._trim()
        folder = Path(tempfile.mkdtemp(prefix="answer-", dir=self._scratch.path))
        (folder / TOLD).touch()
        calling = _Call(self, self._request(question, folder))
        self._calls.add(calling)
        calling.start()
        try:
            yield from _lines(folder / TOLD, calling)
        finally:
            calling.cancel()
            calling.ended.wait(_END_S)
            self._calls.discard(calling)
            _delete(folder)

    def _trim(self) -> None:
        """Delete the oldest of the kept peaks where there are too many: a server of strangers runs for months."""
        kept = list((self._scratch.path / "cache" / "probes").glob("*.json"))
        if len(kept) > _MOST_KEPT:
            for path in sorted(kept, key=lambda path: path.stat().st_mtime)[: len(kept) // 2]:
                path.unlink(missing_ok=True)

    def _request(self, question: Question, folder: Path) -> dict[str, object]:
        limits, cards = self._limits, question.kind == "cards"
        verdict_s = limits.cards_s if cards else limits.verdict_s
        seconds = {"verdict": verdict_s, "advice": 0.0 if cards else limits.advice_s}
        request = {"question": question.to_json(), "seconds": seconds, "socket": self._server.socket_path}
        (folder / "question.json").write_text(json.dumps(request), encoding="utf-8")
        return {
            "entry": "autofit.web.answering:run", "argument": str(folder / "question.json"), "cwd": str(folder),
            "log": str(folder / "log"), "env": {}, "deadline_s": verdict_s + seconds["advice"] + _START_S,
            "cancel": str(folder / "cancel"),
        }  # fmt: skip

    def call(self, message: Mapping[str, object]) -> ProcessEnding:
        """Run a call; a server that is gone is started again."""
        try:
            return self._server.call(message)
        except ServerGone:
            with self._starting:
                if not self._server.lives():
                    self._server = self._started()
            raise

    def _started(self) -> WarmServer:
        return WarmServer(self._scratch.path, memory_bytes=self._limits.memory_bytes)


def _delete(folder: Path) -> None:
    """Delete the folder of an answer; and again, as simulations that are being ended may make it anew for a moment."""
    shutil.rmtree(folder, ignore_errors=True)
    for later_s in _AGAIN_S:
        timer = threading.Timer(later_s, shutil.rmtree, (folder,), {"ignore_errors": True})
        timer.daemon = True
        timer.start()


class _Call(threading.Thread):
    """A call of the server beside the reading of its lines; `problem` says how it failed."""

    def __init__(self, simulator: Simulator, message: Mapping[str, object]) -> None:
        super().__init__(daemon=True)
        self._simulator, self._message = simulator, message
        self.ended, self.problem = threading.Event(), ""

    def cancel(self) -> None:
        """Ask the server to end it; `ended` is set once it has."""
        with contextlib.suppress(OSError):  # the answer's folder is gone
            Path(str(self._message["cancel"])).touch()

    def run(self) -> None:
        try:
            self.problem = _problem(self._simulator.call(self._message))
        except EnvironmentFault:
            self.problem = "the simulation was restarted; ask again"
        finally:
            self.ended.set()


def _lines(told: Path, calling: _Call) -> Generator[Line | None, None, None]:
    """The lines of the file as they are written, until the call has ended; then what went wrong with it."""
    ended, spoke, part = False, time.monotonic(), ""
    with told.open(encoding="utf-8") as file:
        while True:
            part += file.readline()
            if part.endswith("\n"):
                yield json.loads(part)
                part, spoke = "", time.monotonic()
            elif ended:
                break
            elif time.monotonic() - spoke > _BEAT_S:
                yield None
                spoke = time.monotonic()
            else:
                ended = calling.ended.wait(_LOOK_S)
    if calling.problem:
        yield {"is": "error", "text": calling.problem}


def _problem(ending: ProcessEnding) -> str:
    if ending.deadline_passed:
        return "the answer took longer than it may here; autofit on your own machine has no such limit"
    if ending.exit_code and not ending.abandoned:
        return "the simulation ended without an answer"
    return ""
