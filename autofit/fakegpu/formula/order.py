"""A phase step by step, by the clock's own rules: copies and collectives wait for kernels, and kernels for them.

An offload of activations lets its copies run a few tensors ahead and no further, and FSDP gathers one layer ahead. So
the seconds of kernels and of what runs beside them, each by themselves, are too few: they take turns in part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from autofit.fakegpu.formula.polynomials import COMPUTING, GATHERING, HOST, LANES, Kind
from autofit.fakegpu.specs import HostCosts

if TYPE_CHECKING:
    from autofit.fakegpu.formula.kernel_log import Step

Floats = npt.NDArray[np.float64]


class Turn(NamedTuple):
    """The next turn, `host_s` of the host's work later: a part of kernel number `kernel`, a moment, or a wait."""

    host_s: float
    lanes: tuple[int, ...]
    kernel: int = -1
    part: float = 0.0  # of the seconds of all kernels of its kind
    moment: int = -1
    waits: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Work of `passes` passes of a phase in order, of a model of `layers` layers."""

    layers: int
    passes: float
    turns: tuple[Turn, ...]

    @classmethod
    def of(
        cls, steps: Sequence[Step], numbers: Mapping[Kind, int], costs: HostCosts, *, layers: int, passes: float
    ) -> Order:  # fmt: skip
        shares: dict[Kind, float] = {}
        for step in steps:
            if step.kind is not None:
                shares[step.kind] = shares.get(step.kind, 0.0) + step.share
        turns, before_s = [], 0.0
        for step in steps:
            now_s, kind = step.host.seconds(costs) + step.host.alone_s(costs), step.kind
            kernel, part = (-1, 0.0) if kind is None else (numbers[kind], passes * step.share / shares[kind])
            turns.append(Turn(now_s - before_s, tuple(map(int, step.lanes)), kernel, part, step.moment, step.waits))
            before_s = now_s
        return cls(layers=layers, passes=passes, turns=tuple(turns))

    @property
    def kernels(self) -> list[int]:
        return sorted({turn.kernel for turn in self.turns} - {-1})

    def renumbered(self, numbers: Sequence[int]) -> Order:
        """The same where kernel i has the number `numbers[i]`."""
        turns = (t if t.kernel < 0 else t._replace(kernel=int(numbers[t.kernel])) for t in self.turns)
        return Order(layers=self.layers, passes=self.passes, turns=tuple(turns))

    def seconds(self, each: Mapping[int, Floats], points: int, *, left_frac: float) -> Floats:
        """Seconds of a pass at each point; `each` has those of all launches of a kernel in a pass.

        Beside a collective kernels have `left_frac` of their speed.
        """
        lanes = [np.zeros(points) for _ in LANES]
        host, moments, collecting = lanes[HOST], dict[int, Floats](), _Collecting(left_frac)
        for host_s, own, kernel, part, moment, waits in self.turns:  # thousands
            if host_s:
                host += host_s
            if kernel >= 0:
                lane, took = lanes[own[0]], part * each[kernel]
                for other in (HOST, *own[1:]):
                    np.maximum(lane, lanes[other], out=lane)
                if own[0] == COMPUTING:
                    lane[:] = collecting.end(lane, took)
                elif own[0] >= GATHERING:
                    collecting.begin(lane, lane + took)
                    lane += took
                else:
                    lane += took
            elif not waits:
                moments[moment] = reduce(np.maximum, (lanes[number] for number in own), host.copy())
            elif moment in moments:  # else it is of another phase, which is over
                for number in own:
                    np.maximum(lanes[number], moments[moment], out=lanes[number])
        return np.asarray(reduce(np.maximum, lanes) / self.passes)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, kept: dict[str, Any]) -> Order:
        turns = (Turn(host_s, tuple(lanes), *rest) for host_s, lanes, *rest in kept["turns"])
        return cls(layers=kept["layers"], passes=kept["passes"], turns=tuple(turns))


class _Collecting:
    """Collectives that kernels may run beside: when each begins and ends, at each point."""

    def __init__(self, left_frac: float) -> None:
        self._left_frac = left_frac
        self._times: list[tuple[Floats, Floats]] = []

    def begin(self, begins: Floats, ends: Floats) -> None:
        self._times.append((begins.copy(), ends))

    def end(self, start: Floats, seconds: Floats) -> Floats:
        """The end of a kernel that takes `seconds` alone: beside a collective it has a part of the card."""
        if not self._times:
            return start + seconds
        self._times = [times for times in self._times if (times[1] > start).any()]
        for begins, ends in self._times:
            beside = (begins < start + seconds) & (ends > start)
            if not beside.any():
                continue
            alone = np.where(beside, np.maximum(begins - start, 0.0), 0.0)
            start, seconds = start + alone, seconds - alone
            took = np.where(beside, np.minimum(seconds / self._left_frac, ends - start), 0.0)
            start, seconds = start + took, seconds - took * self._left_frac
        return start + seconds


def at_depth(low: Order, high: Order, layers: int, seconds: Sequence[Floats]) -> Floats:
    """Seconds of a model of `layers` layers, from the `seconds` of both orders."""
    one, other = seconds
    if low.layers == high.layers:
        return one
    return one + (layers - low.layers) / (high.layers - low.layers) * (other - one)
