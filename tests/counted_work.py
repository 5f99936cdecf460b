"""Work that the tests start, counted, as seconds differ from machine to machine: processes, calls, simulated cards.

A process is one that a test starts, or a command of one; a call asks a fork server for a child, as a probe, an
inspection and a trace of a forecast do; a simulated card is one in a process of pytest. A whole run of the default
tests shows the counts, and fails if one is above its budget: find what grew, or raise it with a reason in the commit.
"""

import importlib
import subprocess
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from autofit.probing import fork_server

BUDGET = {"processes": 530, "calls": 130, "simulated cards": 530}  # of the default tests
_MARKS = {kind: kind[0].encode() for kind in BUDGET}
_file = Path()


def begin(file: Path) -> None:
    """Count from now on, in this process and its forks, into `file`: a byte for each, which forks append to as well."""
    global _file
    if _file != Path():
        _file = file
        return
    _file = file
    init, answer = subprocess.Popen.__init__, fork_server._answer

    def started(process: Any, *args: Any, **kwargs: Any) -> None:
        note("processes")
        init(process, *args, **kwargs)

    def asked(socket_path: str, message: Mapping[str, object], alive: object) -> dict[str, Any]:
        note("calls")
        return answer(socket_path, message, alive)

    mock.patch.object(subprocess.Popen, "__init__", started).start()
    mock.patch.object(fork_server, "_answer", asked).start()


def count_cards() -> None:
    """Count the simulated cards of this process."""
    device: Any = importlib.import_module("autofit.fakegpu.device")
    made = device.FakeGpu

    def counted(*args: Any, **kwargs: Any) -> Any:
        note("simulated cards")
        return made(*args, **kwargs)

    device.FakeGpu = counted


def note(kind: str) -> None:
    """Count one; nothing before `begin`."""
    if _file != Path():
        with _file.open("ab") as file:
            file.write(_MARKS[kind])


def counts() -> dict[str, int]:
    """{kind: how many so far}."""
    marks = _file.read_bytes() if _file != Path() and _file.exists() else b""
    return {kind: marks.count(mark) for kind, mark in _MARKS.items()}


def total(workers: list[dict[str, int]]) -> dict[str, int]:
    """The counts of all workers together."""
    found: Counter[str] = Counter()
    for one in workers:
        found.update(one)
    return {kind: found[kind] for kind in BUDGET}


def above(found: Mapping[str, int]) -> list[str]:
    """A sentence for each count above its budget."""
    return [
        f"{found[kind]} {kind} where the default tests may have {most}: see tests/counted_work.py"
        for kind, most in BUDGET.items() if found[kind] > most
    ]  # fmt: skip
