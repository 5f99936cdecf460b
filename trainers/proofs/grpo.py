"""The small training of a gradient proof of GRPO: fixed completions and rewards replace generation and scoring."""

from collections import Counter
from collections.abc import Callable
from math import gcd
from types import ModuleType
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOTrainer, get_peft_config
from trl.trainer import grpo_trainer

from ..trl_config import TrlConfig
from .small_model import LONGEST, Sample, name_of, number_of, sample, tokenizer

# Prompts stay in order, so that equal optimizer steps have equal prompts. vLLM and TRL's logs do not affect gradients.
SAME: dict[str, object] = {
    "shuffle_dataset": False, "disable_dropout": True, "use_vllm": False, "log_completions": False,
    "use_transformers_continuous_batching": False, "use_transformers_paged": False, "generation_kwargs": None,
    "log_completions_hub_repo": None,
    "entropy_target": 1e3,  # above any model's entropy, so that an adaptive bonus is active
}  # fmt: skip


def samples_per_step(config: TrlConfig) -> int:
    """Completions of one optimizer step, over all ranks."""
    training = config.training
    return int(training.per_device_train_batch_size * training.gradient_accumulation_steps) * config.ranks


def steps_of_a_round(config: TrlConfig) -> int:
    """Optimizer steps until every kind of step has occurred.

    The kinds are the steps that reuse a rollout, and, with an adaptive entropy bonus, a step that depends on the one
    before it.
    """
    training = config.training
    reused = -(-training.steps_per_generation * training.num_iterations // training.gradient_accumulation_steps)
    return max(int(reused), 2 if training.use_adaptive_entropy else 1)


def common_factor(configs: list[TrlConfig], most_samples: int) -> int:
    """The divisor of accumulation and steps_per_generation in all recipes, so that a step has at most `most_samples`.

    The smallest sufficient divisor, else the largest valid one. A valid divisor leaves whole groups, at least two.
    """
    steps = [(c.training.gradient_accumulation_steps, c.training.steps_per_generation) for c in configs]
    common = gcd(*(n for pair in steps for n in pair))
    valid = [f for f in range(1, common + 1) if common % f == 0 and all(_holds(c, f) for c in configs)]
    wanted = [f for f in valid if samples_per_step(configs[0]) // f <= most_samples]
    return min(wanted, default=max(valid))


def _holds(config: TrlConfig, factor: int) -> bool:
    training = config.training
    groups, rest = divmod(training.generation_batch_size // factor, training.num_generations)
    return factor == 1 or (
        rest == 0 and groups >= 1 and samples_per_step(config) // factor >= 2 * training.num_generations
    )


def shrunken(config: TrlConfig, factor: int) -> dict[str, object]:
    """The keys that make the recipe's step `factor` times smaller."""
    training = config.training
    return {
        "gradient_accumulation_steps": training.gradient_accumulation_steps // factor,
        "steps_per_generation": training.steps_per_generation // factor,
        "generation_batch_size": None,
    }


def deal(config: TrlConfig, module: ModuleType = grpo_trainer) -> None:
    """Make TRL's trainer in `module` give each optimizer step of a rollout the same samples on any number of ranks.

    TRL shuffles each rank's part of a rollout before it cuts it into micro-batches. Here the parts of every step are
    fixed first, and shuffled then.
    """
    training = config.training
    steps = training.steps_per_generation // training.gradient_accumulation_steps

    def dealt(samples: dict[str, Any]) -> dict[str, Any]:
        count = len(next(value for value in samples.values() if value is not None))
        order = torch.cat([torch.arange(step, count, steps)[torch.randperm(count // steps)] for step in range(steps)])
        return {name: _in_order(value, order) for name, value in samples.items()}

    if steps > 1:
        module.shuffle_sequence_dict = dealt  # type: ignore[attr-defined]


def _in_order(values: Any, order: torch.Tensor) -> Any:
    if values is None or (isinstance(values, torch.Tensor) and values.ndim == 0):
        return values
    return values[order] if isinstance(values, torch.Tensor) else [values[i] for i in order]


def build(config: TrlConfig, steps: int) -> GRPOTrainer:
    """TRL's trainer over `steps` optimizer steps of fixed rollouts."""
    longest = int(config.training.max_completion_length)
    calls = Counter[str]()

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        """The fixed completions of `prompts`. Also seeds torch, so that the next shuffle is the same in all runs."""
        calls["rollouts"] += 1
        torch.manual_seed(calls["rollouts"])
        samples = fixed_samples(prompts, longest=longest, first=first_generation(trainer, prompts))
        return {
            "prompt_ids": [list(s.prompt) for s in samples],
            "completion_ids": [list(s.completion) for s in samples],
            "logprobs": None,
            "fixed_reward": [s.reward for s in samples],
        }

    def fixed(fixed_reward: list[float], **_: object) -> list[float]:
        return fixed_reward

    return GRPOTrainer(**arguments(config, steps, fixed), rollout_func=rollout)


def first_generation(trainer: Any, prompts: list[str]) -> int:
    """The number in its group of a rank's first completion: ranks have equal parts of a rollout, one after another."""
    return int(trainer.accelerator.process_index * len(prompts) % trainer.num_generations)


def fixed_samples(prompts: list[str], *, longest: int, first: int = 0) -> list[Sample]:
    """A sample for each of `prompts`, in which a group's prompt stands once for each of its completions.

    `first` is the number of the first completion in its group, where another rank has those before it.
    """
    seen = Counter({prompts[0]: first})
    samples = []
    for name in prompts:
        samples.append(sample(number_of(name), seen[name], longest=min(LONGEST, longest)))
        seen[name] += 1
    return samples


def arguments(config: TrlConfig, steps: int, fixed: Callable[..., list[float]]) -> dict[str, Any]:
    """Arguments of TRL's trainer; `fixed` gives the fixed rewards of completions, as a reward function does."""
    training, script = config.training, config.script
    micro_steps = steps * training.gradient_accumulation_steps
    rollouts = -(-micro_steps // (training.steps_per_generation * training.num_iterations))
    prompts = rollouts * (training.generation_batch_size // training.num_generations)
    rewards = len(script.reward_funcs or []) + bool(script.reward_model_name_or_path)
    return {
        "model": config.model.model_name_or_path, "reward_funcs": [_reward(i, fixed) for i in range(max(1, rewards))],
        "args": training, "train_dataset": Dataset.from_dict({"prompt": [name_of(i) for i in range(prompts)]}),
        "processing_class": tokenizer(), "peft_config": get_peft_config(config.model),
    }  # fmt: skip


def _reward(number: int, fixed: Callable[..., list[float]]) -> Any:
    """Reward function `number`: the fixed reward with its own scale, plus its own multiple of the length."""

    def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        found = fixed(completion_ids=completion_ids, **columns)
        return [(1 + number) * r + 0.3 * number * len(ids) for r, ids in zip(found, completion_ids, strict=True)]

    reward.__name__ = f"fixed_reward_{number}"
    return reward
