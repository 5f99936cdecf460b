"""The progress of a full run: seconds left, tokens a second, and the reward's trend, from its logged lines."""

import random
from collections.abc import Iterator

import pytest

from autofit.commands.studies import step_line
from autofit.watching.contract import Watched
from autofit.watching.progress import ProgressWatcher, progress_of, progress_words, shift, trend

Line = dict[str, object]


def lines(steps: int, *, step_s: float = 2.0, last: int = 200, slope: float = 0.0, noise: float = 0.0) -> list[Line]:
    """A run whose steps take `step_s`, of 1000 tokens each, with a reward of 0.4 + slope a step."""
    draw = random.Random(steps)
    return [
        {
            "step": n, "max_steps": last, "run_s": 30.0 + step_s * n, "num_tokens": 1000.0 * n, "step_s": step_s,
            "reward": 0.4 + slope * n + draw.gauss(0, noise), "host_rss_bytes": 7 * 10**8,
        }
        for n in range(1, steps + 1)
    ]  # fmt: skip


def test_there_is_no_progress_before_the_first_line_and_no_eta_after_it() -> None:
    assert progress_of([]) is None
    first = progress_of(lines(1))
    assert first is not None
    assert (first.step, first.last_step, first.eta_s, first.step_s, first.tokens_per_s) == (1, 200, None, None, None)


def test_the_eta_is_the_seconds_of_the_steps_left_without_the_slow_first_one() -> None:
    now = progress_of(lines(20))
    assert now is not None
    assert now.eta_s == pytest.approx(180 * 2.0)
    assert now.step_s == pytest.approx(2.0)
    assert now.tokens_per_s == pytest.approx(500)


def test_the_eta_counts_saves_and_a_rollout_that_serves_several_steps() -> None:
    run = lines(40)
    for line in run:  # a save of 10 s after every tenth step
        line["run_s"] = float(str(line["run_s"])) + 10.0 * (int(str(line["step"])) // 10)
    now = progress_of(run)
    assert now is not None
    assert now.step_s == pytest.approx(2.0)
    assert now.eta_s == pytest.approx(160 * 3.0, rel=0.05)


def test_the_hours_between_two_starts_are_no_steps_seconds() -> None:
    resumed = [{**line, "run_s": float(str(line["run_s"])) - 50.0} for line in lines(30)[20:]]
    now = progress_of([*lines(20), *resumed])
    assert now is not None
    assert now.eta_s == pytest.approx(170 * 2.0)
    assert now.tokens_per_s == pytest.approx(500)
    first_after = progress_of([*lines(20), resumed[0]])
    assert first_after is not None
    assert first_after.eta_s is None


def test_lines_of_every_tenth_step_give_the_same_eta() -> None:
    now = progress_of(lines(100)[9::10])
    assert now is not None
    assert now.eta_s == pytest.approx(100 * 2.0)


def test_a_rising_reward_is_told_per_100_steps_and_noise_is_flat() -> None:
    rising, noisy = progress_of(lines(50, slope=0.002, noise=0.02)), progress_of(lines(50, noise=0.1))
    assert rising is not None
    assert noisy is not None
    assert rising.reward_trend_per_100 == pytest.approx(0.2, rel=0.25)
    assert not rising.reward_is_flat
    assert noisy.reward_is_flat


def test_one_wild_reward_does_not_turn_the_trend() -> None:
    found = trend([(float(n), 0.01 * n if n != 20 else -50.0) for n in range(40)])
    assert found is not None
    assert found.rises
    assert found.slope == pytest.approx(0.01, rel=0.01)


def test_noise_is_called_a_trend_in_about_one_of_twenty_series() -> None:
    draw = random.Random(1)
    found = [trend([(float(n), draw.gauss(0, 1)) for n in range(30)]) for _ in range(400)]
    wrong = sum(not t.is_flat for t in found if t is not None)
    assert 0.02 < wrong / len(found) < 0.08


def test_a_higher_level_is_told_from_an_equal_one() -> None:
    draw = random.Random(2)
    low, same, high = ([draw.gauss(m, 1) for _ in range(30)] for m in (0, 0, 2))
    assert abs(shift(low, same)) < 2.5
    assert shift(low, high) > 4
    assert shift(high, low) < -4


def test_memory_is_named_as_the_kind_it_is() -> None:
    on_cpu = lines(3)
    on_card = [{**line, "peak_reserved_bytes": 5 * 10**9} for line in on_cpu]
    as_driver_sees = [{**line, "device_used_bytes": 6 * 10**9} for line in on_card]
    kinds = [(p.memory_kind, p.memory_bytes) for p in map(progress_of, (on_cpu, on_card, as_driver_sees)) if p]
    assert kinds == [("host memory", 7 * 10**8), ("peak reserved", 5 * 10**9), ("device-used", 6 * 10**9)]


def watched(earlier: list[Line]) -> Watched:
    return Watched(
        folder=None, trainer="grpo", values={}, device="cpu", generates=True, samples_per_step=8,
        first_step=len(earlier), last_step=200, lines=tuple(earlier),
    )  # fmt: skip


def added(watcher: ProgressWatcher, run: list[Line]) -> Iterator[dict[str, object]]:
    for line in run:
        yield dict(watcher.adds(line))


def test_a_resumed_run_adds_what_an_uninterrupted_one_does() -> None:
    run = lines(40, slope=0.001)
    whole, half = ProgressWatcher(), ProgressWatcher()
    list(whole.begins(watched([])))
    list(half.begins(watched(run[:25])))
    expected = list(added(whole, run))
    assert list(added(half, run[25:])) == expected[25:]
    assert expected[0] == {}
    assert set(expected[-1]) == {"eta_s", "tokens_per_s", "reward_trend_per_100"}


def test_the_words_of_a_line_name_the_trend_the_memory_and_the_time_left() -> None:
    line = {**lines(3)[-1], "eta_s": 400.0, "tokens_per_s": 512.3, "reward_trend_per_100": 0.021}
    words = ["reward rising 0.021 per 100 steps", "512.3 tokens/s", "0.70 GB host memory", "6m40s left"]
    assert progress_words(line) == words
    assert progress_words({**line, "reward_trend_per_100": 0.0})[0] == "reward flat"
    assert progress_words({"step": 1, "max_steps": 2}) == []


def test_the_line_that_promote_prints_ends_with_memory_and_time_left() -> None:
    line = {**lines(3)[-1], "eta_s": 400.0, "tokens_per_s": 512.3, "completions_per_s": 4.0, "reward": 0.41}
    line["reward_trend_per_100"] = -0.02
    assert step_line(line) == (
        "step 3/200: reward 0.41, completions/s 4, reward falling 0.02 per 100 steps, 512.3 tokens/s, "
        "0.70 GB host memory, 6m40s left"
    )
