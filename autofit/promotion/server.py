"""The vLLM server beside a training, as the job sees it, and its keeper, a process that starts it and ends all of it.

A rescue may change the served model, and a server whose client was killed may wait for it for ever. The job and the
keeper of its server speak by files in the run's folder, which all machines share. A training finds its server in its
environment and nowhere on the disk, as a run that goes on later has another one. No torch here.
"""

import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

from autofit.errors import AutofitError, EnvironmentFault, one_line
from autofit.files import end_bytes, read_json, write_json
from autofit.probing.supervise import (
    Keep,
    ProcessEnding,
    RanksEnded,
    become_subreaper,
    birth,
    die_with_parent,
    free_port,
    keep,
    kill_descendants,
    start_child,
    started_by,
)
from autofit.promotion.run_folder import LOOPBACK, RunFolder, asked_to_end, deaf_children, start_deaf
from autofit.recipe.launching import COMMAND, RolloutServer
from autofit.recipe.secrets import opened

_FOLDER = "server"


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """The files of one start of a server: `name` is that of the run's start, and `number` counts servers in it."""

    folder: Path
    name: str
    number: int

    def order(self) -> None:
        """The run wants the server."""
        write_json(self._path("order"), {"serve": True})

    def dismiss(self) -> None:
        """Note that the run has finished with its server."""
        write_json(self._path("order"), {"serve": False})

    def ordered(self) -> bool | None:
        """True if the run wants the server, False if it has done with it; None: it has yet to say."""
        order = read_json(self._path("order"))
        return None if order is None else bool(order["serve"])

    def answers(self, url: str) -> None:
        """The server answers at `url`."""
        write_json(self._path("answers"), {"url": url})

    def url(self) -> str | None:
        """Address at which the server answers, once it does."""
        found = read_json(self._path("answers"))
        return None if found is None else str(found["url"])

    def ended(self, reason: str) -> None:
        """Note that the server ended by itself, or failed to answer."""
        write_json(self._path("ended"), {"reason": reason})

    def why_ended(self) -> str | None:
        """Reason why the server ended by itself, if it did, as a predicate with its subject."""
        found = read_json(self._path("ended"))
        return None if found is None else str(found["reason"])

    def _path(self, what: str) -> Path:
        return self.folder / _FOLDER / f"{self.name}-{self.number}-{what}.json"


def log_of_server(folder: Path) -> Path:
    """The log of the servers of the run in `folder`, one after the other."""
    return folder / "server.log"


_URL, _PORT = "AUTOFIT_VLLM_SERVER", "AUTOFIT_VLLM_GROUP_PORT"


def address_variables(url: str, *, address: str, port: int) -> dict[str, str]:
    """Environment with which a training uses the server at `url`.

    The server's cards meet rank 0, which sends them the weights, at `port` of `address`. No proxy stands between them.
    """
    direct = ",".join(filter(None, [os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), urlsplit(url).hostname]))
    # vLLM's code in rank 0 tells the server that address; without the variable it guesses by a route to the internet.
    host = os.environ.get("VLLM_HOST_IP") or address
    return {_URL: url, _PORT: str(port), "no_proxy": direct, "NO_PROXY": direct, "VLLM_HOST_IP": host}


def with_address(values: Mapping[str, object]) -> dict[str, object]:
    """The values of a recipe, with the server that this process finds in its environment."""
    found = os.environ.get(_URL)
    if found is None:
        return dict(values)
    return {**values, "vllm_server_base_url": found, "vllm_group_port": int(os.environ[_PORT])}


_POLL_S = 0.2
_KNOCK_S = 5.0  # between two looks whether the server's port is open
_SILENT = 4  # closed in a row: its machine is gone, as its keeper would have told anything else
_LEAVE_S = 10.0  # in which a keeper ends its processes


@dataclass(slots=True)
class Beside:
    """The server of one start of a job, `name`. Its users reach the job's machine at `address`.

    `start` starts its keeper on this machine; None: the job's last node keeps it. `abandoned` says that nobody waits
    for the training any more.
    """

    folder: Path
    name: str
    address: str = LOOPBACK
    start: Callable[[Post], int] | None = None
    abandoned: Callable[[], bool] = lambda: False
    number: int = 0
    is_lost: bool = False  # its machine is gone
    _keeper: int | None = None
    _url: str = ""
    _silent: int = 0
    _knocked: float = 0.0

    def beside(self, keep: Keep) -> Keep:
        """`keep`, beside a server."""

        def kept(own: Sequence[dict[str, str]]) -> RanksEnded:
            with self._serving() as env:
                if env is not None:
                    return keep([{**one, **env} for one in own])
            return RanksEnded(
                endings=tuple(ProcessEnding(exit_code=0, abandoned=True, rank=rank) for rank in range(len(own)))
            )

        return kept

    def is_over(self) -> bool:
        """True if the training is to be killed: the server has ended or is gone, or the training is abandoned."""
        return self.abandoned() or self._has_ended() or (self._keeper is None and self._is_silent())

    def dismiss(self) -> None:
        """Tell the server that the job has finished with it."""
        self.number += 1
        self._post.dismiss()

    @property
    def _post(self) -> Post:
        return Post(folder=self.folder, name=self.name, number=self.number)

    @contextmanager
    def _serving(self) -> Iterator[dict[str, str] | None]:
        """Context with a server: the environment of its users; None if it failed to answer."""
        if self.number == 0:
            with suppress(FileNotFoundError):  # nobody waits for an earlier server
                shutil.rmtree(self.folder / _FOLDER)
        self.number += 1
        self._silent, self.is_lost, others = 0, False, become_subreaper()
        self._post.order()
        self._keeper = None if self.start is None else self.start(self._post)
        try:
            url = self._awaited()
            yield None if url is None else address_variables(url, address=self.address, port=free_port(""))
        finally:
            self._tell()
            self._post.dismiss()
            if self._keeper is not None:
                _leave(self._keeper)
                kill_descendants(but=others)

    def _awaited(self) -> str | None:
        """Address at which the server answers; None if it ended before, or the run is asked to end."""
        while (url := self._post.url()) is None:
            if self._has_ended() or self.abandoned() or asked_to_end(self.folder):
                return None
            time.sleep(_POLL_S)
        self._url, self._knocked = url, time.monotonic()
        return url

    def _has_ended(self) -> bool:
        return self._post.why_ended() is not None or (self._keeper is not None and birth(self._keeper) is None)

    def _is_silent(self) -> bool:
        """True if the server's port has been closed for some looks in a row."""
        if time.monotonic() - self._knocked > _KNOCK_S:
            found = urlsplit(self._url)
            try:
                socket.create_connection((str(found.hostname), int(found.port or 0)), timeout=_KNOCK_S).close()
                self._silent = 0
            except OSError:
                self._silent += 1
            self._knocked = time.monotonic()
        self.is_lost = self._silent >= _SILENT
        return self.is_lost

    def _tell(self) -> None:
        """The reason why the server ended is that of the run, unless the run was to end anyway."""
        reason = self._post.why_ended()
        if reason is None and self._keeper is not None and birth(self._keeper) is None:
            reason = f"the keeper of the vLLM server was killed; see {log_of_server(self.folder)}"
        if reason is not None and not RunFolder(self.folder).is_done and not asked_to_end(self.folder):
            with suppress(EnvironmentFault):  # a full disk
                RunFolder(self.folder).fail(reason)


def _leave(keeper: int) -> None:
    """Wait for the end of a keeper that was told to end."""
    deadline = time.monotonic() + _LEAVE_S
    while os.waitpid(keeper, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(keeper, signal.SIGKILL)
        time.sleep(_POLL_S)


# -- the keeper of a run's vLLM server --------------------------------------------------------------------------------
# A process of its own (`python -m autofit.promotion.server REQUEST NAME NUMBER ADDRESS NODE`), so that the
# server ends with a killed job, and the engines of a killed server with it.

_LOOK_S = 1.0  # between two questions whether the server answers
_ANSWER_S = 2.0
_END_BYTES = 1 << 16  # of the log, in which its last words are
_ANY_ADDRESS = "0.0.0.0"  # noqa: S104  # only where the node's own address cannot be listened on
_MEMORY = re.compile(r"out of memory|No available memory|less than desired GPU memory", re.IGNORECASE)
_ERROR = re.compile(r"\b\w*(Error|Exception)\b: (?!.*See root cause above)")  # vLLM's last one names no cause


def serve(
    post: Post, request_path: Path, *, address: str, env: Mapping[str, str], over: Callable[[], bool], where: str = ""
) -> None:
    """Keep the server of the requested run until it ends or `over`; all its processes have ended then.

    It listens on `address`. `where` is " on n3" for a server on a node of its own.
    """
    request = read_json(request_path) or {}
    try:
        values = opened(cast("dict[str, object]", request["values"]))
        own = cast("Mapping[str, object]", values.get("env") or {})
        started = _Started(post, RolloutServer.of(values), address, str(request["cwd"]),
                           {**env, **{key: str(value) for key, value in own.items()}})  # fmt: skip
        ending = keep(started.start, abandoned=lambda: over() or started.is_late())
        reason = None if ending.abandoned and not started.late else started.why(ending)
    except (AutofitError, OSError) as error:
        reason = f"could not be started: {one_line(str(error))}"
    if reason is not None:
        post.ended(f"the vLLM server{where} {reason}; see {log_of_server(post.folder)}")


@dataclass(slots=True)
class _Started:
    """One process of the server."""

    post: Post
    server: RolloutServer
    address: str
    cwd: str
    env: Mapping[str, str]
    late: bool = False
    port: int = 0
    began: float = math.inf
    looked: float = -math.inf
    answered: bool = False
    log_starts: int = 0

    def start(self) -> int:
        """Start the command; its pid. The job's signals are kept from it: the step at work needs the server."""
        log, parent = log_of_server(self.post.folder), os.getpid()
        host, self.port = self._place()
        command = [_program(self.env), *COMMAND[1:], *self.server.arguments(host, self.port)]
        with log.open("ab") as file, deaf_children():
            self.log_starts = file.tell()
            pid = start_child(
                command, cwd=self.cwd, env=self.env, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                preexec_fn=lambda: die_with_parent(parent),  # no thread runs here
            )  # fmt: skip
        self.began = time.monotonic()
        return pid

    def _place(self) -> tuple[str, int]:
        """(address to listen on, free port of it): that by which others reach this node, where it is one of its own."""
        try:
            return self.address, free_port(self.address)
        except OSError:
            return _ANY_ADDRESS, free_port(_ANY_ADDRESS)

    def is_late(self) -> bool:
        """True if the server missed its time to answer; reports once that it answers."""
        now = time.monotonic()
        if self.answered or now - self.looked < _LOOK_S:
            return False
        self.looked = now
        url = f"http://{self.address}:{self.port}"
        self.answered = _answers(f"{url}/health")
        if self.answered:
            self.post.answers(url)
        self.late = not self.answered and now - self.began > self.server.timeout_s
        return self.late

    def why(self, ending: ProcessEnding) -> str:
        """Why the server has ended, as a predicate."""
        said = last_words(log_of_server(self.post.folder), self.log_starts)
        if self.late:
            how = f"did not answer within {self.server.timeout_s:.0f} s (vllm_server_timeout)"
        elif ending.kernel_oom:
            how = "was killed by the kernel, as the machine had no memory left"
        elif ending.exit_code < 0:
            how = f"was killed by {signal.Signals(-ending.exit_code).name}"
        else:
            how = f"ended with exit code {ending.exit_code}"
        return f"{how}{f' ({said})' if said else ''}"


def last_words(log: Path, start: int) -> str:
    """The line of a server's log, from the byte `start`, that says best why it ended: memory, an error, or the last."""
    said = end_bytes(log, _END_BYTES, start=start).decode("utf-8", errors="replace")
    lines = [line for text in said.splitlines() if (line := text.strip())]
    for telling in (_MEMORY, _ERROR):
        found = [line for line in lines if telling.search(line)]
        if found:
            return one_line(found[-1], 200)
    return one_line(lines[-1], 200) if lines else ""


def _program(env: Mapping[str, str]) -> str:
    """TRL's command: that of the PATH, which may be of another environment, or that beside this Python."""
    places = f"{env.get('PATH', '')}{os.pathsep}{Path(sys.executable).parent}"
    found = shutil.which(COMMAND[0], path=places)
    if found is None:
        raise FileNotFoundError(f"`{' '.join(COMMAND)}` is not there: `{COMMAND[0]}` is not on the PATH")
    return found


def _answers(url: str) -> bool:
    """True if a server is ready, asked directly, past any proxy."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=_ANSWER_S) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def start_keeper(
    request_path: Path, post: Post, *, cwd: str, env: Mapping[str, str], address: str = LOOPBACK, node: str = ""
) -> int:
    """Start the keeper of a server that listens on `address`, which is this machine's; its pid.

    `node` is the name of a node that the server has for itself.
    """
    return start_deaf(
        "autofit.promotion.server", request_path, post.name, str(post.number), address, node,
        log=log_of_server(post.folder), cwd=cwd, env=env,
    )  # fmt: skip


def main(request_path: Path, name: str, number: int, address: str, node: str) -> None:
    """Keep a server until the run dismisses it, or the process of the job that started this one is gone."""
    parent = started_by()
    post = Post(folder=request_path.parent, name=name, number=number)
    serve(
        post, request_path, address=address, env=os.environ, where=f" on {node}" if node else "",
        over=lambda: not post.ordered() or os.getppid() != parent,
    )  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5])
