"""Predictions of every candidate from phases that are visited one by one (autofit.forecast.visiting).

For trainers whose `Facts.read_by` says which keys each phase reads. A phase is simulated with the recipe's own values
and with each other value of a group of keys that it reads, so that some fifty phases predict 10^5 candidates: what two
groups do to a phase's bytes and seconds adds up. Of many sizes with a memory order a few are visited, and the others
lie on a line through two of them; a smaller one than these needs as much as the smallest. A candidate takes the most
bytes of its phases, and the sum of their seconds.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from autofit.files import read_json, write_json
from autofit.forecast.composed import keep, processes
from autofit.forecast.predictions import Predictions
from autofit.hardware import calibration
from autofit.plugin.protocol import BEFORE_UPDATE
from autofit.probing.fork_server import ForkServer
from autofit.probing.job import by_content, code_hash
from autofit.recipe.recipe import merge
from autofit.space.space import Candidate, Space, Value

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]
_DEADLINE_S = 600.0
_FEW = 7  # sizes that are all visited
_STEP, _MOST = 4.0, 4  # else how much larger each is than the one before, and the most that are visited
Stop = tuple[str, Candidate]  # a phase, and the candidate with whose recipe it is visited


@dataclass(frozen=True, slots=True, kw_only=True)
class Visited:
    """Figures of a visit: bytes held before it, and the peak bytes and seconds of its phases; or why it was refused."""

    held_bytes: int = 0
    phases: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    refused: bool = False  # whether its engine does not start with these settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Keys whose effect on a phase is visited together: every combination of their values, by the candidates with it.

    `stops` has the candidate that is visited for a combination: its own, or those of the next smaller and larger size.
    """

    names: tuple[str, ...]
    of_each: Ints  # the combination of each candidate
    stops: tuple[tuple[Candidate, ...], ...]  # of each combination; () without one
    sizes: tuple[tuple[float, ...], ...]  # the combination's own, and those of its stops; () where it is visited
    series: tuple[tuple[Candidate, ...], ...]  # all stops, those that differ in a size alone in a row, smallest first


class Itinerary:
    """The visits from which all allowed candidates of a space are predicted."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.candidates = tuple(space.allowed())
        self._known = set(self.candidates)
        names = [knob.name for knob in space.knobs]
        self._columns = {name: _coded([c.values[place] for c in self.candidates]) for place, name in enumerate(names)}
        knobs = set(names)
        self.groups = {
            phase: [self._group(phase, kept) for group in groups if (kept := tuple(k for k in group if k in knobs))]
            for phase, groups in space.recipe.read_by.items()
        }

    @cached_property
    def unread(self) -> NDArray[np.bool_]:
        """Mask of the candidates that change a knob outside those that the phases read (N,)."""
        read = {name for groups in self.groups.values() for group in groups for name in group.names}
        other = [codes != codes[0] for name, (codes, _) in self._columns.items() if name not in read]
        return np.any(other, axis=0) if other else np.zeros(len(self.candidates), dtype=bool)

    @property
    def series(self) -> list[list[Stop]]:
        """Each phase with the recipe's own values, and with those of each group's stops, in rows of growing size."""
        own = self.space.baseline
        rows = [[(phase, c) for c in row] for phase, groups in self.groups.items() for g in groups for row in g.series]
        known = {stop for row in rows if len(row) > 1 for stop in row}
        alone = dict.fromkeys((phase, own) for phase in self.groups)
        alone |= dict.fromkeys(row[0] for row in rows if len(row) == 1)
        return [*(row for row in rows if len(row) > 1), *([stop] for stop in alone if stop not in known)]

    def _group(self, phase: str, names: tuple[str, ...]) -> Group:
        codes, combinations = _combined([self._columns[name] for name in names])
        ordered = [place for place, name in enumerate(names) if self._is_size(name, {c[place] for c in combinations})]
        series: dict[tuple[Value, ...], list[int]] = {}
        one = ordered[0] if len(ordered) == 1 else None
        for number, values in enumerate(combinations):
            series.setdefault((*values[:one], *values[one + 1 :]) if one is not None else values, []).append(number)
        stops: list[tuple[Candidate, ...]] = [()] * len(combinations)
        sizes: list[tuple[float, ...]] = [()] * len(combinations)
        rows: list[tuple[Candidate, ...]] = []
        for numbers in series.values():
            alone = {n: c for n in numbers if (c := self._stop(names, combinations[n])) is not None}
            if one is None:
                for number, candidate in alone.items():
                    stops[number] = (candidate,)
                rows += stops[numbers[0] : numbers[0] + 1]
                continue
            size = {n: float(cast(float, combinations[n][one])) for n in alone}
            kept = _few(size, own=self._own_size(names, one))
            rows.append(tuple(alone[n] for n in sorted(alone, key=lambda n: size[n]) if size[n] in kept))
            for number in alone:
                near = _around(size, kept, number)
                stops[number] = tuple(alone[n] for n in near)
                sizes[number] = () if len(near) == 1 else (size[number], *(size[n] for n in near))
        told = tuple(row for row in rows if row)
        return Group(names=names, of_each=codes, stops=tuple(stops), sizes=tuple(sizes), series=told)

    def _own_size(self, names: tuple[str, ...], place: int) -> float:
        return float(cast(float, self.space.params(self.space.baseline)[names[place]]))

    def _is_size(self, name: str, values: set[Value]) -> bool:
        """True if a knob's values are several sizes with a memory order."""
        knob = next(k for k in self.space.knobs if k.name == name)
        ordered = knob.memory_ascending or name == self.space.keys.micro_batch
        return ordered and len(values) > 1 and all(isinstance(v, int) and not isinstance(v, bool) for v in values)

    def _stop(self, names: tuple[str, ...], values: tuple[Value, ...]) -> Candidate | None:
        """The recipe's own candidate with these values alone changed, if it exists."""
        wanted = dict(zip(names, values, strict=True))
        candidate = self.space.settled(self.space.params(self.space.baseline) | wanted)
        found = self.space.params(candidate)
        return candidate if candidate in self._known and all(found[n] == v for n, v in wanted.items()) else None


def predicted(
    itinerary: Itinerary, visited: Mapping[Stop, Visited], *, outside_bytes: int, share: float
) -> Predictions:
    """The predictions by what was `visited`; `share` of the seconds before the update count in an optimizer step."""
    count, own = len(itinerary.candidates), itinerary.space.baseline
    lowest, highest, before, after = (np.zeros(count) for _ in range(4))
    refused = np.zeros(count, dtype=bool)
    rests = _at_rest(itinerary, visited)
    for phase, groups in itinerary.groups.items():
        base = visited[phase, own]
        shifted = sum((bytes_ for names, bytes_ in rests if not any(set(names) & set(g.names) for g in groups)),
                      np.zeros(count))  # fmt: skip
        for name in base.phases:
            if name != phase and name in itinerary.groups:  # it has visits of its own
                continue
            least, most, seconds = shifted.copy(), shifted.copy(), np.zeros(count)
            for group in groups:
                for total, each in zip(
                    (least, most, seconds), _changed(group, phase, name, base, visited), strict=True
                ):
                    total += each[group.of_each]
            bytes_, seconds_ = base.phases[name]
            lowest, highest = np.maximum(lowest, bytes_ + least), np.maximum(highest, bytes_ + most)
            if name in BEFORE_UPDATE:
                before += share * (seconds_ + seconds)
            else:
                after += seconds_ + seconds
        for group in groups:
            refused |= np.array([_is_refused(phase, s, visited) for s in group.stops])[group.of_each]
    unknown = itinerary.unread | np.isnan(highest) | np.isnan(before + after) | refused
    floor = np.where(refused, np.inf, np.where(unknown, 0.0, outside_bytes + np.nan_to_num(lowest)))
    used, rollout, step = (
        np.where(unknown, np.nan, values) for values in (outside_bytes + highest, before, before + after)
    )
    return Predictions(
        candidates=itinerary.candidates, floor_bytes=floor, device_used_bytes=used, step_s=step,
        rollout_s=rollout if itinerary.space.recipe.generates else None, sure=True,
    )  # fmt: skip


def _is_refused(phase: str, stops: tuple[Candidate, ...], visited: Mapping[Stop, Visited]) -> bool:
    return any(visited[phase, stop].refused for stop in stops if (phase, stop) in visited)


def _at_rest(itinerary: Itinerary, visited: Mapping[Stop, Visited]) -> list[tuple[tuple[str, ...], Floats]]:
    """(keys, how many bytes more than the recipe each candidate holds between two steps by them) of each group."""
    groups = {g.names: (phase, g) for phase, each in itinerary.groups.items() for g in each}
    largest = [n for n in groups if not any(set(n) < set(other) for other in groups)]
    found = []
    for phase, group in (groups[names] for names in largest):
        own = visited[phase, itinerary.space.baseline].held_bytes
        held = [visited.get((phase, stops[0])) if stops else None for stops in group.stops]
        more = [math.nan if each is None else each.held_bytes - own for each in held]
        found.append((group.names, np.array(more)[group.of_each]))
    return found


def _changed(
    group: Group, phase: str, name: str, base: Visited, visited: Mapping[Stop, Visited]
) -> tuple[Floats, Floats, Floats]:
    """(fewest bytes, bytes, seconds) by which each combination of a group changes the phase `name`; NaN if unknown."""
    bytes_, seconds = base.phases[name]
    found = []
    for stops, sizes in zip(group.stops, group.sizes, strict=True):
        each = [v if (v := visited.get((phase, c))) is not None and name in v.phases else None for c in stops]
        if not each or any(v is None for v in each):
            found.append((math.nan, math.nan, math.nan))
            continue
        told = [cast(Visited, v).phases[name] for v in each]
        if len(told) == 1:
            found.append((told[0][0] - bytes_, told[0][0] - bytes_, told[0][1] - seconds))
            continue
        size, low, high = sizes
        part = (size - low) / (high - low)
        line = [(1 - part) * a + part * b for a, b in ((told[0][0], told[1][0]), (low * told[0][1], high * told[1][1]))]
        sure = -math.inf if size < low else told[1][0] if size > high else told[0][0]
        found.append((sure - bytes_, max(line[0], told[0][0]) - bytes_, line[1] / size - seconds))
    columns = np.array(found).reshape(-1, 3).T
    return columns[0], columns[1], columns[2]


def _coded(values: Sequence[Value]) -> tuple[Ints, tuple[Value, ...]]:
    """(the number of each value, the values in the order of these numbers)."""
    numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
    return np.array([numbers[value] for value in values], dtype=np.intp), tuple(numbers)


def _combined(columns: Sequence[tuple[Ints, tuple[Value, ...]]]) -> tuple[Ints, list[tuple[Value, ...]]]:
    """(the number of each candidate's combination of the columns' values, the combinations)."""
    rows = np.column_stack([codes for codes, _ in columns])
    unique, of_each = np.unique(rows, axis=0, return_inverse=True)
    combinations = [tuple(values[code] for code, (_, values) in zip(row, columns, strict=True)) for row in unique]
    return of_each.reshape(-1), combinations


def _few(size: Mapping[int, float], *, own: float) -> list[float]:
    """The sizes to visit: a few all; else the recipe's own, and some around it in steps of about `_STEP`."""
    every = sorted(set(size.values()))
    if len(every) <= _FEW:
        return every
    start = min(every, key=lambda s: abs(math.log(s / own)))
    kept = [max((s for s in every if s * _STEP <= start), default=every[0]), start]
    while len(kept) < _MOST and kept[-1] < every[-1]:
        kept.append(min((s for s in every if s >= _STEP * kept[-1]), default=every[-1]))
    return sorted(set(kept))


def _around(size: Mapping[int, float], kept: Sequence[float], number: int) -> tuple[int, ...]:
    """Combination `number` itself if its size is one of `kept`; else the two of them around it, or nearest to it."""
    own = size[number]
    if own in kept or len(kept) < 2:
        return (number,)
    of = {s: n for n, s in size.items()}
    above = min(max(1, sum(s < own for s in kept)), len(kept) - 1)
    return of[kept[above - 1]], of[kept[above]]


# -- made in the fork server, kept on disk ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Toured:
    """Outcome of an itinerary: the visits, or the reason why there were none."""

    visited: Mapping[Stop, Visited] = field(default_factory=dict)
    outside_bytes: int = 0
    share: float = 1.0
    reason: str = ""


def toured(
    itinerary: Itinerary, *, device: str, limit_bytes: int | None, worst_case: Path, server: ForkServer, scratch: Path,
    kept: Path,
) -> Toured:  # fmt: skip
    """The visits of an itinerary, made anew or found in the folder `kept`."""
    space, series = itinerary.space, itinerary.series
    asked = [[(phase, merge(space.recipe.values, space.yaml_changes(c))) for phase, c in row] for row in series]
    request = {
        "trainer": space.recipe.trainer, "values": dict(space.recipe.values), "device": device,
        "series": asked, "limit_bytes": limit_bytes,
    }  # fmt: skip
    told = [by_content(space.recipe.values), asked, limit_bytes, space.recipe.trainer, device, code_hash(),
            read_json(worst_case), calibration.fingerprint(device)]  # fmt: skip
    name = hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()[:24]
    answer = read_json(kept / name / "visits.json")
    if answer is None:
        folder = scratch / name
        folder.mkdir(parents=True, exist_ok=True)
        places = {"answer": str(folder / "visits.json"), "worst_case": str(worst_case)}
        write_json(folder / "request.json", {**request, **places, "processes": processes(1)})
        server.call({
            "entry": "autofit.forecast.visiting:run", "argument": str(folder / "request.json"), "cwd": str(Path.cwd()),
            "log": str(folder / "visits.log"), "env": {}, "deadline_s": _DEADLINE_S,
        })  # fmt: skip
        answer = read_json(folder / "visits.json") or {"error": f"no answer within {_DEADLINE_S:.0f} s"}
        if "error" not in answer:
            keep(folder, kept / name)
    if "error" in answer:
        return Toured(reason=f"the phases were not simulated: {answer['error']}")
    found = cast("list[list[dict[str, Any] | None]]", answer["series"])
    stops = [stop for row in series for stop in row]
    visited = {s: _read(each) for s, each in zip(stops, (v for row in found for v in row), strict=True) if each}
    short = [phase for phase in itinerary.groups
             if not visited.get((phase, space.baseline), Visited(refused=True)).phases]  # fmt: skip
    if short:
        return Toured(reason=f"{', '.join(short)} did not run by itself with the recipe's own values")
    return Toured(
        visited=visited,
        outside_bytes=int(str(answer["outside_bytes"])), share=float(str(answer["share"])),
    )  # fmt: skip


def _read(told: Mapping[str, Any]) -> Visited:
    if told.get("refused"):
        return Visited(refused=True)
    return Visited(held_bytes=told["held"], phases={name: tuple(each) for name, each in told["phases"].items()})
