"""A recipe as given: a YAML file, read within limits of size and time, a mapping, TRL's config objects. No torch.

With the kinds of values that a field of a trainer's config takes.
"""

import dataclasses
import os
import re
import types
import typing
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, field
from enum import Enum
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar, Protocol, cast

import yaml

from autofit.errors import ConfigError, printable, quoted
from autofit.files import regular_bytes

MOST_BYTES = 128 * 1024  # of a file; the largest recipe we know of has 6 KB
_MOST_VALUES = 20_000  # of a file, aliases counted as often as they are used
_MOST_LEVELS = 30
_MOST_DIGITS = 40  # of a number
_TAG = "tag:yaml.org,2002:"
_PLAIN = {"str", "int", "float", "bool", "null", "seq", "map", "merge"}


def read_yaml_mapping(path: Path, *, what: str) -> dict[str, object]:
    """The mapping in the YAML file `path`; `what` names it in the errors ("recipe", "search space").

    Raises ConfigError for anything but a regular file of at most 128 KiB, in YAML, of plain values alone
    (text, numbers, true, false, null, lists, mappings).
    """
    if what in ("recipe", "file") and path.suffix in (".py", ".ipynb"):
        name = printable(str(path), 200)
        raise ConfigError(f"{name} is a Python script; on a simulated card: autofit fit-check --gpu NAME {name}")
    try:
        text = _text(path)
    except ConfigError as error:
        raise ConfigError(f"the {what} {printable(str(path), 200)} {error}") from error
    try:
        content = parse_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"the {what} {path}: {error}") from error
    if not isinstance(content, dict):
        kind = {list: "a list", type(None): "empty", str: "text"}.get(type(content), f"a {type(content).__name__}")
        raise ConfigError(f"the {what} {path} must be a YAML mapping (key: value lines); it is {kind}")
    wrong = [key for key in content if not isinstance(key, str)]
    if wrong:
        raise ConfigError(f"the {what} {path}: every key must be text; got {quoted(wrong[0])}")
    return cast(dict[str, object], content)


def parse_yaml(text: str) -> object:
    """The plain value that the YAML `text` says. Raises ConfigError, in one line."""
    try:
        return _plain_value(text)
    except ConfigError:
        raise
    except yaml.YAMLError as error:
        problem = _one_line(error)
    except RecursionError:
        problem = f"nested too deeply; at most {_MOST_LEVELS} levels"
    except (ValueError, TypeError, LookupError, ArithmeticError) as error:  # PyYAML's own, of a value of no such kind
        problem = f"a value is not what its tag says: {error}"
    raise ConfigError(f"not valid YAML: {printable(problem, 200)}")


def _plain_value(text: str) -> object:
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check(node)
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _text(path: Path) -> str:
    """Content of the file. Opened at once and checked, so that a pipe or a device is refused unread."""
    try:
        content, _ = regular_bytes(path, most=MOST_BYTES, what="a YAML file")
        return of_notebook(content.decode("utf-8"))
    except ConfigError:
        raise
    except FileNotFoundError as error:
        raise ConfigError("does not exist; give the path of a YAML file") from error
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"must be UTF-8 text; byte {error.start} is not valid") from error
    except ValueError as error:  # a null byte in the path
        raise ConfigError(f"is no path of a file: {error}") from error


def of_notebook(text: str) -> str:
    """`text` with a notebook's mark on its first line (`%%writefile FILE`) as a comment."""
    return f"# {text}" if text.startswith("%%") else text


# What PyYAML was reading: it notices an error of these lines later than where it is, and of a bracket perhaps.
_WHERE_BEGUN = {
    "while scanning a simple key": "a line without the ':' of key: value",
    "while scanning a quoted scalar": "a quotation mark without its end",
}
_BRACKETS = {"while parsing a flow sequence": "[", "while parsing a flow mapping": "{"}


def _one_line(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or " ".join(str(error).split())
    context, begun = getattr(error, "context", None) or "", getattr(error, "context_mark", None)
    bracket = _BRACKETS.get(context, "")
    within = f", within the {bracket} of line {begun.line + 1}" if bracket and begun is not None else ""
    if context in _WHERE_BEGUN and begun is not None:
        problem, mark = _WHERE_BEGUN[context], begun
    if problem == "mapping values are not allowed here":
        problem = "a ':' where no key may stand: the line is indented too far, or a text with ': ' has no quotes"
    if "'\\t'" in problem:
        problem = "a tab, where YAML takes spaces only"
    return f"{problem} (line {mark.line + 1}, column {mark.column + 1}){within}" if mark else problem


# -- what a plain value is --------------------------------------------------------------------------------------------


def _check(top: yaml.Node) -> None:
    """Raise ConfigError unless `top` is plain values, few enough, with every key once."""
    for values, (node, levels) in enumerate(_nodes(top), start=1):
        if values > _MOST_VALUES:
            raise ConfigError(f"more than {_MOST_VALUES:,} values, those of aliases (*name) counted at each use")
        if levels > _MOST_LEVELS:
            raise ConfigError(f"nested too deeply, or an alias (*name) inside itself; at most {_MOST_LEVELS} levels")
        _check_one(node)


def _nodes(top: yaml.Node) -> Iterator[tuple[yaml.Node, int]]:
    """Every node below `top` with the number of levels above it, each as often as it is used."""
    left = [(top, 0)]
    while left:
        node, levels = left.pop()
        yield node, levels
        if isinstance(node, yaml.SequenceNode):
            left += [(child, levels + 1) for child in node.value]
        elif isinstance(node, yaml.MappingNode):
            left += [(child, levels + 1) for pair in node.value for child in pair]


def _check_one(node: yaml.Node) -> None:
    line = node.start_mark.line + 1
    tag = node.tag.removeprefix(_TAG)
    if tag == "timestamp":
        raise ConfigError(f"line {line}: {printable(str(node.value), 40)} is read as a date; put it in quotes")
    if tag not in _PLAIN or (tag == "seq") != isinstance(node, yaml.SequenceNode):
        raise ConfigError(
            f"line {line}: a value must be text, a number, true, false, null, a list or a mapping; got "
            f"{printable(node.tag.replace(_TAG, '!!'), 60)}"
        )
    if tag in ("int", "float") and len(node.value) > _MOST_DIGITS:
        raise ConfigError(
            f"line {line}: a number may have at most {_MOST_DIGITS} digits; this one has {len(node.value)}"
        )
    if isinstance(node, yaml.MappingNode):
        _check_keys(node, line)


def _check_keys(node: yaml.MappingNode, line: int) -> None:
    keys = [key for key, _ in node.value]
    wrong = next((key for key in keys if not isinstance(key, yaml.ScalarNode)), None)
    if wrong is not None:
        raise ConfigError(f"line {wrong.start_mark.line + 1}: a key must be text, and is a list or a mapping")
    twice = sorted(
        name for name, times in Counter(str(key.value) for key in keys).items() if times > 1 and name != "<<"
    )
    if twice:
        raise ConfigError(
            f"each key may appear only once; given twice: {printable(', '.join(twice), 120)}; remove one of them "
            f"(line {line} and below)"
        )


# -- the files of this machine that a recipe may name -----------------------------------------------------------------

_folder: str | None = None  # of the process, whose threads read too


@contextmanager
def only_below(folder: Path) -> Iterator[None]:
    """Context in which a recipe may only read files in `folder` or below."""
    global _folder
    before, _folder = _folder, os.path.abspath(folder)
    try:
        yield
    finally:
        _folder = before


def is_open() -> bool:
    """True if a recipe may name any file."""
    return _folder is None


def may_read(path: str | os.PathLike[str]) -> bool:
    """True if a recipe may name `path`, by its spelling alone."""
    return _folder is None or Path(os.path.abspath(path)).is_relative_to(_folder)


# -- sources of a recipe ----------------------------------------------------------------------------------------------

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
    """`value` of the recipe's `key` as YAML holds it. Raises ConfigError for an unsupported one."""
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
    """{key: plain value} from which TRL makes `part` again: the independent values that differ from the defaults.

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
    """An object of `kind`, unless TRL refuses these values."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return kind(**{k: list(v) if isinstance(v, list) else v for k, v in values.items()})
        except (ValueError, TypeError, ImportError):
            return None


def _same(one: object, other: object) -> bool:
    return one == other or repr(one) == repr(other)


# -- whether a value of YAML can stand for a field of a dataclass, and how the field's type reads ---------------------

# Allowed values, in JSON types: a name of _IS, "any", or a list of the values.
Kind = str | list[Any]

_IS: dict[str, Callable[[object], bool]] = {
    "list": lambda value: isinstance(value, list), "mapping": lambda value: isinstance(value, dict),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "whole number": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "null": lambda value: value is None, "text": lambda value: isinstance(value, str),
    "true or false": lambda value: isinstance(value, bool),
}  # fmt: skip
_OF_HINT: dict[Any, Kind] = {
    float: "number", int: "whole number", type(None): "null", dict: "mapping", list: "list", str: "text",
    bool: "true or false",
}  # fmt: skip


def kinds(hint: Any) -> list[Kind]:
    """The kinds of YAML values that can stand for a field annotated `hint`; an unknown one takes any."""
    if hint is Any or isinstance(hint, str) or hint is object:
        return ["any"]
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return [kind for arm in typing.get_args(hint) for kind in kinds(arm)]
    if origin is typing.Literal:
        return [list(typing.get_args(hint))]
    if origin in (list, tuple):
        return ["list"]
    if origin is dict:
        return ["mapping"]
    return [_OF_HINT.get(hint, "any")]


def is_one_of(value: object, known: Iterable[Kind]) -> bool:
    """True if `value` is of one of these kinds (a whole number passes for a number, true and false for neither)."""
    return any(kind == "any" or (value in kind if isinstance(kind, list) else _IS[kind](value)) for kind in known)


def accepts(value: object, hint: Any) -> bool:
    """True if a YAML value can stand for a field annotated `hint`."""
    return is_one_of(value, kinds(hint))


def readable(hint: Any) -> str:
    """The type `hint` in words."""
    text = re.sub(r"<class '([\w.]+)'>", r"\1", str(hint)).replace("typing.", "")
    words = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}
    words |= {f"{name} | None": f"{word} or null" for name, word in words.items()}
    return words.get(text, text)
