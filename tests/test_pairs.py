"""Two configs measured in turns: disturbed probes are left out, and how many pairs a verdict takes."""

import json
from dataclasses import replace

import pytest

from autofit.probing.result import ProbeResult, ProbeStatus
from autofit.tuning.comparison import MOST_PAIRS, Comparison, Pair


def comparison(*pairs: tuple[float, float], searched: tuple[float, float] = (1.4, 1.0)) -> Comparison:
    made = tuple(Pair(baseline_s=a, finalist_s=b) for a, b in pairs)
    return Comparison(pairs=made, searched=Pair(baseline_s=searched[0], finalist_s=searched[1]))


def test_on_a_steady_machine_three_pairs_say_faster_and_two_say_slower() -> None:
    assert comparison((1.40, 1.0), (1.42, 1.01)).faster is None
    found = comparison((1.40, 1.0), (1.42, 1.01), (1.41, 1.0))
    assert (found.faster, found.steady) == (True, True)
    assert found.speedup == pytest.approx(1.41, abs=0.01)
    assert found.low <= found.speedup <= found.high
    assert comparison((1.0, 1.1), (1.0, 1.1)).faster is False
    assert comparison().faster is None


def test_within_the_spread_is_not_faster() -> None:
    assert comparison((1.0, 0.98), (1.0, 0.99), (1.0, 1.01), searched=(1.0, 0.98)).faster is False


def test_a_machine_that_changed_since_the_search_takes_more_pairs() -> None:
    alike = [(2.8, 2.0)] * 4
    assert comparison(*alike).faster is None
    assert comparison(*alike, (2.8, 2.0)).faster is True


def test_disturbed_probes_are_left_out_and_the_others_compared_in_their_order() -> None:
    found = comparison((1.4, 2.0), (2.8, 1.0), (1.4, 1.0), (1.4, 2.0), (1.4, 1.0))
    assert [p.speedup for p in found.undisturbed] == [1.4, 1.4, 1.4]
    assert (found.speedup, found.low, found.high, found.faster) == (1.4, 1.4, 1.4, True)


def test_without_undisturbed_pairs_it_ends_at_the_bound_and_is_not_faster() -> None:
    ever_slower = [(1.2**n * (1.1 if n % 3 else 0.9), 1.2**n) for n in range(MOST_PAIRS)]
    assert comparison(*ever_slower[:-1]).faster is None
    assert comparison(*ever_slower).faster is False


def test_faster_in_each_of_seven_pairs_is_faster_however_disturbed_they_are() -> None:
    disturbed = [(1.7 * 1.2**n, 1.1**n) for n in range(7)]
    assert comparison(*disturbed[:6]).faster is None
    found = comparison(*disturbed)
    assert found.faster is True
    assert (found.low, found.high) == (disturbed[0][0] / disturbed[0][1], disturbed[6][0] / disturbed[6][1])
    assert comparison(*disturbed, (1.0, 1.1)).faster is None


def test_what_is_slower_in_most_pairs_is_not_measured_to_the_bound() -> None:
    disturbed = [(1.0 * 1.1**n, 1.2 * 1.2**n) for n in range(5)]
    assert comparison(*disturbed[:4]).faster is None
    assert comparison(*disturbed).faster is False


def test_it_is_the_same_after_a_round_trip() -> None:
    found = comparison((1.4, 1.0), (1.3, 1.1))
    assert Comparison.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_the_fastest_step_is_compared_and_the_mean_where_only_some_steps_generate() -> None:
    result = ProbeResult(status=ProbeStatus.FIT, device="cpu", step_s=(3.0, 1.0, 2.0), rollout_s=(1.5, 0.5, 1.0))
    assert result.fastest_step_s == 1.0
    assert replace(result, rollout_s=(1.5, 0.0, 1.0)).fastest_step_s == 2.0
    assert replace(result, step_s=(), rollout_s=()).fastest_step_s is None
