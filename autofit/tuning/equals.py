"""The fastest, unless a leaner candidate is as fast: which step times are equal, and how much memory the winner leaves.

The rule, over (seconds of a step, device-used bytes) of the candidates that fit:

1. A candidate is at the edge if it leaves less than `EDGE_FRAC` of the limit free. A fastest candidate at the edge
   gives way to the fastest that is not, if that is at most `EDGE_EQUAL_FRAC` slower.
2. Of those that are then at most `EQUAL_FRAC` slower than the fastest, the leanest wins, if it needs at least
   `LEANER_FRAC` less memory; between two that are about as lean, the faster.

`EDGE_FRAC` follows from the stated error of predicted bytes: reserved bytes of 39 measured rows were at most 6.2 %
above the prediction (experiments/accuracy/table.md), and 5 % of the limit is 7 % of a target with its headroom of 2 %.
`EDGE_EQUAL_FRAC` is the error of the ratio of two predicted step times: 4.6 % in the median of the 14 pairs of rows of
one PEFT method (the same files). Away from the edge memory that is left over buys nothing, so that only `EQUAL_FRAC`
counts as equal: what the search itself does not look for (--min-gain), and what the same work took when it was measured
twice (PEFT's rows that differ in a learning rate alone: 0.6 to 1.2 %).
"""

from collections.abc import Sequence
from statistics import median

from autofit.probing.result import Fidelity, ProbeResult

EQUAL_FRAC = 0.01
LEANER_FRAC = 0.05
EDGE_FRAC = 0.05
EDGE_EQUAL_FRAC = 0.046
PROBE_NOISE = 0.02  # standard deviation of one probe's seconds, as a share
NOISE_FRAC = 2 * 2**0.5 * PROBE_NOISE  # two standard deviations of the difference of two probes

Cost = tuple[float, float]  # (seconds of a step, device-used bytes)


def preferred(costs: Sequence[Cost], *, equal_frac: float = EQUAL_FRAC, limit_bytes: float | None = None) -> int:
    """The index of the winner among `costs`, which are not empty, by the rule above."""
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


def edge_bytes(limit_bytes: float | None) -> float | None:
    """The most device-used bytes of a candidate that is not at the edge."""
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
