"""The attack on autofit: `nox -s storm -- [--inputs N] [--torn N] [--kills N] [--seed S] [--minutes M]`.

`... --on --seed S --minutes M` goes on towards the goals of issue 37 instead, over days: see storm.results.
`... --again` tries each part once more in which something was mishandled.

Hostile input, torn files and kills at random moments, and afterwards the question whether anything was mishandled:
a traceback, a hang, a flood, an error that is not one line, a trial or step lost or done twice. Exit code 1 if so.
"""

import argparse
import contextlib
import functools
import io
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

HERE = Path(__file__).parent
for helpers in (HERE.parents[1] / "tests", HERE.parent):
    sys.path.insert(0, str(helpers))
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE.parents[1] / "tests"), str(HERE.parent), str(HERE.parents[1])])

from storm.clocks import NAME as CLOCKS  # noqa: E402
from storm.clocks import step_clocks  # noqa: E402
from storm.command_kills import NAME as COMMAND_KILLS  # noqa: E402
from storm.command_kills import kill_commands  # noqa: E402
from storm.commands import kill_mirrors, kill_servers  # noqa: E402
from storm.databases import kill_postgres  # noqa: E402
from storm.forks import Forks, forking  # noqa: E402
from storm.full_runs import kill_runs, tear_checkpoints  # noqa: E402
from storm.inputs import Found, Reader, attack, quick_folder  # noqa: E402
from storm.kills import kill_creations, kill_searches  # noqa: E402
from storm.late_files import NAME as LATE_FILES  # noqa: E402
from storm.late_files import search_late  # noqa: E402
from storm.neighbours import NAME, meet_neighbours  # noqa: E402
from storm.pages import NAME as PAGES  # noqa: E402
from storm.pages import ask_pages  # noqa: E402
from storm.pipelines import kill_pipelines  # noqa: E402
from storm.places import NAME as PLACES  # noqa: E402
from storm.places import call_from_places  # noqa: E402
from storm.quota import NAME as QUOTAS  # noqa: E402
from storm.quota import reach_quotas  # noqa: E402
from storm.readers import READERS  # noqa: E402
from storm.results import FILE, Result, Results, commit, today  # noqa: E402
from storm.torn import tear_files  # noqa: E402
from storm.whole import NAME as WHOLE  # noqa: E402
from storm.whole import attack_commands  # noqa: E402

KILLS = {
    "kills of creations": kill_creations, "kills of searches": kill_searches, "kills of mirrors": kill_mirrors,
    "kills of servers": kill_servers, "kills of full runs": kill_runs, "kills of pipelines": kill_pipelines,
    "kills of a Postgres": kill_postgres,
}  # fmt: skip
_ONCE = {
    WHOLE: 400,
    PLACES: 300,
    COMMAND_KILLS: 300,
    "torn files": 30,
    "torn checkpoints": 4,
    PAGES: 100,
    QUOTAS: 6,
    CLOCKS: 40,
    LATE_FILES: 3,
    "kills of pipelines": 4,
}  # tried before their results are written down
_STAY = (
    WHOLE,
    COMMAND_KILLS,
    PLACES,
    "torn files",
    "kills of pipelines",
)  # what they made is attacked again by the next part
_KILLS_ONCE = 8
Attack = Callable[[Path, int, int, float], Found]  # (folder, how many, number of the first, until)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=2600, help="hostile inputs, the same number for each reader")
    parser.add_argument("--torn", type=int, default=20, help="torn files, a fifth of them in checkpoints")
    parser.add_argument("--kills", type=int, default=20, help="kills, as many of each kind")
    parser.add_argument("--meetings", type=int, default=1, help="searches beside a hostile user; only root can try it")
    parser.add_argument("--calls", type=int, default=200, help="commands from other folders, as other users; by root")
    parser.add_argument("--commands", type=int, default=200, help="whole commands with hostile options and files")
    parser.add_argument("--questions", type=int, default=50, help="requests to the page of `autofit web`")
    parser.add_argument("--quotas", type=int, default=4, help="searches and commands that reach a quota of the disk")
    parser.add_argument("--clocks", type=int, default=20, help="steps of the clock during searches and commands")
    parser.add_argument("--late", type=int, default=1, help="searches on Slurm from where files are seen late")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60.0, help="after which nothing new is begun")
    parser.add_argument("--only", action="append", metavar="NAME", help="what is attacked, as the storm prints it")
    parser.add_argument(
        "--on", action="store_true",
        help=f"go on towards the goals, part by part, from where {FILE.name} ends, and add to it",
    )  # fmt: skip
    parser.add_argument("--again", action="store_true", help="try once more each part with something mishandled")
    parser.add_argument(
        "--folder", type=Path, help="what the attacks are on, kept for the next storm; without: a new one"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell puts in the background ignores Ctrl-C
    until = time.monotonic() + 60 * options.minutes
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(
            tempfile.TemporaryDirectory(prefix="storm-", dir=quick_folder(), ignore_cleanup_errors=True)
        ))  # fmt: skip
        forks = functools.cache(lambda: stack.enter_context(forking()))
        os.environ |= {"AUTOFIT_CACHE": str(folder / "cache"), "MLFLOW_TRACKING_URI": ""}
        os.environ.pop("MLFLOW_TRACKING_URI")
        if options.again:
            return _try_again(lambda seed: _attacks(seed, forks), folder, until)
        every = _attacks(options.seed, forks)
        if options.on:
            return _go_on({name: every[name] for name in options.only or (*_ONCE, *KILLS)}, folder, options.seed, until)
        total = Found()
        for name in options.only or every:
            total += _told(partial(every[name], folder, _count(name, options), 0, until))
    print(f"{total.tried.total():,} attacks, seed {options.seed}: {total.times_wrong.total()} mishandled")
    return 1 if total.wrong else 0


def _attacks(seed: int, forks: Callable[[], Forks]) -> dict[str, Attack]:
    """All attacks by name; `forks` is called by those that need it.

    The same seed and number give the same attack, as far as processes allow.
    """

    def dice(name: str, first: int) -> random.Random:
        return random.Random(f"{seed}:{name}:{first}")

    def reads(reader: Reader) -> Attack:
        return lambda folder, count, first, until: attack(reader, folder, inputs=count, seed=seed + first, until=until)

    def tears(name: str, tear: Callable[..., Found]) -> Attack:
        return lambda folder, count, first, until: tear(folder, files=count, dice=dice(name, first), until=until)

    def kills(name: str, kill: Callable[..., Found]) -> Attack:
        return lambda folder, count, first, until: kill(folder, kills=count, dice=dice(name, first), until=until)

    return {
        **{reader.name: reads(reader) for reader in READERS},
        "torn files": tears("torn files", tear_files),
        "torn checkpoints": tears("torn checkpoints", tear_checkpoints),
        **{name: kills(name, kill) for name, kill in KILLS.items()},
        WHOLE: lambda folder, count, first, until: attack_commands(
            folder, forks(), inputs=count, seed=seed, first=first, until=until
        ),
        COMMAND_KILLS: lambda folder, count, first, until: kill_commands(
            folder, forks(), kills=count, dice=dice(COMMAND_KILLS, first), until=until
        ),
        PLACES: lambda folder, count, first, until: call_from_places(
            folder, calls=count, first=first, dice=random.Random(seed), until=until
        ),
        PAGES: lambda folder, count, first, until: ask_pages(
            folder, questions=count, dice=dice(PAGES, first), until=until
        ),
        QUOTAS: lambda folder, count, first, until: reach_quotas(
            folder, quotas=count, dice=dice(QUOTAS, first), until=until
        ),
        CLOCKS: lambda folder, count, first, until: step_clocks(
            folder, steps=count, dice=dice(CLOCKS, first), until=until
        ),
        LATE_FILES: lambda folder, count, first, until: search_late(
            folder, searches=count, dice=dice(LATE_FILES, first), until=until
        ),
        NAME: lambda folder, count, first, until: meet_neighbours(
            folder, meetings=count, dice=dice(NAME, first), until=until
        ),
    }


def _count(name: str, options: argparse.Namespace) -> int:
    """How many of that name the options ask for."""
    if name in (PLACES, NAME) and os.geteuid() != 0:
        return 0
    known = {
        WHOLE: options.commands, COMMAND_KILLS: options.kills, PLACES: options.calls, NAME: options.meetings,
        PAGES: options.questions, QUOTAS: options.quotas, CLOCKS: options.clocks, LATE_FILES: options.late,
        "torn files": options.torn - options.torn // 5, "torn checkpoints": options.torn // 5,
        **dict.fromkeys(KILLS, options.kills // len(KILLS)),
    }  # fmt: skip
    return int(known.get(name, options.inputs // len(READERS)))


def _go_on(attacks: Mapping[str, Attack], folder: Path, seed: int, until: float) -> int:
    """Attack part by part, each in turn, and add what each found to the results; 1 where anything was mishandled."""
    results, wrong, part = Results(), 0, 0
    while time.monotonic() < until:
        name = list(attacks)[part % len(attacks)]
        part += 1
        planned = Result(kind=name, seed=seed, first=results.next_of(name, seed), tried=_ONCE.get(name, _KILLS_ONCE))
        wrong += _try_part(planned, attacks[name], folder, until)
    return 1 if wrong else 0


def _try_again(attacks: Callable[[int], Mapping[str, Attack]], folder: Path, until: float) -> int:
    """Attack the parts in which something was mishandled; 1 where anything is now."""
    parts = [replace(one, is_again=True) for one in Results().mishandled()]
    return 1 if sum(_try_part(one, attacks(one.seed)[one.kind], folder, until) for one in parts) else 0


def _try_part(part: Result, attack: Attack, folder: Path, until: float) -> int:
    """Attack as the part says and add what was found to the results; how much of it was mishandled."""
    stays = part.kind in _STAY
    own = folder / ("kept" if stays else "part")
    if not stays:  # what a storm that was killed left
        shutil.rmtree(own, ignore_errors=True)
    own.mkdir(parents=True, exist_ok=True)
    began, at = time.monotonic(), commit()
    found = _told(partial(attack, own, part.tried, part.first, until))
    if found.tried.total():  # what is made first may take all of the time
        Results().add(replace(
            part, tried=found.tried.total(), refused=found.refused, wrong=dict(found.times_wrong), smallest=found.wrong,
            seconds=round(time.monotonic() - began, 1), slowest_s=round(found.slowest_s, 1), date=today(),
            commit=at,
        ))  # fmt: skip
    if not stays:
        shutil.rmtree(own, ignore_errors=True)
    return found.times_wrong.total()


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
