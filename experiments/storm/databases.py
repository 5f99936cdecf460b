"""Kills of a Postgres that has the studies, and of searches in it: the server may be away, but nothing may be lost."""

import random
import signal
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

from postgres_server import Server, missing, server

from autofit.tuning.storage import VARIABLE, use_storage
from storm.inputs import Found
from storm.kills import END_S, driver_of, lost, said_by

_NAME = "kills of a Postgres"
_EACH = 8  # of one search, which is then left to end


def kill_postgres(folder: Path, *, kills: int, dice: random.Random, until: float) -> Found:
    """Searches whose Postgres is killed or stopped and comes back, or that are killed; none where Postgres lacks."""
    found = Found()
    if missing() is not None:
        return found
    with server() as postgres:
        while found.tried[_NAME] < kills and time.monotonic() < until:
            home = folder / f"postgres-{found.tried[_NAME]}"
            url = postgres.new_database(home.name)
            use_storage(home, url)
            done = list[str]()
            for _ in range(min(_EACH, kills - found.tried[_NAME])):
                found.tried[_NAME] += 1
                done.append(_kill_once(driver_of(home, **{VARIABLE: url}), postgres, dice))
            code = driver_of(home, **{VARIABLE: url}).wait(timeout=END_S)
            for what in [f"the last search ended with code {code}"] if code else lost(home):
                found.add_wrong(f"{_NAME}: {what}", f"{', '.join(done)}: {said_by(home).read_text()[-1500:]}")
    return found


def _kill_once(search: "subprocess.Popen[bytes]", postgres: Server, dice: random.Random) -> str:
    """Kill the server, the search or both at a random moment; what was done, in words."""
    time.sleep(dice.uniform(0.3, 5.0))
    victims = dice.choice(["server", "server", "search", "both", "stop"])
    with ExitStack() as later:
        if victims in ("server", "both"):
            postgres.kill()
            later.callback(postgres.start)
        elif victims == "stop":
            postgres.stop(dice.choice(["fast", "immediate"]))
            later.callback(postgres.start)
        if victims in ("search", "both"):
            search.send_signal(dice.choice([signal.SIGKILL, signal.SIGINT]))
        away_s = dice.uniform(0, 4.0)
        time.sleep(away_s)
    time.sleep(dice.uniform(0, 2.0))
    search.kill()
    search.wait(timeout=END_S)
    return f"{victims}, away for {away_s:.1f} s"
