"""The attack on autofit: `nox -s storm -- [--inputs N] [--torn N] [--kills N] [--seed S] [--minutes M]`.

Hostile input, torn files and kills at random moments, and afterwards the question whether anything was mishandled:
a traceback, a hang, a flood, an error that is not one line, a trial or step lost or done twice. Exit code 1 if so.
"""

import argparse
import contextlib
import io
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

HERE = Path(__file__).parent
for helpers in (HERE.parents[1] / "tests", HERE.parent):
    sys.path.insert(0, str(helpers))
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE.parents[1] / "tests"), str(HERE.parent), str(HERE.parents[1])])

from storm.commands import kill_mirrors, kill_servers  # noqa: E402
from storm.full_runs import kill_runs, tear_checkpoints  # noqa: E402
from storm.inputs import Found, Reader, attack  # noqa: E402
from storm.kills import kill_creations, kill_searches  # noqa: E402
from storm.neighbours import NAME, meet_neighbours  # noqa: E402
from storm.places import NAME as PLACES  # noqa: E402
from storm.places import call_from_places  # noqa: E402
from storm.readers import READERS  # noqa: E402
from storm.torn import tear_files  # noqa: E402
from storm.whole import NAME as WHOLE  # noqa: E402
from storm.whole import Ledger, attack_commands  # noqa: E402

KILLS = {
    "kills of creations": kill_creations, "kills of searches": kill_searches, "kills of mirrors": kill_mirrors,
    "kills of servers": kill_servers, "kills of full runs": kill_runs,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=2600, help="hostile inputs, the same number for each reader")
    parser.add_argument("--torn", type=int, default=20, help="torn files, a fifth of them in checkpoints")
    parser.add_argument("--kills", type=int, default=20, help="kills, as many of each kind")
    parser.add_argument("--meetings", type=int, default=1, help="searches beside a hostile user; only root can try it")
    parser.add_argument("--calls", type=int, default=200, help="commands from other folders, as other users; by root")
    parser.add_argument("--commands", type=int, default=200, help="whole commands with hostile options and files")
    parser.add_argument(
        "--ledger", type=Path, help="file with the number of commands tried by seed; goes on from there"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60.0, help="after which nothing new is begun")
    parser.add_argument("--only", action="append", metavar="NAME", help="what is attacked, as the storm prints it")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell puts in the background ignores Ctrl-C
    until = time.monotonic() + 60 * options.minutes
    dice = random.Random(options.seed)
    total = Found()
    with tempfile.TemporaryDirectory(prefix="storm-", ignore_cleanup_errors=True) as home:
        folder = Path(home)
        os.environ |= {"AUTOFIT_CACHE": str(folder / "cache"), "MLFLOW_TRACKING_URI": ""}
        os.environ.pop("MLFLOW_TRACKING_URI")
        chances: dict[str, Callable[..., Found]] = {r.name: partial(_attack, r, options) for r in READERS} | {
            "torn files": partial(tear_files, files=options.torn - options.torn // 5, dice=dice),
            "torn checkpoints": partial(tear_checkpoints, files=options.torn // 5, dice=dice),
            **{name: partial(kill, kills=options.kills // len(KILLS), dice=dice) for name, kill in KILLS.items()},
            WHOLE: partial(
                attack_commands,
                inputs=options.commands,
                seed=options.seed,
                ledger=None if options.ledger is None else Ledger(options.ledger.resolve()),
            ),
            PLACES: partial(call_from_places, calls=options.calls if os.geteuid() == 0 else 0, dice=dice),
            NAME: partial(meet_neighbours, meetings=options.meetings if os.geteuid() == 0 else 0, dice=dice),
        }
        for name in options.only or chances:
            total += _told(partial(chances[name], folder, until=until))
    print(f"{total.tried.total():,} attacks, seed {options.seed}: {total.times_wrong.total()} mishandled")
    return 1 if total.wrong else 0


def _attack(reader: Reader, options: argparse.Namespace, folder: Path, *, until: float) -> Found:
    return attack(reader, folder, inputs=options.inputs // len(READERS), seed=options.seed, until=until)


def _told(attacks: Callable[[], Found]) -> Found:
    """What the attacks found, printed. What autofit says meanwhile is not shown."""
    began = time.monotonic()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        found = attacks()
    for name, tried in found.tried.items():
        print(f"{name}: {tried:,} tried, {found.refused:,} refused in a line, slowest {found.slowest_s:.1f} s, "
              f"{time.monotonic() - began:.0f} s in all", flush=True)  # fmt: skip
    for what, given in sorted(found.wrong.items()):
        print(f"  MISHANDLED {found.times_wrong[what]}x: {what}\n    {given}", flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
