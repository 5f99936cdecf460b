"""Reward functions of the demo, with TRL's signature. Fast to import: reasoning-gym loads at the first call."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache

Completion = str | Sequence[Mapping[str, str]]
Scorer = Callable[[str | None, Mapping[str, str]], float]

# A minus right after a digit is an operator: the last number of "3-1" is 1.
_NUMBER = re.compile(r"(?<!\d)-?\d+(?:,\d{3})*(?:\.\d+)?")


def chain_sum_reward(completions: Sequence[Completion], answer: Sequence[str], **_: object) -> list[float]:
    """1.0 for each completion whose last number is the right answer, else 0.0.

    reasoning-gym's own `score_answer` judges the number. Its partial credit (a right digit somewhere in a wrong
    number) is not counted, so a mean reward is the share of problems solved.
    """
    score = _scorer("chain_sum")
    return [
        float(score(last_number(_text(completion)), {"answer": right}) == 1.0)
        for completion, right in zip(completions, answer, strict=True)
    ]


def last_number(text: str) -> str | None:
    """The last number written in `text`, if there is one."""
    numbers = _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    return numbers[-1] if numbers else None


def _text(completion: Completion) -> str:
    if isinstance(completion, str):
        return completion
    return completion[-1].get("content") or "" if completion else ""


@cache
def _scorer(task: str) -> Scorer:
    from reasoning_gym import get_score_answer_fn

    scorer: Scorer = get_score_answer_fn(task)
    return scorer
