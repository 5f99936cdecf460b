"""The keys that a trainer of TRL takes, and what is wrong with those of a recipe: made from TRL's parser, then kept.

A kept table has all that the check needs, so a misspelt key is told without an import of TRL. It counts only while the
files that it was made from are as they were. For the versions that CI proved a table is installed with autofit
(key_tables.json), for others one is kept in the cache by the first inspection. No torch here.
"""

import argparse
import contextlib
import difflib
import hashlib
import itertools
import json
import sys
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import Enum
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from autofit.errors import ConfigError, EnvironmentFault, UnknownKeyError, nearest, option, quoted
from autofit.files import cache_folder, read_json, write_json
from autofit.frontends.reading import refusal
from autofit.recipe.keys import RENAMED
from autofit.recipe.profile import TAKEN_BY, TRAINERS
from autofit.recipe.yaml_file import Kind, is_one_of, kinds, readable

from .names import installed, is_trls, renamed, script_name
from .older import OLDER
from .rules import READ, broken

# Keys of other tools, and arguments that only Python can give: why TRL's YAML does not take them, and what instead.

# Key of another tool's YAML -> (whose, the key of TRL).
_OTHERS = {
    "base_model": ("Axolotl", "model_name_or_path"),
    "micro_batch_size": ("Axolotl", "per_device_train_batch_size"),
    "sequence_len": ("Axolotl", "max_length"),
    "adapter": ("Axolotl", "use_peft"),
    "cutoff_len": ("LLaMA-Factory", "max_length"),
    "finetuning_type": ("LLaMA-Factory", "use_peft"),
    "stage": ("LLaMA-Factory", option("trainer")),
    "trainer": ("pipeline files", option("trainer")),
    "fast_inference": ("Unsloth", "use_vllm"),
    "gpu_memory_utilization": ("Unsloth", "vllm_gpu_memory_utilization"),
}
# Keys that only another trainer of TRL's has, which no recipe simulates (its configs of 1.16).
_NOT_SIMULATED = {
    "desirable_weight": "KTO", "undesirable_weight": "KTO", "cpo_alpha": "CPO", "simpo_gamma": "CPO", "lmbda": "GKD",
    "seq_kd": "GKD", "is_encoder_decoder": "CPO and ORPO", "missing_eos_penalty": "online DPO",
}  # fmt: skip
_PYTHON = {
    "tools": "functions that the model may call",
    "rollout_func": "a function that generates the completions",
    "environment_factory": "a maker of environments",
    "callbacks": "objects", "optimizers": "objects", "train_dataset": "an object", "eval_dataset": "an object",
    "processing_class": "an object", "reward_processing_classes": "objects", "peft_config": "an object",
    "quantization_config": "an object",
}  # fmt: skip


def instead(key: str, known: Collection[str]) -> str | None:
    """Reason why `key` is not one of TRL's YAML and what takes its place, to be appended to its name, if known."""
    if key == "device_map":
        return (
            ": TRL places the model itself, whole on each GPU; omit it, and to split a model over GPUs launch with "
            "`trl --accelerate_config fsdp2` or zero3"
        )
    if key in _PYTHON:
        return (
            f": it takes {_PYTHON[key]}, which YAML cannot say; give a Python trainer of your own with "
            f"{option('trainer')} module:object (trainers/README.md)"
        )
    if key in _NOT_SIMULATED and key not in known:
        runs = "-m trl.scripts.kto --config FILE" if _NOT_SIMULATED[key] == "KTO" else "SCRIPT.py ..."
        whose = f" is of TRL's {_NOT_SIMULATED[key]}, which no recipe simulates"
        return f"{whose}; autofit fit-check --gpu NAME {runs} runs it"
    whose, ours = _OTHERS.get(key, ("", ""))
    return f" is a key of {whose}; in TRL it is {ours}" if ours in known or ours == option("trainer") else None


def _of_others(key: str, known: Collection[str]) -> str:
    """Other trainers or older libraries that take `key`, to be appended to its name; "" if none does."""
    if key in OLDER:
        return " is a key of older libraries, which is read too if its value is right"
    name = renamed(key, TAKEN_BY) or key
    if name not in TAKEN_BY:
        return ""
    older = "" if name == key else f" is an older name of {name!r}, which"
    limit = f"; of a completion {_COMPLETION} is the limit" if name == "max_length" and _COMPLETION in known else ""
    return f"{older} is a key of {', '.join(f'`trl {trainer}`' for trainer in TAKEN_BY[name])}{limit}"


_UNREADABLE = (OSError, EnvironmentFault, ConfigError, ValueError, TypeError, LookupError, AttributeError, ImportError)
TABLES = Path(__file__).parent / "key_tables.json"
_COMPLETION = "max_completion_length"
_SPOKEN = {*itertools.chain(*RENAMED), *TAKEN_BY, *OLDER}  # names that a misspelt key may mean, though it is not taken
_ALIKE = 0.8  # of difflib: a letter or two of one name
_NAMED = 4  # unknown keys that one error names
_LISTED = 15  # choices, at most, where one of them is near to what was given
LOSS_TYPES = ("grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo")
DPO_LOSSES = (
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
    "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
)  # fmt: skip
_CHOICES = {  # that TRL's parser takes as any text, and its trainers refuse minutes later
    "vllm_mode": ("server", "colocate"),
    "importance_sampling_level": ("token", "sequence"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "scale_rewards": ("group", "batch", "none"),
    "f_divergence_type": ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"),
}
_AT_LEAST_ONE = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "num_generations", "max_completion_length",
    "steps_per_generation", "lora_r", "num_iterations", "max_length", "torch_empty_cache_steps",
)  # fmt: skip
_NOT_BOTH = (("bf16", "fp16"), ("bf16_full_eval", "fp16_full_eval"), ("load_in_4bit", "load_in_8bit"))
_TRUTHS = ("yes", "true", "t", "y", "1", "no", "false", "f", "n", "0")  # string_to_bool of hf_argparser.py


def _truth(text: str) -> None:
    if text.lower() not in _TRUTHS:
        raise ValueError(text)


def _or_null(inner: Callable[[Any], object]) -> Callable[[Any], object]:
    return lambda text: None if text.lower() in ("none", "null") else inner(text)  # _accept_none of _hf_argparser.py


_OR_NULL = " or null"

# How TRL's parser turns text into a value, by the function's name; a text that it cannot turn raises.
_CONVERTERS: Mapping[str, Callable[[Any], object]] = {
    "int": int, "float": float, "dict": dict, "string_to_bool": _truth,
    f"int{_OR_NULL}": _or_null(int), f"float{_OR_NULL}": _or_null(float), f"dict{_OR_NULL}": _or_null(dict),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key: the values that it takes, its type in words, and how text is turned into a value."""

    kinds: Sequence[Kind]
    words: str
    converter: str | None = None  # its name in _CONVERTERS; None: not known, and any text is believed
    choices: Sequence[object] | None = None

    def takes(self, value: object) -> bool:
        """True if `value` is of a kind that it takes."""
        return is_one_of(value, self.kinds)

    def reads(self, text: str, convert: Callable[[str], object] | None) -> bool:
        """True if `text` becomes a value by `convert`, else by the function of that name; one not known is believed."""
        function = convert or _CONVERTERS.get(self.converter or "")
        try:
            if function is not None and not self.takes(text):
                function(text)
        except (ValueError, TypeError, argparse.ArgumentTypeError):
            return False
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyTable:
    """The keys of one trainer. `converters` has TRL's own functions, where this process has imported TRL."""

    trainer: str
    keys: Mapping[str, Key]
    synonyms: Mapping[str, Sequence[str]]  # {name: its older names that are taken too}
    defaults: Mapping[str, object]  # of the keys that rules read
    converters: Mapping[str, Callable[[str], object] | None]

    def check(self, values: Mapping[str, object], *, ranks: int | None = None) -> None:
        """Raise ConfigError for another tool's file, unknown keys, values of the wrong kind and broken rules."""
        if (foreign := refusal(values)) is not None:
            raise ConfigError(foreign)
        unknown = [key for key in values if key not in self.keys]
        known = {key: value for key, value in values.items() if key in self.keys}
        wrong = [*self._wrong_kinds(known), *self._wrong_values(known)] or [*broken(known, self.defaults, ranks)]
        if unknown:
            each = "; ".join(f"unknown key {key!r}{self._instead(key)}" for key in unknown[:_NAMED])
            more = f"; {len(unknown) - _NAMED} more; a trainer of your own needs {option('trainer')} module:object"
            hint = more if len(unknown) > _NAMED else ""
            if len(unknown) == len(values) and not any(map(self._instead, unknown)):
                named = ", ".join(map(quoted, unknown[:_NAMED]))
                raise ConfigError(f"none of its keys ({named}) is one of TRL's, or of a tool whose files are read")
            whose = f"`trl {self.trainer} --config`" if is_trls(self.trainer) else f"the trainer {self.trainer}"
            strange = not all(map(self._own, unknown))
            guessed = strange and self.trainer == TRAINERS[0] and not any(key in TAKEN_BY for key in values)
            other = f"; no key says another trainer than {self.trainer}: {option('trainer')} does" if guessed else ""
            first = f"every key must be one that {whose} takes ({installed()}): {each}{hint}{other}"
            error = UnknownKeyError("; ".join((first, *wrong)))
            error.keys = tuple(unknown)
            raise error
        if wrong:
            raise ConfigError("; ".join(wrong))

    def _own(self, key: str) -> str:
        """Words on what takes the place of `key` in this trainer, to be appended to its name; "" if nothing does."""
        if (new := renamed(key, self.keys)) is not None:
            return f" is called {new!r} here: use {new!r}"
        return instead(key, self.keys) or ("" if self._meant(key) else nearest(key, self.keys))

    def _meant(self, key: str) -> str | None:
        """The name that this trainer does not take, but that `key` is, or is more like than any that it takes."""
        close = difflib.get_close_matches(key, [*self.keys, *_SPOKEN], n=1, cutoff=_ALIKE)
        return next((name for name in close if name not in self.keys), None)

    def _instead(self, key: str) -> str:
        """As `_own`, or what the name that is meant is."""
        if own := self._own(key):
            return own
        meant = self._meant(key) or key
        if not (about := self._own(meant) or _of_others(meant, self.keys)):
            return nearest(key, self.keys)
        return about if meant == key else f"; {meant!r}{about}"

    def _wrong_kinds(self, values: Mapping[str, object]) -> typing.Iterator[str]:
        for name, value in values.items():
            key = self.keys[name]
            if isinstance(value, str):
                if not key.reads(value, self.converters.get(name)):
                    yield f"{name} must be {key.words}; got the text {value!r}"
            elif name == "scale_rewards" and isinstance(value, bool):
                continue  # TRL maps the bool to "group" or "none", although the annotation is text
            elif not key.takes(value):
                yield f"{name} must be {key.words}; got {value!r}"
            choices = key.choices
            if choices and value is not None and value not in choices and str(value) not in [str(c) for c in choices]:
                quote = '; YAML reads an unquoted no as false: write "no"' if value is False and "no" in choices else ""
                yield f"{name} must be one of {_of(choices, str(value))}{quote}"

    def _wrong_values(self, values: Mapping[str, object]) -> typing.Iterator[str]:
        losses = LOSS_TYPES if "num_generations" in self.keys else DPO_LOSSES if "loss_weights" in self.keys else ()
        given = values["loss_type"] if "loss_type" in values else losses[:1]
        for name in given if isinstance(given, list | tuple) else [given]:
            if losses and name not in losses:
                yield f"loss_type must be one of {_of(losses, str(name))}"
        for key, names in _CHOICES.items():
            value = values.get(key)
            if key in self.keys and isinstance(value, str) and value not in names:
                yield f"{key} must be one of {_of(names, value)}"
        if isinstance(name := values.get("reward_funcs"), str):  # TRL reads a text as a list of its letters
            listed = f"reward_funcs: [{name[:60]}]"
            yield f"reward_funcs must be a list of names; got the text {quoted(name)}; write {listed}"
        for pair in _NOT_BOTH:
            if all(values.get(name) is True for name in pair):
                yield f"{' and '.join(pair)} cannot both be true: leave one of them out"
        for name in _AT_LEAST_ONE:
            value = values.get(name)
            if name in self.keys and isinstance(value, int) and value < 1:
                yield f"{name} must be 1 or more; got {value!r}"


def _of(choices: Sequence[object], given: str) -> str:
    """The choices and what was given instead; of many only the nearest one."""
    names = list(map(str, choices))
    close = nearest(given, names)
    known = f"{len(names)} names" if close and len(names) > _LISTED else ", ".join(names)
    return f"{known}; got {given!r}{close}"


def taken_env(values: dict[str, object]) -> dict[str, str]:
    """The environment variables of the recipe's `env` block, which is taken out of `values`. Raises ConfigError."""
    env = values.pop("env", {})
    if not isinstance(env, dict):
        raise ConfigError(f"env must be a mapping of environment variables; got {env!r}")
    return {str(key): str(value) for key, value in env.items()}


def table_of(trainer: str, parser: Any, synonyms: Mapping[str, Sequence[str]]) -> KeyTable:
    """The table of TRL's `parser`."""
    actions = {action.dest: action for action in parser._actions}
    keys, converters = {}, {}
    for kind in parser.dataclass_types:
        hints = typing.get_type_hints(kind)
        for field in fields(kind):
            if field.init:
                action = actions.get(field.name)
                convert, choices = getattr(action, "type", None), getattr(action, "choices", None)
                keys[field.name] = Key(
                    kinds=kinds(hints[field.name]), words=readable(hints[field.name]),
                    converter=_name_of(convert),
                    choices=None if choices is None else list(choices),
                )  # fmt: skip
                converters[field.name] = convert
    defaults = {name: _default(parser, name) for name in READ if name in keys}
    return KeyTable(trainer=trainer, keys=keys, synonyms=synonyms, defaults=defaults, converters=converters)


def _default(parser: Any, name: str) -> object:
    value = parser.get_default(name)
    return str(value.value) if isinstance(value, Enum) else value


# -- kept on disk -----------------------------------------------------------------------------------------------------


def kept_table(trainer: str) -> KeyTable | None:
    """The table of the installed TRL: the one that came with autofit, or was kept; None without one that is of it."""
    for kept in (_installed_table, _cached_table):
        with contextlib.suppress(*_UNREADABLE):
            if (table := kept(trainer)) is not None:
                return table
    return None


def _installed_table(trainer: str) -> KeyTable | None:
    content: Any = json.loads(TABLES.read_bytes())
    own = content["trainers"].get(trainer)
    if own is None or content["versions"] != versions():
        return None
    if any(content["files"][file] != hash_of(file) for file in own["files"]):
        return None
    keys = {name: Key(**content["types"][number]) for name, number in {**content["keys"], **own["keys"]}.items()}
    return KeyTable(
        trainer=trainer, keys=keys, synonyms=own["synonyms"], defaults=own["defaults"], converters={}
    )  # fmt: skip


def versions() -> dict[str, str]:
    """The installed versions of the packages that the tables are of."""
    return {name: version(name) for name in ("trl", "transformers")}


def hash_of(file: str) -> str:
    """A hash of the file `trl/trainer/grpo_config.py`, in the TRL that this Python would import."""
    package, _, rest = file.partition("/")
    spec = find_spec(package)
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return hashlib.sha256(Path(places[0], rest).read_bytes()).hexdigest()[:16] if places else ""


def _cached_table(trainer: str) -> KeyTable | None:
    content: Any = read_json(_path(trainer))
    if content is None or any(_mark(path) != mark for path, mark in content["files"].items()):
        return None
    keys = {name: Key(**key) for name, key in content["keys"].items()}
    return KeyTable(
        trainer=trainer, keys=keys, synonyms=content["synonyms"], defaults=content["defaults"], converters={}
    )  # fmt: skip


def keep_table(table: KeyTable, parser: Any) -> None:
    """Keep `table` with a mark of every file that `parser` was made from. A full disk is ignored."""
    made_by = {*sources(table.trainer, parser), __name__, broken.__module__, renamed.__module__, kinds.__module__}
    found = {getattr(sys.modules.get(name), "__file__", None) for name in made_by}
    files = {path: _mark(path) for path in sorted(path for path in found if path is not None)}
    keys = {name: asdict(key) for name, key in table.keys.items()}
    synonyms = {name: list(old) for name, old in table.synonyms.items()}
    content = {"files": files, "keys": keys, "synonyms": synonyms, "defaults": dict(table.defaults)}
    with contextlib.suppress(EnvironmentFault, OSError, TypeError):  # TypeError: a choice that JSON cannot hold
        write_json(_path(table.trainer), content)


def sources(trainer: str, parser: Any) -> set[str]:
    """The modules that `parser` was made from."""
    kinds_of_it = {base.__module__ for kind in parser.dataclass_types for base in kind.__mro__}
    return kinds_of_it | {base.__module__ for base in type(parser).__mro__} | {script_name(trainer)}


def _name_of(convert: object) -> str | None:
    """The name under which `_CONVERTERS` has a function that does the same; None without one."""
    name = str(getattr(convert, "__name__", ""))
    own = name == "string_to_bool" and getattr(convert, "__module__", "").endswith("hf_argparser")
    if "_accept_none" in getattr(convert, "__qualname__", "") and f"{name}{_OR_NULL}" in _CONVERTERS:
        return f"{name}{_OR_NULL}"
    return name if own or convert in (int, float, dict) else None


def _mark(path: str) -> list[int]:
    found = Path(path).stat()
    return [found.st_size, found.st_mtime_ns]


def _path(trainer: str) -> Path:
    """Path of the kept table, by which TRL and transformers this Python would import."""
    places = [getattr(find_spec(name), "origin", None) for name in ("trl", "transformers")]
    name = hashlib.sha256(json.dumps([places, sys.version]).encode()).hexdigest()[:16]
    return cache_folder() / "keys" / f"{trainer}-{name}.json"
