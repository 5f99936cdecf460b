"""The vLLM server beside a training, as the job that trains sees it: a new one for each start of the training.

A rescue may change what is served, and a server whose client was killed may wait for it for ever. The job and the
keeper of its server speak by files in the run's folder, which all machines share. A training finds its server in its
environment and nowhere on the disk, as a run that goes on later has another one. No torch here.
"""

import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from autofit.errors import EnvironmentFault
from autofit.files import read_json, write_json
from autofit.probing.supervise import (
    Keep,
    ProcessEnding,
    RanksEnded,
    become_subreaper,
    birth,
    free_port,
    kill_descendants,
)
from autofit.promotion.run_folder import LOOPBACK, RunFolder, asked_to_end

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
        """The run wants no server any more."""
        write_json(self._path("order"), {"serve": False})

    def ordered(self) -> bool | None:
        """Whether the run wants the server; None: it has not said yet."""
        order = read_json(self._path("order"))
        return None if order is None else bool(order["serve"])

    def answers(self, url: str) -> None:
        """The server answers at `url`."""
        write_json(self._path("answers"), {"url": url})

    def url(self) -> str | None:
        """Where the server answers; None: it does not yet."""
        found = read_json(self._path("answers"))
        return None if found is None else str(found["url"])

    def ended(self, reason: str) -> None:
        """The server has ended by itself, or never answered."""
        write_json(self._path("ended"), {"reason": reason})

    def why_ended(self) -> str | None:
        """Why the server has ended by itself, as a predicate with its subject; None: it has not."""
        found = read_json(self._path("ended"))
        return None if found is None else str(found["reason"])

    def _path(self, what: str) -> Path:
        return self.folder / _FOLDER / f"{self.name}-{self.number}-{what}.json"


def log_of_server(folder: Path) -> Path:
    """The log of the servers of the run in `folder`, one after the other."""
    return folder / "server.log"


def forget_servers(folder: Path) -> None:
    """The run in `folder` starts: nobody waits for an earlier server."""
    with suppress(FileNotFoundError):
        shutil.rmtree(folder / _FOLDER)


_URL, _PORT = "AUTOFIT_VLLM_SERVER", "AUTOFIT_VLLM_GROUP_PORT"


def address_variables(url: str, *, address: str, port: int) -> dict[str, str]:
    """What a training needs in its environment to use the server at `url`.

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
_LEAVE_S = 10.0  # in which a keeper ends what it has started


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
        """Whether the training is to be killed: the server has ended or is gone, or nobody waits for the training."""
        return self.abandoned() or self._has_ended() or (self._keeper is None and self._is_silent())

    def dismiss(self) -> None:
        """The job needs no server any more."""
        self.number += 1
        self._post.dismiss()

    @property
    def _post(self) -> Post:
        return Post(folder=self.folder, name=self.name, number=self.number)

    @contextmanager
    def _serving(self) -> Iterator[dict[str, str] | None]:
        """Context with a server: what its users need in their environment; None where it never came to answer."""
        if self.number == 0:
            forget_servers(self.folder)
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
        """Where the server answers; None where it ended before, or the run is asked to end."""
        while (url := self._post.url()) is None:
            if self._has_ended() or self.abandoned() or asked_to_end(self.folder):
                return None
            time.sleep(_POLL_S)
        self._url, self._knocked = url, time.monotonic()
        return url

    def _has_ended(self) -> bool:
        return self._post.why_ended() is not None or (self._keeper is not None and birth(self._keeper) is None)

    def _is_silent(self) -> bool:
        """Whether nothing listens at the server's port any more, for some looks in a row."""
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
