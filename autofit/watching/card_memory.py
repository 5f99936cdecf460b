"""Bytes of the CUDA card that trains: now, in a window between two calls, and at most since the run began. Loads torch.

A window needs torch's peak statistics reset. What was reset away is kept here, so `since_beginning` stays right: read
peaks of a full run from it, and not from `torch.cuda.max_memory_allocated`, which then tells the last window only.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from autofit.hardware.nvml import used_bytes
from autofit.probing.memory import own_handle

_ALLOCATED, _RESERVED = "allocated_bytes", "reserved_bytes"
_kept = {_ALLOCATED: 0, _RESERVED: 0}


def since_beginning() -> dict[str, int]:
    """peak_allocated_bytes and peak_reserved_bytes since the run began; empty without a card."""
    if not torch.cuda.is_available():
        return {}
    found = _stats()
    return {f"peak_{name}": max(kept, _of(found, name, "peak")) for name, kept in _kept.items()}


def retries() -> dict[str, int]:
    """alloc_retries: how often torch gave cached blocks back and tried again, since the run began; empty without a
    card."""
    return {"alloc_retries": int(_stats().get("num_alloc_retries", 0))} if torch.cuda.is_available() else {}


class CudaGauge:
    """Reads the card of this process; some 30 microseconds a reading, as torch's own tables are slower."""

    def __init__(self) -> None:
        _kept.update({_ALLOCATED: 0, _RESERVED: 0})  # an earlier training of this process has ended
        self._used_bytes = _driver_bytes() or _cuda_bytes

    @property
    def capacity_bytes(self) -> int:
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)

    def allocated_bytes(self) -> int:
        """Bytes of live tensors."""
        return _of(_stats(), _ALLOCATED, "current")

    def window_bytes(self) -> int:
        """The most bytes of live tensors since the last call; a new window begins."""
        found = _stats()
        for name in _kept:
            _kept[name] = max(_kept[name], _of(found, name, "peak"))
        torch.cuda.reset_peak_memory_stats()
        return _of(found, _ALLOCATED, "peak")

    def outside_bytes(self) -> int:
        """Bytes in use on the card that torch's allocator does not hold: CUDA's context, other processes."""
        return max(0, self._used_bytes() - _of(_stats(), _RESERVED, "current"))


def _stats() -> dict[str, Any]:
    return torch.cuda.memory_stats_as_nested_dict()


def _of(stats: dict[str, Any], name: str, moment: str) -> int:
    return int(stats[name]["all"][moment]) if name in stats else 0  # empty until the first tensor on the card


_EVERY_S = 1.0  # between two questions to the driver


class CardPeak:
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


def card_use() -> CardPeak | None:
    """The use of this process' card; None where the driver does not tell it."""
    used = _driver_bytes()
    return None if used is None else CardPeak(lambda: max(0, used() - torch.cuda.memory_reserved()))


def _driver_bytes() -> Callable[[], int] | None:
    """What asks the driver for the bytes in use on this process' card; None where it does not tell them."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handle = own_handle(pynvml)
        used_bytes(pynvml, handle)
    except pynvml.NVMLError:
        return None
    return lambda: used_bytes(pynvml, handle)


def _cuda_bytes() -> int:
    free, total = torch.cuda.mem_get_info()
    return int(total - free)
