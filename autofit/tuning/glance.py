"""Names of studies and trials, looked up in a SQLite file at once: without the imports of a second that reading takes.

A file that cannot be read so, another program's study and a Postgres are left to `autofit.tuning.study`.
"""

import contextlib
import json
import sqlite3
from collections.abc import Sequence

from autofit.errors import ConfigError, nearest, option
from autofit.tuning.frontier import BEST, LEANEST
from autofit.tuning.storage import Database, check_there

NAMES = (BEST, LEANEST)  # of trials, beside their numbers
_WAIT_S = 0.1  # for a writer; whoever opens the database waits as long as it takes
_STUDIES = (
    "SELECT study_name, study_id FROM studies LEFT JOIN study_user_attributes AS kept USING (study_id) "
    "WHERE kept.key = 'used' ORDER BY kept.value_json"
)


def check_names(database: Database, study: str | None, trial: str | None = None, *, takes_points: bool = False) -> None:
    """Raise ConfigError where there is no file of studies, no study called so (None: the one used last), or no trial.

    `takes_points` is whether a point that is known by prediction only (p1) will do as well.
    """
    check_there(database)
    if database.url is not None or not database.path.is_file():
        return
    with contextlib.suppress(sqlite3.Error), contextlib.closing(_opened(database)) as file:
        found = dict(file.execute(_STUDIES))
        whole = len(found) == file.execute("SELECT count(*) FROM studies").fetchone()[0]
        if not found or not whole:  # others' are among them
            return
        if study is not None and study not in found:
            raise no_study(study, list(found), database)
        if trial is None or trial in NAMES:
            return
        number = found[study or list(found)[-1]]
        numbers = [str(n) for (n,) in file.execute("SELECT number FROM trials WHERE study_id = ?", (number,))]
        points = _points(file, number)
        if trial not in numbers and not (takes_points and trial in points):
            raise no_trial(trial, len(numbers), points)


def _opened(database: Database) -> sqlite3.Connection:
    return sqlite3.connect(f"{database.path.absolute().as_uri()}?mode=ro", uri=True, timeout=_WAIT_S)


def _points(file: sqlite3.Connection, study: int) -> list[str]:
    """The names of the points on the front of a study that no probe has reached."""
    asked = "SELECT value_json FROM study_user_attributes WHERE study_id = ? AND key = 'foreseen'"
    return [point["name"] for (text,) in file.execute(asked, (study,)) for point in json.loads(text)]


def no_study(name: str, names: Sequence[str], database: Database) -> ConfigError:
    """The error of a study that is not there."""
    known = ", ".join(names)
    return ConfigError(f"there is no study {name!r} in {database.home}{nearest(name, names)}; there are: {known}")


def no_trial(asked: str, count: int, points: Sequence[str] | None = None) -> ConfigError:
    """The error of a trial that a study of `count` trials does not have; `points` are known by prediction only."""
    now = "" if points is None else f" (now {', '.join(points) or 'none'})"
    point = f"; `autofit promote` probes a point of the front that no probe has reached{now}; then it has a number"
    return ConfigError(
        f"{option('trial')} must be {', '.join(f'`{name}`' for name in NAMES)} or the number of a trial of this "
        f"study (0 to {count - 1}); got {asked!r}{nearest(asked, list(NAMES))}{point if is_point(asked) else ''}"
    )


def is_point(name: str) -> bool:
    """Whether `name` is that of a point which is known by prediction only."""
    return name.startswith("p") and name[1:].isdecimal()
