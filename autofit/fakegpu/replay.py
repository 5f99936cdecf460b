"""Play recorded allocations again: on another capacity, with other allocator settings. No torch here."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from autofit.fakegpu.allocator import (
    ROUND_LARGE_BYTES,
    UNLIMITED,
    AllocatorSettings,
    Block,
    CachingAllocator,
    OutOfCapacityError,
)


class EventLog:
    """Allocations and frees in order: event i is storage `ids[i]` gaining (+) or losing (-) `nbytes[i]`.

    `tags[i]` is the layer at work (see `layers.py`), 0 for none.
    """

    __slots__ = ("ids", "nbytes", "streams", "tags")

    def __init__(self) -> None:
        self.ids = array("q")
        self.nbytes = array("q")
        self.tags = array("q")
        self.streams: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, storage_id: int, nbytes: int, tag: int = 0) -> None:
        self.ids.append(storage_id)
        self.nbytes.append(nbytes)
        self.tags.append(tag)


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


def replay_phases(
    log: EventLog, starts: Sequence[int], *, settings: AllocatorSettings | None = None
) -> list[tuple[int, int]]:
    """(peak allocated, peak reserved) bytes of each phase on an unlimited card; phase i starts at event `starts[i]`."""
    allocator = CachingAllocator(settings=settings)
    blocks: dict[int, Block] = {}
    streams, ids, sizes = log.streams, log.ids, log.nbytes
    peaks = []
    for start, end in pairwise([0, *starts, len(log)]):
        allocator.reset_peaks()
        for storage_id, nbytes in zip(ids[start:end], sizes[start:end], strict=True):
            if nbytes > 0:
                blocks[storage_id] = allocator.malloc(nbytes, streams.get(storage_id, 0))
            else:
                allocator.free(blocks.pop(storage_id))
        peaks.append((allocator.peak_allocated_bytes, allocator.peak_reserved_bytes))
    return peaks[1:]


def least_capacity(
    log: EventLog,
    *,
    settings: AllocatorSettings | None = None,
    tolerance_bytes: int = 8 * ROUND_LARGE_BYTES,
    unlimited_peaks: tuple[int, int] | None = None,
) -> int:
    """The smallest allocator capacity, to within `tolerance_bytes` above, at which `log` runs through.

    `unlimited_peaks` are the peak allocated and reserved without a limit, if they are known.
    """
    if unlimited_peaks is None:
        free_run = replay(log, settings=settings)
        unlimited_peaks = free_run.peak_allocated_bytes, free_run.peak_reserved_bytes
    low, high = unlimited_peaks[0] - 1, unlimited_peaks[1]
    tried = low + 1 + tolerance_bytes
    while high - low > tolerance_bytes:
        run = replay(log, capacity_bytes=tried, settings=settings)
        if run.fits:
            high = min(tried, run.peak_reserved_bytes)  # with no more than it reserved, the run would be the same
        else:
            low = tried
        tried = (low + high) // 2
    return high
