"""Work that ends early, with what it has: after its time, or with Ctrl-C."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from enum import StrEnum
from typing import TypeVar

T = TypeVar("T")


class Ending(StrEnum):
    """What ended a piece of work before it was done."""

    TIME = "time"
    INTERRUPT = "interrupt"


def within(limit_s: float, work: Callable[[], T], *, cancel: Callable[[Ending], None]) -> tuple[T, Ending | None]:
    """What `work` returns, and what ended it: `cancel` is called after `limit_s` seconds or at Ctrl-C.

    `work` runs in a thread of its own, and must return soon after `cancel`, with what it has.
    """
    ending: Ending | None = None
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(work)
        try:
            if not wait([made], timeout=limit_s).done:
                ending = Ending.TIME
        except KeyboardInterrupt:
            ending = Ending.INTERRUPT
        if ending is not None:
            cancel(ending)
        return made.result(), ending
