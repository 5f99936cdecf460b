"""Files of this machine that a recipe may name: all that its user may read; of a stranger's, those of one folder."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_folder: str | None = None  # of the process, whose threads read too


@contextmanager
def only_below(folder: Path) -> Iterator[None]:
    """Context in which no file that a recipe names is read, unless it is in `folder` or below."""
    global _folder
    before, _folder = _folder, os.path.abspath(folder)
    try:
        yield
    finally:
        _folder = before


def is_open() -> bool:
    """Whether a recipe may name any file."""
    return _folder is None


def may_read(path: str | os.PathLike[str]) -> bool:
    """Whether a recipe may name `path`. Looks at no file."""
    return _folder is None or Path(os.path.abspath(path)).is_relative_to(_folder)
