"""A question to the page's server, its limits, and its answer by a process of a warm fork server that then ends."""

import contextlib
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from autofit.errors import ConfigError, EnvironmentFault, nearest, quoted
from autofit.files import ScratchFolder
from autofit.probing.fork_server import ForkServer, ServerGone, call
from autofit.probing.prepare import last_words
from autofit.probing.supervise import ProcessEnding, computing_env

# -- one question to the page's server, and how many of them one address and all may ask ------------------------------

_MOST_ADDRESSES = 4096  # that are remembered; the one heard of longest ago is forgotten


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of a server. The seconds are of one answer, from its start."""

    at_once: int = 1  # answers that are computed at the same time
    waiting: int = 16  # that wait in line
    of_address: int = 2  # computed or in line for one address
    a_minute: int = 20  # questions of one address
    verdict_s: float = 60.0
    advice_s: float = 30.0
    cards_s: float = 180.0
    memory_bytes: int = 6 << 30  # data of one process of the simulation
    body_bytes: int = 256 << 10
    connections: int = 64
    request_s: float = 10.0  # for a whole request to arrive


ALONE = Limits(
    memory_bytes=12 << 30, of_address=4, a_minute=120, verdict_s=300.0, advice_s=60.0, cards_s=900.0
)  # on 127.0.0.1
PUBLIC = Limits()


@dataclass(slots=True)
class Rate:
    """Questions of each address in a minute: a bucket that fills up again at an even pace."""

    a_minute: int
    clock: Callable[[], float] = time.monotonic
    _left: OrderedDict[str, tuple[float, float]] = field(default_factory=OrderedDict)  # {address: (questions, when)}
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def wait_s(self, address: str) -> float:
        """0 and one question less for `address`; or the seconds after which it may ask again."""
        now, a_second = self.clock(), self.a_minute / 60
        with self._lock:
            left, when = self._left.pop(address, (float(self.a_minute), now))
            left = min(float(self.a_minute), left + (now - when) * a_second)
            allowed = left >= 1
            self._left[address] = (left - 1 if allowed else left, now)
            while len(self._left) > _MOST_ADDRESSES:
                self._left.popitem(last=False)
        return 0.0 if allowed else (1 - left) / a_second


KINDS = ("check", "cards")
SHARINGS = ("", "multi_gpu", "fsdp2", "zero2", "zero3")  # how several cards share; "": as the recipe says
COUNTS = (1, 2, 4, 8)
MOST_TOKENS = 131_072
_MOST_TEXT = 64 << 10  # characters
_MOST_CHANGES = 40
_KEYS = ("kind", "text", "config", "trainer", "card", "count", "sharing", "tokens", "changes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question of the page. Its changes are settings of the recipe; None removes one."""

    text: str  # a YAML, or a command
    kind: str = "check"  # check: on one card; else on which of the usual cards
    config: str = ""  # config.json of a model that the catalogue lacks
    trainer: str | None = None  # None: found by the recipe's keys
    card: str = "a100-80gb"
    count: int | None = None  # of cards; None: as many as the recipe says
    sharing: str = ""
    tokens: int | None = None  # of the longest prompt or sample; None: as many as the recipe has room for
    changes: Mapping[str, object] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        return {key: getattr(self, key) for key in _KEYS}

    @classmethod
    def from_json(cls, given: object) -> "Question":
        """The question that a browser sent. Raises ConfigError for anything else."""
        if not isinstance(given, dict) or not isinstance(given.get("text"), str):
            raise ConfigError("a question must be a JSON object with a text")
        unknown = [str(key) for key in given if key not in _KEYS]
        if unknown:
            raise ConfigError(
                f"a question has {', '.join(_KEYS)}; got {quoted(unknown[0])}{nearest(unknown[0], _KEYS)}"
            )
        found = cast("dict[str, object]", given)
        for key, what in (("text", "the recipe"), ("config", "config.json")):
            count = len(_text(found, key))
            _check(count <= _MOST_TEXT, f"{what} must have at most {_MOST_TEXT:,} characters here; it has {count:,}")
        changes = found.get("changes", {})
        known = isinstance(changes, dict) and len(changes) <= _MOST_CHANGES
        _check(known, f"changes must be at most {_MOST_CHANGES} settings")
        cards, tokens = found.get("count"), found.get("tokens")
        _check(cards is None or (type(cards) is int and cards in COUNTS),
               f"count must be one of {', '.join(map(str, COUNTS))}, or null")  # fmt: skip
        whole = tokens is None or (isinstance(tokens, int) and not isinstance(tokens, bool))
        _check(whole and (tokens is None or 1 <= cast(int, tokens) <= MOST_TOKENS),
               f"tokens of the longest sample must be a whole number from 1 to {MOST_TOKENS:,}")  # fmt: skip
        kind, sharing = _text(found, "kind") or "check", _text(found, "sharing")
        _check(kind in KINDS, f"kind must be one of {', '.join(KINDS)}")
        _check(sharing in SHARINGS, f"sharing must be one of {', '.join(filter(None, SHARINGS))}")
        return cls(
            text=_text(found, "text"), kind=kind, config=_text(found, "config"), sharing=sharing,
            trainer=_text(found, "trainer") or None, card=_text(found, "card") or "a100-80gb",
            count=cast("int | None", cards), tokens=cast("int | None", tokens),
            changes=cast("dict[str, object]", changes),
        )  # fmt: skip


def _text(given: Mapping[str, object], key: str) -> str:
    value = given.get(key)
    _check(value is None or isinstance(value, str), f"{key} must be text")
    return cast("str | None", value) or ""


def _check(holds: bool, must: str) -> None:
    if not holds:
        raise ConfigError(must)


# -- answers by processes of a warm fork server -----------------------------------------------------------------------

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
    """A fork server with files in `home`: cut off from the hub, the user's home and secrets, with bounded memory."""

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
        """Its process, whose forks run the simulations."""
        return self._server.pid

    def call(self, message: Mapping[str, object]) -> ProcessEnding:
        return call(self.socket_path, message, alive=self.lives)

    def lives(self) -> bool:
        return self._server.poll() is None

    def is_ready(self) -> bool:
        """True if it has loaded its libraries; waits until it has, or has failed to."""
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


class SharedServer(ForkServer):
    """A server that another process keeps: calls reach it, and `close` leaves it running."""

    def __init__(self, socket_path: str) -> None:
        self.socket_path = socket_path

    def call(self, message: Mapping[str, object]) -> ProcessEnding:
        return call(self.socket_path, message)

    def is_ready(self) -> bool:
        return True

    def close(self) -> None:
        """Leaves the server to its owner."""


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
    """A fork server, with a home that is deleted when it is closed, with all traces of questions."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._scratch = ScratchFolder("web-")
        self._starting = threading.Lock()
        self._calls: set[_Call] = set()
        self._server = self._started()

    def __enter__(self) -> "Simulator":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all answers and the server, and delete their files."""
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
        """The process whose forks make the answers."""
        return self._server.pid

    def is_ready(self) -> bool:
        """True if the libraries are loaded; waits until they are."""
        return self._server.is_ready()

    @property
    def last_words(self) -> str:
        """The last line that its server printed, as `; it printed last: "..."`; "" if it is missing."""
        return last_words(self.home / "server.log")

    def answer(self, question: Question) -> Generator[Line | None, None, None]:
        """The lines of the answer as they are found, and None every idle second. Closing it ends the answer."""
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
