"""Scripts that train with TRL's command line: `trl sft`, or a script of TRL started by a launcher. Free of torch.

`accelerate launch`, `torchrun`, `deepspeed` and `python` are read, and a config of TRL (`--config FILE`),
over which the arguments are laid as TRL's own parser lays them. A script of another project takes TRL's arguments too,
with some of its own: these are named, and left out. It is one by its name (open-r1), or, where its file is here, by the
trainer that it makes. A config of open-r1 or of the alignment-handbook is read as such a file is by itself.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from autofit.errors import ConfigError
from autofit.frontends.command import (
    UNSURE,
    Command,
    Told,
    arguments,
    certain,
    check_certain,
    commands,
    options,
    ranks_in,
    started_ranks,
    told_ranks,
)
from autofit.frontends.draft import Explanation, Foreign, Line
from autofit.frontends.python_file import ADAPTED, LENGTHS, RANKS, PythonFile, adapted, as_it_is, python_file
from autofit.frontends.sharing import OTHERWISE, near
from autofit.frontends.trl_recipe import OTHERS, OTHERS_OWN, batch_words, not_simulated, recipe, stand_in, tool_of
from autofit.recipe.keys import RENAMED
from autofit.recipe.launch import shipped_with_trl
from autofit.recipe.launching import is_launch_key, launched
from autofit.recipe.profile import OF_TRL, TAKEN_BY, profile
from autofit.recipe.recipe import merge
from autofit.recipe.yaml_file import parse_yaml, read_yaml_mapping

TOOL = "TRL"
_KINDS = "|".join((*OF_TRL, *OTHERS))
_SCRIPT = re.compile(rf"(?:.*/)?(?:run_)?({_KINDS})(?:_modeling|_vlm\w*)?\.py")
_MODULE = re.compile(rf"(?:trl|open_r1)(?:\.scripts)?\.({_KINDS})")
_TRLS = re.compile(rf"(?:^|.*/)(?:trl|examples)/scripts/(?:{_KINDS})(?:_modeling|_vlm\w*)?\.py$")
# Options of launchers that change neither the ranks nor the sharding.
_OPTIONS = """
main_process_port main_process_ip master_port master_addr rdzv_backend rdzv_endpoint rdzv_id rdzv_conf machine_rank
node_rank role max_restarts tee num_machines multi_gpu same_network hostfile gpu_ids num_cpu_threads_per_process
debug standalone log_dir with deepspeed_multinode_launcher dynamo_backend module
"""
_WITHOUT = frozenset(_OPTIONS.split())
_COUNTS = ("num_processes", "nproc_per_node", "num_gpus", "include", "nnodes", "num_nodes")
_LISTS = ("reward_funcs", "reward_weights", "lora_target_modules", "lora_modules_to_save")  # also of one word
# Arguments that may hang on the environment: neither memory nor the batch depends on them.
_HARMLESS = ("output_dir", "run_name", "logging_dir", "hub_model_id", "report_to", "hub_token", "save_steps")
_MODEL = "model_name_or_path"
_OF_MODEL_CONFIG = frozenset({
    "dtype", "attn_implementation", "use_peft", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules",
    "load_in_4bit", "load_in_8bit",
})  # fmt: skip
_OF_BATCH = """
per_device_train_batch_size gradient_accumulation_steps gradient_checkpointing activation_checkpointing optim bf16 fp16
"""
# Keys of TRL that count, also where a script has an argument of its own with that name.
_SHARED = frozenset({_MODEL, *_OF_MODEL_CONFIG, *_OF_BATCH.split(), *TAKEN_BY, *(old for old, _ in RENAMED)}) - {
    "dataset_name"
}
_MODELS = ("model_name", "model_id", "base_model", "model_path", "model")  # a script's own names of it
_OTHERWISE = (
    (_MODEL, _MODELS, str), ("max_length", LENGTHS, int), ("lora_r", RANKS[1:], int),
    ("lora_target_modules", ADAPTED, str | list),
)  # fmt: skip


class Started(NamedTuple):
    """A command that trains, with what, the place of the word that says so, and the script's file where it is read."""

    command: Command
    kind: str  # "sft"; the class of a trainer that is not simulated
    place: int
    file: PythonFile | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrlTraining:
    """A training that a script starts: TRL's trainer, its values with those of the launch, and notes on it."""

    kind: str
    values: Mapping[str, object]
    ranks: int | None
    words: str  # how it is started
    notes: tuple[str, ...]
    prompt_tokens: int | None  # of the sample that stands for data that is not read
    keys: Mapping[str, str]  # {key of the recipe: the config's or the script's own name of it}, where those differ
    fixed: frozenset[str]  # keys that the script does not take


def training(text: str, *, folder: Path, ranks: int | None = None) -> TrlTraining:
    """The first training that a script starts, on `ranks` where they are told beside it. Raises ConfigError."""
    found = list(started(text, folder))
    if not found:
        raise ConfigError("no `trl sft` and no script sft.py, dpo.py, grpo.py, reward.py or rloo.py is started in it")
    command, kind, place, file = found[0]
    before, script = command.words[:place], command.words[place]
    if kind not in OF_TRL:
        raise not_simulated(kind, script)
    if "_vlm" in script:
        raise ConfigError(f"{script} trains on images, and only training on text is read{as_it_is(script)}")
    if file is not None and not file.takes_trls:
        raise ConfigError(f"{script} does not take TRL's own arguments, so they cannot be read{as_it_is(script)}")
    notes = [f"the script starts {len(found)} trainings; the first is read"] if len(found) > 1 else []
    given = arguments(command.words[place + 1 :], folder, tool=TOOL)
    prompt_tokens, keys = None, dict[str, str]()
    if (config := given.pop("config", None)) is not None:
        path = near(certain("config", config), folder)
        given = {**read_yaml_mapping(path, what="config of TRL"), **given}
        if tool_of(given) is not None:
            named = recipe(given, folder=path.parent, trainer=kind)
            prompt_tokens, keys = named.prompt_tokens, dict(named.keys)
            given, notes = dict(named.values), [*notes, *named.notes]
    values, names, left = _without_own(given, kind, {} if file is None else file.own)
    if before[-1:] != ("trl",) and not _TRLS.search(script) and not script.startswith("trl."):
        left_out = f"; left out, as its own: {', '.join(left)}" if left else ""
        notes.append(f"{script} is taken for TRL's own {kind}: what it does besides is not simulated{left_out}")
    if file is not None and _MODEL not in values:
        raise ConfigError(f"{script} names its model itself{as_it_is(script)}")
    if file is not None and "dataset_name" not in values and prompt_tokens is None:
        values, prompt_tokens, more = stand_in(kind, values)
        notes += more
    told = told_ranks(before, {}, {})
    launch, unread = _launch(before, told, ranks)
    if unread:
        notes.append(f"{', '.join(unread)} of {before[0]} is not read")
    values |= launch
    values |= {key: [values[key]] for key in _LISTS if isinstance(values.get(key), str | int | float)}
    for key in ("accelerate_config", "config_file", "deepspeed", "deepspeed_config_file", "fsdp_config"):
        if isinstance(name := values.get(key), str) and name.endswith((".yaml", ".yml", ".json")):
            values[key] = _file(key, name, folder, notes)
    count = values.get("num_processes") if ranks is None else ranks
    if count is None and not {"accelerate_config", "config_file"} & values.keys():
        count = started_ranks(before, told, command.variables)
    check_certain([key for key, value in values.items() if UNSURE in str(value) and key not in _HARMLESS])
    values = {key: value for key, value in values.items() if UNSURE not in str(value)}
    return TrlTraining(
        kind=kind, values=values, ranks=count if isinstance(count, int) else None, notes=tuple(notes),
        keys=keys | names,
        fixed=frozenset() if file is None or file.takes_models else _OF_MODEL_CONFIG - file.own.keys(),
        prompt_tokens=prompt_tokens,
        words=" ".join((*takewhile(lambda word: not word.startswith("--"), before[:2]), script)),
    )  # fmt: skip


def _without_own(
    given: Mapping[str, object], kind: str, own: Mapping[str, object]
) -> tuple[dict[str, object], dict[str, str], list[str]]:
    """(`given` less a script's own arguments, its own names of keys of the recipe, the names that are left out).

    Those that TRL has too are taken, and those of the model, of the longest row and of adapters: as they are given, or
    by their defaults.
    """
    said = {**{key: default for key, default in own.items() if default is not None}, **given}
    values = {key: value for key, value in said.items() if key in _SHARED or (key not in OTHERS_OWN and key not in own)}
    names = dict[str, str]()
    for key, others, kept in _OTHERWISE:
        found = [name for name in others if name in own and name not in values and isinstance(said.get(name), kept)]
        if found and key not in values and kind in TAKEN_BY.get(key, (kind,)):
            values[key] = adapted(said[found[0]]) if others is ADAPTED else said[found[0]]
            names[key] = found[0]
    return values, names, [key for key in given if key not in values and key not in names.values()]


def of_script(text: str, *, folder: Path, ranks: int | None = None) -> Foreign:
    """The recipe of the first training that a script starts, on its ranks or those that are told beside it."""
    found = training(text, folder=folder, ranks=ranks)
    return Foreign(
        tool=TOOL, trainer=found.kind, values=found.values, ranks=found.ranks,
        keys={key: found.keys.get(key, key) for key in found.values}, notes=found.notes,
        prompt_tokens=found.prompt_tokens, fixed=found.fixed,
    )  # fmt: skip


def explain(text: str, *, folder: Path, ranks: int | None = None) -> Explanation:
    """The start command, TRL's trainer, and the effective batch by transformers' defaults."""
    found = training(text, folder=folder, ranks=ranks)
    ranks = found.ranks
    told = {} if ranks is None else {"num_processes": ranks}
    read = launched({**found.values, **told}, of=profile(found.kind))
    if ranks is None and read.launch.ranks > 1:  # those of an accelerate config
        ranks = read.launch.ranks
    lines = (
        Line("tool", f"{TOOL}, started by `{found.words}`"),
        Line("trainer", f"{found.kind} of TRL"),
        Line("effective batch", batch_words(found.kind, found.values, ranks)),
        *([] if read.launch.is_plain else [Line("launch", read.launch.words)]),
    )
    return Explanation(tool=TOOL, lines=lines, notes=(*found.notes, *read.notes))


def started(text: str, folder: Path) -> Iterator[Started]:
    """The trainings with TRL that a script in `folder` starts."""
    for command in commands(text):
        words = command.words
        if words[:1] == ("trl",) and len(words) > 1 and words[1] in (*OF_TRL, *OTHERS):
            yield Started(command, words[1], 1)
        elif words and words[0] in ("accelerate", "torchrun", "deepspeed", "python", "python3", "srun"):
            for place, word in enumerate(words):
                if "swift" in word:
                    continue
                file = python_file(word, folder)
                if file is not None and len(file.trainers) == 1:
                    kind = file.trainers[0].removesuffix("Trainer").lower()
                    yield Started(command, kind if kind in (*OF_TRL, *OTHERS) else file.trainers[0], place, file)
                    break
                if file is not None and not file.trainers:
                    continue  # whatever its name is
                if (match := _SCRIPT.fullmatch(word) or _MODULE.fullmatch(word)) is not None:
                    yield Started(command, match[1], place)
                    break


def say(foreign: Foreign, changes: Mapping[str, object]) -> dict[str, object]:
    """{argument: value} of `changes`. Raises ConfigError for what the launcher says."""
    outside = [key for key in changes if key.partition(".")[0] in ("env", "launch")]
    if outside:
        raise ConfigError(f"no argument of {foreign.tool} says {outside[0]}")
    if not_taken := [key for key in changes if key in foreign.fixed and changes[key] != foreign.values.get(key)]:
        raise ConfigError(f"the script takes no argument {not_taken[0]}")
    named = in_its_names(foreign, changes)
    whole = merge(foreign.values, named)
    outer = dict.fromkeys(key.partition(".")[0] for key in named)
    return {foreign.keys.get(key, key): whole.get(key) for key in outer}


def in_its_names(foreign: Foreign, changes: Mapping[str, object]) -> dict[str, object]:
    """`changes` by the older names of settings that a script has: the TRL that it runs with may take no others."""
    older = {new: old for old, new in RENAMED if old in foreign.values and new not in foreign.values}
    parts = ((*key.partition("."), value) for key, value in changes.items())
    return {f"{older.get(outer, outer)}{dot}{inner}": value for outer, dot, inner, value in parts}


def _launch(before: Sequence[str], told: Told | None, ranks: int | None) -> tuple[dict[str, object], list[str]]:
    """({key of an accelerate launch: value} of the words before the script, unread options).

    What the words say of ranks is not looked at where `ranks` are told beside the script.
    """
    found: dict[str, object] = {}
    unread: list[str] = []
    said = dict(options(before))
    if told is not None and ranks is None and (ranks := ranks_in(told)) is None:
        key = next(key for key in _COUNTS if key in said)
        check_certain([f"{key} of {before[0]}"])
    if told is not None:
        found["num_processes"] = ranks
    for key, text in said.items():
        if key == "config_file":
            found["accelerate_config"] = text
        elif key in _COUNTS or key in _WITHOUT:
            continue
        elif is_launch_key(key):
            found[key] = parse_yaml(text) if text else True
        else:
            unread.append(f"--{key}")
    return found, unread


def _file(key: str, name: str, folder: Path, notes: list[str]) -> str:
    """The file of a launch; for a missing accelerate config, the name of TRL's own that is like it."""
    try:
        return str(near(certain(key, name), folder, otherwise=OTHERWISE))
    except ConfigError:
        own = Path(name).stem.removeprefix("deepspeed_")  # as TRL's examples/accelerate_configs have it
        if key not in ("accelerate_config", "config_file") or own not in shipped_with_trl():
            raise
        notes.append(f"{name} is not here: the {own} that TRL ships is taken for it")
        return own
