"""Kills at random moments of the creation of databases and of searches, and whether anything was lost or done twice."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import optuna
import psutil
from optuna.trial import TrialState

from autofit.probing.launch import is_alive
from autofit.tuning.study import load_study
from storm.inputs import Found

TESTS = Path(__file__).parents[2] / "tests"
TRIALS = 12
END_S = 300.0


def kill_searches(folder: Path, *, kills: int, dice: random.Random, until: float) -> Found:
    """Searches of 12 trials that are killed, or whose jobs are, 8 times each and then left to end."""
    found = Found()
    while found.tried["kills of searches"] < kills and time.monotonic() < until:
        home = folder / f"search-{found.tried['kills of searches']}"
        for _ in range(min(8, kills - found.tried["kills of searches"])):
            found.tried["kills of searches"] += 1
            _kill_once(home, dice)
        code = driver_of(home).wait(timeout=END_S)
        for what in (*([f"the last search ended with code {code}"] if code else []), *lost(home)):
            found.add_wrong(f"kills of searches: {what}", home.name)
    return found


def kill_creations(folder: Path, *, kills: int, dice: random.Random, until: float) -> Found:
    """First searches that are killed while they make studies.db and mlflow.db; the next one must find or make them."""
    found = Found()
    while found.tried["kills of creations"] < kills and time.monotonic() < until:
        home = folder / f"birth-{found.tried['kills of creations']}"
        found.tried["kills of creations"] += 4
        told = subprocess.run(
            [sys.executable, TESTS / "birth_driver.py", "killed", home, "4"], capture_output=True, text=True,
            timeout=4 * END_S,  # 300 s passed at a load of 11: MLflow's tables are made five times
        )  # fmt: skip
        if told.returncode or '"codes": [0, 0, 0, 0, 0]' not in told.stdout or "broken" in told.stdout:
            found.add_wrong(f"kills of creations: code {told.returncode}", told.stderr[-500:] + told.stdout)
    return found


def _kill_once(home: Path, dice: random.Random) -> None:
    driver = driver_of(home)
    time.sleep(dice.uniform(0.3, 4.0))
    victim = dice.choice(["driver", "driver", "interrupt", "jobs"])
    if victim == "jobs":
        for job in psutil.process_iter(["cmdline"]):
            words = " ".join(job.info["cmdline"] or [])
            if str(home) in words and "submitit" in words:
                job.kill()
    driver.send_signal(signal.SIGINT if victim == "interrupt" else signal.SIGKILL)
    driver.wait(timeout=END_S)


def driver_of(home: Path, **env: str) -> "subprocess.Popen[bytes]":
    """A search of 12 trials in `home` at work; what it says is in the file beside `home`."""
    command = [sys.executable, str(TESTS / "search_driver.py"), str(home), str(TRIALS)]
    with said_by(home).open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **env})


def said_by(home: Path) -> Path:
    """The file of what the searches in `home` said."""
    return home.with_name(f"{home.name}.log")


def lost(home: Path) -> list[str]:
    """What is wrong with the study in `home`, a phrase each."""
    trials = load_study(home, "law").trials
    params = Counter(tuple(sorted(t.params.items(), key=str)) for t in trials)
    checks = {
        "not 12 trials": len(trials) != TRIALS,
        "a trial that did not end": not all(t.state.is_finished() for t in trials),
        "a trial without an answer": any(t.state is TrialState.COMPLETE and not _answered(t) for t in trials),
        "a candidate that was tried twice": max(params.values()) > 1,
        "a probe that still runs": any(is_alive(probe) for probe in (home / "probes" / "law").iterdir()),
    }
    return [what for what, wrong in checks.items() if wrong]


def _answered(trial: optuna.trial.FrozenTrial) -> bool:
    return isinstance(trial.user_attrs.get("result"), dict)
