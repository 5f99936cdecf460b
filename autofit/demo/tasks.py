"""Verifiable problems from reasoning-gym as local JSONL files: `train.jsonl`, and `test.jsonl` as the hold-out."""

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from autofit.demo.errors import DemoError

Prompt = str | list[dict[str, str]]
DATASET_SEED = 20260101


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One sum to compute, and its answer."""

    question: str
    expression: str
    answer: str


def chat_prompt(problem: Problem) -> Prompt:
    """The prompt for a chat model: the sum, and a request for a short answer. Short, as each token costs CPU time."""
    return [
        {"role": "system", "content": "Answer with one number."},
        {"role": "user", "content": f"What is {problem.expression}?"},
    ]


def bare_prompt(problem: Problem) -> Prompt:
    """The prompt for the tiny model, whose vocabulary has digits and signs only."""
    return f"{problem.expression} ="


def chain_sums(*, max_terms: int, draws: int, seed: int) -> list[Problem]:
    """The distinct one-digit sums of 2 to `max_terms` terms among `draws` draws, in the order drawn."""
    try:
        from reasoning_gym import create_dataset
    except ImportError as error:
        raise DemoError(f"the demo needs a package ({error}): pip install 'reasoning-gym>=0.1.25'") from error
    drawn = create_dataset("chain_sum", min_terms=2, max_terms=max_terms, max_digits=1, size=draws, seed=seed)
    problems = {
        entry["metadata"]["expression"]: Problem(
            question=entry["question"], expression=entry["metadata"]["expression"], answer=entry["answer"]
        )
        for entry in (drawn[index] for index in range(draws))
    }
    return list(problems.values())


def write_splits(
    folder: Path, problems: Iterable[Problem], *, held_out: int, prompt: Callable[[Problem], Prompt]
) -> None:
    """Write `test.jsonl` with `held_out` problems and `train.jsonl` with all the others."""
    shuffled = list(problems)
    random.Random(DATASET_SEED).shuffle(shuffled)
    for name, part in (("test", shuffled[:held_out]), ("train", shuffled[held_out:])):
        rows = (json.dumps({"prompt": prompt(problem), "answer": problem.answer}) + "\n" for problem in part)
        (folder / f"{name}.jsonl").write_text("".join(rows))
