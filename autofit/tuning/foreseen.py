"""The front of a study: its trials, and candidates that no probe has reached but that are predicted to be ahead."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
    name: str = ""  # p1, p2, ... in its study: a number is a trial's; "" in a study of an earlier autofit
    params: Mapping[str, Any] = field(default_factory=dict)  # {knob: value}, with which it becomes a trial
    yaml_changes: Mapping[str, object] = field(default_factory=dict)
    needs: tuple[str, ...] = ()  # packages without which it does not run

    def to_json(self) -> dict[str, object]:
        return {
            "name": self.name, "tier": self.tier, "changes": dict(self.changes), "step_s": self.step_s,
            "device_used_bytes": self.device_used_bytes, "params": dict(self.params),
            "yaml_changes": dict(self.yaml_changes), "needs": list(self.needs),
        }  # fmt: skip

    @classmethod
    def from_json(cls, content: Mapping[str, object]) -> "Foreseen":
        found = cast("Mapping[str, Any]", content)
        return cls(
            tier=cast(Tier, found["tier"]), changes=found["changes"], step_s=float(found["step_s"]),
            device_used_bytes=int(found["device_used_bytes"]), name=found.get("name", ""),
            params=found.get("params", {}), yaml_changes=found.get("yaml_changes", {}),
            needs=tuple(found.get("needs", ())),
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


def leanest_foreseen(trials: Iterable[Trial], foreseen: Iterable[Foreseen]) -> Foreseen | None:
    """The candidate of least memory on the common front, if no probe has reached it; None where a trial needs less."""
    front, ahead = common_front(trials, foreseen)
    if not ahead or (front and cost(front[-1])[1] <= ahead[-1].device_used_bytes):
        return None
    return ahead[-1]


def undominated(costs: Costs) -> list[int]:
    """The indices of the front of `costs`, fastest first; of equal ones the first."""
    front: list[int] = []
    least = math.inf
    for place in sorted(range(len(costs)), key=lambda i: (*costs[i], i)):
        if costs[place][1] < least:
            front.append(place)
            least = costs[place][1]
    return front
