"""Comparisons of step times: which are equal, and whether pairs of probes show that one config is faster.

The rule of equals, over (seconds of a step, device-used bytes) of the candidates that fit:

1. A candidate is at the edge if it leaves less than `EDGE_FRAC` of the limit free. A fastest candidate at the edge
   gives way to the fastest that is not, if that is at most `EDGE_EQUAL_FRAC` slower.
2. Of those that are then at most `EQUAL_FRAC` slower than the fastest, the leanest wins, if it needs at least
   `LEANER_FRAC` less memory; between two that are about as lean, the faster.
3. One that changes the training (a tier below neutral) gives way to the one with the fewest of its changes that is at
   most `EQUAL_FRAC` slower and about as lean: its further changes must gain more than that.

`EDGE_FRAC` follows from the stated error of predicted bytes: reserved bytes of 65 measured rows were at most 6.2 %
above the prediction (experiments/accuracy/table.md), and 5 % of the limit is 7 % of a target with its headroom of 2 %.
`EDGE_EQUAL_FRAC` is the error of the ratio of two predicted step times: 4.6 % in the median of the 14 pairs of rows of
one PEFT method (the same files). Away from the edge memory that is left over buys nothing, so that only `EQUAL_FRAC`
counts as equal: what the search itself does not look for (--min-gain), and what the same work took when it was measured
twice (PEFT's rows that differ in a learning rate alone: 0.6 to 1.2 %).

A pair of probes is measured in turns. Other work on the machine makes a probe slower and never faster
(https://docs.python.org/3/library/timeit.html, note on `Timer.repeat`). A probe is therefore called disturbed if its
fastest step is clearly slower than that of the config's fastest probe; disturbed probes are left out, and the others
are compared in pairs. The constants were chosen with experiments/busy_machine/.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import cast

from autofit.probing.result import Fidelity, ProbeResult

DISTURBED_FRAC = 0.08  # how much slower than its config's fastest probe a disturbed probe is
MOST_PAIRS = 10
_LEAST_PAIRS = 3  # undisturbed pairs for a verdict "faster"
_LEAST_IF_ALL_AGREE = 7  # pairs, each with a faster finalist: less than 1 % by chance if it is not (sign test)
_LEAST_IF_UNSTEADY = 5  # pairs, disturbed ones included, where times differ from each other or from the search's


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Seconds of the fastest optimizer step of two probes, one right after the other."""

    baseline_s: float
    finalist_s: float

    @property
    def speedup(self) -> float:
        return self.baseline_s / self.finalist_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Pairs of a finalist and the baseline in the order of their measurement, and the probes of the search.

    The speed-up is the median of the speed-ups of the undisturbed pairs, and of all pairs where those are too few; they
    range from `low` to `high`.
    """

    pairs: tuple[Pair, ...]
    searched: Pair

    @property
    def undisturbed(self) -> tuple[Pair, ...]:
        """The undisturbed probes in pairs: first with first, second with second. At least one of any pairs."""
        baseline = _undisturbed([p.baseline_s for p in self.pairs])
        finalist = _undisturbed([p.finalist_s for p in self.pairs])
        return tuple(Pair(baseline_s=a, finalist_s=b) for a, b in zip(baseline, finalist, strict=False))

    @property
    def told(self) -> tuple[Pair, ...]:
        """The pairs that the speed-up is taken from: the undisturbed ones, or all if those are too few."""
        return self.undisturbed if len(self.undisturbed) >= _LEAST_PAIRS else self.pairs

    @property
    def speedup(self) -> float:
        return median(p.speedup for p in self.told)

    @property
    def low(self) -> float:
        return min(p.speedup for p in self.told)

    @property
    def high(self) -> float:
        return max(p.speedup for p in self.told)

    @property
    def steady(self) -> bool:
        """True if all probes were undisturbed and the machine is as fast as during the search."""
        disturbed = len(self.undisturbed) < len(self.pairs)
        every = (*self.pairs, self.searched)
        return not disturbed and alike([p.baseline_s for p in every]) and alike([p.finalist_s for p in every])

    @property
    def spread(self) -> float:
        """The width of the range; if the machine was unsteady, at least the bound of an undisturbed one."""
        return max(self.high - self.low, 0.0 if self.steady else DISTURBED_FRAC)

    @property
    def faster(self) -> bool | None:
        """True if the finalist is faster by more than the spread, or in every pair; None if that takes more pairs."""
        even, count = self.undisturbed, len(self.pairs)
        if len(even) >= _LEAST_PAIRS - 1 and max(p.speedup for p in even) <= 1:
            return False
        if len(even) >= _LEAST_PAIRS:
            if (self.steady or count >= _LEAST_IF_UNSTEADY) and self.speedup > 1 + self.spread:
                return True
            if self.speedup <= 1 or (self.steady and self.low <= 1):
                return False
        if count >= _LEAST_IF_ALL_AGREE and all(p.speedup > 1 for p in self.pairs):
            return True
        if count >= _LEAST_IF_UNSTEADY and median(p.speedup for p in self.pairs) <= 1:
            return False
        return False if self.at_bound else None

    @property
    def at_bound(self) -> bool:
        """True if the most pairs are measured, whatever they show."""
        return len(self.pairs) >= MOST_PAIRS

    def to_json(self) -> dict[str, object]:
        """The measured seconds: everything else follows from them."""
        return {"pairs": [[p.baseline_s, p.finalist_s] for p in self.pairs],
                "searched": [self.searched.baseline_s, self.searched.finalist_s]}  # fmt: skip

    @classmethod
    def from_json(cls, content: Mapping[str, object]) -> "Comparison":
        pairs = [Pair(baseline_s=a, finalist_s=b) for a, b in cast(list[list[float]], content["pairs"])]
        baseline_s, finalist_s = cast(list[float], content["searched"])
        return cls(pairs=tuple(pairs), searched=Pair(baseline_s=baseline_s, finalist_s=finalist_s))


def alike(times: Sequence[float]) -> bool:
    """True if probes of one config, some of them with few steps, show the same speed of the machine."""
    return max(times) <= (1 + 2 * DISTURBED_FRAC) * min(times)


def _undisturbed(times: Sequence[float]) -> list[float]:
    return [t for t in times if t <= (1 + DISTURBED_FRAC) * min(times)]


EQUAL_FRAC = 0.01
LEANER_FRAC = 0.05
EDGE_FRAC = 0.05
EDGE_EQUAL_FRAC = 0.046
PROBE_NOISE = 0.02  # standard deviation of one probe's seconds, as a share
NOISE_FRAC = 2 * 2**0.5 * PROBE_NOISE  # two standard deviations of the difference of two probes

Cost = tuple[float, float]  # (seconds of a step, device-used bytes)


def preferred(costs: Sequence[Cost], *, equal_frac: float = EQUAL_FRAC, limit_bytes: float | None = None) -> int:
    """The index of the winner among `costs`, at least one, by the rule above."""
    pool = range(len(costs))
    fastest = min(pool, key=lambda i: costs[i])
    most = edge_bytes(limit_bytes)
    if most is not None and costs[fastest][1] > most:
        slowest_s = (1 + max(equal_frac, EDGE_EQUAL_FRAC)) * costs[fastest][0]
        clear = [i for i in pool if costs[i][1] <= most and costs[i][0] <= slowest_s]
        fastest = min(clear, key=lambda i: costs[i], default=fastest)
    equals = [i for i in pool if costs[fastest][0] <= costs[i][0] <= (1 + equal_frac) * costs[fastest][0]]
    least = min(costs[i][1] for i in equals)
    if least > (1 - LEANER_FRAC) * costs[fastest][1]:
        return fastest
    return min((i for i in equals if costs[i][1] <= least / (1 - LEANER_FRAC)), key=lambda i: costs[i])


def plainest(
    costs: Sequence[Cost], changes: Sequence[Collection[object]], chosen: int, *, equal_frac: float = EQUAL_FRAC
) -> int:
    """The index of the trial with the fewest of the changes of `chosen`, and only such, that is as good by rule 3."""
    able = [
        i for i, (cost, some) in enumerate(zip(costs, changes, strict=True))
        if all(one in changes[chosen] for one in some) and is_as_good(cost, costs[chosen], equal_frac=equal_frac)
    ]  # fmt: skip
    return min(able, key=lambda i: (len(changes[i]), costs[i], i))


def is_as_good(cost: Cost, chosen: Cost, *, equal_frac: float = EQUAL_FRAC) -> bool:
    """True if `cost` is within the tolerances of the `chosen` in seconds and in bytes."""
    return cost[0] <= (1 + equal_frac) * chosen[0] and cost[1] <= chosen[1] / (1 - LEANER_FRAC)


def edge_bytes(limit_bytes: float | None) -> float | None:
    """The most device-used bytes of a candidate below the edge."""
    return None if limit_bytes is None else (1 - EDGE_FRAC) * limit_bytes


def measured_equal_frac(results: Sequence[ProbeResult]) -> float:
    """The share by which equal step times may differ: what steps of one probe differ by, where they were measured.

    No less than for predictions, and no more than the noise of two probes.
    """
    spreads = [
        max(r.step_s) / min(r.step_s) - 1
        for r in results
        if r.fidelity is Fidelity.MEASURED and len(r.step_s) > 1 and r.steps_are_alike
    ]
    return min(max(EQUAL_FRAC, median(spreads)), NOISE_FRAC) if spreads else EQUAL_FRAC
