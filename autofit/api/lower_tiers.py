"""Tiers outside a search: gains in the lower of the allowed ones, and changes beyond the allowed ones."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from os import PathLike
from typing import cast

import numpy as np

from autofit.api.planning import Planned, Request
from autofit.forecast.change import Change, Tell, asks_of_sizes, faster_changes
from autofit.forecast.estimate import Estimator
from autofit.forecast.levers import Levers
from autofit.forecast.predictions import Predictions
from autofit.probing.result import ProbeStatus
from autofit.recipe.keys import GROWING, TIERS, Tier
from autofit.recipe.recipe import Recipe, inner_value, merge, own_names
from autofit.space.knob import Value, space_knobs
from autofit.space.narrow import open_clashes
from autofit.space.space import Candidate, Space
from autofit.space.traits import describe_changes
from autofit.tuning.comparison import plainest
from autofit.tuning.frontier import Trial
from autofit.units import format_bytes, format_seconds

_WORTH_SAYING = 1.1  # times as fast as the winner


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxed:
    """The fastest candidate of a lower tier that is predicted to fit."""

    tier: Tier
    changes: Mapping[str, object]
    device_used_bytes: float
    step_s: float


def where_a_lower_tier_is_faster(
    planned: Planned, asked: Request, trials: Sequence[Trial], best: Trial, predictions: Predictions
) -> str:
    """The fastest candidate of the allowed tiers below the winner's, if it is predicted to be clearly faster; or ""."""
    plan = planned.plan
    lower = TIERS[TIERS.index(best.tier) + 1 : TIERS.index(plan.space.allow) + 1]
    if plan.goal != "speed" or not lower or best.step_s is None:
        return ""
    found = _fastest(plan.space, predictions, trials, limit_bytes=plan.limit_bytes, tiers=lower)
    own = dict(zip(predictions.candidates, predictions.step_s, strict=True)).get(_candidate(plan.space, best))
    if found is None or own is None or not found.step_s * _WORTH_SAYING < own:
        return ""
    change = describe_changes(found.changes, plan.recipe.resolved, own_names(plan.recipe.foreign))
    used, seconds = format_bytes(round(found.device_used_bytes)), format_seconds(found.step_s)
    return (
        f"the {found.tier} tier has a faster one: {change}: {used}, {seconds} a step, predicted "
        f"({own / found.step_s:.1f}x the winner's speed); {command(asked, goal='speed-at-any-tier')}"
    )


def _fastest(
    space: Space, predictions: Predictions, trials: Sequence[Trial], *, limit_bytes: int | None, tiers: Sequence[Tier]
) -> Relaxed | None:
    """The fastest candidate of `tiers` that is predicted to fit.

    A trial that ran out of memory says by how much more than predicted is needed, at least; all candidates get that.
    """
    used, limit = predictions.device_used_bytes, limit_bytes or np.inf
    place = {candidate: i for i, candidate in enumerate(predictions.candidates)}
    tried = {place[c] for t in trials if (c := _candidate(space, t)) in place and t.status is not None}
    ooms = [used[place[c]] for t in trials if t.status is ProbeStatus.OOM and (c := _candidate(space, t)) in place]
    more = max([1.0, *(limit / bytes_ for bytes_ in ooms if np.isfinite(bytes_) and np.isfinite(limit))])
    able = [i for i, c in enumerate(predictions.candidates)
            if space.tiers[c] in tiers and i not in tried and more * used[i] <= limit
            and np.isfinite(predictions.step_s[i])]  # fmt: skip
    if not able:
        return None
    costs = [(float(predictions.step_s[i]), float(used[i])) for i in able]
    fastest = min(range(len(able)), key=lambda n: costs[n][0])
    chosen = able[plainest(costs, [_changes(space, predictions.candidates[i]) for i in able], fastest)]
    candidate = predictions.candidates[chosen]
    return Relaxed(
        tier=space.tiers[candidate], changes=space.changes(candidate), device_used_bytes=float(more * used[chosen]),
        step_s=float(predictions.step_s[chosen]),
    )  # fmt: skip


def _changes(space: Space, candidate: Candidate) -> set[tuple[int, Value]]:
    """(the place of a knob, its value) for each value that differs from the recipe's."""
    own = space.baseline.values
    return {(k, value) for k, value in enumerate(candidate.values) if value != own[k]}


def _candidate(space: Space, trial: Trial) -> Candidate:
    """The candidate of `space` that `trial` probed; knobs that the trial's own space lacked are at their own value."""
    own = space.params(space.baseline)
    return space.candidate({name: trial.params.get(name, value) for name, value in own.items()})  # type: ignore[misc]


def command(asked: Request, **changed: str) -> str:
    """The command line of the search that was asked for, with other options where `changed` names them."""
    if asked.recipe is not None and not isinstance(asked.recipe, str | PathLike):
        return "search again with " + ", ".join(f"{name}={value!r}" for name, value in changed.items())
    return "run: " + shlex.join(["autofit", "search", *_words(asked, changed)])


def _words(asked: Request, changed: Mapping[str, str]) -> Iterator[str]:
    if asked.recipe is not None:
        yield str(asked.recipe)
    goal = None if asked.goal == "speed" else asked.goal
    given: dict[str, object] = {
        "target-vram": asked.target_vram, "headroom": asked.headroom, "gpu": asked.gpu, "trainer": asked.trainer,
        "device": None if asked.device == "auto" else asked.device, "prompt-tokens": asked.prompt_tokens,
        "space": asked.space if isinstance(asked.space, str | PathLike) else None,
        "allow": None if asked.allow == TIERS[0] else asked.allow, "goal": goal, **changed,
    }  # fmt: skip
    for name, option in given.items():
        if option is not None:
            yield from (f"--{name}", str(option))
    for key, value in (asked.changes or {}).items():
        yield from ("--set", f"{key}={'null' if value is None else value}")


MOST = 4  # changes that are simulated after a search


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """A change beyond the allowed tier, on top of the winner's, as the simulated card predicts it."""

    changes: Mapping[str, object]
    options: str  # of the command line, --set dtype=bfloat16, or what to write in another tool's file
    tier: Tier
    device_used_bytes: int
    step_s: float | None
    speedup: float | None  # over the winner; None if nothing fits without the change
    own: str = ""  # the change in the keys of the file that the recipe was, if that was another tool's
    shown_bytes: int | None = None  # to judge it by, as `check` has it; None in a study of an earlier autofit

    @classmethod
    def of(cls, change: Change, step_s: float | None) -> "Outside":
        """`change`, against a step of `step_s` seconds."""
        return cls(
            changes=change.changes, options=change.how, tier=change.tier, step_s=change.step_s,
            device_used_bytes=change.device_used_bytes,
            speedup=step_s / change.step_s if step_s and change.step_s else None, own=change.own,
            shown_bytes=change.shown_bytes,
        )  # fmt: skip

    def line(self, original: Mapping[str, object], names: Mapping[str, str] | None = None) -> str:
        """`dtype None -> bfloat16 (approximate): 8.35 s a step, 24.56 GB, 3.09x   --set dtype=bfloat16`."""
        figures = [] if self.step_s is None else [f"{format_seconds(self.step_s)} a step"]
        figures += [format_bytes(self.shown_bytes or self.device_used_bytes)]
        figures += [] if self.speedup is None else [f"{self.speedup:.2f}x"]
        how = f"in your file: {self.own}" if self.own else self.options
        return f"{describe_changes(self.changes, original, names)} ({self.tier}): {', '.join(figures)}   {how}"


def outside(
    best: Trial | None, trials: Sequence[Trial], estimator: Estimator, allow: Tier, *, tell: Tell = lambda _: None
) -> dict[str, object] | None:
    """Changes beyond the tier `allow`, as JSON that a study keeps, if they can be predicted.

    With a winner, the changes that make it faster; where nothing fits, the cheapest changes that do, of any tier.
    """
    if best is None:
        if any(t.status is not ProbeStatus.OOM for t in trials):
            return None
        mends = estimator.mends(estimator.probe(estimator.recipe.values), tell=tell).changes
        tried = [dict(t.changes) for t in trials]  # on a real card they ran out of memory, against the prediction
        return _kept(None, allow, [Outside.of(change, None) for change in mends if dict(change.changes) not in tried])
    if allow == TIERS[-1]:
        return None
    tuned = _with(estimator.recipe, best.changes)
    grows = inner_value(best.changes, GROWING) is not None
    if grows and any(clash.key == GROWING for clash in open_clashes(tuned, space_knobs(tuned))):
        tuned = _with(estimator.recipe, merge(best.changes, {GROWING: None}))  # they rule out vLLM's sleep mode
    estimator, levers = replace(estimator, recipe=tuned), Levers.of(tuned, estimator.device)
    base = best.result
    if base is None or base.device != estimator.device or asks_of_sizes(levers, below=allow):
        base = estimator.probe(tuned.values)  # a trial on a real card, or one without its least capacity
    if base.status is not ProbeStatus.FIT:
        return None
    faster, _ = faster_changes(levers, estimator.trier(tell), base, below=allow, most=MOST)
    return _kept(best.number, allow, [Outside.of(change, base.median_step_s) for change in faster])


def _with(recipe: Recipe, changes: Mapping[str, object]) -> Recipe:
    """`recipe` with the changes of a trial."""
    return replace(recipe, values=merge(recipe.values, changes), resolved={**recipe.resolved, **changes})


def _kept(trial: int | None, allow: Tier, found: Sequence[Outside]) -> dict[str, object]:
    return {"trial": trial, "allow": allow, "changes": [asdict(one) for one in found]}


def outside_of(kept: Mapping[str, object] | None, best: Trial | None, allow: Tier) -> tuple[Outside, ...]:
    """The changes outside its tier that a study keeps; () if they belong to another winner or tier."""
    if kept is None or not is_known(kept, best, allow):
        return ()
    return tuple(Outside(**row) for row in cast("list[dict[str, object]]", kept["changes"]))  # type: ignore[arg-type]


def is_known(kept: Mapping[str, object] | None, best: Trial | None, allow: Tier) -> bool:
    """True if the study keeps the answer for this winner and tier; it may be an empty one."""
    return kept is not None and kept["trial"] == (None if best is None else best.number) and kept["allow"] == allow


def outside_lines(
    found: Sequence[Outside], original: Mapping[str, object], allow: Tier, *, fits: bool,
    names: Mapping[str, str] | None = None,
) -> list[str]:  # fmt: skip
    """The changes under a heading; [] if there are none."""
    if not found:
        return []
    lowest = max((one.tier for one in found), key=TIERS.index)
    goal = " with --goal speed-at-any-tier" if fits else ""  # without it a search stays in the highest tier that fits
    head = f"Faster on top of the winner, but outside the {allow} tier" if fits else "What would fit"
    how = "write it into your file" if any(one.own for one in found) else "the same command with its --set"
    tries = [f"To use one: {how}. To try them all: --allow {lowest}{goal}."] if lowest != allow else []
    return [f"{head}, predicted:", *(f"  {one.line(original, names)}" for one in found), *tries]
