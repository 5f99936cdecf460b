"""The demo's problems, from reasoning-gym as local JSONL files, and its recipes for `trl grpo --config`."""

import json
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from autofit.demo.cache import DemoError

RecipeValue = str | int | float | bool | list[str]
Recipe = Mapping[str, RecipeValue]

REWARD = "autofit.demo.rewards.chain_sum_reward"


def smollm2_recipe(*, model: Path, data: Path) -> Recipe:
    """GRPO with LoRA on one-digit sums: 16 completions of at most 12 tokens per step.

    A plausible first guess: TRL's own default of gradient checkpointing, and four micro-batches.
    Dropout is off, as its masks would differ between splits of the same batch.
    """
    return {
        "model_name_or_path": str(model),
        "dtype": "bfloat16",
        "dataset_name": str(data),
        "reward_funcs": [REWARD],
        "output_dir": "outputs/smollm2-chain-sum",
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "num_generations": 8,
        "max_completion_length": 12,
        "temperature": 0.8,
        "beta": 0.0,
        "loss_type": "dapo",
        "learning_rate": 5.0e-4,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 2,
        "max_steps": 30,
        "use_peft": True,
        "lora_r": 16,
        "lora_alpha": 32,
        "lora_dropout": 0.0,
        "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "bf16": True,
        "logging_steps": 1,
        "save_steps": 10,
        "report_to": "none",
        "seed": 42,
    }


def recipe_text(recipe: Recipe) -> str:
    """The recipe as YAML text, keys in the order of the functions above."""
    text: str = yaml.safe_dump(dict(recipe), sort_keys=False, default_flow_style=False, width=120)
    return text


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
