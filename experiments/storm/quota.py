"""A quota that is reached at a random byte (quota.c): a command ends in words then, and goes on once it is lifted."""

import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

from search_driver import main as drive

from storm.inputs import Found
from storm.kills import END_S, driver_of, lost, said_by
from storm.preloaded import compiled, set_number

NAME = "quotas"
_COMMANDS = (
    ("sync",), ("sync", "--rebuild"), ("promote", "0", "--write-only"), ("verify", "0"), ("studies",),
    ("report", "--html", "out.html"), ("monitor", "--once"), ("init", "grpo"),
)  # fmt: skip
_PLENTY = 2**40
_END_S = 180.0


def reach_quotas(folder: Path, *, quotas: int, dice: random.Random, until: float) -> Found:
    """Searches and commands on a study of 2 trials, each below a quota of its own; none without a C compiler."""
    found = Found()
    library = compiled("quota.c", folder) if quotas else None
    if library is None:
        return found
    whole = folder / "to-write"
    drive(whole, 2, 0)
    while found.tried[NAME] < quotas and time.monotonic() < until:
        home = folder / f"quota-{found.tried[NAME]}"
        found.tried[NAME] += 1
        searches = dice.random() < 0.4
        command = ("search",) if searches else dice.choice(_COMMANDS)
        (home if searches else shutil.copytree(whole, home)).mkdir(exist_ok=True)
        quota = _Quota(library, home, int(10 ** dice.uniform(1, 6.3)))
        for what in _searches(quota) if searches else _ends(quota, command, found):
            found.add_wrong(f"{NAME}: {command[0]}: {what}", (quota.most, command))
        shutil.rmtree(home, ignore_errors=True)
    return found


class _Quota:
    """A quota of `most` bytes on the folder `home`."""

    def __init__(self, library: Path, home: Path, most: int) -> None:
        self.home, self.most = home, most
        self._left = home.with_suffix(".left")
        self.set(most)
        self.env = {"LD_PRELOAD": str(library), "QUOTA_FOLDER": f"{home}/", "QUOTA_LEFT": str(self._left)}

    def set(self, most: int) -> None:
        set_number(self._left, most)


def _searches(quota: _Quota) -> list[str]:
    """What is wrong with a search that reaches its quota, and is called again without it."""
    search = driver_of(quota.home, **quota.env)
    try:
        search.wait(timeout=_END_S)
    except subprocess.TimeoutExpired:
        search.kill()
        return ["it did not end"]
    quota.set(_PLENTY)
    code = driver_of(quota.home, **quota.env).wait(timeout=END_S)
    if code:
        return [f"it ended with code {code} once the quota was lifted: {said_by(quota.home).read_text()[-600:]}"]
    return lost(quota.home)


def _ends(quota: _Quota, command: tuple[str, ...], found: Found) -> list[str]:
    """What is wrong with how the command ends, with its quota and without."""
    done = _run(quota, command)
    errors = [line for line in done.stderr.splitlines() if line.startswith("autofit: ")]
    found.refused += done.returncode == 2
    quota.set(_PLENTY)
    again = _run(quota, command)
    checks = {
        "a traceback": "Traceback" in done.stderr + again.stderr,
        f"exit code {done.returncode}": done.returncode not in (0, 2),
        f"not one line: {done.stderr[-600:]}": done.returncode == 2 and len(errors) != 1,
        f"it does not name the quota: {errors}": done.returncode == 2 and not _names_it(done.stderr),
        f"it ended with code {again.returncode} once the quota was lifted: {again.stderr[-600:]}": again.returncode
        != 0,
    }
    return [what for what, wrong in checks.items() if wrong]


def _names_it(text: str) -> bool:
    """Whether the words name what failed. SQLite's own, for an error that it does not know, are those of a disk."""
    return "quota" in text or "disk I/O error" in text


def _run(quota: _Quota, command: tuple[str, ...]) -> "subprocess.CompletedProcess[str]":
    own = [] if command[0] == "init" else ["--dir", str(quota.home)]
    out = ["--out", str(quota.home / f"{time.monotonic_ns()}.yaml")] if command[0] == "init" else []
    return subprocess.run(
        [sys.executable, "-m", "autofit", *command, *own, *out], env={**os.environ, **quota.env}, cwd=quota.home,
        capture_output=True, text=True, timeout=_END_S, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
