"""Kills of every command at random moments, each a fork of one warm process: what a study has must stay.

Commands that follow a search are killed up to four times on a copy of a small study, and then left to end, which must
look as if they had never been disturbed; only the candidates of a search may be others, of which none may come twice.
A `search` is simulated from kept traces.
"""

import json
import random
import shutil
import signal
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from storm.forks import Forks, Signalled
from storm.inputs import Found
from storm.whole import made_template

NAME = "kills of commands"
_STUDY = ("--dir", "studies")
_SEARCH = ("search", "sft/run.yaml", "--gpu", "t4", "--no-confirm", "--no-advice", "--no-mlflow")
_COMMANDS: tuple[tuple[str, ...], ...] = (
    (*_SEARCH, "--trials", "4", "--dir", "new"), (*_SEARCH, "--trials", "4", "--dir", "new"),
    ("sync", *_STUDY), ("sync", "--rebuild", *_STUDY), ("report", "--json", *_STUDY),
    ("report", "--html", "out.html", *_STUDY), ("studies", *_STUDY), ("promote", "0", "--write-only", *_STUDY),
    ("promote", "best", "--write-only", "--json", *_STUDY), ("export", "0", "--to", "trl", "--out", "out", *_STUDY),
    ("verify", "0", *_STUDY), ("monitor", "--once", *_STUDY), ("jobs", *_STUDY), ("init", "grpo"),
    ("estimate", "sft/run.yaml", "--gpu", "t4", "--no-advice", "--json"),
    ("check", "sft/run.yaml", "--gpu", "t4", "--advice-time", "0s"),
)  # fmt: skip
_KILLS = (signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGINT, signal.SIGTERM)
_AT_ONCE = 4  # kills before the command is left to end
_END_S = 120.0
_TABLES = ("trials", "trial_params", "trial_values", "trial_user_attributes", "study_user_attributes")
_TRIED = """
    SELECT group_concat(param_name || '=' || param_value) FROM
    (SELECT * FROM trial_params ORDER BY trial_id, param_name) GROUP BY trial_id
"""
State = dict[str, object]


@dataclass(slots=True)
class _Undisturbed:
    """How a command ends that nobody kills, and how long it takes: the longest of those seen so far."""

    code: int
    state: State
    took_s: float = field(default=0.0)


def kill_commands(folder: Path, forks: Forks, *, kills: int, dice: random.Random, until: float) -> Found:
    """`kills` commands killed between their start and their end; one that has ended before is not counted."""
    found = Found()
    template, ends = made_template(folder), dict[tuple[str, ...], _Undisturbed]()
    while found.tried[NAME] < kills and time.monotonic() < until:
        words = dice.choice(_COMMANDS)
        home = folder / "killed"
        if words not in ends:
            _copy(template, home)
            _call(forks, words, home)  # the first one may trace, or import
            _copy(template, home)
            code, _, took_s = _call(forks, words, home)
            ends[words] = _Undisturbed(code, _state(home), took_s)
        _copy(template, home)
        whole, done = ends[words], list[str]()
        rows = _rows(home / "studies/studies.db")
        for _ in range(min(_AT_ONCE, kills - found.tried[NAME])):
            kill = Signalled(number=dice.choice(_KILLS), after_s=dice.uniform(0.0, whole.took_s))
            code, said, took_s = _call(forks, words, home, kill)
            if took_s < kill.after_s:
                whole.took_s = 0.5 * (whole.took_s + took_s)
                break
            found.tried[NAME] += 1
            done.append(f"{signal.Signals(kill.number).name} after {kill.after_s:.2f} s")
            for what in _of_a_killed(kill.number, code, said, home, rows):
                found.add_wrong(f"{NAME}: {words[0]}: {what}", (words, done, said[-1000:]))
        code, said, took_s = _call(forks, words, home)
        found.slowest_s = max(found.slowest_s, took_s)
        for what in _of_the_last(words, whole, code, said, home, rows):
            found.add_wrong(f"{NAME}: {words[0]}: {what}", (words, done, said[-1000:]))
    return found


def _copy(template: Path, home: Path) -> None:
    shutil.rmtree(home, ignore_errors=True)
    shutil.copytree(template, home, symlinks=True)


def _call(
    forks: Forks, words: Sequence[str], home: Path, signalled: Signalled | None = None
) -> tuple[int, str, float]:  # fmt: skip
    """(exit code, output, seconds)"""
    began = time.monotonic()
    code, said = forks.call(words, home, cache=home.parent / "cache", most_s=_END_S, signalled=signalled)
    return code, said, time.monotonic() - began


def _of_a_killed(number: int, code: int, said: str, home: Path, rows: set[str]) -> list[str]:
    """What must not be after a command got the signal."""
    checks = {
        "a traceback": "Traceback (most recent" in said,
        f"exit code {code}": code not in (0, 1, 2, 130, -number),
        "it did not end": code in (-1, -2) and number != -code,
        **_of_files(home, rows),
    }
    return [what for what, wrong in checks.items() if wrong]


def _of_the_last(
    words: Sequence[str], whole: _Undisturbed, code: int, said: str, home: Path, rows: set[str]
) -> list[str]:
    """What must not be once the command was left to end."""
    state = _state(home)
    differs = sorted(name for name in whole.state.keys() | state.keys() if whole.state.get(name) != state.get(name))
    checks = {
        "a traceback at the end": "Traceback (most recent" in said,
        f"the last one ended with code {code}, and undisturbed {whole.code}": code != whole.code
        and not (words[0] == "init" and code == 2),  # it had written the file
        f"other results than undisturbed: {', '.join(differs)}": bool(differs),
        **_of_files(home, rows),
    }
    return [what for what, wrong in checks.items() if wrong]


def _of_files(home: Path, rows: set[str]) -> dict[str, bool]:
    databases = [path for path in home.rglob("*.db") if path.stat().st_size]
    return {
        "a broken database": not all(_is_whole(path) for path in databases),
        "a file of which a part is missing": not all(_is_read(path) for path in home.rglob("*")),
        "something of the study is lost": not rows <= _rows(home / "studies/studies.db"),
    }


def _is_whole(database: Path) -> bool:
    with closing(sqlite3.connect(database)) as connection:
        return bool(connection.execute("PRAGMA integrity_check").fetchone() == ("ok",))


def _is_read(path: Path) -> bool:
    if path.suffix not in (".json", ".yaml") or not path.is_file() or path.parent.name == "matplotlib":
        return True  # matplotlib makes its list of fonts anew
    try:
        return bool((json.loads if path.suffix == ".json" else yaml.safe_load)(path.read_text()) is not None)
    except (ValueError, yaml.YAMLError):
        return False


def _rows(database: Path) -> set[str]:
    """The rows of a study, without the times."""
    if not database.exists():
        return set()
    with closing(sqlite3.connect(database)) as connection:
        connection.row_factory = sqlite3.Row
        return {
            f"{table}: {[row[name] for name in row.keys() if not name.startswith('datetime')]}"  # noqa: SIM118
            for table in _TABLES for row in connection.execute(f"SELECT * FROM {table}")
        }  # fmt: skip


def _state(home: Path) -> State:
    """What a command left: the files that are for the user, and the trials of each study and runs of each mirror."""
    found: State = {
        str(path.relative_to(home)): path.read_text()
        for path in home.rglob("*.yaml") if path.is_file()
    }  # fmt: skip
    for database in home.rglob("studies.db"):
        with closing(sqlite3.connect(database)) as connection:
            states = connection.execute("SELECT number, state FROM trials ORDER BY number").fetchall()
            tried = connection.execute(_TRIED).fetchall()
        found[str(database.relative_to(home))] = (states, "twice" if len(set(tried)) < len(tried) else "once")
    for database in home.rglob("mlflow.db"):
        with closing(sqlite3.connect(database)) as connection:
            runs = connection.execute("SELECT name, status FROM runs WHERE lifecycle_stage = 'active'").fetchall()
        found[str(database.relative_to(home))] = sorted(runs)
    return found
