"""The guards of a full run: no alarm on healthy series, the right step on broken ones, each told once."""

import random
from collections.abc import Mapping
from math import exp, inf, nan
from pathlib import Path

import pytest
from watched_series import Break, Line, events, series, watched

from autofit.watching.events import EventKind, RunEvent, keep_event, stop_asked
from autofit.watching.guards import GuardWatcher
from autofit.watching.thresholds import read_guards


@pytest.mark.parametrize("generates", [True, False])
def test_twenty_healthy_runs_of_400_steps_raise_no_alarm(generates: bool) -> None:
    told = [
        event.text for seed in range(20) for event in events(series(seed, generates=generates), generates=generates)
    ]
    assert told == []


def test_losses_with_a_long_tail_and_gradients_of_rare_rewards_are_no_spikes() -> None:
    for seed in range(4):
        draw = random.Random(seed)
        tailed = [{**line, "loss": exp(draw.gauss(-3, 1))} for line in series(seed, generates=False)]
        spikes = [e.text for e in events(tailed, generates=False) if "spikes" in str(e.data["guard"])]
        assert spikes == []
        rare = [{**line, "grad_norm": 0.1 if draw.random() < 0.3 else 1e-4} for line in series(seed)]
        assert [e.text for e in events(rare)] == []


BROKEN: Mapping[str, tuple[bool, Break]] = {
    "kl": (True, lambda n, line: {"kl": 0.3}),
    "truncation": (True, lambda n, line: {"completions/clipped_ratio": 0.4}),
    "reward_time": (True, lambda n, line: {"rewards/judge/seconds": 42.0, "rewards/judge/seconds_frac": 0.84}),
    "zero_variance": (True, lambda n, line: {"frac_reward_zero_std": 1.0}),
    "length_collapse": (True, lambda n, line: {"completions/mean_length": 12.0}),
    "not_finite": (True, lambda n, line: {"grad_norm": nan}),
    "reward_nan": (True, lambda n, line: {"rewards/judge/nan_frac": 0.125}),
    "reward_none": (True, lambda n, line: {"rewards/judge/none_frac": 1.0}),
    "reward_stuck": (True, lambda n, line: {"reward": 0.1 + 0.01 * (n % 3)}),
    "gradient_spikes": (True, lambda n, line: {"grad_norm": 50.0}),
    "loss_spikes": (False, lambda n, line: {"loss": 9.0}),
    "chance": (False, lambda n, line: {"accuracy": 0.4 + 0.1 * (n % 3)}),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("at", [137, pytest.param(301, marks=pytest.mark.slow)])
def test_each_broken_run_raises_the_alarm_with_the_step_it_began(name: str, at: int) -> None:
    generates, breaks = BROKEN[name]
    told = [e for e in events(series(at, generates=generates, at=at, breaks=breaks), generates=generates)
            if e.data["guard"] == name]  # fmt: skip
    assert told, name
    assert told[0].kind is EventKind.GUARD
    assert abs(int(str(told[0].data["since"])) - at) <= 2, told[0].text
    assert told[0].data["tag_value"] == f"since step {told[0].data['since']}"
    assert told[0].step - at < 90
    assert [e.data["state"] for e in told[:2]] in (["begins"], ["begins", "ends"])  # a level that lasts is usual again


def test_a_run_broken_from_its_first_step_is_seen() -> None:
    told = events(series(3, at=1, breaks=lambda n, line: {"completions/clipped_ratio": 0.88, "reward": 0.0}))
    found = {e.data["guard"]: (e.data["since"], e.step) for e in told}
    assert found["truncation"] == (1, 14)
    assert found["reward_stuck"][0] == 1


def test_a_reward_that_rose_and_stays_is_not_stuck_and_one_that_falls_again_is() -> None:
    high = series(5, at=250, breaks=lambda n, line: {"reward": 0.9 + 0.01 * (n % 5)})
    assert [e.text for e in events(high)] == []
    falls = series(5, at=250, breaks=lambda n, line: {"reward": 0.05 + 0.01 * (n % 5)})
    (first, *_) = [e for e in events(falls) if e.data["guard"] == "reward_stuck"]
    assert first.data["since"] == 250
    assert "falls" in first.text


def test_a_loss_that_never_falls_is_stuck() -> None:
    draw = random.Random(9)
    lines = [{**line, "loss": draw.gauss(2, 0.1)} for line in series(9, generates=False)]
    (first, *_) = events(lines, generates=False)
    assert (first.data["guard"], first.data["since"], first.step) == ("loss_stuck", 1, 240)
    assert "has not fallen for 200 steps" in first.text


def test_a_drifting_kl_is_told_before_it_leaves_its_band_with_the_step_at_which_it_would() -> None:
    draw = random.Random(4)
    lines = [{**line, "kl": 0.0006 * n + draw.gauss(0, 0.003)} for n, line in enumerate(series(4), start=1)]
    told = events(lines)
    drift, left = (next(e for e in told if e.data["guard"] == name) for name in ("kl_drift", "kl"))
    assert drift.step < left.step - 50
    assert abs(int(drift.text.split("at about step ")[1].split()[0]) - 250) < 40  # 0.15 / 0.0006
    assert abs(int(str(left.data["since"])) - 250) < 15


def test_an_alarm_is_told_once_when_it_begins_and_once_when_it_ends() -> None:
    lines = series(7, at=100, breaks=lambda n, line: {"kl": 0.4} if n < 180 else {})
    begins, ends = [e for e in events(lines) if e.data["guard"] == "kl"]
    assert (begins.data["since"], begins.data["state"], begins.stop) == (100, "begins", False)
    assert "kl is 0." in begins.text
    assert "raise beta" in begins.text
    assert ends.data["state"] == "ends"
    assert 190 < ends.step < 205
    assert abs(int(str(ends.data["until"])) - 180) < 10  # the mean of 10 steps
    assert ends.data["tag_value"] == f"steps 100 to {ends.data['until']}"


def test_a_resumed_run_says_what_an_uninterrupted_one_does_and_nothing_twice() -> None:
    lines = series(9, at=100, breaks=lambda n, line: {"kl": 0.4, "completions/clipped_ratio": 0.5})
    expected = [(e.step, e.text) for e in events(lines)]
    assert len(expected) == 2
    for cut in (60, 105, 150):  # before the break, while it is counted, and after the alarm
        resumed = GuardWatcher(read_guards())
        list(resumed.begins(watched(lines=lines[:cut])))
        said = [(e.step, e.text) for line in lines[cut:] for e in resumed.logs(line)]
        assert said == [(step, text) for step, text in expected if step > cut]


def test_infinity_counts_as_not_finite_and_the_figures_stay_json() -> None:
    lines = series(2, at=50, breaks=lambda n, line: {"loss": inf} if n < 53 else {})
    begins, ends = events(lines)
    assert (begins.data["since"], begins.data["value"], begins.step) == (50, None, 50)
    assert (ends.step, ends.data["until"]) == (62, 52)


def test_a_fault_that_comes_and_goes_is_one_alarm() -> None:
    lines = series(2, at=50, breaks=lambda n, line: {"grad_norm": nan} if n % 5 == 0 and n < 300 else {})
    assert [(e.data["state"], e.step) for e in events(lines)] == [("begins", 50), ("ends", 305)]


def test_bands_by_objective_look_only_at_the_steps_that_rewarded_it() -> None:
    """The bands of two objectives, as in guards.yaml: facts 0.02-0.06, helps 0.08-0.15; every other step is of one."""
    bands = {
        "kl": False,
        "kl_facts": {"metric": "kl", "objective": "facts*", "min": 0.02, "max": 0.06, "window": 10, "patience": 10},
        "kl_helps": {"metric": "kl", "objective": "helps*", "min": 0.08, "max": 0.15, "window": 10, "patience": 10},
    }

    def line(n: int) -> Line:
        facts = n % 2 == 0
        name = "rewards/facts/mean" if facts else "rewards/helps/mean"
        level = 0.04 if facts else 0.11 if n < 200 else 0.3
        return {"step": n, "max_steps": 400, name: 0.5, "kl": level}

    told = events([line(n) for n in range(1, 301)], guards=bands)
    assert [(e.data["guard"], e.data["since"]) for e in told] == [("kl_helps", 201)]


def test_stop_is_asked_for_once_and_only_where_the_user_says_so(tmp_path: Path) -> None:
    path = tmp_path / "guards.yaml"
    path.write_text("not_finite: {action: stop}\ntruncation: off\nkl: {max: 0.5, min: null}\n")
    lines = series(2, at=50, breaks=lambda n, line: {"loss": nan, "completions/clipped_ratio": 1.0, "kl": 0.4})
    told = events(lines, guards=path)
    assert [(e.data["guard"], e.stop) for e in told] == [("not_finite", True)]
    assert told[0].text.endswith("the run saves a checkpoint and stops")


def test_the_run_remembers_who_stopped_it_until_it_is_started_again(tmp_path: Path) -> None:
    start = RunEvent(step=0, kind=EventKind.START, text="grpo on the CPU")
    asked = RunEvent(step=9, kind=EventKind.GUARD, text="guard kl", stop=True)
    for event in (start, asked):
        keep_event(tmp_path, event)
    found = stop_asked(tmp_path)
    assert found is not None
    assert found.text == "guard kl"
    keep_event(tmp_path, start)
    assert stop_asked(tmp_path) is None
