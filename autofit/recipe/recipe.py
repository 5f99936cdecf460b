"""A recipe: the YAML that `trl grpo --config` takes, and what follows from it. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

import yaml

from autofit.errors import ConfigError
from autofit.units import format_bytes

TrainerName = Literal["grpo", "sft", "dpo", "reward"]
TRAINERS: tuple[TrainerName, ...] = ("grpo", "sft", "dpo", "reward")


class _UniqueKeyLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice: the second would silently win."""


def _mapping(loader: _UniqueKeyLoader, node: yaml.MappingNode) -> dict[object, object]:
    loader.flatten_mapping(node)
    keys = [loader.construct_object(key, deep=True) for key, _ in node.value]
    twice = sorted({str(key) for key in keys if keys.count(key) > 1})
    if twice:
        raise ConfigError(f"each key may stand once; given twice: {', '.join(twice)}; remove one of them")
    return {key: loader.construct_object(value, deep=True) for key, (_, value) in zip(keys, node.value, strict=True)}


_UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def read_yaml_mapping(path: Path, *, what: str) -> dict[str, object]:
    """The mapping in the YAML file `path`; `what` names it in the errors ("recipe", "search space")."""
    if not path.exists():
        raise ConfigError(f"the {what} {path} does not exist; give the path of a YAML file")
    if path.is_dir():
        raise ConfigError(f"the {what} must be a YAML file, and {path} is a folder")
    try:
        text = path.read_text(encoding="utf-8")
        content = yaml.load(text, Loader=_UniqueKeyLoader)  # noqa: S506  (a SafeLoader)
    except OSError as error:
        raise ConfigError(f"the {what} {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the {what} {path} must be UTF-8 text, and is not (byte {error.start})") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"the {what} {path} is not valid YAML: {_one_line(error)}") from error
    except ConfigError as error:
        raise ConfigError(f"the {what} {path}: {error}") from error
    if not isinstance(content, dict):
        kind = {list: "a list", type(None): "empty", str: "text"}.get(type(content), f"a {type(content).__name__}")
        raise ConfigError(f"the {what} {path} must be a YAML mapping (key: value lines), and is {kind}")
    wrong = [key for key in content if not isinstance(key, str)]
    if wrong:
        raise ConfigError(f"the {what} {path}: every key must be text; got {wrong[0]!r}")
    return cast(dict[str, object], content)


def _one_line(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    return f"{problem} (line {mark.line + 1}, column {mark.column + 1})" if mark else problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What the user trains, as given (`values`) and as TRL's own parser resolved it (`resolved`)."""

    trainer: TrainerName
    values: Mapping[str, object]
    resolved: Mapping[str, object]
    name: str = "recipe"
    folder: Path = field(default_factory=Path.cwd)
    world_size: int = 1
    longest_prompt_tokens: int | None = None
    longest_sample_tokens: int | None = None  # for the trainers that do not generate
    num_prompts: int | None = None
    model_parameters: int | None = None
    weights_bytes: int | None = None
    balances_experts: bool = False  # a loss over each micro-batch's routing
    counts_padding: bool = False  # positions are learned and count it, and a rollout is padded to its longest prompt
    content_hash: str = ""  # of the reward functions' files and the data

    def integer(self, key: str) -> int:
        """The resolved value of `key`, which TRL's parser has made an integer."""
        value = self.resolved[key]
        assert isinstance(value, int), (key, value)
        return value

    @property
    def micro_batch_size(self) -> int:
        return self.integer("per_device_train_batch_size")

    @property
    def grad_accum_steps(self) -> int:
        return self.integer("gradient_accumulation_steps")

    @property
    def effective_batch_size(self) -> int:
        """Samples (completions, for GRPO) per optimizer step, over all ranks."""
        return self.micro_batch_size * self.grad_accum_steps * self.world_size

    @property
    def num_generations(self) -> int:
        """Completions in a group; 1 for the trainers that have none."""
        return self.integer("num_generations") if self.trainer == "grpo" else 1

    @property
    def prompts_per_step(self) -> int:
        return self.effective_batch_size // self.num_generations

    @property
    def steps_per_generation(self) -> int:
        return self.integer("steps_per_generation") if self.trainer == "grpo" else self.grad_accum_steps

    @property
    def generation_batch_size(self) -> int:
        """Completions of one rollout, over all ranks."""
        return self.micro_batch_size * self.world_size * self.steps_per_generation

    @property
    def max_completion_tokens(self) -> int:
        return self.integer("max_completion_length")

    @property
    def loss_type(self) -> str:
        return str(self.resolved.get("loss_type", self.trainer))

    @property
    def uses_lora(self) -> bool:
        return bool(self.resolved.get("use_peft"))

    def check(self) -> None:
        """Raise ConfigError unless every optimizer step holds whole groups of whole prompts."""
        if self.trainer != "grpo":
            return
        if self.effective_batch_size % self.num_generations:
            raise ConfigError(
                f"the effective batch {self.effective_batch_size} (per_device_train_batch_size="
                f"{self.micro_batch_size} x gradient_accumulation_steps={self.grad_accum_steps} x world size "
                f"{self.world_size}) must be a multiple of num_generations={self.num_generations}, or a group is "
                f"split over optimizer steps; change gradient_accumulation_steps or num_generations"
            )
        whole, part = (
            max(self.generation_batch_size, self.effective_batch_size),
            min(self.generation_batch_size, self.effective_batch_size),
        )
        if whole % part:
            raise ConfigError(
                f"steps_per_generation={self.steps_per_generation} must divide or be a multiple of "
                f"gradient_accumulation_steps={self.grad_accum_steps}, or rollouts straddle optimizer steps"
            )

    def describe(self) -> list[tuple[str, str]]:
        """(name, text) rows that tell a user what autofit understood."""
        rows = [
            ("model", str(self.resolved.get("model_name_or_path"))),
            ("trainer", f"{self.trainer}, loss {self.loss_type}" if self.trainer == "grpo" else self.trainer),
            (
                "effective batch",
                f"{self.effective_batch_size} = {self.micro_batch_size} micro-batch x {self.grad_accum_steps} "
                f"accumulation x {self.world_size} rank(s)",
            ),
        ]
        if self.trainer == "grpo":
            rows.append(
                ("groups", f"{self.prompts_per_step} prompts x {self.num_generations} completions per optimizer step")
            )
            longest = "?" if self.longest_prompt_tokens is None else str(self.longest_prompt_tokens)
            rows.append(("worst case", f"{longest} prompt + {self.max_completion_tokens} completion tokens"))
        elif self.longest_sample_tokens is not None:
            limit = self.resolved.get("max_length")
            of = "no max_length" if limit is None else f"max_length {limit}"
            rows.append(("worst case", f"{self.longest_sample_tokens} tokens in the longest sample ({of})"))
        if self.uses_lora:
            rows.append(("adapter", f"LoRA r={self.resolved.get('lora_r')} alpha={self.resolved.get('lora_alpha')}"))
        if self.model_parameters is not None and self.weights_bytes is not None:
            rows.append(
                ("weights", f"{self.model_parameters / 1e6:.3g} M parameters, {format_bytes(self.weights_bytes)}")
            )
        return rows


def tuned_yaml(values: Mapping[str, object], changes: Mapping[str, object], *, comment: str) -> str:
    """YAML text of `values` with `changes` laid over it (None removes a key), under a comment line."""
    tuned = merge(values, changes)
    lines = "".join(f"# {line}\n" for line in comment.splitlines())
    return lines + yaml.safe_dump(tuned, sort_keys=False, allow_unicode=True)


def merge(values: Mapping[str, object], changes: Mapping[str, object]) -> dict[str, object]:
    """`values` with `changes` laid over it; a None removes the key, and `env` merges key by key."""
    tuned = dict(values)
    for key, value in changes.items():
        old = tuned.get(key)
        if key == "env" and isinstance(value, Mapping) and isinstance(old, Mapping):
            value = {**old, **value}
        if value is None:
            tuned.pop(key, None)
        else:
            tuned[key] = value
    return tuned
