"""A finalist and the baseline measured in turns: pairs of probes, and whether the finalist is clearly faster.

Other work on the machine makes a probe slower and never faster (https://docs.python.org/3/library/timeit.html, note on
`Timer.repeat`). A probe is therefore called disturbed if its fastest step is clearly slower than that of the config's
fastest probe; disturbed probes are left out, and the others are compared in pairs. The constants were chosen with
experiments/busy_machine/.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import cast

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
        """Whether no probe was disturbed and the machine is as fast as during the search."""
        disturbed = len(self.undisturbed) < len(self.pairs)
        every = (*self.pairs, self.searched)
        return not disturbed and alike([p.baseline_s for p in every]) and alike([p.finalist_s for p in every])

    @property
    def spread(self) -> float:
        """The width of the range, and no less than what passes for undisturbed if the machine was unsteady."""
        return max(self.high - self.low, 0.0 if self.steady else DISTURBED_FRAC)

    @property
    def faster(self) -> bool | None:
        """Whether the finalist is faster by more than the spread, or in every pair; None if that takes more pairs."""
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
        """Whether no more pairs are measured, whatever they may show."""
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
    """Whether probes of one config, some of them with few steps, show the same speed of the machine."""
    return max(times) <= (1 + 2 * DISTURBED_FRAC) * min(times)


def _undisturbed(times: Sequence[float]) -> list[float]:
    return [t for t in times if t <= (1 + DISTURBED_FRAC) * min(times)]
