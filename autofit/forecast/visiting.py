"""Runs the phases of a training one by one on a simulated card, each with the recipe of another candidate.

One process makes the models once and visits one phase after another, so a visit takes as long as its own operations.
Imports torch.
"""

import gc
import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from autofit.fakegpu.depth.stack import LongerPatternError
from autofit.files import ScratchFolder, write_json, written_json
from autofit.plugin.protocol import LOAD, Report, Task, VisitedTrainer, Visits, WorstCase
from autofit.plugin.ranks import simulated_rank
from autofit.plugin.registry import load
from autofit.probing.simulated import LiveStretch, SimMemory, layers_alike, needs_all_layers
from autofit.probing.supervise import shared_out
from autofit.recipe.launch import split
from autofit.recipe.secrets import opened

Row = Sequence[tuple[str, Mapping[str, object]]]  # (phase, recipe) of each visit
REST, _TAKING = "rest", "taking"  # before a visit: all is as between two steps, and on the way there


def run(request_path: str) -> int:
    """Make the visits requested at `request_path` and write their figures. Always returns 0."""
    request = written_json(request_path)
    answer = Path(str(request["answer"]))
    gc.collect()
    gc.freeze()
    try:
        limit = request["limit_bytes"]
        found = Tour.of(request).made(
            cast("list[Any]", request["series"]), processes=int(str(request["processes"])),
            limit_bytes=None if limit is None else int(str(limit)),
        )  # fmt: skip
    except Exception as error:
        traceback.print_exc()
        write_json(answer, {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"})
        return 0
    write_json(answer, found)
    return 0


class Tour:
    """Visits of phases of one recipe."""

    def __init__(self, *, trainer: str, values: Mapping[str, object], device: str, worst_case: Path) -> None:
        self._trainer, self._stated, self._device, self._worst_case = trainer, values, device, worst_case
        self._values = opened(dict(values))

    @classmethod
    def of(cls, request: Mapping[str, object]) -> "Tour":
        return cls(
            trainer=str(request["trainer"]), values=cast("dict[str, object]", request["values"]),
            device=str(request["device"]), worst_case=Path(str(request["worst_case"])),
        )  # fmt: skip

    def made(self, series: Sequence[Row], *, limit_bytes: int | None, processes: int) -> dict[str, object]:
        """Figures of each (phase, recipe) of each row, with their common part; `processes` share the rows out.

        The recipes of a row grow in size: what comes after one that needs more than the limit takes at least as much,
        and is told so without a visit.
        """
        shares = _dealt([len(row) for row in series], min(processes, len(series)))
        jobs = [partial(self._part, [series[place] for place in share], limit_bytes) for share in shares]
        told = shared_out(jobs, len(jobs))
        rows = {place: row for share, part in zip(shares, told, strict=True)
                for place, row in zip(share, part["series"], strict=True)}  # fmt: skip
        return {**told[0], "series": [rows[place] for place in range(len(series))]}

    def _part(self, series: Sequence[Row], limit_bytes: int | None) -> dict[str, Any]:
        if needs_all_layers(self._values):
            return self._on_card(series, limit_bytes, pattern=None)
        try:
            return self._on_card(series, limit_bytes, pattern=layers_alike(self._values))
        except LongerPatternError:
            return self._on_card(series, limit_bytes, pattern=2)

    def _on_card(self, series: Sequence[Row], limit_bytes: int | None, *, pattern: int | None) -> dict[str, Any]:
        trainer, (launch, values) = cast(VisitedTrainer, load(self._trainer)), split(self._values)
        memory = SimMemory(self._device, None)
        card = memory.card(pattern=pattern)
        with simulated_rank(launch, 0, device=self._device), card, ScratchFolder("visits-") as folder:
            task = Task(device=self._device, output=folder, worst_case=WorstCase(path=self._worst_case), steps=1)
            visits = _Visits(memory, limit_bytes, own=self._stated)
            tour = trainer.visits(values, task, visits.marks)
            numbers = [visits.row(tour, row) for row in series]
            taken = visits.taken()
        found = [[None if n is None else {"refused": True} if n in visits.refused else taken.get(n) for n in row]
                 for row in numbers]  # fmt: skip
        return {"series": found, "outside_bytes": memory.outside_bytes, "share": tour.rollout_share}


def _dealt(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """The rows of each part, about as many visits in each."""
    found: list[list[int]] = [[] for _ in range(parts)]
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        min(found, key=lambda part: sum(lengths[p] for p in part)).append(place)
    return found


class _Visits:
    """The visits of one process, on one card."""

    def __init__(self, memory: SimMemory, limit_bytes: int | None, *, own: Mapping[str, object]) -> None:
        self.marks, self.refused = _VisitMarks(memory), set[int]()
        self._memory, self._limit_bytes, self._own = memory, limit_bytes, own
        self._made, self._broken = 0, False

    def row(self, tour: Visits, row: Row) -> list[int | None]:
        """The number of each visit; of one that was left out that of the last one before it."""
        found: list[int | None] = []
        for phase, recipe in row:
            before = found[-1] if found else None
            if before is not None and recipe != self._own and self._is_over(before):
                found.append(before)
            else:
                found.append(self._visit(tour, phase, recipe))
        return found

    def taken(self) -> dict[int, dict[str, Any]]:
        """{number of a visit: its figures}."""
        self.marks.begin(self._made)
        self.marks.enter(REST)
        return _by_visit(self._memory.stretches())

    def _is_over(self, number: int) -> bool:
        if self._limit_bytes is None or number in self.refused:
            return False
        peaks = [peak for peak, _ in self.taken()[number]["phases"].values()]
        return max(peaks, default=0) + self._memory.outside_bytes > self._limit_bytes

    def _visit(self, tour: Visits, phase: str, recipe: Mapping[str, object]) -> int | None:
        """The number of a visit; None once the card has left its state between two steps."""
        if self._broken:
            return None
        number, self._made = self._made, self._made + 1
        self.marks.begin(number)
        try:
            tour.take(split(opened(dict(recipe)))[1])
        except torch.OutOfMemoryError:
            self.refused.add(number)
            return number
        self.marks.enter(REST)
        try:
            tour.visit(phase, self.marks)
        except Exception:
            traceback.print_exc()
            self._broken = True
            return None
        return number


class _VisitMarks(Report):
    """Marks of a simulated card at each change of phase, with the number of the visit."""

    def __init__(self, memory: SimMemory) -> None:
        self._memory, self._at, self._number = memory, LOAD, -1
        self.enter(LOAD)

    def begin(self, number: int) -> None:
        """Count the next events for visit `number`, until its rest begins."""
        self._number = number
        self.enter(_TAKING)

    def enter(self, phase: str) -> str:
        left, self._at = self._at, phase
        self._memory.switch(left, f"{self._number} {phase}")
        return left


def _by_visit(stretches: Sequence[LiveStretch]) -> dict[int, dict[str, Any]]:
    """{number of a visit: bytes held before it, and the most bytes and the seconds of each of its phases}."""
    found: dict[int, dict[str, Any]] = {}
    for each in stretches:
        number, _, name = each.name.partition(" ")
        visit = found.setdefault(int(number), {"held": 0, "phases": {}})
        if name == REST:
            visit["held"] = each.begins_bytes
        elif name != _TAKING:
            peak, seconds = visit["phases"].get(name, (0, 0.0))
            visit["phases"][name] = max(peak, each.peak_bytes), seconds + each.seconds
    return found
