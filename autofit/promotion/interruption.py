"""How a full run is asked to end: a signal to one of its processes, or the file `stop` in its folder.

SIGTERM and SIGINT end programs; Slurm sends SIGUSR1 or SIGUSR2 before it takes a machine away (`--signal`). The
training saves a checkpoint after the step at work, and ends. A job of Slurm then asks to be started again, unless it
was the file.
"""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from autofit.cluster.scheduler import own_job

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
STOP = "stop"  # file in the folder of a run
_LATER = "stop-for-now"  # file in the folder of a run on Slurm

_received: list[signal.Signals] = []  # by this process


def listen(act: Callable[[], None] = lambda: None) -> None:
    """Note SIGNALS from now on, and call `act` after each, where they would end this process."""

    def note(number: int, _: object) -> None:
        _received.append(signal.Signals(number))
        act()

    for number in SIGNALS:
        signal.signal(number, note)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # what came while this process could not note it, comes now


def received() -> signal.Signals | None:
    """The first of SIGNALS that this process got since it listens."""
    return _received[0] if _received else None


def ask_to_end(folder: Path) -> None:
    """Ask the run in `folder` to save a checkpoint and to end. A disk that takes no file is no error here."""
    with contextlib.suppress(OSError):
        (folder / STOP).touch()


def ask_after_signal(folder: Path) -> None:
    """As `ask_to_end`, after one of SIGNALS: a job of Slurm is to go on later."""
    if own_job() is None:
        ask_to_end(folder)
        return
    with contextlib.suppress(OSError):
        (folder / _LATER).touch()


def asked_to_end(folder: Path) -> bool:
    """Whether the run in `folder` is to save a checkpoint and to end."""
    return bool(_received) or (folder / STOP).exists() or (folder / _LATER).exists()


def goes_on_later(folder: Path) -> bool:
    """Whether the run in `folder` was asked to end by a signal only, and nobody wants it to stay so."""
    return (bool(_received) or (folder / _LATER).exists()) and not (folder / STOP).exists()


def forget_signals(folder: Path) -> None:
    """A job of Slurm starts again."""
    (folder / _LATER).unlink(missing_ok=True)


@contextlib.contextmanager
def deaf_children() -> Iterator[None]:
    """Processes started within do not get SIGNALS: they end when their work does. This process gets them afterwards."""
    kept = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, kept)


def start_deaf(module: str, request_path: Path, *more: str, log: Path, cwd: str, env: Mapping[str, str]) -> int:
    """Start `python -m module request_path more` as a child that hears signals once it listens for them; its pid."""
    with log.open("ab") as file, deaf_children():
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(request_path), *more], cwd=cwd, env=env,
            stdin=subprocess.DEVNULL, stdout=file, stderr=file,
        )  # fmt: skip
    process.returncode = 0  # the keeper waits for it, not this object
    return process.pid
