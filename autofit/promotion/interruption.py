"""How a full run is asked to end: a signal to one of its processes, or the file `stop` in its folder.

SIGTERM and SIGINT end programs; Slurm sends SIGUSR1 or SIGUSR2 before it takes a machine away (`--signal`). The
training saves a checkpoint after the step at work, and ends.
"""

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)

_received: list[signal.Signals] = []  # by this process


def listen(act: Callable[[], None] = lambda: None) -> None:
    """Note SIGNALS from now on, and call `act` after each, where they would end this process."""

    def note(number: int, _: object) -> None:
        _received.append(signal.Signals(number))
        act()

    for number in SIGNALS:
        signal.signal(number, note)


def received() -> signal.Signals | None:
    """The first of SIGNALS that this process got since it listens."""
    return _received[0] if _received else None


def ask_to_end(folder: Path) -> None:
    """Ask the run in `folder` to save a checkpoint and to end. A disk that takes no file is no error here."""
    with contextlib.suppress(OSError):
        (folder / "stop").touch()


def asked_to_end(folder: Path) -> bool:
    """Whether the run in `folder` is to save a checkpoint and to end."""
    return bool(_received) or (folder / "stop").exists()


@contextlib.contextmanager
def deaf_children() -> Iterator[None]:
    """Processes started within do not get SIGNALS: they end when their work does. This process gets them afterwards."""
    kept = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, kept)
