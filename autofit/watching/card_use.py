"""Device-used bytes of the card that a run trains on: what its probe was judged by. Loads torch and needs a card."""

import time
from collections.abc import Callable

import torch

from autofit.hardware.nvml import used_bytes
from autofit.probing.memory import own_handle

_EVERY_S = 1.0  # between two questions to the driver


class CardUse:
    """Peak reserved bytes and the bytes outside torch's allocator, added as `autofit.probing.memory` adds them."""

    def __init__(self, outside_bytes: Callable[[], int]) -> None:
        self._ask = outside_bytes
        self._most_outside, self._asked_at = 0, -_EVERY_S

    def bytes_at(self, peak_reserved_bytes: int) -> int:
        """Device-used bytes at a peak of so many reserved ones; the bytes outside are at most a second old."""
        now = time.monotonic()
        if now - self._asked_at >= _EVERY_S:
            self._most_outside, self._asked_at = max(self._most_outside, self._ask()), now
        return peak_reserved_bytes + self._most_outside


def card_use() -> CardUse | None:
    """The use of this process' card; None where the driver does not tell it."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handle = own_handle(pynvml)
        used_bytes(pynvml, handle)
    except pynvml.NVMLError:
        return None
    return CardUse(lambda: max(0, used_bytes(pynvml, handle) - torch.cuda.memory_reserved()))
