"""Sources of a recipe: a YAML file, a mapping of its keys, TRL's config objects, the built-in one. No torch here."""

import dataclasses
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field
from enum import Enum
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar, Protocol

from autofit.errors import ConfigError
from autofit.recipe.yaml_file import read_yaml_mapping

PROMPT_TOKENS = 1024  # baseline.yaml names the source


def baseline_path() -> Path:
    """The packaged recipe, a YAML file like any other."""
    return Path(str(resources.files("autofit.recipe").joinpath("baseline.yaml")))


class ConfigObject(Protocol):
    """An instance of one of TRL's config dataclasses, such as `trl.GRPOConfig`."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


Stated = str | os.PathLike[str] | Mapping[str, object] | ConfigObject | Sequence[ConfigObject | Mapping[str, object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A recipe as it was given: plain YAML values, before TRL's parser has seen them."""

    values: Mapping[str, object]
    name: str  # of the recipe, after which its study is called
    what: str  # the recipe as errors call it
    prompt_tokens: int | None = None  # of the made-up prompts that it is meant for
    trainer: str | None = None  # told by the class of TRL's config, or by another tool's file, where there is one
    launch: Mapping[str, object] = field(default_factory=dict)  # keys of an accelerate config, of another tool's file
    foreign: Mapping[str, object] = field(default_factory=dict)  # that file: its tool, path, text and ranks
    notes: tuple[str, ...] = ()  # what to know of that file, a sentence each


def read_source(given: Stated | None, *, name: str | None = None) -> Source:
    """The recipe that was `given`; None is the built-in baseline. `name` replaces the file's, or "recipe".

    Raises ConfigError for a file that is no YAML mapping, and for a value or an object that YAML cannot hold.
    """
    if given is None or isinstance(given, str | os.PathLike):
        path = baseline_path() if given is None else Path(given)
        values = read_yaml_mapping(path, what="recipe")
        if path == baseline_path():
            what, prompt_tokens = "the built-in baseline", PROMPT_TOKENS
        else:
            what, prompt_tokens = f"the recipe {path}", None
        return Source(values=values, name=name or path.stem, what=what, prompt_tokens=prompt_tokens)
    parts = given if isinstance(given, Sequence) else (given,)
    values = {}
    for part in parts:
        values |= _plain_mapping(part) if isinstance(part, Mapping) else _stated(part)
    trainers = dict.fromkeys(t for t in map(_trainer, parts) if t is not None)
    if len(trainers) > 1:
        raise ConfigError(f"a recipe is for one trainer; the config objects are for {' and '.join(trainers)}")
    return Source(values=values, name=name or "recipe", what="the recipe", trainer=next(iter(trainers), None))


def _plain_mapping(given: Mapping[str, object]) -> dict[str, object]:
    wrong = [key for key in given if not isinstance(key, str)]
    if wrong:
        raise ConfigError(f"the recipe: every key must be text; got {wrong[0]!r}")
    return {key: _plain(key, value) for key, value in given.items()}


def _plain(key: str, value: object) -> object:
    """`value` of the recipe's `key` as YAML holds it. Raises ConfigError for what it cannot hold."""
    if isinstance(value, Enum):
        value = value.value
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, os.PathLike):
        return str(Path(value))
    if isinstance(value, Mapping):
        return {str(k): _plain(key, v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(key, v) for v in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return {k: _plain(key, v) for k, v in changed.items() if v is not None}
    hint = "; name a function by its dotted path, such as my_rewards.exact" if callable(value) else ""
    raise ConfigError(f"{key} must be a plain value (text, number, list, mapping); got {value!r}{hint}")


# -- TRL's config objects ---------------------------------------------------------------------------------------------


def _trainer(part: object) -> str | None:
    """The trainer whose config `part` is, by the name of its class or a base: GRPOConfig is `grpo`'s."""
    names = [kind.__name__ for kind in type(part).__mro__ if _is_trls(kind)]
    bases = {"_BaseConfig", "ModelConfig", "DatasetMixtureConfig"}
    found = [name.removesuffix("Config").lower() for name in names if name.endswith("Config") and name not in bases]
    return found[0] if found else None


def _is_trls(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "trl"


def _stated(part: object) -> dict[str, object]:
    """{key: plain value} from which TRL makes `part` again: what differs from the defaults and does not follow.

    TRL fills some fields in from others when an object is made (`steps_per_generation` from the accumulation, `bf16`
    from `fp16`). Those are left out wherever the object comes out the same without them.
    """
    if not dataclasses.is_dataclass(part) or isinstance(part, type) or not any(map(_is_trls, type(part).__mro__)):
        raise ConfigError(
            f"a recipe is the path of a YAML file, a mapping of its keys, or TRL's config objects (GRPOConfig, "
            f"ModelConfig, GRPOScriptArguments, ...); got {type(part).__name__}"
        )
    fields = [f for f in dataclasses.fields(part) if f.init]
    own = {f.name: getattr(part, f.name) for f in fields}
    keys = [f.name for f in fields if own[f.name] != _default(f)]
    nearest_miss = list(own)

    def differing(names: Sequence[str]) -> list[str]:
        """The fields in which an object made of these alone differs from `part`; all of them if TRL refuses it."""
        made = _made(type(part), {name: own[name] for name in names})
        found = [n for n in own if made is None or not _same(getattr(made, n), own[n])]
        nearest_miss[:] = found if len(found) < len(nearest_miss) else nearest_miss
        return found

    filled_in = [f.name for f in fields if f.default is None]  # first: TRL derives most of these from the others
    for names in (filled_in, list(own)):
        before: list[str] = []
        while before != keys:
            before = keys
            for key in (k for k in names if k in before):
                fewer = [k for k in keys if k != key]
                keys = fewer if not differing(fewer) else keys
    if differing(keys):
        raise ConfigError(
            f"TRL would not make the same {type(part).__name__} again from what it holds; it differs in "
            f"{', '.join(nearest_miss)}: set these where it is made, not afterwards"
        )
    return _plain_mapping({key: own[key] for key in keys})


def _default(field: "Field[Any]") -> object:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _made(kind: Callable[..., object], values: Mapping[str, object]) -> object | None:
    """An object of `kind`, or None where TRL refuses these values."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return kind(**{k: list(v) if isinstance(v, list) else v for k, v in values.items()})
        except (ValueError, TypeError, ImportError):
            return None


def _same(one: object, other: object) -> bool:
    return one == other or repr(one) == repr(other)
