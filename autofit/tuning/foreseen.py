"""The front of a study: its trials, and candidates that no probe has reached but that are predicted to be ahead."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from autofit.recipe.keys import Tier
from autofit.tuning.frontier import Trial, cost, pareto_front

Costs = Sequence[tuple[float, float]]  # (seconds of a step, device-used bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreseen:
    """A candidate on the front that was not probed; its figures are predicted, corrected by the study's probes."""

    tier: Tier
    changes: Mapping[str, object]
    step_s: float
    device_used_bytes: int

    def to_json(self) -> dict[str, object]:
        return {"tier": self.tier, "changes": dict(self.changes), "step_s": self.step_s,
                "device_used_bytes": self.device_used_bytes}  # fmt: skip

    @classmethod
    def from_json(cls, content: Mapping[str, object]) -> "Foreseen":
        found = cast("Mapping[str, Any]", content)
        return cls(
            tier=cast(Tier, found["tier"]), changes=found["changes"], step_s=float(found["step_s"]),
            device_used_bytes=int(found["device_used_bytes"]),
        )  # fmt: skip


def common_front(trials: Iterable[Trial], foreseen: Iterable[Foreseen]) -> tuple[list[Trial], list[Foreseen]]:
    """The trials and the foreseen candidates that none of all dominates, each fastest first."""
    probed = pareto_front(trials)
    ahead = sorted(foreseen, key=lambda f: (f.step_s, f.device_used_bytes))
    costs = [*map(cost, probed), *((f.step_s, float(f.device_used_bytes)) for f in ahead)]
    kept = set(undominated(costs))
    return (
        [t for place, t in enumerate(probed) if place in kept],
        [f for place, f in enumerate(ahead, start=len(probed)) if place in kept],
    )


def undominated(costs: Costs) -> list[int]:
    """The indices of the front of `costs`, fastest first; of equal ones the first."""
    front: list[int] = []
    least = math.inf
    for place in sorted(range(len(costs)), key=lambda i: (*costs[i], i)):
        if costs[place][1] < least:
            front.append(place)
            least = costs[place][1]
    return front
