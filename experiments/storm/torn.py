"""Torn and hostile files of autofit's own: databases, notes, requests, answers, logs of a study and of a full run."""

import json
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import lawful
from at_once import AtOnce
from search_driver import main as drive
from search_driver import plan

from autofit.cli import main as autofit
from autofit.tuning.search import Search, open_study
from autofit.tuning.study import driving
from autofit.watching.events import PROGRESS, read_progress
from storm.inputs import Found, Reader, attempt

_OURS = (".json", ".db", ".jsonl")
_HOSTILE = [b"", b"{", b"[]", b"null", b"{}", b"5", b'"text"', b"[" * 10_000, b"\xff\x00",
            b'{"pid": "x", "birth": 1}', b'{"pid": -1, "create_time": "y"}', b'{"slurm": {}}', b'{"status": "great"}',
            b'{"step": 1e400, "time": "x"}\n{"step": true}\n', b'{"status": "fit", "wall_s": "x"}']  # fmt: skip


def tear_files(folder: Path, *, files: int, dice: random.Random, until: float) -> Found:
    """Tears one file of a study of 4 trials at a time; the commands that read must end with a line, the search too."""
    found = Found()
    whole = folder / "whole"
    if not whole.exists():
        drive(whole, 4, 0)
        autofit(["sync", "--dir", str(whole)])  # MLflow's tables take seconds to make, and may be torn too
    (whole / PROGRESS).write_text("".join(json.dumps({"step": n, "loss": 0.5, "time": 1.0}) + "\n" for n in range(9)))
    names = sorted(p.relative_to(whole) for p in whole.rglob("*") if p.is_file() and p.suffix in _OURS)
    reader = Reader(name="torn files", makes=None, reads=_reads)  # type: ignore[arg-type]
    for number in range(files):
        if time.monotonic() > until:
            break
        home = folder / f"torn-{number}"
        shutil.copytree(whole, home)
        path = home / dice.choice(names)
        how = dice.choice(sorted(TEARS))
        TEARS[how](path, dice)
        attempt(reader, f"{path.relative_to(home)} {how} {path.read_bytes()[:40]!r}", home, found)
        shutil.rmtree(home)
    return found


def _reads(_: object, home: Path) -> None:
    for command in (["report"], ["studies"], ["monitor", "--once"], ["sync"]):
        autofit([*command, "--dir", str(home)])
    read_progress(home)
    _go_on(home, 5)


def _go_on(folder: Path, trials: int) -> None:
    """The search as search_driver has it, but its probes answer at once: a job of a process each takes a second."""
    wanted = plan(folder, trials)
    with driving(folder, "law"):
        Search(wanted, open_study(wanted), server_socket=None, launcher=AtOnce(lawful.at_once)).run()


def _cut(path: Path, dice: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(dice.random() * len(content))])


def _zeroed(path: Path, dice: random.Random) -> None:
    content = bytearray(path.read_bytes())
    at = int(dice.random() * len(content))
    content[at : at + 512] = bytes(len(content[at : at + 512]))
    path.write_bytes(content)


def _hostile(path: Path, dice: random.Random) -> None:
    path.write_bytes(dice.choice(_HOSTILE))


def _noisy(path: Path, dice: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(min(len(content), 20)):
        content[dice.randrange(len(content))] = dice.randrange(256)
    path.write_bytes(content)


TEARS: dict[str, Callable[[Path, random.Random], None]] = {
    "cut": _cut, "zeroed": _zeroed, "hostile": _hostile, "noisy": _noisy,
}  # fmt: skip
