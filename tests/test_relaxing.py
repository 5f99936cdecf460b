"""What a lower tier offers is said with the command that takes it; predictions by a law."""

from dataclasses import replace
from pathlib import Path

import lawful
import numpy as np
from search_driver import plan

from autofit.api.lower_tiers import where_a_lower_tier_is_faster
from autofit.api.planning import Planned, Request
from autofit.forecast.predictions import Predictions
from autofit.probing.result import ProbeResult, ProbeStatus
from autofit.recipe.keys import TIERS, Tier
from autofit.space.knob import load_space
from autofit.space.space import Candidate, Space
from autofit.tuning.frontier import Trial

ASKED = Request(
    recipe="my run.yaml", name=None, target_vram="150MB", headroom=None, device="auto", gpu="t4", trainer=None,
    space=None, allow="neutral", changes={"beta": 0.1}, prompt_tokens=None, trials=None, time_budget=None,
    plateau=None, min_gain=0.01, goal="speed", sampler="autofit", measured_steps=2, deadline="15m", parallel=None,
    seed=0, study=None, folder=Path(),
)  # fmt: skip


class Lawful:
    """Predicts by the law of `lawful`; each lower tier saves a quarter of the bytes and of the seconds."""

    def predict(self, space: Space) -> Predictions:
        candidates = tuple(space.allowed())
        laws = np.array([lawful.law({**space.recipe.resolved, **space.changes(c)}) for c in candidates], dtype=float)
        laws *= 0.75 ** np.array([[TIERS.index(space.tiers[c])] for c in candidates])
        return Predictions(candidates=candidates, floor_bytes=0.5 * laws[:, 0], device_used_bytes=laws[:, 0],
                           step_s=laws[:, 1])  # fmt: skip


def planned(folder: Path, allow: Tier, target_bytes: int) -> Planned:
    wanted = plan(folder, None, target_bytes)
    knobs = tuple(load_space(None, trainer="grpo"))
    space = Space.of(wanted.recipe, knobs, allow=allow)
    wanted = replace(wanted, space=space, predictions=Lawful().predict(space))
    return Planned(plan=wanted, knobs=knobs, scratch=folder)


def trial_of(space: Space, candidate: Candidate, status: ProbeStatus) -> Trial:
    used, step_s = lawful.law({**space.recipe.resolved, **space.changes(candidate)})
    result = ProbeResult(status=status, device="cuda", device_used_bytes=used, step_s=(step_s,))
    return Trial(number=1, tier="neutral", changes={"x": 1}, params=space.params(candidate), result=result)


def test_a_lower_tier_that_is_allowed_and_clearly_faster_is_named_with_the_goal_that_takes_it(tmp_path: Path) -> None:
    wanted = planned(tmp_path, "recipe", 400 * lawful.MB)
    space, predictions = wanted.plan.space, wanted.plan.predictions
    assert predictions is not None
    neutral = [c for c in space.allowed() if space.tiers[c] == "neutral"]
    best = trial_of(space, min(neutral, key=lambda c: lawful.law({**space.recipe.resolved, **space.changes(c)})[1]),
                    ProbeStatus.FIT)  # fmt: skip
    said = where_a_lower_tier_is_faster(wanted, ASKED, [best], best, predictions)
    assert said.startswith("the recipe tier has a faster one: ")
    assert "(1.8x the winner's speed); run: autofit search" in said
    assert "--goal speed-at-any-tier" in said
    no_file = where_a_lower_tier_is_faster(wanted, replace(ASKED, recipe={"beta": 0.1}), [best], best, predictions)
    assert no_file.endswith("search again with goal='speed-at-any-tier'")
    slow = replace(predictions, step_s=np.ones(len(predictions.candidates)))
    assert where_a_lower_tier_is_faster(wanted, ASKED, [best], best, slow) == ""
    stays = replace(wanted, plan=replace(wanted.plan, goal="speed-at-any-tier"))
    assert where_a_lower_tier_is_faster(stays, ASKED, [best], best, predictions) == ""
