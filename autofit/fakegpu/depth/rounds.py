"""Repeat a stretch of a run that was traced once: micro-batches, or rollouts with theirs, are not traced again.

Two neighbouring stretches are traced. Where they hold and give back the same storages in the same order, each that was
left out after them is the second one again: what it gives back is its own, or what the one before it left behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import NamedTuple

import numpy as np

from autofit.fakegpu.depth.delay import Delay
from autofit.fakegpu.depth.expand import Ints, Run, check_storages
from autofit.fakegpu.depth.stack import NotRepeatingError
from autofit.fakegpu.replay import Round


class RoundsDifferError(NotRepeatingError):
    """What was left out cannot be repeated: it has to be traced."""


class LeftOut(NamedTuple):
    """Consecutive marks, each at the end of a stretch that was left out, and the three that bound the two before."""

    bounds: tuple[int, int, int]
    first: int
    last: int


def with_rounds(run: Run, left_out: Sequence[LeftOut]) -> Run:
    """The run with stretches in place of what happened while they were left out. The number of marks stays.

    Raises RoundsDifferError.
    """
    for group in left_out:
        run = _Repetition.of(run, group).run()
    if left_out:
        try:
            check_storages(run)
        except NotRepeatingError as error:
            raise RoundsDifferError(str(error)) from error
    return run


def without_marks(run: Run, dropped: set[int]) -> Run:
    """The run without the marks of these numbers."""
    return replace(run, marks=tuple(mark for number, mark in enumerate(run.marks) if number not in dropped))


@dataclass(frozen=True)
class _Repetition:
    """One group of stretches that were left out: events `end` to `over`, after the stretch `start` to `end`."""

    whole: Run
    group: LeftOut
    start: int
    end: int
    over: int
    back: Ints  # of each event of the stretch: where its storage was taken, from the stretch's start

    @classmethod
    def of(cls, run: Run, group: LeftOut) -> _Repetition:
        """Raises RoundsDifferError unless the two stretches before are alike, and leave nothing behind for long."""
        before, start, end = (run.marks[number].event for number in group.bounds)
        over = run.marks[group.last].event
        ids, nbytes = run.ids, run.nbytes
        taken_at = np.full(int(ids.max(initial=0)) + 1, -1, np.int64)
        taken_at[ids[nbytes > 0]] = np.flatnonzero(nbytes > 0)
        one, two = slice(before, start), slice(start, end)
        back = taken_at[ids[two]] - start
        of_one = taken_at[ids[one]] - before
        alike = end - start == start - before and all(
            np.array_equal(a, b)
            for a, b in ((nbytes[one], nbytes[two]), (run.categories[one], run.categories[two]),
                         (np.maximum(of_one, -1), np.maximum(back, -1)))  # -1: left behind by the stretch before
        )  # fmt: skip
        streams = [[run.streams.get(id_, 0) for id_ in ids[part].tolist()] for part in (one, two) if run.streams]
        if not alike or streams[:1] != streams[1:] or any(before < event < over for event in run.emptied):
            raise RoundsDifferError("two neighbouring micro-batches are not alike")
        made = cls(run, group, start, end, over, back)
        if (back < start - end).any() or (back < 0).sum() != len(made._left_behind):
            raise RoundsDifferError("micro-batches leave behind what the next does not give back")
        return made

    @property
    def _length(self) -> int:
        return self.end - self.start

    @property
    def _times(self) -> int:
        return self.group.last - self.group.first + 1

    @property
    def _base(self) -> int:
        """The first number that no storage of the run has."""
        return int(self.whole.ids.max()) + 1

    @property
    def _left_behind(self) -> Ints:
        """Places, from the start of the stretch, of what it takes and does not give back."""
        taken = np.flatnonzero(self.whole.nbytes[self.start : self.end] > 0)
        given = self.back[(self.whole.nbytes[self.start : self.end] < 0) & (self.back >= 0)]
        return np.setdiff1d(taken, given)

    def run(self) -> Run:
        whole, start, end, over = self.whole, self.start, self.end, self.over
        copies = self._base + np.arange(self._times)[:, None] * self._length + self.back[None, :]
        earlier = self.back < 0
        copies[0, earlier] = whole.ids[end + self.back[earlier]]
        tail = self._renamed()[whole.ids[over:]]

        def joined(values: Ints) -> Ints:
            return np.concatenate([values[:end], np.tile(values[start:end], self._times), values[over:]])

        return self._with_time(replace(
            whole, ids=np.concatenate([whole.ids[:end], copies.reshape(-1), tail]), nbytes=joined(whole.nbytes),
            tags=joined(whole.tags), categories=joined(whole.categories),
            rounds=(*whole.rounds, Round(end, self._length, self._times, self._base)),
            streams={**whole.streams, **self._streams(copies)},
        ))  # fmt: skip

    def _streams(self, copies: Ints) -> dict[int, int]:
        """The stream of each storage of the stretches that were left out, where it is not the main one."""
        streams, ids = self.whole.streams, self.whole.ids[self.start : self.end].tolist()
        places = [place for place, id_ in enumerate(ids) if id_ in streams] if streams else []
        return {int(copy): streams[ids[place]] for place in places for copy in copies[:, place]}

    def _renamed(self) -> Ints:
        """The number of each storage after the stretches that were left out: those left behind are the last one's."""
        ids, nbytes = self.whole.ids, self.whole.nbytes
        left = ids[self.start + self._left_behind]
        out = slice(self.end, self.over)
        taken, given = ids[out][nbytes[out] > 0], ids[out][nbytes[out] < 0]
        stays, gone = taken[~np.isin(taken, given)], np.isin(left, given)
        size_of = np.zeros(self._base, np.int64)
        size_of[ids[nbytes > 0]] = nbytes[nbytes > 0]
        if not np.isin(given, np.concatenate([taken, left])).all() or not np.array_equal(
            size_of[stays], size_of[left[gone]]
        ):
            raise RoundsDifferError("what a micro-batch leaves behind is not known where some are left out")
        last = self._base + (self._times - 1) * self._length + self._left_behind
        names = np.arange(self._base)
        names[left] = last
        names[stays] = last[gone]
        return names

    def _with_time(self, made: Run) -> Run:
        marks, times, (bounds, first, last) = self.whole.marks, self._times, self.group
        begins, ends, over = (marks[n].stretch for n in (*bounds[1:], last))
        delay = reduce(Delay.then, self.whole.delays(begins, ends), Delay())
        later_events = times * self._length - (self.over - self.end)
        later = times - (over - ends)
        copies = range(1, times + 1)
        moved = [
            *marks[:first],
            *(replace(mark, event=self.end + n * self._length, stretch=ends + n)
              for n, mark in zip(copies, marks[first : last + 1], strict=True)),
            *(replace(m, event=m.event + later_events, stretch=m.stretch + later) for m in marks[last + 1 :]),
        ]  # fmt: skip
        repeats = [r for r in self.whole.repeats if r.end <= ends]
        repeats += [r._replace(start=r.start + later, end=r.end + later) for r in self.whole.repeats if r.start >= over]
        stretches = (*self.whole.stretches[:ends], *([(0, delay)] * times), *self.whole.stretches[over:])
        emptied = tuple(e + later_events if e >= self.over else e for e in self.whole.emptied)
        return replace(made, stretches=stretches, repeats=tuple(repeats), marks=tuple(moved), emptied=emptied)
