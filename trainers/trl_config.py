"""A recipe's values through TRL's own parser, with one-line errors for unknown keys, wrong types and TRL's rules."""

import copy
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NoReturn

from autofit.errors import ConfigError
from autofit.recipe.recipe import merge

from .key_table import KeyTable, table_of, taken_env
from .names import is_trls, parser_of
from .rules import whole_groups

# What a recipe for a GPU needs in order to be parsed, or to run, without one.
ON_CPU: Mapping[str, object] = {"use_cpu": True, "tf32": None}


@dataclass(frozen=True, slots=True)
class TrlConfig:
    """The parsed arguments of TRL's script: its own, the trainer's, the model's and the datasets'.

    `ranks` is how many train together, where a gradient proof asks; else TRL's own process counts. `evaluates` is
    whether the recipe evaluates within its training, which a probe does by itself.
    """

    script: Any
    training: Any
    model: Any
    datasets: Any
    ranks: int = 1
    evaluates: bool = False

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
    os.environ.update(taken_env(merged))
    table = table_of(trainer, parser, {})
    table.check(merged)
    with _quiet_parser(parser):
        parser.set_defaults_with_config(**merged)
        parts = _parse(table, parser, merged)
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


def _parse(table: KeyTable, parser: Any, values: Mapping[str, object]) -> tuple[Any, ...]:
    try:
        return tuple(parser.parse_args_into_dataclasses(args=[]))
    except ConfigError:
        raise
    except (ValueError, TypeError, ImportError, NotImplementedError, OSError) as error:
        whose = "TRL's" if is_trls(table.trainer) else "the"
        said = " ".join(str(error).split()) + whole_groups(values, table.defaults)
        raise ConfigError(f"{whose} {table.trainer} config: {said}") from error


@contextmanager
def _quiet_parser(parser: Any) -> Iterator[None]:
    """Context in which the parser raises ConfigError on an error, instead of printing its usage and exiting."""

    def refuse(message: str) -> NoReturn:
        raise ConfigError(message)

    parser.error = refuse
    yield
