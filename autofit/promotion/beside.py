"""The vLLM server beside a training, as the job that trains sees it: a new one for each start of the training.

A rescue may change what is served, and a server whose client was killed may wait for it for ever. No torch here.
"""

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from autofit.errors import EnvironmentFault
from autofit.files import write_json
from autofit.probing.births import birth
from autofit.probing.rank_processes import RanksEnded, free_port
from autofit.probing.supervise import Ending, become_subreaper, kill_descendants
from autofit.promotion.interruption import asked_to_end
from autofit.promotion.rank_files import LOOPBACK
from autofit.promotion.rank_job import Keep
from autofit.promotion.server_address import address_variables
from autofit.promotion.server_files import Post, forget_servers, log_of_server

_POLL_S = 0.2
_KNOCK_S = 5.0  # between two looks whether the server's port is open
_SILENT = 4  # closed in a row: its machine is gone, as its keeper would have told anything else
_LEAVE_S = 10.0  # in which a keeper ends what it has started

Alone = Callable[[Mapping[str, str]], Ending]  # trains one process with more variables of the environment


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

    def alone(self, train: Alone) -> Callable[[], Ending]:
        """`train`, beside a server."""

        def trained() -> Ending:
            with self._serving() as env:
                return train(env) if env is not None else Ending(exit_code=0, abandoned=True)

        return trained

    def ranks(self, keep: Keep) -> Keep:
        """`keep`, beside a server."""

        def kept(own: Sequence[dict[str, str]]) -> RanksEnded:
            with self._serving() as env:
                if env is not None:
                    return keep([{**one, **env} for one in own])
            return RanksEnded(endings=tuple(Ending(exit_code=0, abandoned=True, rank=rank) for rank in range(len(own))))

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
        if reason is not None and not (self.folder / "final.json").exists() and not asked_to_end(self.folder):
            with suppress(EnvironmentFault):  # a full disk
                write_json(self.folder / "failed.json", {"reason": reason})


def _leave(keeper: int) -> None:
    """Wait for the end of a keeper that was told to end."""
    deadline = time.monotonic() + _LEAVE_S
    while os.waitpid(keeper, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(keeper, signal.SIGKILL)
        time.sleep(_POLL_S)
