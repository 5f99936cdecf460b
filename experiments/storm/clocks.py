"""Clock steps (clock.c): the time of the day is set forth and back during searches and commands; nothing may be lost.

Files keep the times of the true clock, as on a file server whose clock is another one.
"""

import random
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from storm.forks import Forks, forking
from storm.inputs import Found
from storm.kills import END_S, driver_of, lost, said_by
from storm.preloaded import compiled, set_number

NAME = "clock steps"
_DAY_S = 86_400
_STEPS_S = (1, 30, 3600, _DAY_S, 400 * _DAY_S, 30 * 365 * _DAY_S)  # the last one: past 2038
_COMMANDS = (
    ("sync",), ("report", "--json"), ("report", "--html", "out.html"), ("studies",), ("monitor", "--once"), ("jobs",),
    ("promote", "0", "--write-only"), ("verify", "0"),
)  # fmt: skip
_END_S = 180.0


def step_clocks(folder: Path, *, steps: int, dice: random.Random, until: float) -> Found:
    """Searches of which each is killed once, and then commands on what they found; none without a C compiler."""
    found = Found()
    library = compiled("clock.c", folder) if steps else None
    if library is None:
        return found
    clock = _Clock(folder / "offset", dice)
    env = {"LD_PRELOAD": str(library), "CLOCK_OFFSET": str(clock.path)}
    with forking(env) as forks:
        while found.tried[NAME] < steps and time.monotonic() < until:
            home = folder / f"clock-{found.tried[NAME]}"
            before = len(clock.done)
            wrong = _searched(home, env, clock)
            if not wrong:
                wrong = _followed(forks, home, clock)
            found.tried[NAME] += len(clock.done) - before
            for what in wrong:
                found.add_wrong(f"{NAME}: {what}", (clock.done[before:], said_by(home).read_text()[-1500:]))
            shutil.rmtree(home, ignore_errors=True)
    return found


class _Clock:
    """The offset of the clock from the true one, in a file that the library reads; `done` has the seconds it had."""

    def __init__(self, path: Path, dice: random.Random) -> None:
        self.path, self._dice = path, dice
        self.done: list[int] = []
        self._set(0)

    def step(self) -> None:
        """Set the clock to another time, which may be that of a machine whose battery is empty."""
        away_s = self._dice.choice(_STEPS_S) * self._dice.choice((1, -1))
        empty_s = 2 * _DAY_S - int(time.time())
        self._set(max(away_s, empty_s) if self._dice.random() < 0.9 else empty_s)

    def _set(self, offset_s: int) -> None:
        self.done.append(offset_s)
        set_number(self.path, offset_s * 10**9)

    def steps_until(self, process: "subprocess.Popen[bytes]", most_s: float) -> None:
        """Step at random moments until the process ends, or for so many seconds."""
        deadline = time.monotonic() + most_s
        while time.monotonic() < deadline:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=min(self._dice.uniform(0.2, 3.0), max(0.0, deadline - time.monotonic())))
                return
            self.step()


def _searched(home: Path, env: Mapping[str, str], clock: _Clock) -> list[str]:
    """What is wrong with a search that is killed, and called again, under such a clock."""
    search = driver_of(home, **env)
    clock.steps_until(search, 8.0)
    search.send_signal(signal.SIGKILL)
    search.wait()
    search = driver_of(home, **env)
    clock.steps_until(search, END_S)
    search.kill()
    code = search.wait()
    return [f"the last search ended with code {code}"] if code else lost(home)


def _followed(forks: Forks, home: Path, clock: _Clock) -> list[str]:
    """What is wrong with the commands that follow a search."""
    wrong = []
    for words in _COMMANDS:
        clock.step()
        code, said = forks.call(
            [*words, "--dir", str(home)], home, cache=home.parent / "cache", most_s=_END_S
        )  # fmt: skip
        if code != 0 or "Traceback" in said:
            wrong.append(f"{words[0]} ended with code {code}: {said[-600:]}")
    return wrong
