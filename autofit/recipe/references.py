"""`${name}` in the values of a pipeline file: which names stand there, and the values with something else in place."""

import re
from collections.abc import Callable, Iterator, Mapping

_REFERENCE = re.compile(r"\$\$|\$\{([^}]*)\}")  # `$$` is a plain dollar sign


def names_in(value: object) -> Iterator[str]:
    """The names in `${...}` anywhere inside `value`: text, or lists and mappings of it."""
    if isinstance(value, str):
        yield from (match[1].strip() for match in _REFERENCE.finditer(value) if match[1] is not None)
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from names_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from names_in(inner)


def replaced(value: object, values: Mapping[str, object], *, last: bool = True) -> object:
    """`value` with each `${name}` replaced by `values[name]`; a text that is one reference takes that value's type.

    Names that `values` lacks stay as they are. `$$` becomes `$` in the `last` round.
    """
    if isinstance(value, Mapping):
        return {key: replaced(inner, values, last=last) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [replaced(inner, values, last=last) for inner in value]
    if not isinstance(value, str):
        return value
    whole = _REFERENCE.fullmatch(value)
    if whole is not None and whole[1] is not None and whole[1].strip() in values:
        return values[whole[1].strip()]
    return _REFERENCE.sub(_text(values, last=last), value)


def _text(values: Mapping[str, object], *, last: bool) -> Callable[[re.Match[str]], str]:
    def text(match: re.Match[str]) -> str:
        if match[1] is None:
            return "$" if last else "$$"
        name = match[1].strip()
        return str(values[name]) if name in values else match[0]

    return text
