"""Logs of probes that print without end: their beginning and their latest lines are kept. The end of a log."""

import os
from collections.abc import Iterable
from pathlib import Path

MOST_BYTES = 2**26  # a probe of TRL's trainers writes some KB
_KEPT_BYTES = 2**20
_END_BYTES = 10_000  # read of a log's end
_LEFT_OUT = b"\n... left out by autofit, as the log was longer than 64 MiB ...\n"


def keep_small(logs: Iterable[str | os.PathLike[str]]) -> None:
    """Cut each log of more than 64 MiB down to its first MiB; who writes must append (O_APPEND)."""
    for log in logs:
        try:
            if os.stat(log).st_size > MOST_BYTES:
                with open(log, "r+b") as file:
                    file.seek(_KEPT_BYTES)
                    file.write(_LEFT_OUT)
                    file.truncate()
        except OSError:  # not there yet, or on a disk that fails
            continue


def end_of(log: Path) -> str:
    """The last lines of a log; empty where there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _END_BYTES))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
