"""The reward the demo trains on."""

import subprocess
import sys

import pytest

from autofit.demo.rewards import chain_sum_reward, last_number


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("3", 1.0),
        ("4 - 1 = 3.", 1.0),
        ("The answer is 3", 1.0),
        ("The answer is 3.0", 1.0),
        ("13", 0.0),
        ("-3", 0.0),
        ("3 or maybe 4", 0.0),
        ("three", 0.0),
        ("?", 0.0),
        ("", 0.0),
    ],
)
def test_only_the_right_last_number_is_rewarded(completion: str, reward: float) -> None:
    assert chain_sum_reward([completion], ["3"]) == [reward]


def test_a_chat_completion_is_scored_by_its_last_message() -> None:
    right, empty = [{"role": "assistant", "content": "It is -4."}], [{"role": "assistant", "content": ""}]
    assert chain_sum_reward([right, empty, []], ["-4", "-4", "-4"]) == [1.0, 0.0, 0.0]


def test_the_other_columns_trl_passes_are_ignored() -> None:
    assert chain_sum_reward(["1", "2"], answer=["1", "1"], prompts=["a", "b"], completion_ids=[[1], [2]]) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("text", "number"),
    [("3-1", "1"), ("5 - 9 = \N{MINUS SIGN}4", "-4"), ("1,200 of them", "1,200"), ("7, 8,", "8"), ("none", None)],
)
def test_a_minus_after_a_digit_is_an_operator(text: str, number: str | None) -> None:
    assert last_number(text) == number


def test_the_demo_imports_no_torch_and_the_reward_nothing_heavy() -> None:
    heavy = "{'torch', 'transformers', 'reasoning_gym'}"
    code = f"import sys, autofit.demo, autofit.demo.rewards; print({heavy} & {{*sys.modules}})"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"
