"""Growth of the bytes of micro-batches with their tokens, and the first one to come whose bytes cross a limit.

The model: the bytes that a micro-batch works with, above those held when it begins, are the largest of several amounts
(attention, loss, a layer that is computed again, ...), each a constant that is not negative plus a part that grows with
the tokens. Tokens are padded: sequences times the length of the longest. Where attention keeps its matrix ("eager") a
part grows with sequences times length squared, which `Size.square` counts.

Two bounds follow without a fit. More tokens need at least the bytes already seen at fewer. They need at most those
bytes times the ratio of the tokens (of the squares, where attention is eager). The line lies between them; it is too
low where an amount that was never the largest so far grows faster.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from autofit.watching.micro_batches import EpochBatches, MicroBatch

_LEAST = 4  # different sizes that a line needs


@dataclass(frozen=True, slots=True, order=True)
class Size:
    """Padded tokens of a micro-batch, and the sum of its squared padded lengths where attention is eager, else 0."""

    tokens: int
    square: int = 0

    def over(self, other: "Size") -> float:
        """Factor by which this is larger than `other`: the larger of the ratios of tokens and squares."""
        square = self.square / other.square if other.square else 0.0
        return max(self.tokens / max(1, other.tokens), square)


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """Bytes of an untrained micro-batch: the estimate, and its upper bound under the model above."""

    estimate: float
    at_most: float
    fitted: bool  # whether a line gave the estimate; else it is the lower bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """Law of the bytes of other sizes, from those seen. Making one takes some 100 microseconds, asking it a few."""

    largest: Size
    largest_bytes: float
    line: tuple[float, ...] | None  # bytes of no token, of each token, of each of `Size.square`

    @classmethod
    def of(cls, seen: Mapping[Size, float]) -> "Law":
        """The law of micro-batches, at least one of which was `seen`."""
        points = sorted(seen.items(), key=lambda point: point[0].tokens)
        # Of several amounts, the one that decides at the largest sizes decides beyond them: the upper half is fitted.
        line = _fit(points[-max(_LEAST, (len(points) + 1) // 2) :])
        return cls(largest=points[-1][0], largest_bytes=max(seen.values()), line=line)

    def at(self, size: Size) -> Projection:
        """The bytes of a micro-batch that is larger than all seen."""
        at_least = self.largest_bytes
        at_most = at_least * max(1.0, size.over(self.largest))
        if self.line is None:
            return Projection(estimate=at_least, at_most=at_most, fitted=False)
        base, of_token, of_square = self.line
        value = base + of_token * size.tokens + of_square * size.square
        return Projection(estimate=min(max(value, at_least), at_most), at_most=at_most, fitted=True)


def _fit(points: Sequence[tuple[Size, float]]) -> tuple[float, float, float] | None:
    """The least squares through `points`, if they are enough, and the bytes rise."""
    squared = any(size.square for size, _ in points)
    if len(points) < _LEAST:
        return None
    columns = np.array([(1.0, size.tokens, size.square)[: 3 if squared else 2] for size, _ in points], dtype=float)
    columns /= (scale := columns.max(axis=0))
    try:
        found = np.linalg.solve(columns.T @ columns, columns.T @ np.array([b for _, b in points])) / scale
    except np.linalg.LinAlgError:
        return None
    return None if (found[1:] < 0).any() else (float(found[0]), float(found[1]), float(found[2]) if squared else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rhythm:
    """Rhythm of micro-batches, optimizer steps and rollouts, and the place where this start of the run begins."""

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
        """(True if it is a step's first, before other gradients; True if a rollout comes before it)."""
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
    projection: Projection  # of its working bytes besides
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

    def __init__(self, visits: "EpochBatches", rhythm: Rhythm) -> None:
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
        """Learn the bytes of a micro-batch."""
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
        """Difference of the trained shape from the lengths in the dataset."""
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
        """True if the next step has a micro-batch that is longer than all before it."""
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
        """The seen ones of a kind; before any, of another, whose bytes are larger by the gradients it begins with."""
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
