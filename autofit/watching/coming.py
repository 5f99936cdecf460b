"""The micro-batches that are still to come, and the first of them whose bytes cross a limit."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from autofit.watching.law import Law, Projection, Size

if TYPE_CHECKING:
    from autofit.watching.micro_batches import MicroBatch
    from autofit.watching.visits import Visits


@dataclass(frozen=True, slots=True, kw_only=True)
class Rhythm:
    """How micro-batches make optimizer steps and rollouts, and where this start of the run begins."""

    accumulation: int
    first_step: int  # finished steps before this start
    first_micro_batch: int  # of the epoch, that this start trains
    micro_batches_a_rollout: int | None = None  # None: the trainer does not generate
    flat: bool = False  # samples lie one after the other without padding
    eager: bool = False  # attention keeps its matrix

    def step_of(self, visit: int) -> int:
        """The optimizer step, from 1, that trains micro-batch `visit` of the epoch."""
        return self.first_step + (visit - self.first_micro_batch) // self.accumulation + 1

    def kind_of(self, visit: int) -> tuple[bool, bool]:
        """(whether it is a step's first, without gradients of others; whether a rollout comes before it)."""
        each = self.micro_batches_a_rollout
        return visit % self.accumulation == 0, each is not None and visit % each == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """A micro-batch to come whose bytes cross the limit."""

    visit: int
    step: int
    row: int
    tokens: int  # of its longest sample; with completions, as the micro-batch is padded
    before_bytes: int  # held when it begins, above those between steps: gradients of its step
    projection: Projection  # of what it works with besides
    largest_seen: int  # most tokens of a sequence so far
    fitting_tokens: int | None  # the longest sequence that stays within the limit; None: not even those seen


@dataclass(slots=True)
class _Seen:
    before_bytes: int = 0
    first_step: dict[Size, float] = field(default_factory=dict)  # the card's libraries make their buffers in it
    later: dict[Size, float] = field(default_factory=dict)
    made: Law | None = None

    @property
    def law(self) -> Law:
        if self.made is None:
            self.made = Law.of(self.later or self.first_step)
        return self.made

    def add(self, size: Size, working_bytes: int, *, in_first_step: bool) -> None:
        known = self.first_step if in_first_step else self.later
        known[size] = max(working_bytes, known.get(size, 0))
        if len(known) > _MOST_SIZES:
            del known[min(known, key=lambda s: s.tokens)]
        self.made = None

    def projected(self, size: Size, *, upper: bool) -> float:
        """Bytes of a micro-batch above those held between steps."""
        found = self.law.at(size)
        return self.before_bytes + (found.at_most if upper else found.estimate)


_MOST_SIZES = 128  # sizes kept for a fit, the largest ones


class Coming:
    """Learns the bytes of micro-batches by their size, and finds the first one to come that is too large."""

    def __init__(self, visits: "Visits", rhythm: Rhythm) -> None:
        self._visits, self._rhythm = visits, rhythm
        self._next = rhythm.first_micro_batch
        self._seen: dict[tuple[bool, bool], _Seen] = {}
        self._per_sample = 1.0  # sequences of a micro-batch over the samples that its visit names
        self._extra = 0  # most tokens of a sequence beyond its sample: a completion, or padding to a multiple
        self._largest = 0
        self.completion_tokens = 0  # the longest of the last micro-batch
        self._records = self._rising()

    def _rising(self) -> dict[tuple[bool, bool], list[int]]:
        """Of each kind, the visits longer than all of it before: the first to cross a limit is one of these."""
        visits, tokens = np.arange(self._next, len(self._visits.longest)), self._tokens()
        each = self._rhythm.micro_batches_a_rollout
        first = visits % self._rhythm.accumulation == 0
        rollout = np.zeros_like(first) if each is None else visits % each == 0
        return {
            kind: _records(own, tokens[own])
            for kind in product((True, False), (True, False))
            if len(own := visits[(first == kind[0]) & (rollout == kind[1])])
        }

    def _tokens(self) -> npt.NDArray[np.int64]:
        visits = self._visits
        return visits.total if self._rhythm.flat else visits.samples * visits.longest

    def learn(self, done: "MicroBatch") -> None:
        """What a micro-batch took."""
        visit = self._rhythm.first_micro_batch + done.number
        self._next = visit + 1
        if visit >= len(self._visits.longest):
            return
        if done.sequences:
            self._compare(visit, done)
        size = self._size(visit) if not done.sequences else self._size_of(done.sequences, done.width)
        self._largest = max(self._largest, done.width or int(self._visits.longest[visit]))
        if done.number == 0 < self._rhythm.accumulation - 1:
            return  # its bytes are mostly buffers of the card's libraries, and the next one tells more
        seen = self._seen.setdefault(self._rhythm.kind_of(visit), _Seen())
        seen.add(size, done.working_bytes, in_first_step=done.number < self._rhythm.accumulation)
        seen.before_bytes = done.before_bytes

    def _compare(self, visit: int, done: "MicroBatch") -> None:
        """How the shape that was trained differs from the lengths in the dataset."""
        visits = self._visits
        named = int(visits.total[visit] if self._rhythm.flat else visits.longest[visit])
        self.completion_tokens = done.width - named
        self._extra = max(self._extra, self.completion_tokens)
        if not self._rhythm.flat:
            self._per_sample = done.sequences / int(visits.samples[visit])

    def _size(self, visit: int) -> Size:
        """The size of a micro-batch to come, if its completions are as long as the longest so far."""
        visits = self._visits
        if self._rhythm.flat:
            return self._size_of(1, int(visits.total[visit]) + self._extra)
        return self._size_of(self._sequences(visit), int(visits.longest[visit]) + self._extra)

    def _sequences(self, visit: int) -> int:
        return 1 if self._rhythm.flat else max(1, round(self._per_sample * int(self._visits.samples[visit])))

    def _size_of(self, sequences: int, width: int) -> Size:
        return Size(sequences * width, sequences * width * width if self._rhythm.eager else 0)

    def is_due(self, finished_steps: int) -> bool:
        """Whether the next step has a micro-batch that is longer than all before it."""
        visits = [next((v for v in visits if v >= self._next), None) for visits in self._records.values()]
        return any(v is not None and self._rhythm.step_of(v) <= finished_steps + 1 for v in visits)

    def crossing(self, room_bytes: float, *, finished_steps: int, guess: bool) -> Crossing | None:
        """A micro-batch of the first step to come that needs more than `room_bytes`: its first one by the estimate.

        With `guess`, those in the next step count by their upper bound, as nothing more is learnt before them; of
        several that may cross, the largest.
        """
        found = [c for kind in self._records for c in self._crossings(kind, room_bytes, finished_steps, guess=guess)]
        step = min((c.step for c in found), default=0)
        here = [c for c in found if c.step == step]
        sure = [c for c in here if c.before_bytes + c.projection.estimate > room_bytes]
        if sure:
            return min(sure, key=lambda c: c.visit)
        return max(here, key=lambda c: c.before_bytes + c.projection.at_most, default=None)

    def _crossings(
        self, kind: tuple[bool, bool], room_bytes: float, finished_steps: int, *, guess: bool
    ) -> Iterator[Crossing]:
        self._records[kind] = [v for v in self._records[kind] if v >= self._next]
        seen = self._known(kind)
        if seen is None:
            return
        first = 0
        for visit in self._records[kind]:
            size, step = self._size(visit), self._rhythm.step_of(visit)
            upper = guess and step <= finished_steps + 1
            if first and step > first:
                return
            # that many tokens were trained, and fitted
            if size > seen.law.largest and seen.projected(size, upper=upper) > room_bytes:
                first = step
                yield self._crossing(visit, seen, room_bytes, upper=upper)

    def completion_limit(self, room_bytes: float, most: int) -> int | None:
        """The fewest tokens of a completion, up to `most`, with which the longest prompt needs more than the room.

        None: not even the most do, or too little was seen to tell.
        """
        longest, laws = int(self._visits.longest.max()), [s for s in self._seen.values() if s.law.line is not None]
        sequences = self._sequences(int(self._visits.longest.argmax()))

        def crosses(tokens: int) -> bool:
            size = self._size_of(sequences, longest + tokens)
            return any(seen.projected(size, upper=False) > room_bytes for seen in laws)

        low, high = 0, most
        if not crosses(high):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if crosses(middle) else (middle, high)
        return high

    def _known(self, kind: tuple[bool, bool]) -> _Seen | None:
        """What was seen of a kind; before any, of another, whose bytes are larger by the gradients it begins with."""
        own = self._seen.get(kind)
        return own or max(self._seen.values(), key=lambda seen: seen.before_bytes, default=None)

    def _crossing(self, visit: int, seen: _Seen, room_bytes: float, *, upper: bool) -> Crossing:
        projection = seen.law.at(self._size(visit))
        return Crossing(
            visit=visit, step=self._rhythm.step_of(visit), row=int(self._visits.row[visit]), projection=projection,
            tokens=self._width(visit), largest_seen=self._largest, before_bytes=seen.before_bytes,
            fitting_tokens=self._fitting(visit, seen, room_bytes, upper=upper),
        )  # fmt: skip

    def _width(self, visit: int) -> int:
        return int(self._visits.total[visit] if self._rhythm.flat else self._visits.longest[visit]) + self._extra

    def _fitting(self, visit: int, seen: _Seen, room_bytes: float, *, upper: bool) -> int | None:
        """The most tokens of a sequence of that micro-batch that stay within the room."""
        sequences, low, high = self._sequences(visit), self._largest, self._width(visit)
        while high - low > 1:
            middle = (low + high) // 2
            fits = seen.projected(self._size_of(sequences, middle), upper=upper) <= room_bytes
            low, high = (middle, high) if fits else (low, middle)
        return low if low > 0 else None


def _records(visits: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]) -> list[int]:
    before = np.maximum.accumulate(np.concatenate(([-1], tokens[:-1])))
    return [int(v) for v in visits[tokens > before]]
