"""A recipe's values through TRL's own parser, with one-line errors for unknown keys, wrong types and TRL's rules."""

import argparse
import copy
import os
import typing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NoReturn

from autofit.errors import ConfigError, nearest
from autofit.plugin.fields import accepts, readable
from autofit.recipe.recipe import merge

from .foreign_keys import foreign_file, instead
from .names import installed, renamed
from .scripts import is_trls, parser_of

_NAMED = 4  # unknown keys that one error names
_LOSS_TYPES = ("grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo")


@dataclass(frozen=True, slots=True)
class TrlConfig:
    """The parsed arguments of TRL's script: its own, the trainer's, the model's and the datasets'.

    `ranks` is how many train together, where a gradient proof asks; else TRL's own process counts.
    """

    script: Any
    training: Any
    model: Any
    datasets: Any
    ranks: int = 1

    @property
    def resolved(self) -> dict[str, object]:
        """{key: value} of all four parts, with plain values only (those that a recipe can hold)."""
        merged: dict[str, object] = {}
        for part in (self.datasets, self.model, self.training, self.script):
            for item in fields(part):
                merged[item.name] = plain(getattr(part, item.name))
        return merged


def plain(value: object) -> object:
    """`value` in JSON types; other types become text."""
    if isinstance(value, str) and not isinstance(value, bool | int | float):
        return str(value.value) if hasattr(value, "value") else str(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if is_dataclass(value) and not isinstance(value, type):  # transformers' AcceleratorConfig
        return {item.name: plain(getattr(value, item.name)) for item in fields(value)}
    return str(value)


def parse(trainer: str, values: Mapping[str, object], *, overrides: Mapping[str, object]) -> TrlConfig:
    """`values` with `overrides` applied, through the parser of its script; exports their `env` block."""
    parser = parser_of(trainer)
    merged = copy.deepcopy(merge(values, overrides))  # TRL's parser changes lists in place
    env = merged.pop("env", {})
    if not isinstance(env, dict):
        raise ConfigError(f"env must be a mapping of environment variables; got {env!r}")
    os.environ.update({str(key): str(value) for key, value in env.items()})
    hints = _hints(parser.dataclass_types)
    _check_keys(trainer, merged, hints)
    _check_types(merged, hints, {a.dest: a for a in parser._actions})
    with _quiet_parser(parser):
        parser.set_defaults_with_config(**merged)
        parts = _parse(trainer, parser)
    return TrlConfig(*parts)


@contextmanager
def counting(ranks: int) -> Iterator[None]:
    """Context in which TRL's configs count `ranks` processes, for the rules of their batches, though this is one."""
    if ranks == 1:
        yield
        return
    from transformers import TrainingArguments

    own = TrainingArguments.world_size
    TrainingArguments.world_size = property(lambda _: ranks)
    try:
        yield
    finally:
        TrainingArguments.world_size = own


def _hints(dataclass_types: typing.Iterable[type]) -> dict[str, Any]:
    hints: dict[str, Any] = {}
    for kind in dataclass_types:
        known = typing.get_type_hints(kind)
        hints |= {f.name: known[f.name] for f in fields(kind) if f.init}
    return hints


def _check_keys(trainer: str, values: Mapping[str, object], hints: Mapping[str, Any]) -> None:
    foreign = foreign_file(trainer, values)
    if foreign is not None:
        raise ConfigError(foreign)
    unknown = [key for key in values if key not in hints]
    if unknown:
        each = "; ".join(f"unknown key {key!r}{_instead(key, hints)}" for key in unknown[:_NAMED])
        more = f"; {len(unknown) - _NAMED} more; a trainer of your own needs --trainer module:object"
        hint = more if len(unknown) > _NAMED else ""
        whose = f"`trl {trainer} --config`" if is_trls(trainer) else f"the trainer {trainer}"
        raise ConfigError(f"every key must be one that {whose} takes ({installed()}): {each}{hint}")


def _instead(key: str, known: Mapping[str, Any]) -> str:
    new, other = renamed(key, known), instead(key, known)
    if other is not None and new is None:
        return other
    return nearest(key, known) if new is None else f", which is called {new!r} here: use {new!r}"


def _check_types(values: Mapping[str, object], hints: Mapping[str, Any], actions: Mapping[str, Any]) -> None:
    wrong = []
    for key, value in values.items():
        if isinstance(value, str):
            convert = actions[key].type if key in actions else None
            try:
                if convert is not None and not accepts(value, hints[key]):
                    convert(value)
            except (ValueError, TypeError, argparse.ArgumentTypeError):
                wrong.append(f"{key} must be {readable(hints[key])}; got the text {value!r}")
        elif key == "scale_rewards" and isinstance(value, bool):
            continue  # TRL maps the bool to "group" or "none", although the annotation is text
        elif not accepts(value, hints[key]):
            wrong.append(f"{key} must be {readable(hints[key])}; got {value!r}")
        choices = getattr(actions.get(key), "choices", None)
        if choices and value is not None and value not in choices and str(value) not in [str(c) for c in choices]:
            wrong.append(f"{key} must be one of {', '.join(map(str, choices))}; got {value!r}")
    if values.get("loss_type", "grpo") not in _LOSS_TYPES and "num_generations" in hints:
        given = str(values["loss_type"])
        wrong.append(f"loss_type must be one of {', '.join(_LOSS_TYPES)}; got {given!r}{nearest(given, _LOSS_TYPES)}")
    for key in ("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations",
                "max_completion_length", "steps_per_generation", "lora_r", "num_iterations"):  # fmt: skip
        value = values.get(key)
        if key in hints and isinstance(value, int) and value < 1:
            wrong.append(f"{key} must be 1 or more; got {value!r}")
    if wrong:
        raise ConfigError("; ".join(wrong))


def _parse(trainer: str, parser: Any) -> tuple[Any, ...]:
    try:
        return tuple(parser.parse_args_into_dataclasses(args=[]))
    except ConfigError:
        raise
    except (ValueError, TypeError, ImportError, NotImplementedError, OSError) as error:
        whose = "TRL's" if is_trls(trainer) else "the"
        raise ConfigError(f"{whose} {trainer} config: {' '.join(str(error).split())}") from error


@contextmanager
def _quiet_parser(parser: Any) -> Iterator[None]:
    """Context in which the parser raises ConfigError on an error, instead of printing its usage and exiting."""

    def refuse(message: str) -> NoReturn:
        raise ConfigError(message)

    parser.error = refuse
    yield
