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


def slot_names(device: str, count: int) -> tuple[str, ...]:
    """The slots of a device kind: `cpu-0`, or one for each GPU that this process may see."""
    if device == "cpu":
        return tuple(f"cpu-{i}" for i in range(count))
    visible = os.environ.get("AUTOFIT_GPUS") or os.environ.get("CUDA_VISIBLE_DEVICES") or ""
    return tuple(f"cuda-{name}" for name in visible.split(",") if name) or tuple(f"cuda-{i}" for i in range(count))


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
