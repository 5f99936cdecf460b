"""What the page's server gives to one address and to all, and how fast one address may ask."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

_MOST_ADDRESSES = 4096  # that are remembered; the one heard of longest ago is forgotten


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of a server. The seconds are of one answer, from its start."""

    at_once: int = 1  # answers that are computed at the same time
    waiting: int = 16  # that wait in line
    of_address: int = 2  # computed or in line for one address
    a_minute: int = 20  # questions of one address
    verdict_s: float = 60.0
    advice_s: float = 30.0
    cards_s: float = 180.0
    memory_bytes: int = 6 << 30  # data of one process of the simulation
    body_bytes: int = 256 << 10
    connections: int = 64
    request_s: float = 10.0  # for a whole request to arrive


ALONE = Limits(
    memory_bytes=12 << 30, of_address=4, a_minute=120, verdict_s=300.0, advice_s=60.0, cards_s=900.0
)  # on 127.0.0.1
PUBLIC = Limits()


@dataclass(slots=True)
class Rate:
    """Questions of each address in a minute: a bucket that fills up again at an even pace."""

    a_minute: int
    clock: Callable[[], float] = time.monotonic
    _left: OrderedDict[str, tuple[float, float]] = field(default_factory=OrderedDict)  # {address: (questions, when)}
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def wait_s(self, address: str) -> float:
        """0 and one question less for `address`; or the seconds after which it may ask again."""
        now, a_second = self.clock(), self.a_minute / 60
        with self._lock:
            left, when = self._left.pop(address, (float(self.a_minute), now))
            left = min(float(self.a_minute), left + (now - when) * a_second)
            allowed = left >= 1
            self._left[address] = (left - 1 if allowed else left, now)
            while len(self._left) > _MOST_ADDRESSES:
                self._left.popitem(last=False)
        return 0.0 if allowed else (1 - left) / a_second
