"""Whether a YAML value can stand for a field of a dataclass, and how the field's type reads."""

import re
import types
import typing
from typing import Any

# What a value may be, in JSON types: a name of _IS, "any", or a list of values of which it is one.
Kind = str | list[Any]

_IS: dict[str, typing.Callable[[object], bool]] = {
    "list": lambda value: isinstance(value, list),
    "mapping": lambda value: isinstance(value, dict),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "whole number": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "null": lambda value: value is None,
    "text": lambda value: isinstance(value, str),
    "true or false": lambda value: isinstance(value, bool),
}
_OF_HINT: dict[Any, Kind] = {
    float: "number", int: "whole number", type(None): "null", dict: "mapping", list: "list", str: "text",
    bool: "true or false",
}  # fmt: skip


def kinds(hint: Any) -> list[Kind]:
    """The kinds of YAML values that can stand for a field annotated `hint`: one that is not known takes any."""
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


def is_one_of(value: object, known: typing.Iterable[Kind]) -> bool:
    """Whether `value` is of one of these kinds (a whole number passes for a number, true and false for neither)."""
    return any(kind == "any" or (value in kind if isinstance(kind, list) else _IS[kind](value)) for kind in known)


def accepts(value: object, hint: Any) -> bool:
    """Whether a YAML value can stand for a field annotated `hint`."""
    return is_one_of(value, kinds(hint))


def readable(hint: Any) -> str:
    """The type `hint` in words."""
    text = re.sub(r"<class '([\w.]+)'>", r"\1", str(hint)).replace("typing.", "")
    words = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}
    words |= {f"{name} | None": f"{word} or null" for name, word in words.items()}
    return words.get(text, text)
