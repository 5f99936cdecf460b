"""The faults of the campaign. Each takes a run from its start to its end, and says what it did."""

import random
import shutil
import signal
import socket
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from autofit.promotion.checkpoints import checkpoints, is_proven, step_of
from autofit.watching.events import EventKind, events_of
from experiments.faults.run import FaultyRun

Facts = dict[str, object]
STEPS = 24
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
TEARS: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
}


def sigterm(run: FaultyRun, dice: random.Random) -> Facts:
    """A signal that asks to end, twice."""
    facts = [_interrupted(run, dice.randint(1, STEPS // 2), dice.choice(SIGNALS), 0.0)]
    facts.append(_interrupted(run, dice.randint(run.step + 1, STEPS - 2), dice.choice(SIGNALS), 0.0))
    return {"interruptions": facts, **_to_the_end(run)}


def kill(run: FaultyRun, dice: random.Random) -> Facts:
    """SIGKILL at a random moment of a step, twice."""
    facts = [_interrupted(run, dice.randint(1, STEPS // 2), signal.SIGKILL, dice.random() / 5)]
    facts.append(_interrupted(run, dice.randint(run.step + 1, STEPS - 2), signal.SIGKILL, dice.random() / 5))
    return {"interruptions": facts, **_to_the_end(run)}


def torn(run: FaultyRun, dice: random.Random) -> Facts:
    """SIGKILL, then a file of the newest checkpoint is torn."""
    facts = [_interrupted(run, dice.randint(9, STEPS - 2), signal.SIGKILL, 0.0)]
    newest, before = [c for c in checkpoints(run.output) if is_proven(c)][:2]
    path = dice.choice(sorted(p for p in newest.iterdir() if p.suffix in (".pt", ".pth", ".safetensors", ".json")))
    how = dice.choice(list(TEARS))
    TEARS[how](path)
    facts[0] |= {"torn": f"{newest.name}/{path.name} {how}", "newest_whole": step_of(before)}
    return {"interruptions": facts, **_to_the_end(run)}


def mlflow(run: FaultyRun, dice: random.Random) -> Facts:
    """MLflow's server is down, its database is locked, or its mirror is killed."""
    how = dice.choice(("port closed", "database locked", "mirror killed"))
    run.mirror = True
    if how == "port closed":
        run.env = {"MLFLOW_TRACKING_URI": f"http://127.0.0.1:{_closed_port()}", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
    with _locked(run.folder / "mlflow.db") if how == "database locked" else nullcontext():
        run.start()
        if how == "mirror killed":
            run.wait_for_step(dice.randint(1, STEPS - 2))
            _kill_mirror(run.folder)
        run.wait()
    return {"how": how, "interruptions": [], "starts": 1}


def disk(run: FaultyRun, dice: random.Random) -> Facts:
    """The disk is full from a random step on, until a checkpoint could not be saved, or until the run has failed.

    In half of the runs it is the disk of the checkpoints alone, in the others also that of the run's log and lines.
    """
    home, also_lines = run.folder, dice.random() < 0.5
    with _small_disk(home / "disk") as small:
        run.output = small / "out"
        if also_lines:
            run.folder = small / "run"
        full_at = dice.randint(1, STEPS // 2)
        run.start()
        run.wait_for_step(full_at)
        filler = _fill(small)
        while run.is_alive and not any("could not be saved" in event for event in run.events):
            time.sleep(0.02)
        filler.unlink()
        facts = _ended(run)
        for name, place in (("out", run.output), ("run", run.folder)):
            shutil.copytree(place, home / "kept" / name, ignore=shutil.ignore_patterns("disk", "kept"))
    run.output, run.folder = home / "kept" / "out", home / "kept" / "run"
    return {"full_at_step": full_at, "also_lines": also_lines, "interruptions": [], **facts}


def oom(run: FaultyRun, dice: random.Random) -> Facts:
    """The reward raises torch.OutOfMemoryError in a random step; the run goes on with less memory, by itself."""
    run.rescues = True
    at = dice.randint(2, STEPS - 1)
    run.folder.mkdir(parents=True)
    (run.folder / "oom").write_text(str(at))
    run.values = {**run.values, "reward_funcs": ["oom_rewards.share_of_t1"]}
    run.env = {"FAULTS_OOM": str(run.folder / "oom")}
    run.start()
    facts = _ended(run)
    rescue = next(e for e in events_of(run.folder) if e.kind is EventKind.RESCUE)
    again = {"reached": rescue.step, "newest_whole": rescue.data["resumed_from"], "changes": rescue.data["changes"]}
    return {"oom_in_step": at, "interruptions": [again], **facts}


OOM_REWARD = '''"""The tests' reward; runs out of memory once, in the call whose number is in a file."""

import os
from pathlib import Path

import torch

calls = 0


def share_of_t1(completions, **kwargs):
    global calls
    calls += 1
    told = Path(os.environ["FAULTS_OOM"])
    if told.exists() and calls == int(told.read_text()):
        told.unlink()
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB (injected)")
    return [c.split().count("t1") / max(1, len(c.split())) for c in completions]
'''

KINDS: dict[str, Callable[[FaultyRun, random.Random], Facts]] = {
    "sigterm": sigterm, "kill": kill, "torn": torn, "mlflow": mlflow, "disk": disk, "oom": oom,
}  # fmt: skip


def _interrupted(run: FaultyRun, step: int, number: signal.Signals, delay_s: float) -> Facts:
    """Start the run and send it a signal once `step` is logged."""
    run.start()
    run.wait_for_step(step)
    time.sleep(delay_s)
    with suppress(ProcessLookupError, FileNotFoundError):
        run.send(number)
    ending = run.wait()
    newest = max((step_of(c) for c in checkpoints(run.output) if is_proven(c)), default=0)
    return {"signal": number.name, "reached": run.step, "newest_whole": newest, "exit_code": ending.exit_code}


def _to_the_end(run: FaultyRun) -> Facts:
    """Start the run for the last time; nothing if the signal came too late."""
    if run.final is None:
        run.start()
    return _ended(run)


def _ended(run: FaultyRun) -> Facts:
    """Wait for the end, and start again a run that could not save its model."""
    starts = 1
    run.wait()
    while run.final is None and starts < 4:
        starts += 1
        run.start()
        run.wait()
    return {"starts": starts}


def _closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def _locked(database: Path) -> Iterator[None]:
    database.parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(database)
    connection.execute("BEGIN EXCLUSIVE")
    try:
        yield
    finally:
        connection.close()


def _kill_mirror(folder: Path) -> None:
    import psutil

    for process in psutil.process_iter(["cmdline"]):
        if str(folder / "request.json") in (process.info["cmdline"] or []):
            process.kill()


@contextmanager
def _small_disk(place: Path) -> Iterator[Path]:
    place.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def _fill(disk: Path) -> Path:
    path = disk / "filler"
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return path
