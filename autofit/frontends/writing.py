"""Another tool's file as a recipe, and changes of the recipe back in that file: its keys, its layout and its comments.

What is written is read again, and must be the same recipe but for the changes. No torch here.
"""

import functools
import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import yaml

from autofit.errors import ConfigError, UnknownKeyError, option, quoted
from autofit.frontends import (
    axolotl,
    hf_script,
    llama_factory,
    ms_swift,
    sharing,
    tools,
    trl_recipe,
    trl_script,
    verl_recipe,
)
from autofit.frontends.command import Command, commands, script_text
from autofit.frontends.draft import NOT_SIMULATED, Explanation, Foreign, summary
from autofit.frontends.reading import (
    SCRIPTS,
    explain,
    explain_script,
    first_training,
    read,
    read_script,
    read_values,
    starts_training,
)
from autofit.frontends.tools import AXOLOTL, LLAMA_FACTORY, MS_SWIFT, VERL, tool_of
from autofit.frontends.verl import is_below_a_part, starts_verl, unknown_key, whole_key
from autofit.frontends.verl import span as verls_span
from autofit.recipe.recipe import merge, own_names
from autofit.recipe.secrets import opened_text
from autofit.recipe.yaml_file import Source, Stated, parse_yaml, read_source, read_yaml_mapping


def source_of(given: Stated | None, *, name: str | None = None, ranks: int | None = None) -> Source:
    """The recipe that was `given`; of another tool's file, or of its keys, the recipe that trains as that tool would.

    A command of another tool, in one text, is a script of it in the working directory. `ranks` are those of the
    training, where they are told beside the file. Raises ConfigError.
    """
    if isinstance(given, str) and _is_command(given):
        return _of_script(_COMMANDS_SCRIPT, given, name, ranks)
    if isinstance(given, str | os.PathLike) and Path(given).suffix in SCRIPTS:
        return _of_script(Path(given), script_text(Path(given)), name, ranks)
    source = read_source(given, name=name)
    if source.trainer is not None or not isinstance(given, str | os.PathLike | Mapping):
        return source
    path = Path.cwd() / "recipe" if isinstance(given, Mapping) else Path(given)
    foreign = read_values(source.values, path, ranks=ranks)
    if foreign is None:
        return source
    text = yaml.safe_dump(dict(source.values)) if isinstance(given, Mapping) else script_text(path)
    return _source(foreign, source.name, source.what, _origin(foreign, path, text, ranks))


def _of_script(path: Path, text: str, name: str | None, ranks: int | None) -> Source:
    script = read_script(path, text=text, ranks=ranks)
    origin = _origin_of_config(script, path, text, ranks) or _origin(script, path, text, ranks)
    return _source(script, name or path.stem, f"the recipe {path}", origin)


def _origin(foreign: Foreign, path: Path, text: str, ranks: int | None) -> dict[str, object]:
    if not can_write(foreign.tool):
        return {}
    return {
        "tool": foreign.tool, "path": str(path.resolve()), "text": text, "ranks": ranks, "names": _names(foreign)
    }  # fmt: skip


def _names(foreign: Foreign) -> dict[str, str]:
    """{key of the recipe: the tool's name of it} where the tool has another name of it; values too (`own_names`)."""
    found = dict.fromkeys(foreign.derived, "")
    for key, own in _own_keys(foreign):
        given = foreign.values.get(key, False if key in _SET_BY_A_SEARCH else None)
        others = (True, False) if isinstance(given, bool) else (given, *_ATTENTION) if key == _KERNEL else ()
        values = [value for value in others or (given,) if can_say(foreign, key, value)]
        said = [(value, in_own_keys(foreign, {key: value})) for value in values]
        whole = (
            len(said) == 2
            if isinstance(given, bool)
            else key == _KERNEL or all(words.get(own) == value for value, words in said)
        )
        if own != key and given in values and whole and all(own in words for _, words in said):
            found[key] = own
            found |= {f"{key}={value}": str(words[own]) for value, words in said if words[own] != value}
    return found


def _own_keys(foreign: Foreign) -> Iterator[tuple[str, str]]:
    """(key of the recipe, its name in the file), also of those that the file leaves out and a search may set."""
    yield from foreign.keys.items()
    for key in set(_SET_BY_A_SEARCH) - set(foreign.keys):
        if can_say(foreign, key, True) and len(own := in_own_keys(foreign, {key: True})) == 1:
            yield key, next(iter(own))


def _origin_of_config(foreign: Foreign, script: Path, text: str, ranks: int | None) -> dict[str, object]:
    """The YAML that a script names, with the values that the script lays over it; {} if it names none.

    Changes are written there: a tuned file is a YAML, and the tool's command takes it.
    """
    if foreign.tool not in (LLAMA_FACTORY.name, AXOLOTL.name):
        return {}
    found = tools.training(text, folder=script.resolve().parent)
    if found.config is None or found.config.suffix == ".json":
        return {}
    changed = script_text(found.config)
    for key, value in found.laid_over.items():
        changed = _in_yaml(changed, key, value)
    return _origin(foreign, found.config, changed, found.ranks if ranks is None else ranks)


def _source(foreign: Foreign, name: str, what: str, origin: Mapping[str, object]) -> Source:
    launch = dict(foreign.launch)
    if foreign.ranks is not None:
        launch["num_processes"] = foreign.ranks
    of = "a script with transformers' arguments" if foreign.tool == hf_script.TOOL else f"a file of {foreign.tool}"
    return Source(
        values=foreign.values, name=name, what=what, prompt_tokens=foreign.prompt_tokens, trainer=foreign.trainer,
        launch=launch, foreign=origin, notes=(f"{of}: {summary(foreign)}", *foreign.notes),
    )  # fmt: skip


# Changes of a recipe, back in another tool's own file: its keys, its layout and its comments. No torch here.
#
# What is written is read again, and must be the same recipe but for the changes.

# Tool -> {its key: value} for changes of a recipe that was read from a file of it. A tool's key may be a.b.
_SAYS: dict[str, Callable[[Foreign, Mapping[str, object]], dict[str, object]]] = {
    LLAMA_FACTORY.name: llama_factory.say, AXOLOTL.name: axolotl.say, MS_SWIFT.name: ms_swift.say,
    VERL.name: verl_recipe.say, trl_script.TOOL: trl_script.say, hf_script.TOOL: hf_script.say,
    trl_recipe.OPEN_R1: trl_recipe.say, trl_recipe.HANDBOOK: trl_recipe.say,
}  # fmt: skip
_RUNS = {LLAMA_FACTORY.name: "llamafactory-cli train", AXOLOTL.name: "axolotl train", MS_SWIFT.name: "swift sft",
         trl_recipe.OPEN_R1: "accelerate launch YOUR_SCRIPT.py --config",
         trl_recipe.HANDBOOK: "accelerate launch YOUR_SCRIPT.py --config",
         VERL.name: "python -m verl.trainer.main_ppo --config-path . --config-name"}  # fmt: skip
_KERNEL = "attn_implementation"
_SET_BY_A_SEARCH = ("use_liger_kernel", "load_in_4bit", "load_in_8bit")
_ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3")
_ENV, _LAUNCH = "env.", "launch."  # prefixes of keys that say how a training is started
_WORD = r"""(?:"(?:[^"\\]|\\.)*"|'[^']*'|\$\((?:[^()]|\([^()]*\))*\)|\\[^\n]|[^\s\\"';&|])+"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """A recipe whose own file was changed in its tool's keys, and the changes that are of the recipe itself.

    `unknown` has, of each of these that the tool does not know, what it says of it.
    """

    source: Source
    changes: Mapping[str, object]
    unknown: Mapping[str, str] = field(default_factory=dict)
    own: tuple[str, ...] = ()  # keys of the changes that were made in the file's text

    @contextmanager
    def in_its_words(self) -> Iterator[None]:
        """Report an unknown key of the trainer in the tool's words."""
        try:
            yield
        except UnknownKeyError as error:
            if set(error.keys) & set(self.own):
                raise ConfigError(error.marked.replace(self.source.what, option("set"), 1)) from error
            if not self.unknown:
                raise
            raise ConfigError(
                f"{self.source.what}, read as a file of {self.source.foreign['tool']}: "
                f"{'; '.join(self.unknown.values())}"
            ) from error


def changed(source: Source, changes: Mapping[str, object] | None) -> Changed:
    """`source` with `changes`: of another tool's file those in the tool's own keys are made in the file's text.

    Raises ConfigError, in the tool's words, for what it does not take.
    """
    changes = dict(changes or {})
    own: list[str] = []
    unknown: dict[str, str] = {}
    if source.foreign:
        if source.foreign["tool"] == VERL.name:
            changes = {whole_key(key): value for key, value in changes.items()}
        own = [key for key in changes if not key.startswith((_ENV, _LAUNCH)) and _is_own(source, key, unknown, changes)]
    if not own:
        return Changed(source=source, changes=changes, unknown=unknown)
    path, ranks = Path(str(source.foreign["path"])), cast("int | None", source.foreign["ranks"])
    text = _edited(source.foreign, {key: changes[key] for key in own})
    try:
        foreign = read(path, text=text, ranks=ranks)
    except ConfigError as error:
        given = " ".join(f"--set {key}={_flow(changes[key])}" for key in own)
        raise type(error)(f"{error.marked} (with {given})") from error
    assert foreign is not None, path
    made = _source(foreign, source.name, source.what, _origin(foreign, path, text, ranks))
    rest = {key: value for key, value in changes.items() if key not in own}
    return Changed(source=made, changes=rest, unknown=unknown, own=tuple(own))


def on_card(own: Changed, *, bfloat16: bool) -> Changed:
    """`own` as its tool reads it on a card with or without `bfloat16`: `bf16: auto` of Axolotl is fp16 without."""
    origin = own.source.foreign
    if bfloat16 or origin.get("tool") != AXOLOTL.name:
        return own
    path, ranks = Path(str(origin["path"])), cast("int | None", origin["ranks"])
    given = parse_yaml(str(origin["text"]))
    means = axolotl.without_bfloat16(given) if isinstance(given, Mapping) else {}
    foreign = read(path, text=_edited(origin, means), ranks=ranks) if means else None
    if foreign is None:
        return own
    words = ", ".join(f"{key}: {_flow(value)}" for key, value in means.items())
    source = _source(foreign, own.source.name, own.source.what, dict(origin))
    note = f"the card has no bfloat16, where Axolotl takes bf16: auto as {words}"
    return replace(own, source=replace(source, notes=(*source.notes, note)))


def as_long(source: Source, tokens: int | None) -> Source:
    """`source` with samples of `tokens`, where a program of one's own has no limit of them that is known."""
    if tokens is None or source.foreign.get("tool") != hf_script.TOOL or "max_length" in source.values:
        return source
    return replace(source, values={**source.values, "max_length": tokens})


_COMMAND = Path("the command")  # where a command is given itself, and no script
_COMMANDS_SCRIPT = Path("command.sh")  # and under this name where changes may be written into it


def explained(
    words: Sequence[str], changes: Mapping[str, object], *, ranks: int | None = None
) -> tuple[Explanation, Source | None]:
    """Facts of a file of another tool, or a command, with `changes` in the tool's own keys; and its recipe, if any.

    `words` are the file's path, a command in one text, or its words. Raises ConfigError for what is of none of the
    tools, and for a change that cannot be written into it.
    """
    path = Path(words[0])
    is_command = len(words) > 1 or _is_command(words[0])
    if is_command:
        path = _COMMAND
    if is_command or path.suffix in SCRIPTS:
        text = script_text(path) if not is_command else shlex.join(words) if len(words) > 1 else words[0]
        for key, value in changes.items():
            text = _in_any_script(text, key, value, path)
        found = explain_script(text, path, ranks=ranks)
        return _with_known(changes, found), _recipe_of(found, lambda: read_script(path, text=text, ranks=ranks))
    edited = None
    if changes:
        is_verls = tool_of(read_yaml_mapping(path, what="file")) is VERL
        edited = script_text(path)
        for key, value in changes.items():
            edited = _in_yaml(edited, whole_key(key) if is_verls else key, value)
    found = explain(path, text=edited, ranks=ranks)
    return _with_known(changes, found), _recipe_of(found, lambda: read(path, text=edited, ranks=ranks))


def _is_command(text: str) -> bool:
    """True if a text is a command; a name such as `my file.yaml` is a path, existing or missing."""
    if " " not in text.strip() or os.path.exists(text):
        return False
    return Path(text).suffix not in (*SCRIPTS, ".yaml", ".yml", ".json") or starts_training(text)


def _recipe_of(found: Explanation, made: Callable[[], Foreign | None]) -> Source | None:
    """The recipe of an explained file; None if it is unsupported, and of verl, whose rules were looked at."""
    is_made = found.tool != VERL.name and not found.wrong and all(line.name != NOT_SIMULATED for line in found.lines)
    foreign = made() if is_made else None
    return None if foreign is None else _source(foreign, "recipe", "the recipe", {})


def _with_known(changes: Mapping[str, object], found: Explanation) -> Explanation:
    """`found`, whose file has `changes`. Raises ConfigError if its tool lacks the key of one."""
    if wrong := [key for key in changes if key.split(".")[0] in found.unknown]:
        said = f" ({'; '.join(found.wrong)})" if found.wrong else ""
        raise ConfigError(f"{option('set')}: {found.tool} has no key {', '.join(wrong)}{said}")
    return found


def _in_any_script(text: str, key: str, value: object, path: Path) -> str:
    """`text` of the script `path` with `key` of the first training that it starts set to `value`."""
    if starts_verl(text):
        return _in_verls_script(text, whole_key(key), value)
    if (first := next(tools.started(text), None)) is not None and first[1] is LLAMA_FACTORY:
        end = first[0].end
        if tools.training(text, folder=path.resolve().parent).config is not None:
            return f"{text[:end].rstrip()} {override(key, value)}{text[end:]}"  # of several, the last counts
    return _in_script(text, key, value, folder=path.resolve().parent)


def _is_own(source: Source, key: str, unknown: dict[str, str], changes: Mapping[str, object]) -> bool:
    """True if the tool of the file knows `key`; its message on an unknown one is added to `unknown`."""
    path, ranks = Path(str(source.foreign["path"])), cast("int | None", source.foreign["ranks"])
    if source.foreign["tool"] == VERL.name:
        if not is_below_a_part(key):
            return False
        if said := unknown_key(key):
            raise ConfigError(f"{source.what}, read as a file of {VERL.name}: {said}")
        return True
    try:
        foreign = read(path, text=_edited(source.foreign, {key: changes[key]}), ranks=ranks)
    except UnknownKeyError as error:
        unknown[key] = str(error).partition(f"{source.foreign['tool']}: ")[2]
        return False
    except ConfigError:
        return True
    assert foreign is not None, path
    if key.split(".")[0] not in foreign.unknown:  # LLaMA-Factory's max_length, say, is of generation alone
        launch = {key: value for key, value in source.launch.items() if key != "num_processes"}  # by itself there
        without_effect = (foreign.values, foreign.launch) == (source.values, launch)
        return not (without_effect and key in source.values)
    unknown[key] = foreign.unknown[key.split(".")[0]]
    return False


def _edited(origin: Mapping[str, object], own: Mapping[str, object]) -> str:
    """The text of the file that a recipe was, with these keys of its tool."""
    text, edit = str(origin["text"]), _editor(Path(str(origin["path"])), str(origin["tool"]))
    for key, value in own.items():
        text = edit(text, key, value)
    return text


def can_write(tool: str) -> bool:
    """True if changes can be written back into files of this tool."""
    return tool in _SAYS


def in_own_keys(foreign: Foreign, changes: Mapping[str, object]) -> dict[str, object]:
    """{the tool's key: value} of `changes`. Raises ConfigError for a change that the tool has no key for."""
    return _SAYS[foreign.tool](foreign, changes)


def can_say(foreign: Foreign, key: str, value: object) -> bool:
    """True if the tool has a key for this change of a recipe."""
    try:
        in_own_keys(foreign, {key: value})
    except ConfigError:
        return False
    return True


def written(
    path: Path, changes: Mapping[str, object], *, text: str | None = None, ranks: int | None = None
) -> str:  # fmt: skip
    """The text of the file at `path`, or this `text` of it, with `changes` of the recipe that it means.

    Raises ConfigError for what the tool has no key for, and where what is written would not be read as it was meant.
    """
    text = script_text(path) if text is None else text
    foreign = read(path, text=text, ranks=ranks)
    if foreign is None:
        raise ConfigError(f"{path} is no file of another tool")
    own = in_own_keys(foreign, changes)
    if foreign.tool == trl_script.TOOL:
        changes = trl_script.in_its_names(foreign, changes)
    edit = _editor(path, foreign.tool)
    for key, value in own.items():
        text = edit(text, key, value)
    again = read(path, text=text, ranks=ranks)
    changes = {key: value for key, value in changes.items() if not key.startswith(_LAUNCH)}
    wanted = {**dict.fromkeys(changes), **merge(foreign.values, changes)}
    wrong = [] if again is None else [
        key for key, value in wanted.items()
        if again.values.get(key) != value and (key in changes or key not in again.fixed)  # the launch may fix a key
        and not (value and key.startswith("gradient_checkpointing") and sharing.checkpoints_itself(again.launch))
    ]  # fmt: skip
    if again is None or wrong:
        raise ConfigError(f"{path}: {', '.join(wrong) or 'a change'} cannot be written in the keys of {foreign.tool}")
    return text


# -- of a recipe that was such a file: `origin` is Recipe.foreign, {} for one that was none ---------------------------


def own_words(origin: Mapping[str, object], changes: Mapping[str, object]) -> str:
    """`cutoff_len: 1024, optim: sgd`: changes of a recipe in the keys of the file that it was; "" if it was none.

    Those of verl stand as overrides, `a.b=1 a.c=2`, to paste behind its command, and those of a script as arguments.
    """
    if not origin:
        return ""
    own, others = own_changes(origin, changes)
    if origin["tool"] == VERL.name:
        parts = [" ".join(override(key, value) for key, value in own.items())] if own else []
    elif Path(str(origin["path"])).suffix in SCRIPTS:
        set_here = " ".join(f"--{key} {_words(value)}" for key, value in own.items() if value is not None)
        parts = [set_here, *(f"without --{key}" for key, value in own.items() if value is None)]
        parts = list(filter(None, parts))
    else:
        parts = [f"{key}: {_flow(value)}" for key, value in own.items()]
    return ", ".join((*parts, *others))


def in_16_bits(origin: Mapping[str, object]) -> str:
    """Setting of bfloat16 weights, in the keys of the file that a recipe was; "" if its tool has none."""
    halved = {"dtype": "bfloat16"}
    if not origin:
        return "dtype: bfloat16"
    return own_words(origin, halved) if own_changes(origin, halved)[0] else ""


def in_own_names(origin: Mapping[str, object], text: str) -> str:
    """`text` with the names that the file has, for those of the recipe's keys that look unlike plain words."""
    known = own_names(origin)
    other = {key.partition("=")[0] for key in known if "=" in key}  # their values are not as in the text
    names = {key: name for key, name in known.items() if name and "_" in key and key.partition("=")[0] not in other}
    if not names:
        return text
    keys = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    return re.sub(rf"(?<![\w.-])(?:{keys})(?![\w.-])", lambda found: names[found[0]], text)


def own_changes(origin: Mapping[str, object], changes: Mapping[str, object]) -> tuple[dict[str, object], list[str]]:
    """(changes in the keys of the file that a recipe was, the words of those that it lacks a key for)."""
    foreign = _read_origin(str(origin["path"]), str(origin["text"]), cast("int | None", origin["ranks"]))
    changes = dict(_flat(changes))
    said = {key: value for key, value in changes.items() if can_say(foreign, key, value)}
    others: list[str] = []
    for key, value in changes.items():
        if key in said or value is None:
            continue
        name = key.removeprefix(_ENV).removeprefix(_LAUNCH)
        where = "the environment" if key.startswith(_ENV) else "its launch" if key.startswith(_LAUNCH) else ""
        others.append(f"{name} {value} ({f'in {where}' if where else f'{foreign.tool} has no key for it'})")
    return in_own_keys(foreign, said), others


def wrong_with(origin: Mapping[str, object], changes: Mapping[str, object]) -> tuple[str, ...]:
    """Parts that the tool refuses of the file that a recipe was, with these changes that it has keys for."""
    own, _ = own_changes(origin, changes)
    return explain(
        Path(str(origin["path"])), text=_edited(origin, own), ranks=cast("int | None", origin["ranks"])
    ).wrong


def _flat(changes: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """`changes` with the content of the mappings env and launch taken apart, as env.NAME."""
    for key, value in changes.items():
        if f"{key}." in (_ENV, _LAUNCH) and isinstance(value, Mapping):
            yield from ((f"{key}.{name}", inner) for name, inner in value.items())
        else:
            yield key, value


def own_text(origin: Mapping[str, object], changes: Mapping[str, object]) -> str:
    """The text of the file that a recipe was, with those of the `changes` that its tool has a key for."""
    path, text, ranks = Path(str(origin["path"])), str(origin["text"]), cast("int | None", origin["ranks"])
    foreign = _read_origin(str(path), text, ranks)
    said = {key: value for key, value in _flat(changes) if can_say(foreign, key, value)}
    return written(path, said, text=text, ranks=ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnFile:
    """A tuned file of another tool: its text, the changes in its keys, and the command that runs it."""

    tool: str
    name: str  # of the user's file
    text: str
    words: str
    command: str  # up to the file's name

    @classmethod
    def of(cls, origin: Mapping[str, object], changes: Mapping[str, object]) -> "OwnFile":
        """The file that a recipe was, with `changes`. Raises ConfigError where the tool would read it otherwise."""
        tool, name = str(origin["tool"]), Path(str(origin["path"])).name
        set_first = [f"{k.removeprefix(_ENV)}={v}" for k, v in _flat(changes) if k.startswith(_ENV) and v is not None]
        command = "bash" if Path(name).suffix in SCRIPTS else _RUNS[tool]
        return cls(
            tool=tool, name=name, text=opened_text(own_text(origin, changes)),
            words=own_words(origin, changes) or "as it was",
            command=" ".join((*set_first, command)),
        )  # fmt: skip


def has_key(origin: Mapping[str, object], key: str, values: Iterable[object]) -> bool:
    """True if the tool of the file that a recipe was has a key for one of these values of `key`, or its launch does."""
    if key.startswith((_ENV, _LAUNCH)):
        return True
    foreign = _read_origin(str(origin["path"]), str(origin["text"]), cast("int | None", origin["ranks"]))
    return any(can_say(foreign, key, value) for value in values)


@functools.lru_cache(maxsize=8)
def _read_origin(path: str, text: str, ranks: int | None) -> Foreign:
    found = read(Path(path), text=text, ranks=ranks)
    assert found is not None, path
    return found


# -- the text ---------------------------------------------------------------------------------------------------------


def _in_yaml(text: str, key: str, value: object) -> str:
    """`text` with the YAML's `key`, which may be a.b, set to `value`; comments stay."""
    key = key.lstrip("+")  # of a command
    *above, last = key.split(".")
    node = yaml.compose(text)
    if above and isinstance(node, yaml.MappingNode) and _pair(node, key) is not None:
        above, last = [], key  # a file of dotted keys
    for place, name in enumerate(above):
        pair = _pair(node, name) if isinstance(node, yaml.MappingNode) else None
        if pair is None and isinstance(node, yaml.MappingNode) and node.value:
            value = functools.reduce(lambda inner, outer: {outer: inner}, reversed([*above[place + 1 :], last]), value)
            last = name
            break
        node = None if pair is None else pair[1]
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{key} cannot be written: {above[-1] if above else 'the file'} is no mapping")
    shown = _flow(value)
    if (pair := _pair(node, last)) is not None:
        start, end = pair[1].start_mark.index, _end(pair[1])
        if start == end:  # `key:` with nothing after it
            start = end = text.index(":", pair[0].end_mark.index) + 1
            return f"{text[:start]} {shown}{text[end:]}"
        before = text[:start].rstrip()
        return f"{before} {shown}{text[end:]}" if before.endswith(":") else f"{text[:start]}{shown}{text[end:]}"
    if node.flow_style:
        end = node.end_mark.index - 1
        return f"{text[:end].rstrip()}{', ' if node.value else ''}{last}: {shown}{text[end:]}"
    column = node.value[0][0].start_mark.column
    end = _end(node.value[-1][1])
    end = text.find("\n", end) if "\n" in text[end:] else len(text)
    return f"{text[:end]}\n{' ' * column}{last}: {shown}{text[end:]}"


def _pair(node: yaml.MappingNode, name: str) -> tuple[yaml.Node, yaml.Node] | None:
    """The last pair of a mapping with this key, which is the one that counts."""
    return next((pair for pair in reversed(node.value) if pair[0].value == name), None)


def _end(node: yaml.Node) -> int:
    """End of a node: a block's own mark is behind the comments that follow it."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    return int(node.end_mark.index)


def _flow(value: object) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n").removesuffix("\n...")


def stated(path: Path, text: str) -> dict[str, object]:
    """{key: value} that the `text` of a file of another tool sets: for a script, the values of its first training.

    Raises ConfigError for a YAML that cannot be read.
    """
    if path.suffix not in SCRIPTS:
        content = parse_yaml(text)
        return {str(key): value for key, value in content.items()} if isinstance(content, Mapping) else {}
    begins = {command.start: command for command in commands(text)}
    start = verls_span(text)[0] if starts_verl(text) else getattr(_first_of(text, path.resolve().parent), "start", -1)
    first = begins.get(start)
    return {} if first is None else {**first.variables, **_arguments(first.words)}


def _arguments(words: Sequence[str]) -> dict[str, object]:
    """{name: value} of `--name value`, `--name=value`, `--flag` and `a.b=value`; the last of several counts."""
    found: dict[str, object] = {}
    name = ""
    for word in words:
        key, equals, value = word.partition("=")
        if key.startswith("--") or (equals and "." in key):
            name = "" if equals else key[2:]
            found[key.lstrip("-+")] = value if equals else True
        elif name:
            found[name] = word if found[name] is True else f"{found[name]} {word}"
    return found


def _editor(path: Path, tool: str) -> Callable[[str, str, object], str]:
    """Function that sets a key to a value in the text of the file `path` of a tool."""
    if path.suffix not in SCRIPTS:
        return _in_yaml
    return _in_verls_script if tool == VERL.name else functools.partial(_in_script, folder=path.resolve().parent)


def _first_of(text: str, folder: Path) -> Command | None:
    """The first training that a script in `folder` starts, but for verl's."""
    first = first_training(text, folder)
    return None if first is None else first[1]


def _in_script(text: str, key: str, value: object, *, folder: Path) -> str:
    """`text` with `--key` of the first training that it starts set to `value`, None: without it; all else stays."""
    command = _first_of(text, folder)
    if command is None:
        raise ConfigError(ms_swift.NOT_STARTED)
    start, end = command.start, command.end
    shown = _words(value)
    given = re.compile(rf"(?<=\s)--{re.escape(key)}(?:=|(?:\s|\\\n)+)(?!--){_WORD}(?:(?:[ \t]|\\\n)+(?!-|`#){_WORD})*")
    places = list(given.finditer(text, start, end))
    places = places or list(re.compile(rf"(?<=\s)--{re.escape(key)}(?=\s|$)").finditer(text, start, end))  # a flag
    if value is None:
        for found in reversed(places):
            text = text[: found.start()] + text[found.end() :]
        return text
    if places:  # of several, the last counts
        found = places[-1]
        return f"{text[: found.start()]}--{key} {shown}{text[found.end() :]}"
    return f"{text[:end].rstrip()} \\\n    --{key} {shown}{text[end:]}"


def _in_verls_script(text: str, key: str, value: object) -> str:
    """`text` with the override `key=` set to `value`: where it stands once, else behind the first training's command.

    The last of several overrides of a key is the one that counts.
    """
    name, shown = key.lstrip("+"), override(key, value)
    places = list(re.finditer(rf"""(?<=[\s(])(['"]?)(\+{{0,2}}){re.escape(name)}=(?:(?=\s)|{_WORD}|[^\s'"]*)""", text))
    if len(places) == 1 and not places[0][1] and text.count(f"{name}=") == 1:
        found = places[0]
        return f"{text[: found.start()]}{found[2]}{shown.lstrip('+')}{text[found.end() :]}"
    _, end = verls_span(text)
    command = text[:end].rstrip()
    return f"{command} \\\n    {shown}{text[len(command) :]}"


def override(key: str, value: object) -> str:
    """`a.b=8`, as hydra takes it in a shell."""
    return shlex.quote(f"{key}={'null' if value is None else _flow(value)}")


def _words(value: object) -> str:
    """The words of a command line that say `value`; a list is one word each."""
    return " ".join(map(_shell, value if isinstance(value, list) else [value]))


def _shell(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return shlex.quote(json.dumps(value))
    if value is None or isinstance(value, int | float | str):
        return shlex.quote(str(value))
    raise ConfigError(f"{quoted(value)} cannot be written in a command line")
