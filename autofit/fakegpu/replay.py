"""Play recorded allocations again: on another capacity, with other allocator settings. No torch here."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from autofit.fakegpu.allocator import (
    ROUND_LARGE_BYTES,
    UNLIMITED,
    AllocatorSettings,
    Block,
    CachingAllocator,
    OutOfCapacityError,
)


class EventLog:
    """Allocations and frees in order: event i is storage `ids[i]` gaining (+) or losing (-) `nbytes[i]`."""

    __slots__ = ("ids", "nbytes", "streams")

    def __init__(self) -> None:
        self.ids = array("q")
        self.nbytes = array("q")
        self.streams: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, storage_id: int, nbytes: int) -> None:
        self.ids.append(storage_id)
        self.nbytes.append(nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """What an allocator of that capacity would have reported."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    retry_count: int
    oom_event: int | None

    @property
    def fits(self) -> bool:
        return self.oom_event is None


def replay(
    log: EventLog, *, capacity_bytes: int = UNLIMITED, settings: AllocatorSettings | None = None
) -> ReplayResult:
    """Play `log` against a fresh allocator; stops at the first allocation that has no room."""
    allocator = CachingAllocator(capacity_bytes=capacity_bytes, settings=settings)
    blocks: dict[int, Block] = {}
    streams = log.streams
    oom_event = None
    for index, (storage_id, nbytes) in enumerate(zip(log.ids, log.nbytes, strict=True)):
        if nbytes > 0:
            try:
                blocks[storage_id] = allocator.malloc(nbytes, streams.get(storage_id, 0))
            except OutOfCapacityError:
                oom_event = index
                break
        else:
            allocator.free(blocks.pop(storage_id))
    return ReplayResult(
        peak_allocated_bytes=allocator.peak_allocated_bytes,
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        retry_count=allocator.retry_count,
        oom_event=oom_event,
    )


def least_capacity(
    log: EventLog, *, settings: AllocatorSettings | None = None, tolerance_bytes: int = 8 * ROUND_LARGE_BYTES
) -> int:
    """The smallest allocator capacity, to within `tolerance_bytes` above, at which `log` runs through."""
    free_run = replay(log, settings=settings)
    low, high = free_run.peak_allocated_bytes - 1, free_run.peak_reserved_bytes
    if replay(log, capacity_bytes=low + 1 + tolerance_bytes, settings=settings).fits:
        high = min(high, low + 1 + tolerance_bytes)
    while high - low > tolerance_bytes:
        middle = (low + high) // 2
        if replay(log, capacity_bytes=middle, settings=settings).fits:
            high = middle
        else:
            low = middle
    return high
