"""Replay recorded allocations with another capacity or other allocator settings. Free of torch."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from autofit.fakegpu.allocator import (
    ROUND_LARGE_BYTES,
    UNLIMITED,
    AllocatorSettings,
    Block,
    CachingAllocator,
    segment_bytes,
)

_CHECKPOINT_EVENTS = 16384  # a checkpoint costs as much as replaying about half this many
_GUESSES = 12  # tried capacities before the search falls back to bisection


class Round(NamedTuple):
    """Events that repeat: `times` stretches of `length` from event `start` on, with storages `base` and above.

    Event i of stretch n takes storage `base + n * length + i`.
    """

    start: int
    length: int
    times: int
    base: int

    @property
    def end(self) -> int:
        return self.start + self.length * self.times


class EventLog:
    """Allocations and frees in order: event i allocates (+) or frees (-) `nbytes[i]` of storage `ids[i]`.

    `tags[i]` is the current layer (see `layers.py`), 0 outside all layers. Before each event of `emptied`, in order,
    the program gave back the allocator's unused memory (`torch.cuda.empty_cache`).
    """

    __slots__ = ("emptied", "ids", "nbytes", "rounds", "streams", "tags")

    def __init__(self) -> None:
        self.ids = array("q")
        self.nbytes = array("q")
        self.tags = array("q")
        self.streams: dict[int, int] = {}
        self.rounds: tuple[Round, ...] = ()
        self.emptied: list[int] = []

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, storage_id: int, nbytes: int, tag: int = 0) -> None:
        self.ids.append(storage_id)
        self.nbytes.append(nbytes)
        self.tags.append(tag)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """The counters of an allocator after a replay."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    retry_count: int
    oom_event: int | None
    wanted_bytes: int = 0  # reserved bytes that the failed allocation would have led to

    @property
    def fits(self) -> bool:
        return self.oom_event is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """An allocator's state before event `index` of a replay, with the block of each live storage.

    The state is the same for every capacity of at least the peak reserved bytes so far.
    """

    index: int
    allocator: CachingAllocator
    blocks: dict[int, Block]

    def resumed(self, capacity_bytes: int) -> Checkpoint:
        """A copy to continue from, with another capacity."""
        allocator, blocks = self.allocator.copy(self.blocks)
        allocator.capacity_bytes = capacity_bytes
        return Checkpoint(index=self.index, allocator=allocator, blocks=blocks)

    def kept(self, index: int, peak_allocated_bytes: int, peak_reserved_bytes: int) -> Checkpoint:
        """A copy for later, with the peaks of the whole replay so far."""
        allocator, blocks = self.allocator.copy(self.blocks)
        allocator.peak_allocated_bytes, allocator.peak_reserved_bytes = peak_allocated_bytes, peak_reserved_bytes
        return Checkpoint(index=index, allocator=allocator, blocks=blocks)


def replay(
    log: EventLog, *, capacity_bytes: int = UNLIMITED, settings: AllocatorSettings | None = None
) -> ReplayResult:
    """Replay `log` on a new allocator, up to the first allocation that fails."""
    start = Checkpoint(index=0, allocator=CachingAllocator(settings=settings), blocks={})
    return _go_on(log, start.resumed(capacity_bytes))


def _go_on(log: EventLog, at: Checkpoint) -> ReplayResult:
    """Replay the rest of `log` from `at`, up to the first allocation that fails."""
    missing = 0
    oom_event = _play(log, at.index, len(log), at.allocator, at.blocks)
    if oom_event is not None:
        missing = at.allocator.reserved_bytes + segment_bytes(at.allocator.round_size(log.nbytes[oom_event]))
    return ReplayResult(
        peak_allocated_bytes=at.allocator.peak_allocated_bytes, peak_reserved_bytes=at.allocator.peak_reserved_bytes,
        retry_count=at.allocator.retry_count, oom_event=oom_event, wanted_bytes=missing,
    )  # fmt: skip


def _play(log: EventLog, start: int, end: int, allocator: CachingAllocator, blocks: dict[int, Block]) -> int | None:
    """Replay the events from `start` to `end`; the index of the first allocation that fails, if one does."""
    for each in log.rounds:
        if start <= each.start and each.end <= end:
            oom = _play_plain(log, start, each.start, allocator, blocks)
            if oom is None:
                oom = _play_round(log, each, allocator, blocks)
            if oom is not None:
                return oom
            start = each.end
    return _play_plain(log, start, end, allocator, blocks)


def _play_plain(
    log: EventLog, start: int, end: int, allocator: CachingAllocator, blocks: dict[int, Block]
) -> int | None:
    first, last = (bisect_left(log.emptied, event) for event in (start, end))
    for at in log.emptied[first:last]:
        place = allocator.play(log.ids[start:at], log.nbytes[start:at], blocks, log.streams)
        if place is not None:
            return start + place
        allocator.empty_cache()
        start = at
    place = allocator.play(log.ids[start:end], log.nbytes[start:end], blocks, log.streams)
    return None if place is None else start + place


def _play_round(log: EventLog, each: Round, allocator: CachingAllocator, blocks: dict[int, Block]) -> int | None:
    """Replay a round until the allocator is as it was some stretches before: from there on it goes in circles."""
    seen: dict[object, tuple[int, int]] = {}
    done = 0
    while done < each.times:
        start = each.start + done * each.length
        if (oom := _play_plain(log, start, start + each.length, allocator, blocks)) is not None:
            return oom
        done += 1
        own = each.base + (done - 1) * each.length  # storages of the stretch that has just ended
        names = tuple(sorted((id_ - own if id_ >= own else ~id_, b.address) for id_, b in blocks.items()))
        state = (allocator.state, names)
        if state in seen:
            before, retries = seen[state]
            circles = (each.times - done) // (done - before)
            allocator.retry_count += circles * (allocator.retry_count - retries)
            ahead = circles * (done - before)
            for id_ in [id_ for id_ in blocks if id_ >= own]:
                blocks[id_ + ahead * each.length] = blocks.pop(id_)
            done += ahead
            seen.clear()
        else:
            seen[state] = done, allocator.retry_count
    return None


def _cuts(log: EventLog, start: int, end: int) -> list[int]:
    """Events from `start` to `end` at which a replay may be continued: all outside rounds."""
    cuts = [start]
    while cuts[-1] < end:
        at = min(cuts[-1] + _CHECKPOINT_EVENTS, end)
        cuts.append(next((r.end for r in log.rounds if r.start < at < r.end and r.end <= end), at))
    return cuts


class Unlimited:
    """`log` replayed unlimited: its peaks, and checkpoints at which replays with a limit can start."""

    def __init__(self, log: EventLog, starts: Sequence[int] = (), *, settings: AllocatorSettings | None = None) -> None:
        self.log = log
        self._replayed: dict[int, ReplayResult] = {}  # of each capacity that was tried
        self.phases: list[tuple[int, int]] = []  # peak allocated and reserved bytes; phase i starts at `starts[i]`
        self._checkpoints = [Checkpoint(index=0, allocator=CachingAllocator(settings=settings), blocks={})]
        now = self._checkpoints[0].resumed(UNLIMITED)
        highest = (0, 0)
        for start, end in pairwise([0, *starts, len(log)]):
            now.allocator.reset_peaks()
            for at, after in pairwise(_cuts(log, start, end)):
                if highest[1] == self._checkpoints[-1].allocator.peak_reserved_bytes:
                    self._checkpoints.pop()  # the next checkpoint is valid for the same capacities, and later
                self._checkpoints.append(now.kept(at, *highest))
                _play(log, at, after, now.allocator, now.blocks)
                highest = (
                    max(highest[0], now.allocator.peak_allocated_bytes),
                    max(highest[1], now.allocator.peak_reserved_bytes),
                )
            self.phases.append((now.allocator.peak_allocated_bytes, now.allocator.peak_reserved_bytes))
        self.phases = self.phases[1:] if starts else self.phases
        self.peaks = highest  # peak allocated and peak reserved bytes

    def replay(self, capacity_bytes: int) -> ReplayResult:
        """Replay with that capacity, from the last checkpoint before the limit matters."""
        if capacity_bytes not in self._replayed:
            same = [c for c in self._checkpoints if c.allocator.peak_reserved_bytes <= capacity_bytes]
            self._replayed[capacity_bytes] = _go_on(self.log, same[-1].resumed(capacity_bytes))
        return self._replayed[capacity_bytes]

    def least_capacity(self, tolerance_bytes: int | None = None, *, first_bytes: int | None = None) -> int:
        """The smallest allocator capacity, to within `tolerance_bytes` above, at which the log runs through.

        Without a tolerance it is told to 0.2 % of the live tensors, and to 1.6 % where the whole cache has room to
        spare below `first_bytes`: in a third of the replays.

        `first_bytes` is tried first, so the answer is on the right side of it: a limit, whose verdict has to be exact.
        The reserved bytes that a failed replay wanted are often the answer: they are tried next, and then slightly
        less, to show that it is not enough. Guesses that fail grow in doubled steps, since a cache that grows for
        10^4 tokens always wants slightly more. After a number of such guesses the search is a bisection.
        """
        tolerance = self._tolerance(first_bytes) if tolerance_bytes is None else tolerance_bytes
        low, high = self.peaks[0] - 1, self.peaks[1]
        tried = low + 1 + tolerance
        if first_bytes is not None and low < first_bytes < high:
            tried = first_bytes
        guesses, less, more = _GUESSES, tolerance, tolerance
        while high - low > tolerance:
            run = self.replay(tried)
            if run.fits:
                high = min(tried, run.peak_reserved_bytes)  # the replay is the same with exactly its reserved bytes
                wanted, less = high - less, 4 * less
            else:
                low, wanted, more = tried, max(run.wanted_bytes, tried + more), 2 * more
            if tried == first_bytes:
                wanted = max(wanted, low + 1 + tolerance) if low == tried else self.peaks[0] + tolerance
            guesses -= 1
            tried = wanted if guesses >= 0 and low < wanted < high else (low + high) // 2
        return high

    def _tolerance(self, limit_bytes: int | None) -> int:
        spare = 0 if limit_bytes is None else (limit_bytes - self.peaks[1]) // 8
        return max(8 * ROUND_LARGE_BYTES, self.peaks[0] // 512, min(self.peaks[0] // 64, spare))


def least_capacity(
    log: EventLog, *, settings: AllocatorSettings | None = None, tolerance_bytes: int | None = None
) -> int:
    """The smallest allocator capacity, to within `tolerance_bytes` above, at which `log` runs through."""
    return Unlimited(log, settings=settings).least_capacity(tolerance_bytes)
