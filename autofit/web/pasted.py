"""What was pasted, as a recipe: a YAML of TRL or of another tool, or the command that starts a training."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import cast

import yaml

from autofit.errors import ConfigError, printable, quoted
from autofit.frontends.foreign import Explanation
from autofit.frontends.reading import explain
from autofit.frontends.shipped import shipped
from autofit.frontends.tools import tool_of
from autofit.frontends.verl import starts_verl
from autofit.recipe.catalogue import architecture
from autofit.recipe.profile import OF_TRL
from autofit.recipe.yaml_file import parse_yaml, read_yaml_mapping

# Keys that name code, files or other models.
_DROPPED = ("auto_map", "_name_or_path", "_commit_hash", "custom_pipelines", "quantization_config", "name_or_path")


def write_config(text: str, folder: Path) -> str:
    """The folder with the config.json in `text`. Raises ConfigError for what is no config of a model."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"config.json is not valid JSON: {printable(str(error), 100)}") from error
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise ConfigError("config.json must be a JSON object with a model_type, as models on the hub have one")
    kept = {key: value for key, value in content.items() if key not in _DROPPED and not key.startswith("_")}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(kept), encoding="utf-8")
    return str(folder)


_STARTERS = (
    "swift",
    "llamafactory-cli",
    "axolotl",
    "trl",
    "accelerate",
    "torchrun",
    "python",
    "python3",
    "deepspeed",
    "autofit",
    "uv",
    "uvx",
    "srun",
    "sbatch",
)
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*=\S*")
_RANKS = ("num_processes", "nproc_per_node", "num_gpus")
_SHARED = ("accelerate_config", "config_file")
_NAMED = ("fsdp1", "fsdp2", "zero1", "zero2", "zero3", "multi_gpu")
_FILE = re.compile(r"[/\\\\~]|\.\.|\.(json|jsonl|ya?ml|sh|py|txt|csv|parquet|bin|pt|safetensors)$", re.IGNORECASE)
_PRESET = re.compile(r"zero[0-3](_offload)?|fsdp[12]?")
_HEAD = 400  # characters in which a command begins


@dataclass(frozen=True, slots=True, kw_only=True)
class Pasted:
    """A recipe's values as they were pasted; of another tool's file without names of files, and what it says."""

    values: Mapping[str, object] = field(default_factory=dict)
    trainer: str | None = None  # where the command names it
    ranks: int | None = None  # that it is written for
    sharing: str = ""  # an accelerate config by its name
    notes: tuple[str, ...] = ()
    explained: Explanation | None = None
    script: Path | None = None  # of verl, which says more than a mapping


def read(text: str, folder: Path) -> Pasted:
    """What `text` says; `folder` takes it as a file while it is read. Raises ConfigError for neither."""
    if not text.strip():
        raise ConfigError("paste a recipe (YAML) or the command of a training first, or choose a model")
    if starts_verl(text):
        script = folder / "pasted.sh"
        script.write_text(text, encoding="utf-8")
        return Pasted(explained=explain(script), script=script)
    if _is_command(text):
        return _command(text, folder)
    recipe = folder / "pasted.yaml"
    recipe.write_text(text, encoding="utf-8")
    return _recipe(recipe)


def _recipe(path: Path, **said: object) -> Pasted:
    try:
        values = read_yaml_mapping(path, what="recipe")
        if (tool := tool_of(values)) is not None:
            own = shipped(tool.name, values.get("deepspeed"))
            kept, left = without_files(values if own is None else {**values, "deepspeed": own})
            path.write_text(yaml.safe_dump(kept), encoding="utf-8")
            notes = [f"left out, as no file is read: {', '.join(left[:12])}"] if left else []
            if own is not None:
                notes.append(f"for {Path(str(values['deepspeed'])).name} the file that {tool.name} ships is taken")
            return Pasted(values=kept, explained=explain(path), notes=tuple(notes))
    except ConfigError as error:
        raise ConfigError(str(error).replace(f"{path} ", "").replace(f" {path}", "")) from error
    return Pasted(values=values, **said)  # type: ignore[arg-type]


def without_files(values: Mapping[str, object]) -> tuple[dict[str, object], list[str]]:
    """(`values` without those that may name a file or an address, the keys that these had)."""
    kept, left = dict[str, object](), list[str]()
    for key, value in values.items():
        if isinstance(value, Mapping):
            kept[key], inner = without_files(value)
            left += [f"{key}.{name}" for name in inner]
        elif isinstance(value, list):
            whole = [without_files(one)[0] if isinstance(one, Mapping) else one for one in value]
            kept[key] = [one for one in whole if not isinstance(one, list) and not _may_be_a_file(key, one)]
            left += [key] if kept[key] != value else []
        elif _may_be_a_file(key, value):
            left.append(key)
        else:
            kept[key] = value
    return kept, left


def _may_be_a_file(key: str, value: object) -> bool:
    """Whether a value could be the name of a file: by its look, or by its key. A model of the catalogue is none."""
    if not isinstance(value, str) or architecture(value) is not None:
        return False
    of_key = key in ("deepspeed", "fsdp_config", "config", "accelerate_config") and not _PRESET.fullmatch(value)
    return of_key or _FILE.search(value) is not None


# -- commands ---------------------------------------------------------------------------------------------------------


def _is_command(text: str) -> bool:
    """Whether the first word, after variables of the environment, starts programs; a YAML's ends in a colon."""
    words = text.lstrip()[:_HEAD].replace("\\\n", " ").split()
    first = next((word for word in words if not _VARIABLE.fullmatch(word) and word not in ("$", "!")), "").removeprefix(
        "!"
    )
    return first.rpartition("/")[2] in _STARTERS


def _command(text: str, folder: Path) -> Pasted:
    """A recipe of a command's options: `trl grpo --model_name_or_path NAME --use_peft ...`."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise ConfigError(f"the command cannot be read: {error}; check its quotes") from error
    trainer = next((b for a, b in pairwise(words) if a.endswith("trl") and b in OF_TRL), None)
    given: dict[str, object] = {}
    for name, values in _options(words):
        given[name.replace("-", "_")] = True if not values else _value(values[0]) if len(values) == 1 else list(values)
    file = given.pop("config", None)
    if not given:
        raise ConfigError("the command has no options: paste the lines of its YAML file, for no file is read here")
    notes = (f"{quoted(file)} is not here: the recipe is what the command says besides it",) if file else ()
    ranks = next((given.pop(name) for name in _RANKS if isinstance(given.get(name), int)), None)
    shared = next((str(given.pop(name)) for name in _SHARED if given.get(name) in _NAMED), "")
    if tool_of(given) is not None:
        path = folder / "pasted.yaml"
        path.write_text(yaml.safe_dump(given), encoding="utf-8")
        return _recipe(path)
    return Pasted(values=given, trainer=trainer, ranks=cast("int | None", ranks), sharing=shared, notes=notes)


def _options(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """(name, its values) of each `--name value ...` and `--name=value`; a program among them ends the values."""
    name, values = "", list[str]()
    for word in [*words, "--"]:
        if word.startswith("--") or word.endswith(".py") or word in _STARTERS:
            if name:
                yield name, values
            name, equals, value = word.removeprefix("--").partition("=") if word.startswith("--") else ("", "", "")
            values = [value] if equals else []
        elif name:
            values.append(word)


def _value(text: str) -> object:
    """A value as YAML has it; text where it is none. Python's True and None are those of TRL's parser too."""
    try:
        return parse_yaml({"True": "true", "False": "false", "None": "null"}.get(text, text))
    except ConfigError:
        return text
