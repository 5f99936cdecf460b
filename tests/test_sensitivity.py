"""What lies around the winner: lawful predictions, so that every figure can be told in advance."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from recipes import grpo_recipe

from autofit.api.results import margin_of, neighbours_of
from autofit.api.tables import margin_sentence, sensitivity_table
from autofit.probing.result import ProbeResult, ProbeStatus
from autofit.space.knob import load_space
from autofit.space.space import Candidate, Space
from autofit.trainers.keys import ROLLOUT as CHUNK
from autofit.trainers.keys import SPLIT
from autofit.tuning.frontier import Trial
from autofit.tuning.sensitivity import neighbours, of_winner, sensitivity

MB = 10**6
LIMIT = 400 * MB


def space_of(**changes: object) -> Space:
    recipe = grpo_recipe(per_device_train_batch_size=4, gradient_accumulation_steps=4, **changes)
    return Space.of(recipe, load_space(None, trainer="grpo"), allow="recipe")


def lawful(space: Space, *, wrong_by: float = 1.0) -> Callable[[Candidate, int | None], tuple[float, float] | None]:
    """Bytes grow with micro-batch x tokens and with the rank; time with the number of micro-batches."""

    def predict(candidate: Candidate, tokens: int | None) -> tuple[float, float] | None:
        params = space.params(candidate)
        if params["gradient_checkpointing"] is False:
            return None  # a structure that was not traced
        micro, accumulation, _, _ = space.split(candidate)
        length = tokens or int(str(params["max_completion_length"]))
        used = 100 * MB + micro * length * MB + int(str(params["lora_r"])) * MB
        return used * wrong_by, 0.5 + 0.1 * accumulation

    return predict


def trial_of(space: Space, number: int = 3, **params: object) -> Trial:
    """A trial that fits, measured as the law says."""
    values = {**space.params(space.baseline), **params}
    candidate = space.candidate(values)  # type: ignore[arg-type]
    used, step_s = lawful(space)(candidate, None) or (300.0 * MB, 0.7)
    result = ProbeResult(status=ProbeStatus.FIT, device="cpu", device_used_bytes=int(used), step_s=(step_s,),
                         completions_per_step=16)  # fmt: skip
    return Trial(number=number, tier="neutral", changes={"a": 1}, params=values, result=result)


def rows(kept: dict[str, object]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(r["knob"], r["direction"]): r for r in kept["neighbours"]}  # type: ignore[attr-defined]


def test_a_neighbour_differs_in_one_knob_and_keeps_the_effective_batch_and_the_rollout() -> None:
    space = space_of()
    found = {(knob, direction): c for knob, direction, c in neighbours(space, space.baseline)}
    own = space.params(space.baseline)
    assert {(SPLIT, "down"), (SPLIT, "up"), (CHUNK, "down"), ("lora_r", "down")} <= set(found)
    for (knob, _), candidate in found.items():
        assert space.violated(candidate) is None
        micro, accumulation, chunk, _ = space.split(candidate)
        assert micro * accumulation == 16
        changed = {k for k, v in space.params(candidate).items() if v != own[k]}
        assert changed == ({SPLIT, CHUNK} if knob == SPLIT else {knob})
        assert knob != SPLIT or micro * chunk == 16
    assert [space.split(found[SPLIT, d])[0] for d in ("down", "up")] == [2, 8]


def test_steps_are_predicted_corrected_by_what_the_winners_prediction_is_off() -> None:
    space = space_of()
    best = trial_of(space)
    found = rows(sensitivity(space, [best], best, limit_bytes=LIMIT, predict=lawful(space, wrong_by=1.3)))
    up, down, rank = found[SPLIT, "up"], found[SPLIT, "down"], found["lora_r", "down"]
    assert (up["device_used_delta_bytes"], up["step_delta_s"]) == (4 * 64 * MB, pytest.approx(-0.2))
    assert (up["fits"], up["fidelity"], up["trial"], up["tier"]) == (False, "predicted", None, "neutral")
    assert (down["device_used_delta_bytes"], down["fits"]) == (-2 * 64 * MB, True)
    assert (rank["device_used_delta_bytes"], rank["tier"], rank["after"]) == (-8 * MB, "recipe", 8)
    unknown = found["gradient_checkpointing", "up"]
    assert (unknown["device_used_bytes"], unknown["fidelity"]) == (None, None)


def test_what_was_probed_is_said_as_measured() -> None:
    space = space_of()
    best, other = trial_of(space), trial_of(space, 5, gradient_checkpointing=False)
    kept = sensitivity(space, [best, other], best, limit_bytes=LIMIT, predict=lambda _, __: None)
    known = {key: row for key, row in rows(kept).items() if row["fidelity"] is not None}
    assert set(known) == {("gradient_checkpointing", "up")}
    row = known["gradient_checkpointing", "up"]
    assert (row["fidelity"], row["trial"], row["device_used_bytes"]) == ("measured", 5, 300 * MB)
    assert kept["margin"]["tokens"] is None  # type: ignore[index]
    assert "grow" not in margin_sentence(margin_of(kept))  # nothing is said of what is not known
    table = sensitivity_table(0, neighbours_of(kept))
    assert table is not None
    assert list(table.columns[-1].cells) == ["trial 5, measured"]


def test_a_neighbour_that_ran_out_of_memory_is_a_lower_bound_unless_it_was_graded() -> None:
    space = space_of()
    best, other = trial_of(space), trial_of(space, 5, gradient_checkpointing=False)
    assert other.result is not None
    oom = replace(other.result, status=ProbeStatus.OOM, device_used_bytes=LIMIT + 1, step_s=(), oom_phase="update")
    for graded, text in ((None, "at least +28.0 MB, does not fit"), (LIMIT + 1, "+28.0 MB, does not fit")):
        trials = [best, replace(other, result=replace(oom, uncapped_bytes=graded))]
        kept = sensitivity(space, trials, best, limit_bytes=LIMIT, predict=lambda _, __: None)
        table = sensitivity_table(best.number, neighbours_of(kept))
        assert table is not None
        assert list(table.columns[3].cells) == [text]


def test_the_margin_is_the_last_token_that_fits() -> None:
    space = space_of()
    best = trial_of(space)  # 100 + 4 * 64 + 16 = 372 MB: 28 MB below the target, and 4 MB a token
    kept = sensitivity(space, [best], best, limit_bytes=LIMIT, predict=lawful(space, wrong_by=0.8))
    assert kept["margin"] == {"bytes_left": 28 * MB, "key": "max_completion_length", "tokens": 7, "at_least": False,
                              "fidelity": "predicted"}  # fmt: skip
    assert margin_sentence(margin_of(kept)).endswith("max_completion_length can grow by about 7 tokens (predicted)")
    wide = sensitivity(space, [best], best, limit_bytes=10**10, predict=lawful(space))["margin"]
    assert (wide["tokens"], wide["at_least"]) == (3 * 64, True)  # type: ignore[index]

    assert "grow" not in margin_sentence(replace(margin_of(kept), tokens=0, at_least=True))

    def traced(candidate: Candidate, tokens: int | None) -> tuple[float, float] | None:
        return None if (tokens or 0) > 70 else lawful(space)(candidate, tokens)

    short = sensitivity(space, [best], best, limit_bytes=10**10, predict=traced)["margin"]
    assert (short["tokens"], short["at_least"]) == (6, True)  # type: ignore[index]


def test_a_study_searched_with_fewer_knobs_has_neighbours_of_lower_tiers_too() -> None:
    wide = space_of()
    narrow = Space.of(wide.recipe, load_space(None, trainer="grpo"))
    names = {knob.name for knob in narrow.knobs}
    best = trial_of(wide)
    best = replace(best, params={k: v for k, v in best.params.items() if k in names})
    found = rows(sensitivity(wide, [best], best, limit_bytes=LIMIT, predict=lawful(wide)))
    assert "max_completion_length" not in names
    assert found["max_completion_length", "down"]["device_used_delta_bytes"] == -4 * 16 * MB


def test_what_was_kept_of_another_winner_is_not_shown() -> None:
    best = trial_of(space_of())
    assert of_winner({"trial": 3, "neighbours": []}, best) is not None
    assert of_winner({"trial": 2, "neighbours": []}, best) is None
    assert of_winner(None, best) is None
