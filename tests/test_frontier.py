"""The winner rule: the tier first, then what the goal asks for."""

from dataclasses import replace

import pytest

from autofit.errors import ConfigError
from autofit.probing.result import ProbeResult, ProbeStatus
from autofit.recipe.keys import Tier
from autofit.tuning.frontier import Goal, Trial, baseline, winner
from autofit.tuning.record import StudyRecord
from autofit.tuning.search import since_improvement
from autofit.tuning.sentences import predicted_note, why
from autofit.units import parse_frac

GB = 10**9


def trial(number: int, step_s: float, used_gb: float, *, tier: Tier = "neutral") -> Trial:
    result = ProbeResult(
        status=ProbeStatus.FIT, device="cpu", device_used_bytes=int(used_gb * GB), step_s=(step_s,),
        completions_per_step=8,
    )  # fmt: skip
    return Trial(number=number, tier=tier, changes={"x": number} if number else {}, params={}, result=result)


TRIALS = [
    trial(0, 10.0, 2), trial(1, 4.0, 9.5), trial(2, 4.3, 6), trial(3, 5.0, 8), trial(4, 9.0, 1),
    trial(5, 3.0, 5, tier="recipe"),
]  # fmt: skip


@pytest.mark.parametrize(("goal", "number"), [("speed", 1), ("memory", 2), ("utilisation", 3)])
def test_each_goal_has_its_winner_in_the_highest_tier_that_fits(goal: Goal, number: int) -> None:
    best = winner(TRIALS, goal=goal, target_bytes=10 * GB)
    assert best is not None
    assert best.number == number
    assert why(TRIALS, {}, 10 * GB, {"goal": goal, "target_bytes": 10 * GB}).startswith(f"trial {number} wins")


@pytest.mark.parametrize(
    ("rows", "limit_gb", "number"),
    [
        ([(3.16, 62.65), (3.22, 55.0)], 62.72, 1),  # no winner at the edge for 2 %
        ([(3.16, 62.65), (3.22, 61.0)], 62.72, 0),  # unless the other is there too
        ([(3.16, 62.65), (3.32, 50.0)], 62.72, 0),  # or clearly slower
        ([(12.8, 34.3), (13.0, 21.5)], 39.2, 0),  # away from the edge memory that is left buys nothing
        ([(3.0, 41.0), (3.01, 20.4)], 64.0, 1),  # but what is as fast with clearly less memory wins
        ([(3.0, 41.0), (3.01, 39.9)], 64.0, 0),
        ([(3.0, 41.0), (3.01, 20.4), (3.005, 21.0)], 64.0, 2),  # of two about as lean the faster
        ([(3.0, 41.0), (3.01, 20.4)], None, 1),
    ],
)
def test_of_equally_fast_trials_the_one_with_clearly_less_memory_wins(
    rows: list[tuple[float, float]], limit_gb: float | None, number: int
) -> None:
    limit = None if limit_gb is None else int(limit_gb * GB)
    trials = [trial(n, *row) for n, row in enumerate(rows, start=1)]
    best = winner(trials, goal="speed", target_bytes=limit)
    assert best is not None
    assert best.number == number + 1
    said = why(trials, {}, limit, {"goal": "speed", "target_bytes": limit})
    assert (" % faster, but needs " in said) is (costs_of(trials[0]) < costs_of(best)), said
    assert ("but needs 7.65 GB more and leaves only 70.0 MB; 2 is chosen" in said) is (rows[1] == (3.22, 55.0)), said
    assert ("among the fastest of the" in said) is (" % faster, but " in said), said  # the two do not contradict


@pytest.mark.parametrize(
    ("step_s", "used_gb", "tier", "number"),
    [(2.99, 4.9, "recipe", 1), (2.9, 4.9, "recipe", 2), (2.99, 4.0, "recipe", 2), (2.99, 4.9, "neutral", 2)],
)
def test_a_change_of_the_training_that_gains_next_to_nothing_is_left_out(
    step_s: float, used_gb: float, tier: Tier, number: int
) -> None:
    plain = replace(trial(1, 3.0, 5, tier=tier), changes={"max_length": 512})
    more = replace(trial(2, step_s, used_gb, tier=tier), changes={"max_length": 512, "lora_r": 4})
    other = replace(trial(3, 2.995, 5, tier=tier), changes={"max_length": 256})  # another change, no part of it
    best = winner([plain, more, other], goal="speed", target_bytes=10 * GB)
    assert best is not None
    assert best.number == number


def costs_of(one: Trial) -> float:
    return one.step_s or 0.0


def test_steps_that_vary_widen_what_counts_as_equal_on_a_real_device() -> None:
    def noisy(number: int, step_s: float, used_gb: float, spread: float) -> Trial:
        one = trial(number, step_s, used_gb)
        assert one.result is not None
        return replace(one, result=replace(one.result, step_s=(step_s * (1 - spread / 2), step_s * (1 + spread / 2))))

    for spread, number in ((0.0, 1), (0.04, 2), (0.5, 2)):
        best = winner([noisy(1, 1.0, 5, spread), noisy(2, 1.03, 3, spread), noisy(3, 1.2, 1, spread)])
        assert best is not None
        assert best.number == number


def test_at_any_tier_the_fastest_wins_and_the_highest_tier_of_equally_fast_ones() -> None:
    found = [winner(rows, goal="speed-at-any-tier") for rows in (TRIALS, [*TRIALS, trial(6, 3.02, 9.0)])]
    assert [best.number for best in found if best is not None] == [5, 6]


def test_one_trial_is_told_as_one() -> None:
    said = why([trial(0, 5.0, 2), trial(1, 4.0, 3, tier="recipe")], {}, 10 * GB)
    assert "the only one probed that fits and keeps the neutral tier" in said
    assert "1 faster trial changes more than the neutral tier allows" in said


def test_a_lower_tier_fills_the_band_only_where_no_higher_one_does() -> None:
    rows = [trial(0, 1.0, 3), trial(1, 1.0, 6, tier="recipe"), trial(2, 2.0, 8, tier="recipe"),
            trial(3, 3.0, 8, tier="approximate")]  # fmt: skip
    for count, number in ((1, 0), (2, 1), (3, 2), (4, 3)):
        best = winner(rows[:count], goal="utilisation", target_bytes=10 * GB)
        assert best is not None
        assert best.number == number


def test_with_nothing_in_the_band_the_nearest_from_below_wins() -> None:
    rows = [TRIALS[1], TRIALS[2], TRIALS[4]]
    assert winner(rows, goal="utilisation", target_bytes=10 * GB) is TRIALS[2]
    said = why(rows, {}, 10 * GB, {"goal": "utilisation", "target_bytes": 10 * GB})
    assert said.endswith(". No trial is between 75% and 85%")
    nearly = [trial(0, 1.0, 6.0), trial(1, 1.0, 6.1, tier="recipe")]  # 1 % nearer is not worth a tier
    assert winner(nearly, goal="utilisation", target_bytes=10 * GB) is nearly[0]


def test_a_baseline_that_was_not_probed_is_said_to_be_predicted_not_to_fit() -> None:
    predicted = {"floor_bytes": 11e9, "device_used_bytes": 12e9, "step_s": 1.0}
    record = StudyRecord(target_bytes=10 * GB, headroom_bytes=GB, baseline_predicted=predicted)
    moved = [trial(number, 1.0, 1) for number in (1, 2)]
    assert baseline(moved) is None
    assert predicted_note(moved, record).endswith("it does not fit, predicted 12.00 GB")
    least = replace(record, baseline_predicted={**predicted, "device_used_bytes": 11e9})  # no more than live tensors
    assert predicted_note(moved, least).endswith("it does not fit, predicted 11.00 GB or more")
    assert predicted_note(TRIALS, record) == ""
    assert predicted_note([], record) == "; run the same command again to go on"
    assert "predicted to need 11.00 GB or more" in predicted_note([], replace(record, least_floor_bytes=11e9))
    assert record.rule == {"goal": "speed", "target_bytes": 9 * GB}


def test_trials_since_the_winner_improved_are_counted_in_one_pass() -> None:
    steps = [10.0, 8.0, 7.99, 9.0, 7.0, 7.0, 7.5]
    assert since_improvement([trial(n, s, 1) for n, s in enumerate(steps)]) == 2
    assert since_improvement([trial(n, 5.0, 1) for n in range(3000)]) == 2999


def test_a_share_is_given_as_a_percentage_or_a_number() -> None:
    assert (parse_frac("1%"), parse_frac("0.01"), parse_frac("0")) == (0.01, 0.01, 0.0)
    with pytest.raises(ConfigError, match="a share must look like"):
        parse_frac("120%")
