"""Optuna's empty database, made once in a process of tests and copied from then on: its tables take 0.2 s.

A database that a process of its own makes (test_born_whole.py) is made by Optuna as ever.
"""

import os
import shutil
import tempfile
from pathlib import Path
from unittest import mock

from optuna.storages import RDBStorage

from autofit.tuning import study

_make = study._make
_head = RDBStorage.get_head_version
_heads: list[str] = []


def _copied(path: Path) -> None:
    template = Path(tempfile.gettempdir()) / "optuna-template" / str(os.getpid()) / path.name
    if not template.exists():
        template.parent.mkdir(parents=True, exist_ok=True)
        _make(template)
    shutil.copyfile(template, path)


def _head_once(storage: RDBStorage) -> str:
    if not _heads:
        _heads.append(_head(storage))
    return _heads[0]


def install() -> None:
    """Let studies of this process begin with a copy, and the versions of its tables be read from its files once."""
    study._make = _copied
    mock.patch.object(RDBStorage, "get_head_version", _head_once).start()
