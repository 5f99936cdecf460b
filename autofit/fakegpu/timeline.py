"""Live bytes by category and phase over the whole run, and the tensors alive at the peak."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from autofit.fakegpu.allocator import MIN_BLOCK_BYTES
from autofit.fakegpu.memory import Allocation
from autofit.fakegpu.replay import EventLog

CATEGORIES = (
    "weights", "gradients", "optimizer", "activations", "logits", "KV cache", "temporaries", "workspace", "vLLM",
)  # fmt: skip
GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePeak:
    """Peak live bytes of one phase, and their categories at that moment."""

    name: str
    peak_allocated_bytes: int
    categories: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakItem:
    """Storages of one category, operation and dtype, alive at the peak and allocated by the same line of code."""

    category: str
    place: str
    op: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakReport:
    """The storages alive at the peak, largest first; `str()` of it is a table."""

    allocated_bytes: int
    phase: str
    items: tuple[PeakItem, ...]

    def __str__(self) -> str:
        head = f"peak {self.allocated_bytes / GIB:.3f} GiB allocated, in phase {self.phase!r}"
        rows = [
            f"{item.nbytes / GIB:9.3f} GiB  {item.count:5d} x {item.category:11s} {item.op:28s} "
            f"{item.dtype.removeprefix('torch.')}{list(item.shape)}  {item.place}"
            for item in self.items
        ]
        return "\n".join([head, *rows])


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """`live_bytes[category][i]`: bytes of that category alive after event i (512 B granules, before segment slack)."""

    live_bytes: Mapping[str, npt.NDArray[np.int64]]
    phases: tuple[PhasePeak, ...]

    @property
    def total_bytes(self) -> npt.NDArray[np.int64]:
        return _total(self.live_bytes)

    def highest(self, cuts: Sequence[int]) -> dict[str, list[int]]:
        """Bytes of each category at the moment of the highest total between two neighbours of `cuts`, one a pair.

        `cuts` are places of events in order, each above the one before it. Categories without bytes are left out.
        """
        first = cuts[0]
        total = _total({name: values[first : cuts[-1]] for name, values in self.live_bytes.items()})
        moments = [start + int(total[start - first : end - first].argmax()) for start, end in pairwise(cuts)]
        found = {name: values[moments].tolist() for name, values in self.live_bytes.items()}
        return {name: values for name, values in found.items() if any(values)}

    @property
    def at_peak(self) -> dict[str, int]:
        """Bytes of each category at the moment of the highest total."""
        if not len(self.total_bytes):
            return dict.fromkeys(CATEGORIES, 0)
        moment = int(self.total_bytes.argmax())
        return {name: int(values[moment]) for name, values in self.live_bytes.items()}


def final_categories(allocations: Sequence[Allocation], backward_starts: Sequence[int]) -> list[str]:
    """Each allocation's category; an activation that no later backward pass finds alive is a temporary."""
    starts = np.asarray(backward_starts, np.int64)
    end = np.iinfo(np.int64).max
    names = []
    for allocation in allocations:
        name = allocation.category
        if name == "recomputed":  # by activation checkpointing, during backward
            name = "activations"
        elif name == "activations":
            died = end if allocation.died is None else allocation.died
            first = int(np.searchsorted(starts, allocation.born, side="right"))
            if first == len(starts) or starts[first] > died:
                name = "temporaries"
        names.append(name)
    return names


def build_timeline(
    log: EventLog, allocations: Sequence[Allocation], *, backward_starts: Sequence[int],
    phase_marks: Sequence[tuple[int, str]],
) -> Timeline:  # fmt: skip
    ids = np.asarray(log.ids, np.int64)
    category = category_numbers(allocations, backward_starts)
    live = _live(np.asarray(log.nbytes, np.int64), category[ids] if len(ids) else ids)
    return Timeline(live_bytes=live, phases=_phase_peaks(live, phase_marks, len(ids)))


def timeline_of(
    nbytes: npt.NDArray[np.int64], categories: npt.NDArray[np.int64], phase_marks: Sequence[tuple[int, str]]
) -> Timeline:
    """The timeline and the peak of each phase, from the size and the category number of each event."""
    live = _live(nbytes, categories)
    return Timeline(live_bytes=live, phases=_phase_peaks(live, phase_marks, len(nbytes)))


def category_numbers(allocations: Sequence[Allocation], backward_starts: Sequence[int]) -> npt.NDArray[np.int64]:
    """Each allocation's category as an index of CATEGORIES."""
    number = {name: i for i, name in enumerate(CATEGORIES)}
    names = final_categories(allocations, backward_starts)
    return np.asarray([number.get(name, number["temporaries"]) for name in names], np.int64)


def _live(nbytes: npt.NDArray[np.int64], categories: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[np.int64]]:
    granules = _granules(nbytes)
    return {name: np.cumsum(np.where(categories == i, granules, 0)) for i, name in enumerate(CATEGORIES)}


def _phase_peaks(
    live: Mapping[str, npt.NDArray[np.int64]], marks: Sequence[tuple[int, str]], count: int
) -> tuple[PhasePeak, ...]:
    total = _total(live)
    moments: dict[str, int] = {}
    for (start, name), (end, _) in zip(marks, [*marks[1:], (count, "")], strict=True):
        if end <= start:
            continue
        moment = start + int(total[start:end].argmax())
        if name not in moments or total[moment] > total[moments[name]]:
            moments[name] = moment
    return tuple(
        PhasePeak(
            name=name,
            peak_allocated_bytes=int(total[moment]),
            categories={key: int(values[moment]) for key, values in live.items()},
        )
        for name, moment in moments.items()
    )


def build_peak_report(
    log: EventLog, allocations: Sequence[Allocation], *, backward_starts: Sequence[int], limit: int
) -> PeakReport:
    total = np.cumsum(_granules(np.asarray(log.nbytes, np.int64)))
    if not len(total):
        return PeakReport(allocated_bytes=0, phase="start", items=())
    moment = int(total.argmax())
    names = final_categories(allocations, backward_starts)
    groups: dict[tuple[str, str, str, str], list[Allocation]] = defaultdict(list)
    for allocation, name in zip(allocations, names, strict=True):
        if allocation.born <= moment and (allocation.died is None or allocation.died > moment):
            groups[name, allocation.place, allocation.op, allocation.dtype].append(allocation)
    items = [
        PeakItem(
            category=name, place=place, op=op, shape=max(members, key=lambda a: a.nbytes).shape, dtype=dtype,
            nbytes=sum(a.nbytes for a in members), count=len(members),
        )
        for (name, place, op, dtype), members in groups.items()
    ]  # fmt: skip
    items.sort(key=lambda item: -item.nbytes)
    phase = allocations[int(log.ids[moment])].phase
    return PeakReport(allocated_bytes=int(total[moment]), phase=phase, items=tuple(items[:limit]))


def _total(live: Mapping[str, npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    first, *others = live.values()
    total = first.copy()
    for each in others:
        total += each  # a run has 10^6 events: all categories in one array take four times as long
    return total


def _granules(nbytes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Round away from zero to a multiple of 512 B, as the allocator does."""
    rounded = -(-np.abs(nbytes) // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
    return np.asarray(np.sign(nbytes) * rounded, np.int64)
