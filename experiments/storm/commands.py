"""Kills at random moments of commands that follow a search: of the mirror in MLflow and of MLflow's own server."""

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import psutil
from search_driver import main as drive

from autofit.files import read_json
from autofit.probing.launch import is_alive
from autofit.tracking.runs import TRIAL
from storm.inputs import Found

_TRIALS = 12
END_S, _INTERRUPT_S, _GONE_S = 300.0, 60.0, 20.0
_AT_ONCE = 4  # kills of one mirror, server or full run before it must come to its end


def kill_mirrors(folder: Path, *, kills: int, dice: random.Random, until: float) -> Found:
    """`autofit sync`, killed 4 times; the next one must leave one run of each trial."""
    whole = folder / "to-mirror"
    drive(whole, _TRIALS, 0)

    def ends(home: Path) -> list[str]:
        code = autofit_command(home, "sync").wait(timeout=END_S)
        with closing(sqlite3.connect(home / "mlflow.db")) as database:
            runs = database.execute(
                "SELECT tags.value, runs.status FROM runs JOIN tags USING (run_uuid) "
                "WHERE tags.key = ? AND runs.lifecycle_stage = 'active'",
                [TRIAL],
            ).fetchall()
        checks = {
            f"the last sync ended with code {code}": code != 0,
            "not one run of each trial": Counter(n for n, _ in runs) != Counter(map(str, range(_TRIALS))),
            "a run that did not end": any(status == "RUNNING" for _, status in runs),
        }
        return [what for what, wrong in checks.items() if wrong]

    storm = Kills(whole, ("sync",), 0.3, 6.0, dice)
    return storm.run("kills of mirrors", ends, kills=kills, until=until)


def kill_servers(folder: Path, *, kills: int, dice: random.Random, until: float) -> Found:
    """`autofit ui`, killed 4 times; none may leave a server, and the next one must answer."""
    whole = folder / "to-show"
    drive(whole, 2, 0)

    def ends(home: Path) -> list[str]:
        wrong = [] if _are_gone(home) else ["a server that still runs"]
        ui = autofit_command(home, "ui", stdout=subprocess.PIPE)
        assert ui.stdout is not None
        line = ui.stdout.readline().decode()
        try:
            with urllib.request.urlopen(line.split()[-1] + "/health", timeout=30) as answer:
                wrong += [] if answer.status == 200 else [f"the server answers {answer.status}"]
        except (OSError, ValueError, IndexError) as error:
            wrong.append(f"the server does not answer: {error}; {line}")
        ui.send_signal(signal.SIGINT)
        code = ui.wait(timeout=END_S)
        return wrong + ([f"the last server ended with code {code}"] if code else [])

    storm = Kills(whole, ("ui",), 0.3, 12.0, dice)
    return storm.run("kills of servers", ends, kills=kills, until=until)


@dataclass(frozen=True, slots=True)
class Kills:
    """Kills of a command on copies of the folder `whole`, between `least_s` and `most_s` seconds after its start."""

    whole: Path
    command: Sequence[str]
    least_s: float
    most_s: float
    dice: random.Random

    def run(self, name: str, ends: Callable[[Path], list[str]], *, kills: int, until: float) -> Found:
        """A new copy after 4 kills, or one that came too late; `ends` says what is wrong with the old one then."""
        found, homes = Found(), count()
        while found.tried[name] < kills and (not found.tried[name] or time.monotonic() < until):
            home = self.whole.parent / f"{name.rpartition(' ')[2]}-{next(homes)}"
            shutil.copytree(self.whole, home)
            wrong = list[str]()
            for _ in range(min(_AT_ONCE, kills - found.tried[name])):
                try:
                    if not self._once(home):
                        break
                except subprocess.TimeoutExpired as error:
                    wrong.append(f"it went on after SIGINT, for {error.timeout:.0f} s")
                found.tried[name] += 1
            for what in wrong + ends(home):
                found.add_wrong(f"{name}: {what}", f"{home.name}: {(home / 'log').read_text()[-1500:]}")
            shutil.rmtree(home, ignore_errors=True)  # a mirror may still write its last lines
        return found

    def _once(self, home: Path) -> bool:
        """Kill the command, its job or a child of that at a random moment; False if it ended before."""
        command = autofit_command(home, *self.command)
        with suppress(subprocess.TimeoutExpired):
            command.wait(timeout=self.dice.uniform(self.least_s, self.most_s))
            return False
        run = run_folder(home)
        job = read_json(run / "started.json")
        with suppress(psutil.NoSuchProcess):
            if job is not None and is_alive(run) and self.dice.random() < 0.7:
                process = psutil.Process(int(str(job["pid"])))
                self.dice.choice([process, *process.children(recursive=True)]).kill()
        command.send_signal(self.dice.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGINT]))
        try:
            command.wait(timeout=_INTERRUPT_S)
        finally:
            command.kill()
        return True


def autofit_command(home: Path, *words: str, stdout: int | None = None) -> "subprocess.Popen[bytes]":
    with (home / "log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "autofit", *words, "--dir", str(home)],
            stdout=log if stdout is None else stdout, stderr=log, env=os.environ.copy(), cwd=home,
        )  # fmt: skip


def run_folder(home: Path) -> Path:
    """The folder of the full run, or of the newest of them."""
    started = sorted((home / "promoted").glob("*/started.json"), key=lambda path: path.stat().st_mtime)
    return started[-1].parent if started else next((home / "promoted").glob("*"), home / "promoted" / "none")


def _are_gone(home: Path) -> bool:
    """Whether no process names `home` any more, after a while."""
    deadline = time.monotonic() + _GONE_S
    while time.monotonic() < deadline:
        named = [p for p in psutil.process_iter(["cmdline"]) if str(home) in " ".join(p.info["cmdline"] or [])]
        if not named:
            return True
        time.sleep(0.2)
    return False
