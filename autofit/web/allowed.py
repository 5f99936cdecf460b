"""The settings that a recipe of a stranger may have: names and numbers on which memory and time depend.

A setting that is not in the list never reaches a trainer. None of those in it can name code, a file or an address:
texts are single words without a slash, and models are those of the catalogue. The list is in settings.yaml. What was
pasted becomes files: of a training, which the commands' own readers then read, and of a model's config.
"""

import ast
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from autofit.errors import ConfigError, printable, quoted
from autofit.frontends.reading import is_script
from autofit.recipe.catalogue import architecture, names
from autofit.recipe.keys import LAUNCH, OTHER_MODELS

_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,79}")
_MODULES = re.compile(r"[A-Za-z0-9_.*+?|()\[\]^$\\-]{1,200}")  # names of modules, or a pattern of them
_NAMES = re.compile(r"[A-Za-z0-9_.,+ -]{0,200}")
_SWITCHES = re.compile(r"[a-z_]{3,30}:[A-Za-z0-9_.]{1,20}(,[a-z_]{3,30}:[A-Za-z0-9_.]{1,20}){0,7}")
_ATTENTIONS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward", "get_soft_overlong_punishment")
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_MOST_LIST = 64
# Far above trained lengths: a larger number would only keep the page busy.
_MOST = {
    "per_device_train_batch_size": 1024, "per_gpu_train_batch_size": 1024, "gradient_accumulation_steps": 4096,
    "steps_per_generation": 4096, "generation_batch_size": 65_536, "num_generations": 1024, "num_iterations": 64,
    "max_length": 131_072, "max_seq_length": 131_072, "max_completion_length": 131_072, "max_prompt_length": 131_072,
    "per_device_eval_batch_size": 1024, "num_generations_eval": 1024, "eval_accumulation_steps": 65_536,
    "precompute_ref_batch_size": 1024, "num_processes": 1024, "num_machines": 128,
}  # fmt: skip

_MODELS = frozenset({"model_name_or_path", "model_path"})  # the second is verl's
_OF_MODEL = ("dtype", "torch_dtype", "attn_implementation", "use_cache")  # what model_init_kwargs may have
_ACCELERATE = ("single_gpu", "multi_gpu", "fsdp1", "fsdp2", "zero1", "zero2", "zero3")  # configs that TRL ships
_FILES = ("deepspeed", "fsdp_config", "accelerator_config", "config_file", "accelerate_config")


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """A recipe cut off from code, files and addresses, and the parts left out or replaced, a sentence each."""

    values: dict[str, object]
    notes: tuple[str, ...]


def allowed(
    values: Mapping[str, object], *, known: Iterable[str], trainer: str = "", model: str | None = None
) -> Allowed:
    """`values` as far as a stranger's may go. `model` is the folder of a pasted config, in place of the named model.

    Settings of the list for the `trainer` alone are allowed too. `known` are the keys that it takes; the name of any
    other goes on without its value, for the trainer to suggest its real name. Raises ConfigError for a model, a file or
    a value that cannot be simulated here.
    """
    taken, found, notes, left = frozenset(known), dict[str, object](), list[str](), list[str]()
    for key, value in values.items():
        if key in _MODELS:
            found[key] = _model(value, key) if model is None else model
        elif key in OTHER_MODELS:
            found[key] = None if value is None else _model(value, key)
        elif key == "reward_funcs":
            found[key] = _rewards(value, notes)
        elif key == "env":
            found[key] = _environment(value, notes)
        elif key == "trust_remote_code":
            if value:
                notes.append("trust_remote_code is off here: no code of a model is run")
        elif value and (key == "deepspeed" or (key in _FILES and isinstance(value, str) and value not in _ACCELERATE)):
            raise ConfigError(f"{key} is not read here; got {quoted(value)}; omit it, and choose ZeRO or FSDP2 under "
                              "\"Shared by\"")  # fmt: skip
        elif key in ("accelerate_config", "config_file"):
            found[key] = value
        elif key in _listed("data"):
            continue
        elif key == "fsdp" and isinstance(value, bool | str):
            found[key] = value if isinstance(value, bool) else " ".join(_word(key, part) for part in value.split()[:4])
        elif (kept := _kept(key, value, _listed(trainer))) is not None:
            found[key] = kept[0]
        elif key in taken:
            left.append(key)
        else:
            found[key] = None  # the trainer reports the error of the key
    if model is not None and not _MODELS & values.keys():
        found["model_name_or_path"] = model
    if left:
        notes.append(f"left out: {', '.join(left[:12])}{f' and {len(left) - 12} more' if len(left) > 12 else ''}")
    if _listed("data") & values.keys():
        notes.append("the dataset is not read: a sample of the length that is asked for stands for it")
    return Allowed(values=found, notes=tuple(notes))


def allowed_launch(launch: Mapping[str, object]) -> dict[str, object]:
    """The accelerate config that another tool's file says, of numbers and words. Raises ConfigError for a path."""
    return {key: _of_launch(key, value) for key, value in _items("launch", launch).items()}


def _of_launch(key: str, value: object, levels: int = 4) -> object:
    if isinstance(value, Mapping) and levels:
        return {name: _of_launch(f"{key}.{name}", one, levels - 1) for name, one in _items(key, value).items()}
    if isinstance(value, list):
        return [_of_launch(key, one, 0) for one in value[:_MOST_LIST]]
    if value is None or isinstance(value, bool | int | float) or (isinstance(value, str) and _NAMES.fullmatch(value)):
        return value
    raise ConfigError(f"{key} must be a number, true, false or names here; got {quoted(value)}")


@cache
def _settings() -> dict[str, Any]:
    text = (resources.files("autofit.web") / "settings.yaml").read_text(encoding="utf-8")
    return dict(yaml.safe_load(text))


@cache
def _listed(kind: str) -> frozenset[str]:
    """The settings of a kind or of a trainer, as settings.yaml lists them."""
    found = _settings().get(kind, [])
    return frozenset(found if isinstance(found, list) else (name for names in found.values() for name in names))


def _kept(key: str, value: object, of_trainer: frozenset[str]) -> tuple[object] | None:
    """The value of a setting of the list or `of_trainer`, checked; None for another setting."""
    if key == "attn_implementation":
        return (_attention(value),)
    if key in _listed("plain") | of_trainer or key.startswith(f"{LAUNCH}."):
        return (_plain(key, value),)
    outer, dot, inner = key.partition(".")
    if dot and (outer in _listed("mappings") or (outer == "model_init_kwargs" and inner in _OF_MODEL)):
        return (_attention(value) if inner == "attn_implementation" else _plain(key, value),)
    if key in _listed("mappings"):
        return (_mapping(key, value),)
    if key in _listed("lists"):
        return (_list(key, value),)
    if key == "model_init_kwargs":
        inside = {name: one for name, one in _items(key, value).items() if name in _OF_MODEL}
        return ({name: _attention(one) if name == "attn_implementation" else _plain(name, one)
                 for name, one in inside.items()},)  # fmt: skip
    return None


def _model(value: object, key: str = "model_name_or_path") -> str:
    """The catalogue's name of a model. Raises ConfigError for one that it lacks."""
    entry = architecture(value) if isinstance(value, str) else None
    if entry is not None:
        return entry.name
    text = str(value)
    of_same = [name for name in names() if name.partition("/")[2].lower() == text.rpartition("/")[2].lower()]
    near = of_same or [name for name in names() if text.rpartition("/")[2].lower()[:5] in name.lower()]
    hint = f"; it has {', '.join(near[:4])}" if near and text.rpartition("/")[2] else ""
    raise ConfigError(
        f"{key} must be one of the {len(names())} models of the list, as no other is loaded here; got "
        f"{quoted(value)}{hint}; for another model paste its config.json under More"
    )


def _rewards(value: object, notes: list[str]) -> object:
    """As many reward functions, all of TRL's own."""
    given = value if isinstance(value, list) else [value]
    if any(one not in _REWARDS for one in given):
        notes.append("your reward functions are not run: their memory and time are not counted")
    return [one if one in _REWARDS else _REWARDS[2] for one in given[:_MOST_LIST]]


def _environment(value: object, notes: list[str]) -> dict[str, str]:
    """The variables of the allocator; others are left out."""
    found = {}
    for name, one in _items("env", value).items():
        if name not in _ALLOCATOR:
            notes.append(f"left out: env.{printable(name, 40)}")
        elif not _SWITCHES.fullmatch(str(one)):
            raise ConfigError(f"env.{name} must be such as expandable_segments:True; got {quoted(one)}")
        else:
            found[name] = str(one)
    return found


def _attention(value: object) -> object:
    if value is None or value in _ATTENTIONS:
        return value
    raise ConfigError(
        f"attn_implementation must be one of {', '.join(_ATTENTIONS)} here, as kernels from the hub are not loaded; "
        f"got {quoted(value)}"
    )


def _plain(key: str, value: object) -> object:
    """A number, true, false, null or a word."""
    most = _MOST.get(key)
    if most is not None and isinstance(value, int | float) and not value <= most:
        raise ConfigError(f"{key} must be at most {most:,} here; got {quoted(value)}")
    return value if value is None or isinstance(value, bool | int | float) else _word(key, value)


def _word(key: str, value: object) -> str:
    if isinstance(value, str) and _WORD.fullmatch(value):
        return value
    raise ConfigError(f"{key} must be a number, true, false or one word here; got {quoted(value)}")


def _items(key: str, value: object) -> dict[str, object]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or len(value) > _MOST_LIST:
        raise ConfigError(f"{key} must be a mapping of at most {_MOST_LIST} settings here; got {quoted(value)}")
    return {_word(key, name): one for name, one in value.items()}


def _mapping(key: str, value: object, levels: int = 2) -> object:
    """A mapping of words and numbers, which may have one of its own inside."""
    found: dict[str, object] = {}
    for name, one in _items(key, value).items():
        if isinstance(one, Mapping) and levels:
            found[name] = _mapping(f"{key}.{name}", one, levels - 1)
        elif key == "generation_kwargs" and isinstance(one, str):
            raise ConfigError(f"{key}.{name} must be a number, true or false here; got {quoted(one)}")
        elif isinstance(one, list):
            found[name] = [_plain(f"{key}.{name}", inner) for inner in one[:_MOST_LIST]]
        else:
            found[name] = _plain(f"{key}.{name}", one)
    return found


def _list(key: str, value: object) -> object:
    """Names of modules: one, or a list."""
    many = value if isinstance(value, list) else [value]
    for one in many:
        if not isinstance(one, str) or not _MODULES.fullmatch(one):
            raise ConfigError(f"{key} must be names of modules; got {quoted(one)}")
    if len(many) > _MOST_LIST:
        raise ConfigError(f"{key} must have at most {_MOST_LIST} names here; got {len(many)}")
    return value


# -- what was pasted, as files ----------------------------------------------------------------------------------------

SUFFIXES = (".sh", ".yaml")  # of the file of a training
# Keys that name code, files or other models.
_DROPPED = ("auto_map", "_name_or_path", "_commit_hash", "custom_pipelines", "quantization_config", "name_or_path")
_UNQUANTISED = (
    "quantization_config of config.json is left out: weights count in the recipe's dtype; load_in_4bit: true in the "
    "recipe holds them in 4 bits"
)


def write_training(text: str, folder: Path) -> Path:
    """The file in `folder` with the `text` of a training: a recipe, or a script that starts one."""
    if not text.strip():
        raise ConfigError("paste a recipe (YAML) or the command of a training first, or choose a model")
    if re.match(r"\s*(?:\[\w+\]:\s*)?(?:Traceback |[\w.]*[Ee]rror:|CUDA out of memory)", text):
        raise ConfigError("this is the error of a training: paste its recipe (YAML), or the command that started it")
    if _is_config(text):
        raise ConfigError("this is the config.json of a model: paste it under More, and here a recipe of the training")
    if _is_python(text):
        raise ConfigError(
            "this is Python code, and the page runs none: paste its settings as YAML, or on your own machine "
            "run `autofit fit-check --gpu NAME train.py`"
        )
    path = folder / f"training{SUFFIXES[0 if is_script(text) else 1]}"
    path.write_text(text, encoding="utf-8", errors="replace")
    return path


def _is_python(text: str) -> bool:
    if not re.search(r"^(?:from|import) \w", text, re.MULTILINE):
        return False
    try:
        ast.parse(text)
    except (ValueError, RecursionError, MemoryError, SyntaxError):  # a notebook's cell with a command, for one
        return False
    return True


def _is_config(text: str) -> bool:
    if not text.lstrip().startswith("{"):
        return False
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict) and "model_type" in content


def write_config(text: str, folder: Path) -> tuple[str, tuple[str, ...]]:
    """(folder with the config.json in `text`, notes on the parts left out). Raises ConfigError for any other text."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"config.json is not valid JSON: {printable(str(error), 100)}") from error
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise ConfigError("config.json must be a JSON object with a model_type, as models on the hub have one")
    kept = {key: value for key, value in content.items() if key not in _DROPPED and not key.startswith("_")}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(kept), encoding="utf-8")
    quantised = "quantization_config" in content
    return str(folder), (_UNQUANTISED,) if quantised else ()
