"""How a run and the keeper of its vLLM server speak: files in the run's folder, which all machines share.

Each start of a server has files of its own, so that nothing of an earlier one is taken for news. No torch here.
"""

import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from autofit.files import read_json, write_json

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
