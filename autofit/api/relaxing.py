"""What a lower of the allowed tiers offers where the search stayed in a higher one."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike

import numpy as np

from autofit.api.planning import Planned, Request
from autofit.forecast.predictions import Predictions
from autofit.probing.result import ProbeStatus
from autofit.recipe.keys import TIERS, Tier
from autofit.space.describe import describe_changes
from autofit.space.space import Candidate, Space
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

    def words(self, original: Mapping[str, object]) -> str:
        """Its changes, bytes and seconds, as part of a sentence."""
        change = describe_changes(self.changes, original)
        used, seconds = format_bytes(round(self.device_used_bytes)), format_seconds(self.step_s)
        return f"{change}: {used}, {seconds} a step, predicted"


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
    words = f"{found.words(plan.recipe.resolved)} ({own / found.step_s:.1f}x the winner's speed)"
    return f"the {found.tier} tier has a faster one: {words}; {command(asked, goal='speed-at-any-tier')}"


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
    chosen = min(able, key=lambda i: float(predictions.step_s[i]))
    candidate = predictions.candidates[chosen]
    return Relaxed(
        tier=space.tiers[candidate], changes=space.changes(candidate), device_used_bytes=float(more * used[chosen]),
        step_s=float(predictions.step_s[chosen]),
    )  # fmt: skip


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
