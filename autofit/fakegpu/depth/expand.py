"""Expand the run of a shallow model to the run of a deep one: its events, its categories and its clock.

A run visits the layers in sweeps: forward, backward (with recomputation), a decode step, one foreach operation, the
release of a cache. Within a sweep all middle layers have the same events, so the events of one are repeated to the full
depth; a free in one repetition frees an allocation of the same repetition or of its neighbour. Allocator, least
capacity and timeline then process the events of the deep run. A run without this structure raises `NotRepeatingError`.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from autofit.fakegpu.clock import Clock
from autofit.fakegpu.depth.delay import Delay
from autofit.fakegpu.depth.layers import DATA, LayerClock, LayerRecorder, Repeat, Tag
from autofit.fakegpu.depth.stack import NotRepeatingError, Stack
from autofit.fakegpu.memory import HostTensors, SimulatedMemory
from autofit.fakegpu.replay import EventLog, Round

Ints = npt.NDArray[np.int64]


class FollowedCard(Protocol):
    """The parts of a simulated card that an expansion reads (`FakeGpu`, made with `follow_layers`)."""

    @property
    def clock(self) -> Clock: ...
    @property
    def memory(self) -> SimulatedMemory: ...
    @property
    def layers(self) -> LayerRecorder | None: ...
    def category_numbers(self) -> Ints: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A moment of a run, as the number of events and of time segments before it."""

    name: str
    event: int
    stretch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRun:
    """The events of a run in order, allocations (+) and frees (-), and the delay of each time segment."""

    ids: Ints
    nbytes: Ints
    tags: Ints
    categories: Ints  # category of each event's storage, as an index of CATEGORIES
    stretches: tuple[tuple[int, Delay], ...]
    marks: tuple[Mark, ...]
    repeats: tuple[Repeat, ...] = ()
    streams: Mapping[int, int] = field(default_factory=dict)
    rounds: tuple[Round, ...] = ()  # stretches of events that are alike
    emptied: tuple[int, ...] = ()  # events before which the allocator's unused memory was given back

    @property
    def log(self) -> EventLog:
        log = EventLog()
        log.ids, log.nbytes, log.tags = (_array(values) for values in (self.ids, self.nbytes, self.tags))
        log.streams, log.rounds, log.emptied = dict(self.streams), self.rounds, list(self.emptied)
        return log

    def seconds(self) -> list[float]:
        """The simulated time at each mark."""
        now = (0.0, 0.0, 0.0, 0.0, 0.0)
        found, done = [], 0
        for mark in self.marks:
            for delay in self.delays(done, mark.stretch):
                now = delay.after(now)
            done = max(done, mark.stretch)
            found.append(max(now))
        return found

    def delays(self, start: int, end: int) -> Iterator[Delay]:
        """The delays of the segments `start` to `end`, repeated ones joined to one."""
        inside = [repeat for repeat in self.repeats if start <= repeat.start and repeat.end <= end]
        yield from self._delays(start, end, sorted(inside, key=lambda repeat: (repeat.start, -repeat.end)))

    def _delays(self, start: int, end: int, repeats: Sequence[Repeat]) -> Iterator[Delay]:
        """The same where `repeats` are inside, an outer one before those in it."""
        while repeats:
            outer, *repeats = repeats
            inner = [repeat for repeat in repeats if repeat.end <= outer.end]
            repeats = repeats[len(inner) :]
            yield from (delay for _, delay in self.stretches[start : outer.start])
            yield reduce(Delay.then, self._delays(outer.start, outer.end, inner)).repeated(outer.times)
            start = outer.end
        yield from (delay for _, delay in self.stretches[start:end])


def run_of(gpu: FollowedCard, marks: Sequence[Mark]) -> TracedRun:
    """The recorded run of a card made with `follow_layers`."""
    clock, allocations = gpu.clock, gpu.memory.allocations
    assert isinstance(clock, LayerClock)
    clock.cut()
    run = _attributed(gpu.memory.log, [a.layer for a in allocations], gpu.category_numbers(), marks)
    return replace(
        run, stretches=tuple(clock.stretches), repeats=tuple(clock.repeats), streams=dict(gpu.memory.log.streams)
    )


def _attributed(log: EventLog, layers: Sequence[int], categories: Ints, marks: Sequence[Mark]) -> TracedRun:
    """The events of a log up to the last mark with layers; storage number n has `layers[n]` and `categories[n]`."""
    end = marks[-1].event if marks else len(log)
    ids, nbytes, known = (np.array(values[:end], np.int64) for values in (log.ids, log.nbytes, log.tags))
    emptied = tuple(event for event in log.emptied if event < end)
    owner = np.asarray([_data_code(layer) for layer in layers], np.int64)
    for _ in range(2):
        tags = np.where(known == 0, owner[ids], known) if len(ids) else ids
        order = _canonical_order(ids, nbytes, tags, [*(mark.event for mark in marks), *emptied])
        ids, nbytes, known, tags = ids[order], nbytes[order], known[order], tags[order]
        _own_what_loops_take(owner, ids, nbytes, tags)
    return TracedRun(
        ids=ids, nbytes=nbytes, tags=with_what_loops_give_back(nbytes, tags), stretches=(), marks=tuple(marks),
        categories=categories[ids] if len(ids) else ids, emptied=emptied,
    )  # fmt: skip


def expanded(gpu: FollowedCard, marks: Sequence[Mark]) -> TracedRun:
    """The run at full depth; the recorded run itself if no model was shrunk."""
    assert gpu.layers is not None
    return _deep(run_of(gpu, marks), gpu.layers, gpu.layers.shares)


def expanded_host(host: HostTensors, layers: LayerRecorder, marks: Sequence[Mark]) -> TracedRun:
    """The events of the host's memory at full depth; the category of each is 1 if its storage is pinned, else 0."""
    return _deep(_attributed(host.log, host.owners, np.asarray(host.pinned, np.int64), marks), layers, {})


def _deep(run: TracedRun, layers: LayerRecorder, shares: Mapping[int, Mapping[int, int]]) -> TracedRun:
    """The run with all layers of what `layers` followed, with the tensors of several layers in `shares`."""
    if not layers.stacks:
        if layers.is_shrunk:
            raise NotRepeatingError("the layers of a model that was built with few of them were not found")
        return run
    if layers.problem:
        raise NotRepeatingError(layers.problem)
    return Expansion(_grown(run, shares, layers.stacks), layers.stacks).run()


def _canonical_order(ids: Ints, nbytes: Ints, tags: Ints, marks: Sequence[int]) -> Ints:
    """Sort consecutive frees outside the layers, all between two marks, by (layer, allocation order).

    The allocator's state does not depend on the order of consecutive frees. torch frees some sets in the order of their
    addresses (autocast's copies of weights), which is arbitrary.
    """
    outside = (nbytes < 0) & ((tags == 0) | (tags > Tag(DATA, 0, 0).encode() - 1))
    begins = ~outside | np.concatenate([[True], ~outside[:-1]]) if len(ids) else outside
    begins[[event for event in marks if event < len(ids)]] = True
    row = np.cumsum(begins)
    return np.lexsort((np.where(outside, ids, 0), np.where(outside, tags, 0), row))


def _own_what_loops_take(owner: Ints, ids: Ints, nbytes: Ints, tags: Ints) -> None:
    """Assign an allocation between storages of the same or adjacent layers (a step counter) to the earlier layer."""
    makes = (tags > 0) & (nbytes > 0)
    filled = np.maximum.accumulate(np.where(makes, np.arange(len(tags)), 0)) if len(tags) else tags
    follows = np.minimum.accumulate(np.where(makes, np.arange(len(tags)), len(tags) - 1)[::-1])[::-1]
    before, after = tags[filled], tags[follows]
    data = Tag(DATA, 0, 0).encode()
    near = (before >= data) & (after >= data) & (np.abs(after - before) <= 1)
    taken = (tags == 0) & (nbytes > 0) & near
    owner[ids[taken]] = before[taken]


def with_what_loops_give_back(nbytes: Ints, tags: Ints) -> Ints:
    """`tags`, in which frees of a layer's storage amid the next layer's events are the next layer's.

    A loop over the layers keeps its last temporary until the next one replaces it: one that loads quantised weights,
    and, from the last layer to the first, the backward of a loss over all routers.
    """
    starts = np.concatenate([[0], np.flatnonzero(np.diff(tags)) + 1]) if len(tags) else tags
    taken = np.add.reduceat(nbytes > 0, starts) if len(starts) else starts
    codes = tags[starts]
    found = np.array(tags)
    for place in np.flatnonzero((taken == 0) & (codes >= Tag(DATA, 0, 0).encode())):
        around = codes[place - 1 : place + 2 : 2] if 0 < place < len(codes) - 1 else codes[:0]
        if len(around) == 2 and around[0] == around[1] and abs(around[0] - codes[place]) == 1:
            found[starts[place] : starts[place + 1]] = around[0]
    return found


def _data_code(code: int) -> int:
    return Tag.decode(code)._replace(kind=DATA).encode() if code else 0


def _array(values: Ints) -> array[int]:
    found = array("q")
    found.frombytes(np.ascontiguousarray(values, np.int64).tobytes())
    return found


def _grown(run: TracedRun, shares: Mapping[int, Mapping[int, int]], stacks: Sequence[Stack]) -> TracedRun:
    """The run with tensors gathered from all layers (a stack of norms) at their full-depth size."""
    if not shares:
        return run
    more = np.zeros(int(run.ids.max()) + 1, np.int64)
    for index, parts in shares.items():
        more[index] = sum(round(nbytes * (stacks[stack].growth - 1)) for stack, nbytes in parts.items())
    return replace(run, nbytes=np.where(run.nbytes > 0, run.nbytes + more[run.ids], run.nbytes - more[run.ids]))


# ---------------------------------------------------------------------- sweeps
@dataclass(frozen=True, slots=True)
class Sweep:
    """The middle units of a sweep in visiting order: unit `order[p]` has items `bounds[p]:bounds[p+1]`."""

    stack: int
    order: tuple[int, ...]
    bounds: tuple[int, ...]


def find_sweeps(tags: Ints, stacks: Sequence[Stack], taken: npt.NDArray[np.bool_]) -> list[Sweep]:
    """The sweeps over middle layers, in order; raises if one covers only some middle units, beyond frees at one end."""
    if not len(tags):
        return []
    starts = np.concatenate([[0], np.flatnonzero(np.diff(tags)) + 1])
    sweeps: list[Sweep] = []
    current: list[tuple[int, int, int]] = []  # (layer, start, end) of the items of one sweep
    key: tuple[int, int] | None = None
    ends = [*starts[1:].tolist(), len(tags)]
    for start, end, code in zip(starts.tolist(), ends, tags[starts].tolist(), strict=True):
        if not code:
            continue
        tag = Tag.decode(code)
        if (tag.kind, tag.stack) != key or not _continues(current, tag.layer, stacks[tag.stack].period):
            _close(current, key, stacks, sweeps, taken)
            current, key = [], (tag.kind, tag.stack)
        current.append((tag.layer, start, end))
    _close(current, key, stacks, sweeps, taken)
    return sweeps


def _continues(runs: list[tuple[int, int, int]], layer: int, period: int) -> bool:
    """True if a sweep over these layers can visit `layer` next (within a period, layers free of events are skipped)."""
    first, last = runs[0][0], runs[-1][0]
    ahead = layer - last if last >= first else last - layer
    return layer == last or 0 < ahead <= period or (first == last and 0 < -ahead <= period)


def _close(
    runs: list[tuple[int, int, int]], key: tuple[int, int] | None, stacks: Sequence[Stack], sweeps: list[Sweep],
    taken: npt.NDArray[np.bool_],
) -> None:  # fmt: skip
    if key is None:
        return
    stack = stacks[key[1]]
    units = [stack.unit(layer) for layer, _, _ in runs]
    if all(unit is None for unit in units):
        return
    order: list[int] = []
    bounds: list[int] = []
    end = 0
    for unit, (_, start, stop) in zip(units, runs, strict=True):
        if unit is None and order:
            end = start
            break
        if unit is not None:
            if not order or order[-1] != unit:
                order.append(unit)
                bounds.append(start)
            end = stop
    wanted = list(range(stack.traced_units))
    alone = order in ([wanted[0]], [wanted[-1]])
    if alone and not any(taken[a:b].any() for unit, (_, a, b) in zip(units, runs, strict=True) if unit is not None):
        return  # for example, code after the layers frees the last layer's input
    if order not in (wanted, wanted[::-1]):
        raise NotRepeatingError(f"a sweep over the layers visits middle units {order} only")
    sweeps.append(Sweep(key[1], tuple(order), (*bounds, end)))


# ---------------------------------------------------------------------- events
_FIXED = -1
_NONE: Ints = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Units:
    """The events of a sweep in each unit, sorted by unit number, and those that happen in one unit alone.

    Event `once[i]` of unit number `unit` comes before event `places[i]` of its block.
    """

    blocks: list[Ints]
    unit: int = 0
    once: Ints = field(default_factory=_NONE.copy)
    places: Ints = field(default_factory=_NONE.copy)


class Expansion:
    """Repeats the middle units in each sweep of a run."""

    def __init__(self, run: TracedRun, stacks: Sequence[Stack]) -> None:
        self._run = run
        self._stacks = stacks
        self._sweeps = find_sweeps(run.tags, stacks, run.nbytes > 0)
        count = int(run.ids.max()) + 1 if len(run.ids) else 0
        self._step = count  # id of a storage in repetition U = its id in the first unit + (U + 1) * step
        self._sweep_of = np.full(count, _FIXED, np.int64)
        self._unit_of = np.zeros(count, np.int64)
        self._first_of = np.arange(count)  # id of the corresponding storage in the first unit
        self._units: list[Units] = []  # of each sweep
        self._born_in_units()
        spans = [(sweep.bounds[0], sweep.bounds[-1]) for sweep in self._sweeps]
        if any(start < event < end for event in run.emptied for start, end in spans):
            raise NotRepeatingError("unused memory is given back between two layers")

    def run(self) -> TracedRun:
        """The run at full depth."""
        run, base = self._run, self._step
        fixed = self._edge_ids(run.ids)
        ids: list[Ints] = []
        source: list[Ints] = []
        places: list[tuple[int, int]] = [(0, 0)]  # (event of the run, event of the expansion) after each repetition
        at = total = 0
        for number, sweep in enumerate(self._sweeps):
            start, end = sweep.bounds[0], sweep.bounds[-1]
            named, events = self._repeated(number, sweep)
            ids += [fixed[at:start], named]
            source += [np.arange(at, start), events]
            total += start - at + len(named)
            at = end
            places.append((end, total))
        ids.append(fixed[at:])
        source.append(np.arange(at, len(run.ids)))
        all_ids, events = np.concatenate(ids), np.concatenate(source)
        result = replace(
            run,
            ids=all_ids,
            nbytes=run.nbytes[events],
            tags=np.zeros(len(events), np.int64),
            categories=run.categories[events],
            streams={i: run.streams[i % base] for i in all_ids.tolist() if i % base in run.streams}
            if run.streams
            else {},
            emptied=tuple(_moved(event, places) for event in run.emptied),
        )
        check_storages(result)
        self._check_repetitions(result)
        return self._with_time(result, places)

    # ------------------------------------------------------------------ which storage is which
    def _born_in_units(self) -> None:
        run = self._run
        for number, sweep in enumerate(self._sweeps):
            units = self._units_of(sweep)
            self._units.append(units)
            first = units.blocks[0]
            for unit, block in enumerate(units.blocks):
                same = len(block) == len(first) and np.array_equal(run.nbytes[block], run.nbytes[first])
                if not same:
                    raise NotRepeatingError(f"middle units 0 and {unit} differ in sweep {number}")
                born = run.nbytes[block] > 0
                mine = run.ids[block][born]
                self._sweep_of[mine] = number
                self._unit_of[mine] = unit
                self._first_of[mine] = run.ids[first][born]

    def _units_of(self, sweep: Sweep) -> Units:
        """The events of each unit. What only the first or the last one gives back, made before all layers, is apart.

        The mask of the full attention in a model with few layers of it is given back within the unit that uses it last.
        """
        run, nbytes = self._run, self._run.nbytes
        ranges = zip(sweep.order, sweep.bounds, sweep.bounds[1:], strict=False)
        blocks = [np.arange(start, end) for _, start, end in sorted(ranges)]
        sizes = [len(block) for block in blocks]
        longest = sizes.index(max(sizes))
        if sizes.count(min(sizes)) != len(blocks) - 1 or longest not in (0, len(blocks) - 1):
            return Units(blocks)
        whole, other = blocks[longest], blocks[longest - 1]
        here = run.ids[sweep.bounds[0] : sweep.bounds[-1]][nbytes[sweep.bounds[0] : sweep.bounds[-1]] > 0]
        older = (self._sweep_of[run.ids[whole]] == _FIXED) & ~np.isin(run.ids[whole], here)
        once: list[int] = []
        for _ in range(len(whole) - len(other)):
            rest = np.delete(whole, once)[: len(other)]
            place = _first(nbytes[rest] != nbytes[other]) + len(once)
            if not older[place]:
                return Units(blocks)
            once.append(place)
        blocks[longest] = np.delete(whole, once)
        return Units(blocks, longest, whole[once], np.asarray(once) - np.arange(len(once)))

    def _stack_of(self, ids: Ints) -> Ints:
        stacks = np.asarray([sweep.stack for sweep in self._sweeps] or [0], np.int64)
        return stacks[np.maximum(self._sweep_of[ids], 0)]

    def _name(self, ids: Ints, unit: Ints | int) -> Ints:
        """Ids of the storages of `ids` in repetition `unit`; storages outside the sweeps keep their ids."""
        return np.where(self._sweep_of[ids] == _FIXED, ids, self._first_of[ids] + (unit + 1) * self._step)

    def _edge_ids(self, ids: Ints) -> Ints:
        """Ids as the first and last layers refer to them: the last traced unit becomes the last full-depth unit."""
        traced = np.asarray([stack.traced_units for stack in self._stacks])[self._stack_of(ids)]
        units = np.asarray([stack.units for stack in self._stacks])[self._stack_of(ids)]
        unit = self._unit_of[ids]
        return self._name(ids, np.where(unit >= traced - 1, unit + units - traced, unit))

    def _repeated(self, number: int, sweep: Sweep) -> tuple[Ints, Ints]:
        """Storage ids of a sweep's events at full depth, and the traced event behind each."""
        stack, ids, units = self._stacks[sweep.stack], self._run.ids, self._units[number]
        blocks = units.blocks
        near, far = ids[blocks[0]], ids[blocks[-1]]
        inner, shift = self._inner(number, sweep, near, far)
        repetitions = np.arange(stack.units)[:, None]
        names = self._name(inner[None, :], repetitions + shift[None, :])
        names[0] = self._name(near, self._unit_of[near])
        names[-1] = self._name(far, self._unit_of[far] + stack.units - stack.traced_units)
        events = np.broadcast_to(blocks[0], names.shape)
        if sweep.order[0]:
            names, events = names[::-1], events[::-1]
        visited = 0 if sweep.order[0] == units.unit else stack.units - 1
        places = visited * len(blocks[0]) + units.places
        return np.insert(names, places, ids[units.once]), np.insert(events, places, units.once)

    def _inner(self, number: int, sweep: Sweep, near: Ints, far: Ints) -> tuple[Ints, Ints]:
        """For each event of an inner unit: the storage, and the distance in units to the unit that allocated it."""
        last = self._stacks[sweep.stack].traced_units - 1
        moved_near = self._unit_of[near]
        moved_far = self._unit_of[far] - last
        from_near = (self._sweep_of[near] != _FIXED) & (moved_near >= 0)
        from_far = (self._sweep_of[far] != _FIXED) & (moved_far <= 0)
        both = from_near & from_far
        agree = (self._first_of[near] == self._first_of[far]) & (moved_near == moved_far)
        bad = (both & ~agree & (moved_near > 0) & (moved_far < 0)) | ~(from_near | from_far)
        use_near = from_near & ~(both & ~agree & (moved_far < 0))
        if bad.any() or (both & ~agree & (moved_near == 0) & (moved_far == 0)).any():
            raise NotRepeatingError(f"sweep {number} frees what does not repeat")
        other = self._stack_of(np.where(use_near, near, far)) != sweep.stack
        if other.any():
            raise NotRepeatingError(f"sweep {number} frees storages of another model's layers")
        return np.where(use_near, near, far), np.where(use_near, moved_near, moved_far)

    def _check_repetitions(self, run: TracedRun) -> None:
        """Raise unless each storage is either freed in all repetitions or kept in all."""
        given = run.ids[run.nbytes < 0]
        counts = np.bincount(given[given >= self._step] % max(self._step, 1), minlength=self._step)
        units = np.asarray([stack.units for stack in self._stacks])[self._stack_of(np.arange(self._step))]
        if not np.isin(counts[counts != units], 0).all():
            raise NotRepeatingError("a storage is given back in some layers only")

    # ------------------------------------------------------------------ time
    def _with_time(self, run: TracedRun, places: list[tuple[int, int]]) -> TracedRun:
        """Repeat the time segments too, and move the marks to their expanded positions."""
        tags = np.asarray([tag for tag, _ in self._run.stretches], np.int64)
        stretches: list[tuple[int, Delay]] = []
        moved = [(0, 0)]
        at = 0
        for sweep in find_sweeps(tags, self._stacks, np.ones(len(tags), bool)):
            start, end = sweep.bounds[0], sweep.bounds[-1]
            stretches += self._run.stretches[at:start]
            parts = [
                reduce(Delay.then, (delay for _, delay in self._run.stretches[a:b]))
                for a, b in zip(sweep.bounds, sweep.bounds[1:], strict=False)
            ]
            middle = [parts[-1]] * (self._stacks[sweep.stack].units - len(parts))
            stretches += [(0, delay) for delay in [*parts, *middle]]
            at = end
            moved.append((end, len(stretches)))
        stretches += self._run.stretches[at:]
        marks = [Mark(name=m.name, event=_moved(m.event, places), stretch=_moved(m.stretch, moved)) for m in run.marks]
        repeats = [Repeat(_moved(r.start, moved), _moved(r.end, moved), r.times) for r in run.repeats]
        return replace(run, stretches=tuple(stretches), repeats=tuple(repeats), marks=tuple(marks))


def _first(found: npt.NDArray[np.bool_]) -> int:
    """The first place that is true, or the number of places."""
    return int(found.argmax()) if found.any() else len(found)


def _moved(place: int, places: list[tuple[int, int]]) -> int:
    """The expanded position of a position between two sweeps."""
    old, new = places[bisect_right(places, (place, 1 << 62)) - 1]
    return new + place - old


def check_storages(run: TracedRun) -> None:
    """Raise unless each storage is allocated once and freed at most once, later, with the same size."""
    taken, given = run.nbytes > 0, run.nbytes < 0
    order = np.arange(len(run.ids))
    born, first = np.unique(run.ids[taken], return_index=True)
    died, once = np.unique(run.ids[given], return_index=True)
    if len(born) != taken.sum() or len(died) != given.sum() or not np.isin(died, born).all():
        raise NotRepeatingError("a storage would be taken or given back twice")
    at = np.searchsorted(born, died)
    if (order[taken][first][at] > order[given][once]).any():
        raise NotRepeatingError("a storage would be given back before it is taken")
    if (run.nbytes[taken][first][at] != -run.nbytes[given][once]).any():
        raise NotRepeatingError("a storage would be given back with another size")


class RoundsDifferError(NotRepeatingError):
    """The parts left out fail to repeat: they have to be traced."""


class LeftOut(NamedTuple):
    """Consecutive marks, each at the end of a stretch that was left out, and the three that bound the two before."""

    bounds: tuple[int, int, int]
    first: int
    last: int


def with_rounds(run: TracedRun, left_out: Sequence[LeftOut]) -> TracedRun:
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


def without_marks(run: TracedRun, dropped: set[int]) -> TracedRun:
    """The run less the marks of these numbers."""
    return replace(run, marks=tuple(mark for number, mark in enumerate(run.marks) if number not in dropped))


@dataclass(frozen=True)
class _Repetition:
    """One group of stretches that were left out: events `end` to `over`, after the stretch `start` to `end`."""

    whole: TracedRun
    group: LeftOut
    start: int
    end: int
    over: int
    back: Ints  # of each event of the stretch: where its storage was taken, from the stretch's start

    @classmethod
    def of(cls, run: TracedRun, group: LeftOut) -> _Repetition:
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
        """The first number above those of the run's storages."""
        return int(self.whole.ids.max()) + 1

    @property
    def _left_behind(self) -> Ints:
        """Places, from the start of the stretch, of the storages that it takes and keeps."""
        taken = np.flatnonzero(self.whole.nbytes[self.start : self.end] > 0)
        given = self.back[(self.whole.nbytes[self.start : self.end] < 0) & (self.back >= 0)]
        return np.setdiff1d(taken, given)

    def run(self) -> TracedRun:
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
        """The streams, if other than the main one, of the storages of the stretches that were left out."""
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

    def _with_time(self, made: TracedRun) -> TracedRun:
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
