"""The page's server: a few fixed files, and questions whose answers come line by line. Logging is off."""

import io
import json
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from importlib.util import find_spec
from typing import Any, Protocol

import yaml

from autofit import __version__
from autofit.api.markup import STYLE, escaped
from autofit.errors import AutofitError
from autofit.fakegpu.specs import GPU_SPECS
from autofit.hardware.prices import prices
from autofit.recipe.catalogue import names
from autofit.web.simulator import Limits, Question, Rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A question, the words of its button, and the training that the page shows as chosen."""

    words: str
    method: str
    question: Question


@cache
def examples() -> tuple[Example, ...]:
    """The examples, in the order of the page."""
    content = yaml.safe_load((resources.files("autofit.web") / "examples.yaml").read_text(encoding="utf-8"))
    return tuple(
        Example(words=one.pop("words"), method=one.pop("method"), question=Question.from_json(one)) for one in content
    )


File = tuple[str, bytes]  # (its type, its bytes)
_FIRST = "a100-80gb"
_ZERO = '<option value="zero2">ZeRO-2</option><option value="zero3">ZeRO-3</option>'  # where it can be simulated


@cache
def _page() -> File:
    listed = prices()
    cards = sorted(GPU_SPECS.values(), key=lambda spec: (spec.capacity_bytes, spec.half_flops_per_s))
    options = []
    for spec in cards:
        price = f", ${listed[spec.name].usd_per_hour:.2f}/h" if spec.name in listed else ""
        words = f"{spec.full_name.removeprefix('NVIDIA ')}: {spec.capacity_bytes / 1e9:.0f} GB{price}"
        chosen = " selected" if spec.name == _FIRST else ""
        options.append(f'<option value="{escaped(spec.name)}"{chosen}>{escaped(words)}</option>')
    models = (f'<option value="{escaped(name)}"></option>' for name in names())
    text = _text("index.html").replace("<!--cards-->", "\n".join(options)).replace("<!--models-->", "\n".join(models))
    buttons = (
        f'<li><button type="button" data-text="{escaped(one.question.text)}" data-card="{escaped(one.question.card)}" '
        f'data-method="{escaped(one.method)}" data-tokens="{one.question.tokens or ""}">'
        f"{escaped(one.words)}</button></li>"
        for one in examples()
    )
    text = text.replace("<!--examples-->", "\n".join(buttons))
    if find_spec("deepspeed") is not None:
        text = text.replace("<!--zero-->", _ZERO)
    return "text/html; charset=utf-8", text.replace("<!--version-->", escaped(__version__)).encode()


def _text(name: str) -> str:
    return (resources.files("autofit.web") / "page" / name).read_text(encoding="utf-8")


FILES: Mapping[str, Callable[[], File]] = {
    "/": _page,
    "/page.css": cache(lambda: ("text/css; charset=utf-8", (STYLE + _text("page.css")).encode())),
    "/page.js": cache(lambda: ("text/javascript; charset=utf-8", _text("page.js").encode())),
    "/icon.svg": cache(lambda: ("image/svg+xml", _text("icon.svg").encode())),
    "/health": lambda: ("text/plain; charset=utf-8", b"ok\n"),
}


class Full(Exception):
    """The line is full, or has too many of one address; the text says which."""


@dataclass(slots=True, kw_only=True)
class ArrivalQueue:
    """Places in the order of arrival; the first `at_once` have their turn."""

    at_once: int
    waiting: int
    of_address: int
    _places: list[tuple[object, str]] = field(default_factory=list)  # (ticket, address), those at work first
    _moved: threading.Condition = field(default_factory=threading.Condition)

    @contextmanager
    def turn(self, address: str, *, waits: Callable[[int], None]) -> Iterator[None]:
        """Context of a turn. `waits` is called with the number of those ahead, at each move and every second.

        Whatever `waits` raises gives up the place. Raises Full where there is none.
        """
        ticket = object()
        with self._moved:
            if sum(whose == address for _, whose in self._places) >= self.of_address:
                raise Full(f"at most {self.of_address} questions of one address are answered at a time; wait for those")
            if len(self._places) >= self.at_once + self.waiting:
                raise Full("too many questions are waiting; try again in a minute")
            self._places.append((ticket, address))
        try:
            while (ahead := self._ahead(ticket)) >= 0:
                waits(ahead + 1)
                with self._moved:
                    self._moved.wait_for(lambda: self._ahead(ticket) != ahead, 1.0)
            yield
        finally:
            with self._moved:
                self._places = [place for place in self._places if place[0] is not ticket]
                self._moved.notify_all()

    def _ahead(self, ticket: object) -> int:
        """Places in line before `ticket`; below 0 once it is its turn."""
        with self._moved:
            return next(n for n, (other, _) in enumerate(self._places) if other is ticket) - self.at_once


_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors "
)
_WRITE_S = 10.0
Lines = Generator[Mapping[str, object] | None, None, None]


class Answers(Protocol):
    """Object that answers questions (autofit.web.simulator)."""

    def answer(self, question: Question) -> Lines: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Rules of access. A page of another site is kept from a server on 127.0.0.1 by a name that it has bound to it."""

    hosts: frozenset[str]  # names that a browser may ask for, without their port; empty: any
    framed_by: str = "'self'"  # of the policy: who may show the page inside of theirs
    behind_proxy: bool = False  # the last address of X-Forwarded-For is the asker's

    def refusal(self, host: str, origin: str | None) -> str | None:
        """Reason why a request for `host` from a page of `origin` is refused, if it is."""
        if self.hosts and re.sub(r":[0-9]{1,5}$", "", host.lower()) not in self.hosts:
            return "this server answers to its own address only"
        if origin is not None and origin.partition("://")[2].lower() != host.lower():
            return "a page of another site may not ask this server"
        return None


@dataclass(slots=True)
class Connections:
    """The connections that are open, at most `most`. One whose request is still arriving gives way to a new one."""

    most: int
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _arriving: dict[socket.socket, str] = field(default_factory=dict)  # {connection: address}, the oldest first
    _asked: set[socket.socket] = field(default_factory=set)

    def take(self, connection: socket.socket, address: str) -> bool:
        """True if there is a place; the oldest request of the address with most of them loses its own for it."""
        with self._lock:
            if len(self._arriving) + len(self._asked) >= self.most:
                if not self._arriving:
                    return False
                count = Counter(self._arriving.values())
                oldest = max(self._arriving, key=lambda other: count[self._arriving[other]])
                del self._arriving[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread wakes up, and closes it
            self._arriving[connection] = address
            return True

    def has_asked(self, connection: socket.socket) -> bool:
        """True if the connection, whose request has arrived, still has its place; it keeps that until its end."""
        with self._lock:
            if self._arriving.pop(connection, None) is None:
                return connection in self._asked
            self._asked.add(connection)
            return True

    def release(self, connection: socket.socket) -> None:
        """Give up its place."""
        with self._lock:
            self._arriving.pop(connection, None)
            self._asked.discard(connection)


class PageServer(ThreadingHTTPServer):
    """Serves the page on `address`. Raises OSError where that is taken."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    answers: Answers  # set before it serves

    def __init__(self, address: tuple[str, int], *, access: Access, limits: Limits) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self.access, self.limits = access, limits
        self.line = ArrivalQueue(at_once=limits.at_once, waiting=limits.waiting, of_address=limits.of_address)
        self.rate = Rate(limits.a_minute)
        self.connections = Connections(limits.connections)
        super().__init__(address, Handler)

    def prepare(self, questions: Iterable[Question]) -> None:
        """Answer the questions once, each in its turn, so that their next answers come at once."""
        for question in questions:
            with suppress(Full), self.line.turn("", waits=lambda _: None):
                for _ in self.answers.answer(question):
                    pass

    def process_request(self, request: Any, client_address: Any) -> None:
        """Take the connection if there is a place for it; a thread of its own answers it."""
        if not self.connections.take(request, str(client_address[0])):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.connections.release(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Silent: what goes wrong here is the other end's connection."""


class _InTime(io.RawIOBase):
    """The bytes of a connection until a moment after which it counts as dead, however many of them still come."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self._connection, self._end = connection, time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request took too long to arrive")
        self._connection.settimeout(left)
        count = self._connection.recv_into(buffer)
        self._connection.settimeout(_WRITE_S)
        return count


class Handler(BaseHTTPRequestHandler):
    """One request. Every response closes its connection."""

    server: PageServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "autofit", ""

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(_InTime(self.connection, self.server.limits.request_s))

    def log_message(self, *_: object) -> None:
        """Drops the message: a visitor's questions are private."""

    # -- the files -----------------------------------------------------------------------------------------------------

    def do_GET(self) -> None:
        self._file(body=True)

    def do_HEAD(self) -> None:
        self._file(body=False)

    def _file(self, *, body: bool) -> None:
        if not self.server.connections.has_asked(self.connection):
            return
        if (why := self._refusal()) is not None:
            self._refuse(HTTPStatus.FORBIDDEN, why)
            return
        found = FILES.get(self.path.partition("?")[0])
        if found is None:
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such page")
            return
        kind, content = found()
        self._head(HTTPStatus.OK, kind, len(content))
        if body:
            self.wfile.write(content)

    # -- questions -----------------------------------------------------------------------------------------------------

    def do_POST(self) -> None:
        if (why := self._refusal()) is not None:
            self._refuse(HTTPStatus.FORBIDDEN, why)
        elif self.path != "/answer":
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such page")
        elif self.headers.get("Content-Type", "").partition(";")[0].strip() != "application/json":
            self._refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "a question must be application/json")
        elif (question := self._question()) is not None:
            self._answer(question)

    def _question(self) -> Question | None:
        """The question in the body, unless it is refused."""
        told, most = self.headers.get("Content-Length", ""), self.server.limits.body_bytes
        if "Transfer-Encoding" in self.headers or not told.isdecimal():
            self._refuse(HTTPStatus.LENGTH_REQUIRED, "a question must say its Content-Length")
            return None
        if len(told) > 9 or int(told) > most:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a question must have at most {most // 1024} KiB")
            return None
        wait_s = self.server.rate.wait_s(self._address())
        if wait_s:
            self._refuse(HTTPStatus.TOO_MANY_REQUESTS, f"too many questions; ask again in {wait_s:.0f} s", wait_s)
            return None
        body = self.rfile.read(int(told))
        if not self.server.connections.has_asked(self.connection):
            return None
        try:
            return Question.from_json(json.loads(body.decode("utf-8")))
        except AutofitError as error:
            self._refuse(HTTPStatus.BAD_REQUEST, str(error))
        except (ValueError, RecursionError):
            self._refuse(HTTPStatus.BAD_REQUEST, "a question must be JSON")
        return None

    def _answer(self, question: Question) -> None:
        """The lines of the answer, as they are found; a browser that goes away ends it."""
        self._streams = False

        def waits(place: int) -> None:
            self._say({"is": "waiting", "place": place})

        try:
            with self.server.line.turn(self._address(), waits=waits):
                self._say({"is": "started"})
                with closing(self.server.answers.answer(question)) as lines:
                    for line in lines:
                        self._say(line)
                self._say({"is": "done"})
        except Full as error:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, str(error), 10.0)

    def _say(self, line: Mapping[str, object] | None) -> None:
        """Send one line of JSON; an empty one tests the connection. Raises OSError if the other end has left."""
        if not self._streams:
            self._streams = True
            self._head(HTTPStatus.OK, "application/x-ndjson; charset=utf-8", None)
        if self._has_left():
            raise ConnectionResetError("nobody listens any more")
        self.wfile.write(b"\n" if line is None else json.dumps(line).encode() + b"\n")
        self.wfile.flush()

    def _has_left(self) -> bool:
        """True if the other end closed the connection: a browser whose page was left, or who asks anew."""
        try:
            self.connection.settimeout(0)
            return len(self.connection.recv(1, socket.MSG_PEEK)) == 0
        except (BlockingIOError, TimeoutError):
            return False
        except OSError:
            return True
        finally:
            with suppress(OSError):
                self.connection.settimeout(_WRITE_S)

    # -- what both need ------------------------------------------------------------------------------------------------

    def _refusal(self) -> str | None:
        return self.server.access.refusal(self.headers.get("Host", ""), self.headers.get("Origin"))

    def _address(self) -> str:
        told = self.headers.get("X-Forwarded-For", "").rpartition(",")[2].strip()
        return told[:64] if self.server.access.behind_proxy and told else str(self.client_address[0])

    def _refuse(self, status: HTTPStatus, why: str, wait_s: float = 0.0) -> None:
        content = json.dumps({"is": "error", "text": why}).encode()
        self._head(status, "application/json; charset=utf-8", len(content), wait_s)
        with suppress(OSError):
            self.wfile.write(content)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """A plain refusal, for requests that http.server refuses itself: the status phrase replaces its message."""
        self._refuse(HTTPStatus(code), HTTPStatus(code).phrase)

    def _head(self, status: HTTPStatus, kind: str, length: int | None, wait_s: float = 0.0) -> None:
        self.close_connection = True
        self.send_response_only(status)
        for name, value in (
            ("Content-Type", kind), ("Content-Security-Policy", _POLICY + self.server.access.framed_by),
            ("X-Content-Type-Options", "nosniff"), ("Referrer-Policy", "no-referrer"),
            ("Cross-Origin-Resource-Policy", "same-origin"), ("Cache-Control", "no-store"), ("Connection", "close"),
            ("Permissions-Policy", "camera=(), microphone=(), geolocation=()"), ("X-Accel-Buffering", "no"),
        ):  # fmt: skip
            self.send_header(name, value)
        if length is not None:
            self.send_header("Content-Length", str(length))
        if wait_s:
            self.send_header("Retry-After", str(int(wait_s) + 1))
        self.end_headers()
