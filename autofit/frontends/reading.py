"""A file of another tool, read and explained; and why its values fail as a recipe of TRL's. Free of torch."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from autofit.errors import ConfigError, UnknownKeyError
from autofit.frontends import (
    axolotl,
    hf_script,
    llama_factory,
    ms_swift,
    tools,
    trl_recipe,
    trl_script,
    verl,
    verl_recipe,
    verl_rules,
)
from autofit.frontends.command import UNSURE, Command, commands, hands_on_arguments, script_text, takes_arguments
from autofit.frontends.draft import NOT_SIMULATED, Explanation, Foreign, Line, WrongValuesError, lines
from autofit.frontends.python_file import as_it_is
from autofit.frontends.tools import AXOLOTL, LLAMA_FACTORY, MS_SWIFT, TOOLS, VERL, tool_of, tools_of
from autofit.frontends.verl import file_notes, script_notes
from autofit.recipe.yaml_file import of_notebook, parse_yaml, read_yaml_mapping

SCRIPTS = (".sh", ".bash")
_BY_YAML, _OF_ITS_OWN = "LLaMA-Factory or Axolotl", "a Trainer of its own"
_READERS: dict[str, Callable[..., Foreign]] = {  # of a script's arguments
    trl_script.TOOL: trl_script.of_script, _OF_ITS_OWN: hf_script.of_script, MS_SWIFT.name: ms_swift.of_script,
}  # fmt: skip
_ACCELERATE = ("compute_environment", "distributed_type", "mixed_precision", "num_machines", "num_processes")
_OF_VERL = re.compile(r"verl\.trainer\.\w+")
_OTHERS = {"OpenRLHF": re.compile(r"openrlhf\.cli\.\w+"), "EasyR1": re.compile(r"verl\.trainer\.main")}
_KEY = re.compile(r"(?m)^\w+:(?:\s|$)")  # of a YAML
Read = TypeVar("Read")
# Tool -> the recipe of its YAML's values in a folder. A tool that is not here is only explained.
_RECIPES: dict[str, Callable[..., Foreign]] = {
    LLAMA_FACTORY.name: llama_factory.recipe, AXOLOTL.name: axolotl.recipe, MS_SWIFT.name: ms_swift.recipe,
    VERL.name: verl_recipe.of_file,
}  # fmt: skip


def read(path: Path, *, text: str | None = None, ranks: int | None = None) -> Foreign | None:
    """The recipe that a file of another tool means, or would with this `text`; None for any other YAML.

    `ranks` are told beside the file. Raises ConfigError for a file of another tool that cannot be read as a recipe, in
    a sentence that names the tool, and for a script that trains with none.
    """
    if path.suffix in SCRIPTS:
        return read_script(path, text=text, ranks=ranks)
    values = read_yaml_mapping(path, what="recipe") if text is None else parse_yaml(text)
    return read_values(values, path, ranks=ranks) if isinstance(values, dict) else None


def is_script(text: str) -> bool:
    """True if a text is a script that starts a training, or anything but YAML; a YAML with a mistake is none."""
    try:
        content = parse_yaml(of_notebook(text))
    except ConfigError:
        content = None
        if _KEY.search(text) and not starts_training(text):
            return False
    if isinstance(content, dict):  # a command with a colon in it is a mapping of one key
        return any(re.search(r"\s", str(key)) for key in content) and starts_training(text)
    return True


def starts_training(text: str) -> bool:
    """True if a script with this text starts a training that is read."""
    return verl.starts_verl(text) or first_training(text, Path.cwd()) is not None


def first_training(text: str, folder: Path) -> tuple[str, Command] | None:
    """(tool, command) of the first training that a script in `folder` starts, but for verl's."""
    started: Mapping[str, Iterator[tuple[Any, ...]]] = {
        trl_script.TOOL: trl_script.started(text, folder), _BY_YAML: tools.started(text),
        _OF_ITS_OWN: hf_script.started(text), MS_SWIFT.name: ms_swift.started(text),
    }  # fmt: skip
    return next(((tool, found[0]) for tool, each in started.items() for found in each), None)


def _tool(text: str, path: Path) -> str:
    """The tool whose training a script starts first. Raises ConfigError for a script that trains with none."""
    if verl.starts_verl(text):
        return VERL.name
    first = first_training(text, path.resolve().parent)
    if first is None and "megatron" not in text:  # ms-swift's reader tells of its Megatron
        raise _starts_none(text, path)
    return MS_SWIFT.name if first is None else first[0]


def read_script(path: Path, *, text: str | None = None, ranks: int | None = None) -> Foreign:
    """The recipe of the training that a script starts. Raises ConfigError."""
    text = script_text(path) if text is None else text
    found = _recipe_of_script(path, text, ranks)
    return replace(found, notes=(*found.notes, *_own_arguments(text)))


def _own_arguments(text: str) -> tuple[str, ...]:
    """A note where a script may be started with arguments."""
    takes = takes_arguments(text) or (hands_on_arguments(text) and not verl.starts_verl(text))
    return ("the script is read as it runs without arguments of its own",) if takes else ()


def _recipe_of_script(path: Path, text: str, ranks: int | None) -> Foreign:
    folder, tool = path.resolve().parent, _tool(text, path)
    if tool == VERL.name:
        return _named(tool, path, lambda: verl_recipe.of_script(text, ranks=ranks))
    if (reader := _READERS.get(tool)) is None:
        started = _named(tool, path, lambda: tools.training(text, folder=folder))
        return _of_training(started, path, ranks)
    return _named(tool, path, lambda: reader(text, folder=folder, ranks=ranks))


def _starts_none(text: str, path: Path) -> ConfigError:
    """The refusal of a script that starts no training which is read."""
    started = [word for command in commands(text) for word in command.words if UNSURE not in word]
    scripts = [word for word in started if word.endswith(".py")]
    for tool, module in _OTHERS.items():
        if other := next((word for word in started if module.fullmatch(word)), None):
            return ConfigError(
                f"{path} trains with {tool} ({other}), which is not read; a recipe of TRL with its model and batch "
                "(`autofit init --help`) says what the like of it takes there"
            )
    if other := next((word for word in started if _OF_VERL.fullmatch(word)), None):
        return ConfigError(f"{path} starts {other}, and of verl only the training with PPO and its kin is read")
    return ConfigError(
        f"no training is started in {path}: it must call `llamafactory-cli train`, `axolotl train`, `swift sft`, "
        "`trl sft` or their like, `python -m verl.trainer.main_ppo`, or a Python file with --model_name_or_path"
        f"{as_it_is(scripts[-1]) if scripts else ''}"
    )


def _of_training(found: tools.Training, path: Path, ranks: int | None) -> Foreign:
    """The recipe of LLaMA-Factory's or Axolotl's keys that a script starts a training with."""
    folder, count = path.resolve().parent, found.ranks if ranks is None else ranks
    made = _RECIPES[found.tool.name]
    foreign = _named(found.tool.name, path, lambda: made(found.values, folder=folder, ranks=count))
    return replace(foreign, notes=(*foreign.notes, *found.notes))


def read_values(values: Mapping[str, object], path: Path, *, ranks: int | None = None) -> Foreign | None:
    """The recipe that the `values` of the YAML `path` mean, if these are of another tool."""
    found = tools_of(values)
    if len(found) > 1:
        each = " and ".join(f"of {tool.name} ({', '.join(tool.keys_in(values)[:3])})" for tool in found)
        raise ConfigError(f"{path} has keys {each}, so it is a file of neither; keep those of one tool")
    if not found and (whose := trl_recipe.tool_of(values)) is not None:
        return _named(whose, path, lambda: trl_recipe.recipe(values, folder=path.resolve().parent, ranks=ranks))
    tool = found[0] if found else None
    made = None if tool is None else _RECIPES.get(tool.name)
    if tool is None or made is None:
        return None
    return _named(tool.name, path, lambda: made(values, folder=path.resolve().parent, ranks=ranks))


def _named(tool: str, path: Path, made: Callable[[], Read]) -> Read:
    try:
        return made()
    except ConfigError as error:
        raise error.within(f"{path}, read as a file of {tool}") from error


def explain(path: Path, *, text: str | None = None, ranks: int | None = None) -> Explanation:
    """Facts of the file, or of it with this `text`. Raises ConfigError for a file of none of the tools."""
    if path.suffix in SCRIPTS:
        return explain_script(script_text(path) if text is None else text, path, ranks=ranks)
    values = read_yaml_mapping(path, what="file") if text is None else _mapping(text, path)
    tool = tool_of(values)
    if tool is None and (whose := trl_recipe.tool_of(values)) is not None and not tools_of(values):
        folder = path.resolve().parent
        return _named(whose, path, lambda: trl_recipe.explain(values, folder=folder, ranks=ranks))
    if tool is None and (other := beside(values, path.name)) is not None:
        raise ConfigError(f"{path}: {other}")
    if tool is None:
        known = (*(each.name for each in TOOLS), trl_recipe.OPEN_R1, trl_recipe.HANDBOOK)
        raise ConfigError(
            f"{path} is not recognised as a file of {', '.join(known)}{_partly(values)}; a "
            "recipe of TRL is explained by `autofit doctor`"
        )
    if tool is VERL:
        return replace(verl_rules.explain(verl.on_gpus(values, ranks)), notes=file_notes(values))
    return _with_recipe(tools.explain(tool, values, ranks=ranks), lambda: read_values(values, path, ranks=ranks))


def _mapping(text: str, path: Path) -> dict[str, object]:
    values = parse_yaml(text)
    assert isinstance(values, dict), path  # it was one before it was changed
    return values


def refusal(values: Mapping[str, object]) -> str | None:
    """Reason why a recipe with these `values` is none, if it is another tool's file: whose, and its effective batch."""
    tool = tool_of(values)
    if tool is None:
        return beside(values)
    said = verl.effective_sentence(values) if tool is VERL else tools.batch_sentence(tool, values)
    keys = ", ".join(tool.keys_in(values)[:2])
    what = f"this is a config of {tool.name} ({keys}) and no recipe of TRL"
    return f"{what}: `autofit explain FILE`; {said}"


def beside(values: Mapping[str, object], name: str = "FILE") -> str | None:
    """Reason why a file `name` with these `values` is no recipe, if it only describes a launch, and how to give it."""
    if "model_name_or_path" in values:
        return None
    ours = [key for key in _ACCELERATE if key in values]
    if len(ours) > 1:
        return (
            f"this is a config of accelerate ({', '.join(ours)}), not of TRL: it says how a training is launched and "
            f"not what is trained; give it beside a recipe: `autofit check run.yaml --accelerate_config {name}`"
        )
    if "zero_optimization" in values:
        return (
            "this is a config of DeepSpeed (zero_optimization), not of TRL: it says how the ranks share a model and "
            f"not what is trained; name it in a recipe: `deepspeed: {name}`"
        )
    return None


def _with_recipe(found: Explanation, made: Callable[[], Foreign | None]) -> Explanation:
    """`found` with the trained model and its simulation, or with the reason why it is refused."""
    try:
        foreign = made()
    except (WrongValuesError, UnknownKeyError) as error:
        unknown = error.keys if isinstance(error, UnknownKeyError) else ()
        return replace(found, wrong=(str(error).partition(": ")[2] or str(error),), unknown=unknown)
    except ConfigError as error:
        return replace(found, lines=(*found.lines, Line(NOT_SIMULATED, str(error).partition(": ")[2] or str(error))))
    if foreign is None:
        return found
    return replace(
        found, lines=(*found.lines, *lines(foreign)), notes=foreign.notes, unknown=tuple(foreign.unknown)
    )  # fmt: skip


def explain_script(text: str, path: Path, *, ranks: int | None = None) -> Explanation:
    """Facts of the training that the script `path` with this `text` starts. Raises ConfigError."""
    found = _explained_script(text, path, ranks)
    return replace(found, notes=tuple(dict.fromkeys((*found.notes, *_own_arguments(text)))))


def _explained_script(text: str, path: Path, ranks: int | None) -> Explanation:
    folder, tool = path.resolve().parent, _tool(text, path)
    if tool == trl_script.TOOL:
        return trl_script.explain(text, folder=folder, ranks=ranks)
    if tool == _OF_ITS_OWN:
        return _named(tool, path, lambda: hf_script.explain(text, folder=folder, ranks=ranks))
    if tool != VERL.name:
        read = ms_swift.training if tool == MS_SWIFT.name else tools.training
        started: ms_swift.SwiftTraining | tools.Training = _named(tool, path, lambda: read(text, folder=folder))
        of = started.tool if isinstance(started, tools.Training) else MS_SWIFT
        said = tools.explain(of, started.values, ranks=started.ranks if ranks is None else ranks)
        return _with_recipe(said, lambda: _recipe_of_script(path, text, ranks))
    found, unread = verl.overrides(text)
    notes = script_notes(text, found, unread)
    found = dict(verl.on_gpus(found, ranks))
    batch = [key for key in unread if key in verl.DEFAULTS and key not in found]
    # no default in place of a value that is only known where the script runs
    explained = verl_rules.explain({**found, **dict.fromkeys(batch, verl.UNSURE)})
    return replace(explained, unread=tuple(batch), notes=notes)


def _partly(values: Mapping[str, object]) -> str:
    """The keys of tools that are in it all the same."""
    found = [f"{', '.join(keys[:3])} of {tool.name}" for tool in TOOLS if (keys := tool.keys_in(values))]
    return f" (it has {' and '.join(found)})" if found else ""
