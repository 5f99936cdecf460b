"""A word of progress from a phase that would be silent for long."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from autofit.units import format_seconds

EVERY_S = 20.0


@contextmanager
def still_at(what: str, say: Callable[[str], None]) -> Iterator[None]:
    """Context of a silent phase: says every 20 s that it is still at `what`, from a thread of its own."""
    ended, began = threading.Event(), time.monotonic()

    def wait() -> None:
        while not ended.wait(EVERY_S):
            say(f"still {what}, for {format_seconds(time.monotonic() - began)}")

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
