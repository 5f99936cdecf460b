"""TRL's GRPOTrainer from a recipe: as `trl grpo` builds it, or on worst-case data with random weights for a probe."""

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from math import gcd
from pathlib import Path
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch
import trl.generation.vllm_generation as vllm_generation
import trl.trainer.grpo_trainer as trl_grpo
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from trl import GRPOTrainer
from trl.rewards import accuracy_reward, get_soft_overlong_punishment, reasoning_accuracy_reward, think_format_reward

from autofit.errors import ConfigError, nearest
from autofit.fakegpu.patches.cuda_api import active_gpu
from autofit.plugin.protocol import Facts, Inspection, SampleLengths, Task

from .common import dataset_name, made, one_batch, random_model, random_weights, real, samples_per_step, short, split
from .features import Features
from .image_prompts import has_images, longest_row, note_of, processor_of, simulated_only, with_an_image
from .images import StandInProcessor
from .inspection import data_hash, keep, longest_prompt
from .keys import COMPARED, ROLLOUTS, TILE_TOKENS, grpo_tiers
from .offline import FEATURES, no_reward, or_stated
from .rows import in_epoch, padded, place_of, shorter_prompts, unmasked_is_larger
from .trl import TrlRun, TrlTrainer
from .trl_config import TrlConfig

_REWARD = "reward_funcs or reward_model_name_or_path"
_NEVER = 2**31 - 1  # token id that no tokenizer has, as end token: generation never ends early


def prompts(config: TrlConfig) -> Any:
    """The train split, checked to have a column of prompts (text, or lists of messages)."""
    rows = split(config)
    if config.script.dataset_streaming:
        raise ConfigError("a search must read the whole dataset for its longest prompt; set dataset_streaming to false")
    if "prompt" not in rows.column_names:
        raise ConfigError(
            f"the trainer needs a dataset with a column 'prompt'; {dataset_name(config)} has "
            f"{', '.join(rows.column_names)}; rename the column"
        )
    return rows


def reward_functions(config: TrlConfig, *, simulated: bool = False) -> list[str | Callable[..., Any]]:
    """Reward models (by name) and reward functions (TRL's own, or by dotted path), resolved as in TRL's script.

    On a simulated card `no_reward` stands for a function whose module is not there, or for no reward at all.
    """
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
        elif "/" in name:
            raise ConfigError(f"reward_funcs takes functions; set reward_model_name_or_path: {name} for a reward model")
        elif "." in name:
            found.append(_imported(name, simulated=simulated))
        else:
            raise ConfigError(
                f"reward_funcs takes TRL's own functions or dotted paths such as my_rewards.exact; got {name!r}"
                f"{nearest(name, own)}"
            )
    if not found and not simulated:
        raise ConfigError(f"the recipe needs a reward: give {_REWARD}")
    return found or [no_reward]


_OF_CHATS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")  # TRL's that read messages


def _check_text_is_read(config: TrlConfig, rows: Dataset) -> None:
    """Raise ConfigError where a reward of TRL reads messages and the prompts are text: the first step would end so."""
    named = [name for name in config.script.reward_funcs or [] if name in _OF_CHATS]
    if named and len(rows) and isinstance(rows[0]["prompt"], str):
        raise ConfigError(
            f"reward_funcs {', '.join(named)} of TRL reads messages, and the prompts of {dataset_name(config)} are "
            'text: the first step would fail; write each prompt as [{"role": "user", "content": "..."}], or give '
            "reward functions of your own"
        )


def _note_of_rewards(config: TrlConfig, rewards: Sequence[object]) -> tuple[str, ...]:
    """Sentences of a prediction on rewards that `no_reward` stands for."""
    if no_reward not in rewards:
        return ()
    given = config.script.reward_funcs or []
    absent = [name for name, one in zip(given, rewards[len(rewards) - len(given) :], strict=True) if one is no_reward]
    said = f"the reward functions {', '.join(absent)} cannot be imported here" if absent else "the recipe has no reward"
    return (f"{said}: one that returns 0 stands in, without their memory or time; a run needs {_REWARD}",)


def _imported(name: str, *, simulated: bool) -> Callable[..., Any]:
    module_name, function_name = name.rsplit(".", 1)
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        if simulated and isinstance(error, ModuleNotFoundError):
            return no_reward
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
    """The single row of `rows`, repeated for every step of a probe."""
    prompts_per_generation = max(1, training.generation_batch_size // training.num_generations)
    generations = training.max_steps * training.gradient_accumulation_steps
    return rows.select([0] * (prompts_per_generation * (generations + 1)))


def _without_end(training: Any) -> dict[str, object]:
    """Arguments of a generation that no end token ends: vLLM's, which has no `eos_token_id`, or transformers'."""
    return {"ignore_eos": True} if training.use_vllm else {"eos_token_id": [_NEVER]}


def _engine_without_weights() -> AbstractContextManager[object]:
    """Context in which TRL's colocated vLLM makes up its weights (`load_format`): a probe needs no checkpoint on disk.

    The first generation gets those of the trainer, as in a run. Bytes are the same; only the start is shorter. A 4-bit
    engine still reads a checkpoint: vLLM sets `load_format` to bitsandbytes (EngineArgs.create_load_config).
    """
    engine = getattr(vllm_generation, "LLM", None)  # None: vLLM is not installed, and TRL says so
    if engine is None:
        return nullcontext()
    return mock.patch.object(vllm_generation, "LLM", partial(engine, load_format="dummy"))


class RolloutRun(TrlRun):
    """A run of a trainer that generates: it saves only between rollouts, and restores the prompts' order on resume."""

    weighs_samples_alike = True  # its micro-batches are all whole

    @property
    def steps_between_saves(self) -> int:
        training = self.trainer.args
        micro_steps = int(training.steps_per_generation * training.num_iterations)
        return micro_steps // gcd(int(training.gradient_accumulation_steps), micro_steps)

    @property
    def rollout_every(self) -> int:
        """As for any run."""
        training = self.trainer.args
        repeats = not getattr(self.trainer, "generates_each_step", False)
        return int(training.steps_per_generation * training.num_iterations) if repeats else 0

    def kinds(self) -> list[object]:
        """As for any run. A micro-batch of the longest prompt alone has no padding, and all others have."""
        gpu = active_gpu()
        assert gpu is not None
        values, found = gpu.tracer.shadows, list[object]()
        for inputs in self.trainer._buffered_inputs:
            mask = inputs["prompt_mask"]
            found.append(values.count_true(mask) == mask.numel() if values.of(mask) is not None else object())
        return found * int(self.trainer.args.num_iterations)

    def save_on_the_spot(self) -> bool:
        """As for any run, but not while a rollout is in use: it is not saved."""
        exact = int(self.trainer.state.global_step) % self.steps_between_saves == 0
        return exact and super().save_on_the_spot()

    @property
    def rollout_share(self) -> float:
        return 1 / self.steps_between_saves if getattr(self.trainer, "generates_each_step", False) else 1.0

    def generate_each_step(self) -> None:
        """Generate in every optimizer step, although the recipe uses a rollout for several.

        The second step of a simulated probe then has a rollout beside the optimizer's state, as later ones do.
        """
        trainer, training = self.trainer, self.trainer.args
        each = int(training.steps_per_generation * training.num_iterations)
        accumulation = int(training.gradient_accumulation_steps)
        original, done = trainer._prepare_inputs, count()

        def prepared(*args: Any, **kwargs: Any) -> Any:
            if trainer.model.training and next(done) % accumulation == 0:
                trainer._step = -(-trainer._step // each) * each  # where TRL generates
            return original(*args, **kwargs)

        trainer._prepare_inputs = prepared
        trainer.generates_each_step = True

    def before_resuming(self, checkpoint: Path) -> None:
        """Restore the prompts' order of the resumed epoch.

        TRL's sampler draws each epoch's order from one generator, which restarts in a new process; the trainer skips
        whole epochs without drawing from it.
        """
        state = json.loads((checkpoint / "trainer_state.json").read_text())
        epochs_done = int(float(state["epoch"]) + 1e-6)
        original = self.trainer._get_train_sampler

        def advanced(*args: Any, **kwargs: Any) -> Any:
            sampler = original(*args, **kwargs)
            for _ in range(epochs_done):
                torch.randperm(sampler.num_samples, generator=sampler.generator)
            return sampler

        if self.trainer.shuffle_dataset and epochs_done:
            self.trainer._get_train_sampler = advanced


class RolloutTrainer(TrlTrainer):
    """Base of GRPO and RLOO: both generate completions, score them, and train on them."""

    keys = ROLLOUTS
    phases = MappingProxyType({
        "_generate": "rollout", "_generate_and_score_completions": "scoring", "_save_checkpoint": "save",
        "vllm_generation.sync_weights": "wake-up",  # with sleep mode vLLM wakes up for its new weights
    })  # fmt: skip
    phases_of_ranks = MappingProxyType({"vllm_generation.sync_weights": "sync"})  # every rank takes part in gathering
    quiet = MappingProxyType({"log_completions": False})
    auto_class = AutoModelForCausalLM
    run_class = RolloutRun
    trl_class: Any
    trl_module: Any

    def build(self, values: Mapping[str, object], task: Task) -> TrlRun:
        run = super().build(values, task)
        assert isinstance(run, RolloutRun)
        if task.worst_case is not None and task.device.startswith("sim:") and run.steps_between_saves > 1:
            run.generate_each_step()
        return run

    def real(self, config: TrlConfig) -> Any:
        rewards = reward_functions(config)
        if any(isinstance(reward, Features) for reward in rewards):
            raise ConfigError("rewards by features are simulated and not run; train with the tool that has them")
        return real(self.trl_class, config, reward_funcs=rewards)

    def inspect(self, values: Mapping[str, object], inspection: Inspection) -> Facts:
        facts = super().inspect(values, inspection)
        named = facts.resolved.get("reward_funcs")
        own = isinstance(named, list) and any(name in FEATURES for name in named)
        return replace(facts, forecasts=facts.forecasts and not own)

    def probed(self, config: TrlConfig, worst_case: Mapping[str, Any]) -> Any:
        """A trainer with random weights on the longest prompt; every completion has `max_completion_length` tokens."""
        training = config.training
        training.generation_kwargs = {**(training.generation_kwargs or {}), **_without_end(training)}
        rewards = reward_functions(config, simulated=active_gpu() is not None)
        longest = int(worst_case["prompt_tokens"]) + int(training.max_completion_length)
        with random_weights(self.trl_module), random_reward_models(self.trl_module), _engine_without_weights():
            rows = _repeat(worst_case["rows"], training)
            group = int(training.num_generations_eval or training.num_generations)
            images = {"processing_class": processor_of(config)} if "images" in worst_case else {}
            trainer = made(
                self.trl_class, config, reward_funcs=rewards, train_dataset=rows,
                eval_dataset=one_batch(rows[0], config, samples_of_row=group),
                reward_processing_classes=tokenizers(rewards, longest), **images,
            )  # fmt: skip
        for reward in rewards:
            if isinstance(reward, Features):
                reward.bound(trainer, longest)
        trainer.eos_token_ids = [_NEVER]
        if padded(config, worst_case) and not images:
            trainer._tokenize_prompts = shorter_prompts(trainer._tokenize_prompts)
        return trainer

    def longest(self, config: TrlConfig, inspection: Inspection) -> dict[str, object]:
        rewards = reward_functions(
            config, simulated=inspection.simulated
        )  # first: a wrong path is reported before a large dataset is read
        check_reward_model(config)
        notes = _note_of_rewards(config, rewards)
        with or_stated(inspection):
            rows = prompts(config)
        made_up = inspection.prompt_tokens is not None  # a synthetic prompt of that length replaces the dataset
        if not made_up:
            _check_text_is_read(config, rows)
        processor = processor_of(config) if inspection.simulated or has_images(rows) else None
        if processor is not None:
            found = self._longest_with_images(rows, processor, config, inspection, data_hash(rewards, rows))
            return {**found, "notes": (*notes, *cast("tuple[str, ...]", found["notes"]))}
        index, tokens, least = longest_prompt(rows, config)
        lengths = SampleLengths.of(
            [tokens, 0 if made_up else least], most=tokens, generates=True,
            unmasked_is_larger=unmasked_is_larger(config, inspection.device),
        )  # fmt: skip
        keep(rows.select([index]), {"prompt_tokens": tokens, "lengths": lengths.to_json()}, inspection.worst_case)
        where = {} if made_up else in_epoch(config, place_of(index, rows, rows, None))
        return {
            **where, "longest_prompt_tokens": tokens, "num_prompts": None if made_up else len(rows),
            "content_hash": data_hash(rewards, None if made_up else rows), "notes": notes,
        }  # fmt: skip

    def _longest_with_images(
        self, rows: Dataset, processor: StandInProcessor, config: TrlConfig, inspection: Inspection, content: str
    ) -> dict[str, object]:
        simulated_only(inspection)
        made_up = inspection.prompt_tokens is not None
        row, tokens, least = longest_row(with_an_image(rows, processor) if made_up else rows, processor, "prompt")
        lengths = SampleLengths.of([tokens, least], most=tokens, generates=True, unmasked_is_larger=False)
        facts = {"prompt_tokens": tokens, "lengths": lengths.to_json(), "images": len(row["images"])}
        keep(Dataset.from_list([row]), facts, inspection.worst_case)
        return {
            "longest_prompt_tokens": tokens, "num_prompts": None if made_up else len(rows), "content_hash": content,
            "notes": (note_of(processor, row, made_up=made_up),), "images": len(row["images"]),
        }  # fmt: skip

    def tokens_per_step(self, config: TrlConfig, worst_case: Mapping[str, Any]) -> int:
        """Prompt and completion tokens of one optimizer step."""
        tokens = int(worst_case["prompt_tokens"]) + int(config.training.max_completion_length)
        return samples_per_step(config) * tokens


class GrpoTrainer(RolloutTrainer):
    """`trl grpo`."""

    name = "grpo"
    tile_tokens = TILE_TOKENS
    trl_class, trl_module = GRPOTrainer, trl_grpo
    tiers = staticmethod(grpo_tiers)
    compared = (
        *COMPARED,
        "steps_per_generation", "generation_batch_size", "num_iterations", "loss_type", "beta",
        "sapo_temperature_neg", "sapo_temperature_pos", "vespo_k_pos", "vespo_lambda_pos",
        "vespo_k_neg", "vespo_lambda_neg", "importance_sampling_level", "multi_objective_aggregation", "scale_rewards",
        "mask_truncated_completions", "top_entropy_quantile", "entropy_coef", "use_adaptive_entropy",
        "use_bias_correction_kl", "reward_weights",
    )  # fmt: skip


TRAINER = GrpoTrainer()


# Reward models of GRPO and RLOO in a probe: random weights, and every text at its full length.
#
# TRL scores a whole rollout with each reward model at once. A simulated card has no weights and no text, and a probe on
# a real one no trained answers; so the model comes from its config alone, and its tokenizer is replaced by one that
# gives each text the tokens of the longest prompt and a full completion. A tokenizer of its own may make more of them.

_TOKEN, _PAD = 1, 0


class FullLength:
    """A tokenizer to TRL, which makes `tokens` tokens of any text or conversation."""

    pad_token_id = _PAD
    eos_token = pad_token = ""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def apply_chat_template(self, *_: object, **__: object) -> str:
        return ""

    def __call__(self, text: Sequence[str], **_: object) -> dict[str, torch.Tensor]:
        ids = torch.full((len(text), self._tokens), _TOKEN)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@contextmanager
def random_reward_models(module: ModuleType) -> Iterator[None]:
    """Context in which the trainer of `module` makes its reward models from their config, without a download."""
    original = module.AutoModelForSequenceClassification

    def from_pretrained(name: str, **kwargs: Any) -> Any:
        return random_model(name, AutoModelForSequenceClassification, **kwargs)

    module.AutoModelForSequenceClassification = SimpleNamespace(from_pretrained=from_pretrained)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.AutoModelForSequenceClassification = original  # type: ignore[attr-defined]


def tokenizers(rewards: Sequence[object], tokens: int) -> list[FullLength | None]:
    """The `reward_processing_classes` of a probe: one for each reward model (a name), None for a function."""
    return [FullLength(tokens) if isinstance(reward, str) else None for reward in rewards]


def check_reward_model(config: TrlConfig) -> None:
    """Raise ConfigError unless transformers can make the recipe's reward model and its weights match the recipe's."""
    name = config.script.reward_model_name_or_path
    weights, rewards = config.training.reward_weights, config.script.reward_funcs or []
    count = len(rewards) + bool(name)
    if weights is not None and len(weights) != count:
        raise ConfigError(
            f"reward_weights must have one number for each reward ({count}: reward_model_name_or_path first, if given, "
            f"then reward_funcs); got {len(weights)}: {weights}"
        )
    if not name:
        return
    try:
        found = AutoConfig.from_pretrained(name, trust_remote_code=bool(config.training.trust_remote_code))
        with torch.device("meta"):
            AutoModelForSequenceClassification.from_config(found)
    except (OSError, ValueError, KeyError) as error:
        problem = " ".join(str(error).split())[:200]
        folder = f"{name}/config.json" if os.path.isdir(name) else repr(name)
        raise ConfigError(
            f"reward_model_name_or_path must name a model that transformers can load to classify sequences; {folder} "
            f"cannot be: {problem}"
        ) from error
