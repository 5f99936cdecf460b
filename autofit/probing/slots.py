"""Slots: at most one probe per GPU, and by default one on the CPU, across all searches of a user on a machine.

A slot is a locked file, so a killed holder frees it at once.
"""

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def slot(names: tuple[str, ...], *, abandoned: Callable[[], bool] = lambda: False) -> Iterator[str | None]:
    """Hold the first free slot of `names`; yields its name, or None if `abandoned` became true while waiting."""
    folder = Path(tempfile.gettempdir()) / f"autofit-slots-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    while not abandoned():
        for name in names:
            with (folder / name).open("w") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                yield name
                return
        time.sleep(0.1)
    yield None
