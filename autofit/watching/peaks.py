"""Bytes of the CUDA card that trains: now, in a window between two calls, and at most since the run began. Loads torch.

A window needs torch's peak statistics reset. What was reset away is kept here, so `since_beginning` stays right: read
peaks of a full run from it, and not from `torch.cuda.max_memory_allocated`, which then tells the last window only.
"""

from typing import Any

import torch

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
        free, total = torch.cuda.mem_get_info()
        return max(0, total - free - _of(_stats(), _RESERVED, "current"))


def _stats() -> dict[str, Any]:
    return torch.cuda.memory_stats_as_nested_dict()


def _of(stats: dict[str, Any], name: str, moment: str) -> int:
    return int(stats[name]["all"][moment]) if name in stats else 0  # empty until the first tensor on the card
