"""TRL's GRPOTrainer from a recipe: as `trl grpo` builds it, or on worst-case data with random weights for a probe."""

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
import trl.trainer.grpo_trainer as trl_grpo
from datasets import Dataset, load_dataset
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from trl import GRPOTrainer, get_dataset, get_peft_config, get_quantization_config
from trl.rewards import accuracy_reward, get_soft_overlong_punishment, reasoning_accuracy_reward, think_format_reward

from autofit.errors import ConfigError, nearest
from autofit.probing.trl_config import TrlConfig

# Method of the trainer -> the phase that runs while it does; everything else in a step is `update`.
PHASES = {"_generate": "rollout", "_generate_and_score_completions": "scoring", "_save_checkpoint": "save"}
_NEVER = 2**31 - 1  # a token id that no tokenizer has: generation never ends early, and nothing else changes


def build(config: TrlConfig, *, worst_case: Mapping[str, Any] | None = None) -> GRPOTrainer:
    """The trainer of `config`, as TRL's own script makes it.

    With `worst_case` (`rows`: a dataset of the one row with the longest prompt), it trains random weights on that row
    alone and forces every completion to `max_completion_length` tokens. Raises ConfigError for what the recipe names
    and nobody has.
    """
    training, model = config.training, config.model
    kwargs = {
        "revision": model.model_revision,
        "trust_remote_code": training.trust_remote_code,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
    }
    training.model_init_kwargs = kwargs | (training.model_init_kwargs or {})
    if worst_case is not None:
        training.generation_kwargs = {**(training.generation_kwargs or {}), "eos_token_id": [_NEVER]}
    with _random_weights() if worst_case is not None else _real_weights():
        trainer = GRPOTrainer(
            model=model.model_name_or_path,
            reward_funcs=reward_functions(config),
            args=training,
            train_dataset=_repeat(worst_case["rows"], training) if worst_case is not None else split(config),
            eval_dataset=split(config, evaluation=True) if training.eval_strategy != "no" else None,
            quantization_config=get_quantization_config(model),
            peft_config=get_peft_config(model),
        )
    if worst_case is not None:
        trainer.eos_token_ids = [_NEVER]
    return trainer


def tokens_per_step(config: TrlConfig, prompt_tokens: int) -> int:
    """Prompt and completion tokens that one optimizer step of one rank trains on, at full length."""
    return samples_per_step(config) * (prompt_tokens + int(config.training.max_completion_length))


def samples_per_step(config: TrlConfig) -> int:
    """Completions that one optimizer step of one rank trains on."""
    training = config.training
    return int(training.per_device_train_batch_size) * int(training.gradient_accumulation_steps)


def prompts(config: TrlConfig) -> Any:
    """The train split, which has a column of prompts (text, or lists of messages)."""
    rows = split(config)
    if config.script.dataset_streaming:
        raise ConfigError("a search reads the whole dataset for its longest prompt; set dataset_streaming to false")
    if "prompt" not in rows.column_names:
        raise ConfigError(
            f"GRPO needs a dataset with a column 'prompt'; {_dataset_name(config)} has "
            f"{', '.join(rows.column_names)}; rename the column"
        )
    return rows


def split(config: TrlConfig, *, evaluation: bool = False) -> Any:
    """The train (or test) split of the dataset, found as TRL's script finds it."""
    script, mixture = config.script, config.datasets
    if not mixture.datasets and not script.dataset_name:
        raise ConfigError("a recipe needs a dataset: give dataset_name (a folder or a name) or datasets")
    try:
        if mixture.datasets:
            splits = get_dataset(mixture)
        else:
            splits = load_dataset(script.dataset_name, name=script.dataset_config, streaming=script.dataset_streaming)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"the dataset {_dataset_name(config)} cannot be loaded: {_short(error)}") from error
    except Exception as error:  # datasets raises classes of its own for broken files
        raise ConfigError(f"the dataset {_dataset_name(config)} cannot be read: {_short(error)}") from error
    key = "dataset_test_split" if evaluation else "dataset_train_split"
    wanted = getattr(script, key)
    if wanted not in splits:
        raise ConfigError(f"{key} {wanted!r} is not in the dataset; it has {', '.join(splits)}")
    return splits[wanted]


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
            f"importing {module_name} gave {type(error).__name__}: {_short(error)}"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        callables = [n for n, v in vars(module).items() if callable(v)]
        raise ConfigError(f"{module_name} has no function {function_name!r}{nearest(function_name, callables)}")
    return function  # type: ignore[no-any-return]


def _dataset_name(config: TrlConfig) -> str:
    if config.datasets.datasets:
        return ", ".join(str(d.data_files or d.path) for d in config.datasets.datasets)
    return str(config.script.dataset_name)


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _repeat(rows: Dataset, training: Any) -> Dataset:
    """The one row of `rows`, often enough for every step of a probe."""
    prompts_per_generation = max(1, training.generation_batch_size // training.num_generations)
    generations = training.max_steps * training.gradient_accumulation_steps
    return rows.select([0] * (prompts_per_generation * (generations + 1)))


# -- weights ----------------------------------------------------------------------------------------------------------


@contextmanager
def _real_weights() -> Iterator[None]:
    yield


@contextmanager
def _random_weights() -> Iterator[None]:
    """Within, the trainer makes its models (policy and reference) from their config: as large, and no download."""
    original = trl_grpo.create_model_from_path
    trl_grpo.create_model_from_path = random_model
    try:
        yield
    finally:
        trl_grpo.create_model_from_path = original


def random_model(model_id: str, architecture: Any = None, **kwargs: Any) -> PreTrainedModel:
    """A model of `model_id`'s architecture, in the dtype, attention and quantisation that TRL would load it in."""
    trust = kwargs.get("trust_remote_code", False)
    config = AutoConfig.from_pretrained(model_id, revision=kwargs.get("revision") or "main", trust_remote_code=trust)
    architecture = architecture or _architecture(config)
    on_card = torch.cuda.is_available() and not _cpu_wanted()
    dtype = _dtype(kwargs.get("dtype", "float32"), config)
    made = {"dtype": dtype, "attn_implementation": kwargs.get("attn_implementation")}
    quantization = kwargs.get("quantization_config")
    if quantization is None:
        with torch.device("cuda" if on_card else "cpu"):
            model = architecture._from_config(config, **made) if not trust else architecture.from_config(config, **made)
    else:
        state = architecture._from_config(config, **made).state_dict()
        model = architecture.from_pretrained(
            None, config=config, state_dict=state, quantization_config=quantization,
            device_map={"": 0} if on_card else None, **made,
        )  # fmt: skip
    model.config._name_or_path = model_id
    return model


def _architecture(config: Any) -> Any:
    names = config.architectures or []
    return getattr(transformers, names[0], AutoModelForCausalLM) if names else AutoModelForCausalLM


def _dtype(asked: Any, config: Any) -> torch.dtype:
    if isinstance(asked, torch.dtype):
        return asked
    if asked in ("auto", None):
        found = getattr(config, "dtype", None)
        return found if isinstance(found, torch.dtype) else torch.float32
    dtype = getattr(torch, str(asked))
    assert isinstance(dtype, torch.dtype)
    return dtype


def _cpu_wanted() -> bool:
    from accelerate import PartialState

    return PartialState().device.type == "cpu"  # type: ignore[no-any-return]
