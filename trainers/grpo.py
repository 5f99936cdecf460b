"""TRL's GRPOTrainer from a recipe: as `trl grpo` builds it, or on worst-case data with random weights for a probe."""

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import trl.trainer.grpo_trainer as trl_grpo
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer
from trl.rewards import accuracy_reward, get_soft_overlong_punishment, reasoning_accuracy_reward, think_format_reward

from autofit.errors import ConfigError, nearest
from autofit.recipe.trl_config import TrlConfig

from .common import dataset_name, made, random_weights, real, samples_per_step, short, split

# Method of the trainer -> the phase that runs while it does; everything else in a step is `update`.
PHASES = {
    "_generate": "rollout", "_generate_and_score_completions": "scoring", "_save_checkpoint": "save",
    "vllm_generation.sync_weights": "wake-up",  # with sleep mode vLLM wakes up for its new weights
}  # fmt: skip
QUIET = {"log_completions": False}  # what a probe turns off besides what it turns off for every trainer
MODEL = AutoModelForCausalLM
_NEVER = 2**31 - 1  # a token id that no tokenizer has: generation never ends early, and nothing else changes


def build(config: TrlConfig, *, worst_case: Mapping[str, Any] | None = None) -> GRPOTrainer:
    """The trainer of `config`, as TRL's own script makes it.

    With `worst_case` (`rows`: a dataset of the one row with the longest prompt), it trains random weights on that row
    alone and forces every completion to `max_completion_length` tokens. Raises ConfigError for what the recipe names
    and nobody has.
    """
    training = config.training
    if worst_case is None:
        return real(GRPOTrainer, config, reward_funcs=reward_functions(config))
    training.generation_kwargs = {**(training.generation_kwargs or {}), "eos_token_id": [_NEVER]}
    with random_weights(trl_grpo):
        rows = _repeat(worst_case["rows"], training)
        trainer = made(GRPOTrainer, config, reward_funcs=reward_functions(config), train_dataset=rows)
    trainer.eos_token_ids = [_NEVER]
    return trainer


def tokens_per_step(config: TrlConfig, worst_case: Mapping[str, Any]) -> int:
    """Prompt and completion tokens that one optimizer step of one rank trains on, at full length."""
    return samples_per_step(config) * (int(worst_case["prompt_tokens"]) + int(config.training.max_completion_length))


def prompts(config: TrlConfig) -> Any:
    """The train split, which has a column of prompts (text, or lists of messages)."""
    rows = split(config)
    if config.script.dataset_streaming:
        raise ConfigError("a search reads the whole dataset for its longest prompt; set dataset_streaming to false")
    if "prompt" not in rows.column_names:
        raise ConfigError(
            f"GRPO needs a dataset with a column 'prompt'; {dataset_name(config)} has "
            f"{', '.join(rows.column_names)}; rename the column"
        )
    return rows


def reward_functions(config: TrlConfig) -> list[str | Callable[..., Any]]:
    """Reward models (by name) and functions (TRL's own, or anyone's by dotted path), found as TRL's script does."""
    own = {
        "accuracy_reward": accuracy_reward,
        "reasoning_accuracy_reward": reasoning_accuracy_reward,
        "think_format_reward": think_format_reward,
        "get_soft_overlong_punishment": get_soft_overlong_punishment(max_completion_len=1280, soft_punish_cache=256),
    }
    found: list[str | Callable[..., Any]] = []
    if config.script.reward_model_name_or_path:
        found.append(config.script.reward_model_name_or_path)
    for name in config.script.reward_funcs or []:
        if name in own:
            found.append(own[name])
        elif "." in name:
            found.append(_imported(name))
        else:
            raise ConfigError(
                f"reward_funcs takes TRL's own functions or dotted paths such as my_rewards.exact; got {name!r}"
                f"{nearest(name, own)}"
            )
    if not found:
        raise ConfigError("a GRPO recipe needs a reward: give reward_funcs or reward_model_name_or_path")
    return found


def _imported(name: str) -> Callable[..., Any]:
    module_name, function_name = name.rsplit(".", 1)
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"the reward function {name!r} must be importable from {Path.cwd()} or the installed packages; "
            f"importing {module_name} gave {type(error).__name__}: {short(error)}"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        callables = [n for n, v in vars(module).items() if callable(v)]
        raise ConfigError(f"{module_name} has no function {function_name!r}{nearest(function_name, callables)}")
    return function  # type: ignore[no-any-return]


def _repeat(rows: Dataset, training: Any) -> Dataset:
    """The one row of `rows`, often enough for every step of a probe."""
    prompts_per_generation = max(1, training.generation_batch_size // training.num_generations)
    generations = training.max_steps * training.gradient_accumulation_steps
    return rows.select([0] * (prompts_per_generation * (generations + 1)))
