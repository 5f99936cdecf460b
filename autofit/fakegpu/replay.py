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
    segment_bytes,
)

_CHECKPOINT_EVENTS = 16384  # a checkpoint costs about as much as playing half as many
_GUESSES = 12  # of the least capacity, before the interval is halved


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
    wanted_bytes: int = 0  # what the allocation without room would have brought the reserved bytes to

    @property
    def fits(self) -> bool:
        return self.oom_event is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """An allocator in the middle of a replay: its state before event `index`, with the block of each live storage.

    As long as no more was reserved than some capacity, a card of that capacity would be in the same state.
    """

    index: int
    allocator: CachingAllocator
    blocks: dict[int, Block]

    def resumed(self, capacity_bytes: int) -> Checkpoint:
        """A copy to go on with, on a card of that capacity."""
        allocator, blocks = self.allocator.copy(self.blocks)
        allocator.capacity_bytes = capacity_bytes
        return Checkpoint(index=self.index, allocator=allocator, blocks=blocks)

    def kept(self, index: int, peak_allocated_bytes: int, peak_reserved_bytes: int) -> Checkpoint:
        """A copy to come back to, which knows the peaks of all that was before."""
        allocator, blocks = self.allocator.copy(self.blocks)
        allocator.peak_allocated_bytes, allocator.peak_reserved_bytes = peak_allocated_bytes, peak_reserved_bytes
        return Checkpoint(index=index, allocator=allocator, blocks=blocks)


def replay(
    log: EventLog, *, capacity_bytes: int = UNLIMITED, settings: AllocatorSettings | None = None
) -> ReplayResult:
    """Play `log` against a fresh allocator; stops at the first allocation that has no room."""
    start = Checkpoint(index=0, allocator=CachingAllocator(settings=settings), blocks={})
    return _go_on(log, start.resumed(capacity_bytes))


def _go_on(log: EventLog, at: Checkpoint) -> ReplayResult:
    """Play the rest of `log` on the allocator of `at`, to the end or to the first allocation that has no room."""
    missing = 0
    oom_event = _play(log, at.index, len(log), at.allocator, at.blocks)
    if oom_event is not None:
        missing = at.allocator.reserved_bytes + segment_bytes(at.allocator.round_size(log.nbytes[oom_event]))
    return ReplayResult(
        peak_allocated_bytes=at.allocator.peak_allocated_bytes,
        peak_reserved_bytes=at.allocator.peak_reserved_bytes,
        retry_count=at.allocator.retry_count,
        oom_event=oom_event,
        wanted_bytes=missing,
    )


def _play(log: EventLog, start: int, end: int, allocator: CachingAllocator, blocks: dict[int, Block]) -> int | None:
    """Play the events from `start` to `end`; the first allocation that has no room, if there is one."""
    malloc, free, stream_of, pop = allocator.malloc, allocator.free, log.streams.get, blocks.pop
    events = zip(log.ids[start:end], log.nbytes[start:end], strict=True)
    for index, (storage_id, nbytes) in enumerate(events, start):
        if nbytes < 0:
            free(pop(storage_id))
            continue
        try:
            blocks[storage_id] = malloc(nbytes, stream_of(storage_id, 0))
        except OutOfCapacityError:
            return index
    return None


class Unlimited:
    """`log` on a card without a limit: its peaks, and checkpoints from which the replay on a smaller card goes on."""

    def __init__(self, log: EventLog, starts: Sequence[int] = (), *, settings: AllocatorSettings | None = None) -> None:
        self.log = log
        self.phases: list[tuple[int, int]] = []  # peak allocated and reserved bytes; phase i starts at `starts[i]`
        self._checkpoints = [Checkpoint(index=0, allocator=CachingAllocator(settings=settings), blocks={})]
        now = self._checkpoints[0].resumed(UNLIMITED)
        highest = (0, 0)
        for start, end in pairwise([0, *starts, len(log)]):
            now.allocator.reset_peaks()
            for at in range(start, end, _CHECKPOINT_EVENTS):
                if highest[1] == self._checkpoints[-1].allocator.peak_reserved_bytes:
                    self._checkpoints.pop()  # what is later serves the same capacities, and saves more
                self._checkpoints.append(now.kept(at, *highest))
                _play(log, at, min(at + _CHECKPOINT_EVENTS, end), now.allocator, now.blocks)
                highest = (
                    max(highest[0], now.allocator.peak_allocated_bytes),
                    max(highest[1], now.allocator.peak_reserved_bytes),
                )
            self.phases.append((now.allocator.peak_allocated_bytes, now.allocator.peak_reserved_bytes))
        self.phases = self.phases[1:] if starts else self.phases
        self.peaks = highest  # allocated and reserved

    def replay(self, capacity_bytes: int) -> ReplayResult:
        """What a card of that capacity would report: as without a limit until it is reached."""
        same = [c for c in self._checkpoints if c.allocator.peak_reserved_bytes <= capacity_bytes]
        return _go_on(self.log, same[-1].resumed(capacity_bytes))

    def least_capacity(self, tolerance_bytes: int = 8 * ROUND_LARGE_BYTES) -> int:
        """The smallest allocator capacity, to within `tolerance_bytes` above, at which the log runs through.

        A run that fails says how much it wanted, which often is the answer: it is tried, and then that a little less
        is too little. Where the guesses lead nowhere, the interval is halved.
        """
        low, high = self.peaks[0] - 1, self.peaks[1]
        tried = low + 1 + tolerance_bytes
        guesses, less = _GUESSES, tolerance_bytes
        while high - low > tolerance_bytes:
            run = self.replay(tried)
            if run.fits:
                high = min(tried, run.peak_reserved_bytes)  # with no more than it reserved, the run would be the same
                wanted, less = high - less, 4 * less
            else:
                low, wanted = tried, max(run.wanted_bytes, tried + tolerance_bytes)
            guesses -= 1
            tried = wanted if guesses >= 0 and low < wanted < high else (low + high) // 2
        return high


def least_capacity(
    log: EventLog, *, settings: AllocatorSettings | None = None, tolerance_bytes: int = 8 * ROUND_LARGE_BYTES
) -> int:
    """The smallest allocator capacity, to within `tolerance_bytes` above, at which `log` runs through."""
    return Unlimited(log, settings=settings).least_capacity(tolerance_bytes)
