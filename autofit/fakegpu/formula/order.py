"""A phase step by step, by the clock's own rules: for copies that wait for kernels, and kernels that wait for copies.

An offload of activations lets its copies run a few tensors ahead and no further. So the seconds of kernels and of
copies, each by themselves, are too few: they take turns in part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from autofit.fakegpu.formula.polynomials import COMPUTING, COPYING, HOST, Kind
from autofit.fakegpu.specs import HostCosts

if TYPE_CHECKING:
    from autofit.fakegpu.formula.kernel_log import Step

Floats = npt.NDArray[np.float64]


class Turn(NamedTuple):
    """What comes next, `host_s` of the host's work later: a part of kernel number `kernel`, a moment, or a wait."""

    host_s: float
    lanes: tuple[int, ...]
    kernel: int = -1
    part: float = 0.0  # of the seconds of all kernels of its kind
    moment: int = -1
    waits: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What `passes` passes of a phase do in order, of a model of `layers` layers."""

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

    def seconds(self, each: Mapping[int, Floats], points: int) -> Floats:
        """Seconds of a pass at each point; `each` has those of all launches of a kernel in a pass."""
        lanes = [np.zeros(points) for _ in (HOST, COMPUTING, COPYING)]
        host, moments = lanes[HOST], dict[int, Floats]()
        for host_s, own, kernel, part, moment, waits in self.turns:  # thousands
            if host_s:
                host += host_s
            if kernel >= 0:
                lane = lanes[own[0]]
                np.maximum(lane, host, out=lane)
                lane += part * each[kernel]
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


def at_depth(low: Order, high: Order, layers: int, seconds: Sequence[Floats]) -> Floats:
    """Seconds of a model of `layers` layers, from the `seconds` of both orders."""
    one, other = seconds
    if low.layers == high.layers:
        return one
    return one + (layers - low.layers) / (high.layers - low.layers) * (other - one)
