"""Whether a YAML value can stand for a field of a dataclass, and how the field's type reads."""

import re
import types
import typing
from typing import Any


def accepts(value: object, hint: Any) -> bool:
    """Whether a YAML value can stand for a field annotated `hint` (int passes for float, not bool for int)."""
    origin = typing.get_origin(hint)
    if hint is Any or isinstance(hint, str) or hint is object:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(accepts(value, arm) for arm in typing.get_args(hint))
    if origin is typing.Literal:
        return value in typing.get_args(hint)
    if origin in (list, tuple):
        return isinstance(value, list)
    if origin is dict or hint is dict:
        return isinstance(value, dict)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is type(None):
        return value is None
    return isinstance(value, hint) if isinstance(hint, type) and hint in (str, bool, list) else True


def readable(hint: Any) -> str:
    """The type `hint` in words."""
    text = re.sub(r"<class '([\w.]+)'>", r"\1", str(hint)).replace("typing.", "")
    return {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}.get(text, text)
