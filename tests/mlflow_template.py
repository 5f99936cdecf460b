"""MLflow's empty database, made once in a process of tests and copied from then on: its schema takes a second or two.

Databases that are broken, older, or made by a process of its own (test_born_whole.py) are made by MLflow as ever.
"""

import os
import shutil
import tempfile
from pathlib import Path

from autofit.tracking import database
from autofit.tracking.follower import DATABASE

_make = database._make


def _copied(folder: Path, path: Path) -> None:
    if path.exists() and path.stat().st_size:
        _make(folder, path)
        return
    template = Path(tempfile.gettempdir()) / "mlflow-template" / str(os.getpid()) / DATABASE
    if not template.exists():
        template.parent.mkdir(parents=True)
        _make(template.parent, template)
    shutil.copyfile(template, path)  # `_follow_the_move` has its artifacts beside it


def install() -> None:
    """Let databases that are made in this process be copies."""
    database._make = _copied
