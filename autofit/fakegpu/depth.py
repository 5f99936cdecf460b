"""Predict a deep model from two shallow ones.

The bytes alive when a given line of code allocates a given shape, for the first, last or worst layer, are linear in the
number of equal layers. So each such moment of two short traces (2 and 3 layers) is extrapolated by itself, and the
highest is taken: a peak that moves to another place as the model gets deeper is found. The phases come out exact.
Peak allocated and reserved also hold the allocator's unsplit rests (up to 1 MiB a block) and its fragmentation, for
which the deeper trace's ratios are taken: replay a full-depth trace before relying on those two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from autofit.fakegpu.errors import FakeGpuError
from autofit.fakegpu.timeline import CATEGORIES, PhasePeak

if TYPE_CHECKING:
    from autofit.fakegpu.device import FakeGpu


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthPrediction:
    """What a run with `layers` layers would report; the phases are the exact part."""

    layers: int
    phases: tuple[PhasePeak, ...]
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    context_bytes: int
    elapsed_s: float

    @property
    def device_used_bytes(self) -> int:
        return self.context_bytes + self.peak_reserved_bytes


def predict_depth(traced: Mapping[int, FakeGpu], layers: int) -> DepthPrediction:
    """The run at `layers` layers, from traces of it at exactly two smaller numbers of layers."""
    if len(traced) != 2 or layers < 1:
        raise FakeGpuError(f"two traced depths are needed to predict {layers} layers, got {sorted(traced)}")
    low, high = sorted(traced)
    first, second = _moments(traced[low]), _moments(traced[high])

    def line(a: float, b: float) -> float:
        return a + (b - a) / (high - low) * (layers - low)

    best: dict[str, tuple[float, MomentKey]] = {}
    for key in first.highest.keys() & second.highest.keys():
        nbytes = line(first.total_at(key), second.total_at(key))
        if key.phase not in best or nbytes > best[key.phase][0]:
            best[key.phase] = (nbytes, key)
    if not best:
        raise FakeGpuError(f"the traces with {low} and {high} layers have nothing in common")
    phases = tuple(
        PhasePeak(
            name=phase,
            peak_allocated_bytes=round(nbytes),
            categories={
                name: max(0, round(line(first.part(name, key), second.part(name, key)))) for name in CATEGORIES
            },
        )
        for phase, (nbytes, key) in best.items()
    )
    deeper = traced[high]
    live = max(phase.peak_allocated_bytes for phase in phases)
    allocated = round(live * deeper.peak_allocated_bytes / int(second.total.max()))
    reserved = round(allocated * deeper.peak_reserved_bytes / deeper.peak_allocated_bytes)
    return DepthPrediction(
        layers=layers,
        phases=phases,
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
        context_bytes=traced[low].spec.context_bytes,
        elapsed_s=line(traced[low].elapsed_s, traced[high].elapsed_s),
    )


class MomentKey(NamedTuple):
    """A kind of moment: the first, last or highest time that this code allocates this in this phase."""

    phase: str
    which: str
    op: str
    dtype: str
    shape: tuple[int, ...]
    place: tuple[CodeType | None, int]


@dataclass(frozen=True, slots=True)
class _Moments:
    """Where in a trace each kind of moment is, and what was alive then."""

    highest: Mapping[MomentKey, int]
    total: npt.NDArray[np.int64]
    live: Mapping[str, npt.NDArray[np.int64]]

    def total_at(self, key: MomentKey) -> int:
        return int(self.total[self.highest[key]])

    def part(self, category: str, key: MomentKey) -> int:
        return int(self.live[category][self.highest[key]])


def _moments(gpu: FakeGpu) -> _Moments:
    timeline = gpu.timeline
    total = timeline.total_bytes
    found: dict[MomentKey, int] = {}
    for allocation in gpu.memory.allocations:
        at = allocation.born
        place = (allocation.code, allocation.line)
        base = MomentKey(allocation.phase, "first", allocation.op, allocation.dtype, allocation.shape, place)
        found.setdefault(base, at)
        found[base._replace(which="last")] = at
        worst = base._replace(which="worst")
        if worst not in found or total[at] > total[found[worst]]:
            found[worst] = at
    return _Moments(found, total, timeline.live_bytes)
