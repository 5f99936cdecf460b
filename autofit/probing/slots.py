"""Slots: at most one probe a GPU, and one on the CPU by default, over all searches of a user on a machine.

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
    """Hold the first of the slots `names` that is free, waiting for one; None when `abandoned` while waiting."""
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
