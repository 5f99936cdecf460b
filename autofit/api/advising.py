"""What a search may not try, told beside its result: changes of lower tiers, each simulated on top of the winner."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import cast

from autofit.forecast.change import Change, Tell
from autofit.forecast.estimate import Estimator
from autofit.forecast.faster import faster_changes
from autofit.forecast.levers import Levers
from autofit.probing.result import ProbeStatus
from autofit.recipe.keys import TIERS, Tier
from autofit.recipe.recipe import Recipe, merge
from autofit.space.describe import describe_changes
from autofit.tuning.frontier import Trial
from autofit.units import format_bytes, format_seconds

MOST = 4  # changes that are simulated after a search


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """A change beyond the allowed tier, on top of the winner's, as the simulated card predicts it."""

    changes: Mapping[str, object]
    options: str  # of the command line, --set dtype=bfloat16, or what to write in another tool's file
    tier: Tier
    device_used_bytes: int
    step_s: float | None
    speedup: float | None  # over the winner; None where nothing fits without the change
    own: str = ""  # the change in the keys of the file that the recipe was, if that was another tool's

    @classmethod
    def of(cls, change: Change, step_s: float | None) -> "Outside":
        """`change`, against a step of `step_s` seconds."""
        return cls(
            changes=change.changes, options=change.how, tier=change.tier, step_s=change.step_s,
            device_used_bytes=change.device_used_bytes,
            speedup=step_s / change.step_s if step_s and change.step_s else None, own=change.own,
        )  # fmt: skip

    def line(self, original: Mapping[str, object]) -> str:
        """`dtype None -> bfloat16 (approximate): 8.35 s a step, 24.56 GB, 3.09x   --set dtype=bfloat16`."""
        figures = [] if self.step_s is None else [f"{format_seconds(self.step_s)} a step"]
        figures += [format_bytes(self.device_used_bytes)]
        figures += [] if self.speedup is None else [f"{self.speedup:.2f}x"]
        how = f"in your file: {self.own}" if self.own else self.options
        return f"{describe_changes(self.changes, original)} ({self.tier}): {', '.join(figures)}   {how}"


def outside(
    best: Trial | None, trials: Sequence[Trial], estimator: Estimator, allow: Tier, *, tell: Tell = lambda _: None
) -> dict[str, object] | None:
    """What lies beyond the tier `allow`, as JSON that a study keeps; None where nothing can be said.

    With a winner, the changes that make it faster; where nothing fits, the cheapest changes that do, of any tier.
    """
    if best is None:
        if any(t.status is not ProbeStatus.OOM for t in trials):
            return None
        mends = estimator.mends(estimator.probe(estimator.recipe.values), tell=tell).changes
        tried = [dict(t.changes) for t in trials]  # on a real card they ran out of memory, whatever is predicted
        return _kept(None, allow, [Outside.of(change, None) for change in mends if dict(change.changes) not in tried])
    if allow == TIERS[-1]:
        return None
    tuned = _with(estimator.recipe, best.changes)
    estimator = replace(estimator, recipe=tuned)
    base = estimator.probe(tuned.values)
    if base.status is not ProbeStatus.FIT:
        return None
    levers = Levers.of(tuned, estimator.device)
    faster, _ = faster_changes(levers, estimator.trier(tell), base, below=allow, most=MOST)
    return _kept(best.number, allow, [Outside.of(change, base.median_step_s) for change in faster])


def _with(recipe: Recipe, changes: Mapping[str, object]) -> Recipe:
    """`recipe` with the changes of a trial."""
    return replace(recipe, values=merge(recipe.values, changes), resolved={**recipe.resolved, **changes})


def _kept(trial: int | None, allow: Tier, found: Sequence[Outside]) -> dict[str, object]:
    return {"trial": trial, "allow": allow, "changes": [asdict(one) for one in found]}


def outside_of(kept: Mapping[str, object] | None, best: Trial | None, allow: Tier) -> tuple[Outside, ...]:
    """What a study keeps of the changes outside its tier; () if it belongs to another winner or tier."""
    if kept is None or not is_known(kept, best, allow):
        return ()
    return tuple(Outside(**row) for row in cast("list[dict[str, object]]", kept["changes"]))  # type: ignore[arg-type]


def is_known(kept: Mapping[str, object] | None, best: Trial | None, allow: Tier) -> bool:
    """Whether what a study keeps is of this winner and tier; it may be that there is nothing."""
    return kept is not None and kept["trial"] == (None if best is None else best.number) and kept["allow"] == allow


def outside_lines(found: Sequence[Outside], original: Mapping[str, object], allow: Tier, *, fits: bool) -> list[str]:
    """The changes under a heading; [] without one."""
    if not found:
        return []
    lower = " or ".join(f"--allow {tier}" for tier in TIERS[TIERS.index(allow) + 1 :])
    goal = " with --goal speed-at-any-tier" if fits else ""  # without it a search stays in the highest tier that fits
    head = f"Faster on top of the winner, but outside the {allow} tier" if fits else "What would fit"
    tries = [f"To use one: the same command with its --set. To try them all: {lower}{goal}."] if lower else []
    return [f"{head}, predicted:", *(f"  {one.line(original)}" for one in found), *tries]
