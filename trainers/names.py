"""Settings with more than one name: the names that the installed TRL takes, and the one that a recipe goes by.

Nothing here is a table of versions. A pair of names counts if the installed dataclass takes both, and an object made
with the older one alone has its value under the newer one.
"""

import importlib
import re
import typing
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib.metadata import version
from types import ModuleType
from typing import Any

from autofit.recipe.keys import RENAMED
from autofit.recipe.yaml_file import accepts

# The script whose parser reads a trainer's recipes: TRL's own, or one of ours in the same form.

_OURS = {"hf": "hf_script"}


def is_trls(trainer: str) -> bool:
    """True if `trl <trainer>` is a command."""
    return trainer not in _OURS


def command_of(trainer: str) -> str | None:
    """The command that trains a recipe without autofit, before its file's name; None: there is none."""
    return f"trl {trainer} --config" if is_trls(trainer) else None


def script_name(trainer: str) -> str:
    """The name of the module with the `make_parser` of `trainer`."""
    ours = _OURS.get(trainer)
    return f"trl.scripts.{trainer}" if ours is None else f"{__package__}.{ours}"


def script(trainer: str) -> ModuleType:
    """The module with the `make_parser` of `trainer`."""
    return importlib.import_module(script_name(trainer))


def parser_of(trainer: str) -> Any:
    """A parser of the recipes of `trainer`."""
    return script(trainer).make_parser()


_TRIED = (True, False, 3, 2.5, {"use_reentrant": False})  # values for a field of any type that has been renamed so far
_SAFE = {"use_cpu": True, "bf16": False}  # a config made for a look at it starts no GPU and asks for no feature of one


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A recipe that calls each setting by one name."""

    values: Mapping[str, object]
    resolved: Mapping[str, object]  # every key in use and its value
    other_names: Mapping[str, str]  # {a name that the recipe does not use: the name that it does}
    notes: tuple[str, ...]  # what was changed in the recipe for this, a sentence each

    def name_of(self, key: str) -> str:
        """The recipe's name of the setting `key`, which may lie inside another ("outer.inner")."""
        outer, dot, inner = key.partition(".")
        return f"{self.other_names.get(outer, outer)}{dot}{inner}"


def installed() -> str:
    """`TRL 1.16.0 with transformers 5.23.0`."""
    return f"TRL {version('trl')} with transformers {version('transformers')}"


def renamed(key: str, known: Collection[str]) -> str | None:
    """The name in `known` of the setting that was, or will be, called `key`; None if it was not renamed."""
    others = [old if key == new else new for old, new in RENAMED if key in (old, new)]
    return next((name for name in others if name in known), None)


@cache
def synonyms(trainer: str) -> Mapping[str, tuple[str, ...]]:
    """{name: its older names that `trl <trainer>` takes too}, for every setting with several names."""
    found: dict[str, tuple[str, ...]] = {}
    for kind in _kinds(trainer):
        names = {f.name for f in fields(kind) if f.init}
        for old, new in dict.fromkeys((*RENAMED, *_announced(kind, names))):
            if {old, new} <= names and _copies(kind, old, new):
                found[new] = (*found.get(new, ()), old)
    return found


def overridden(trainer: str, values: Mapping[str, object], changed: Collection[str]) -> dict[str, object]:
    """`values` without the other names of the `changed` keys, which the user has given besides the recipe."""
    return overridden_by(synonyms(trainer), values, changed)


def overridden_by(
    known: Mapping[str, Collection[str]], values: Mapping[str, object], changed: Collection[str]
) -> dict[str, object]:
    """As `overridden`, where the `synonyms` of the trainer are known."""
    dropped: set[str] = set()
    for new, older in known.items():
        group = {new, *older}
        if group & set(changed):
            dropped |= group - set(changed)
    return {key: value for key, value in values.items() if key not in dropped}


def one_name_each(trainer: str, values: Mapping[str, object], resolved: Mapping[str, object]) -> Named:
    """The recipe `values` with one name for each setting: the given name, or the newest if it gives none or several.

    `resolved` is what TRL's parser makes of `values`; it has the value that the trainer would use.
    """
    kept, found, notes = dict(values), dict(resolved), []
    other = {name: key for name in _all_names() if name not in found and (key := renamed(name, found))}
    for new, older in synonyms(trainer).items():
        group, value = (*older, new), resolved[new]
        given = [name for name in group if name in values]
        used = given[0] if len(given) == 1 else new
        if len(given) > 1:
            both = " and ".join(f"{name}: {values[name]}" for name in given)
            notes.append(f"{both} are one setting by two names; {installed()} uses {value}, kept as {new}")
            kept[new] = value
        for name in group:
            if name != used:
                kept.pop(name, None)
                found.pop(name, None)
        found[used] = value
        other = {name: used if key in group else key for name, key in other.items()}
        other |= {name: used for name in group if name != used}
    return Named(values=kept, resolved=found, other_names=other, notes=tuple(notes))


def _all_names() -> Iterator[str]:
    return (name for pair in RENAMED for name in pair)


def _kinds(trainer: str) -> tuple[type, ...]:
    return tuple(parser_of(trainer).dataclass_types)


def _announced(kind: type, names: Collection[str]) -> Iterator[tuple[str, str]]:
    """(older, newer) for the deprecated fields of `kind` whose help text names another field.

    Looks at base classes too: TRL repeats some fields of transformers with a help text of its own.
    """
    for base in kind.__mro__:
        for name, field in getattr(base, "__dataclass_fields__", {}).items():
            text = field.metadata.get("help") or ""
            if text.startswith("Deprecated"):
                yield from ((name, said) for said in re.findall(r"`(\w+)`", text)[:1] if said in names)


def _copies(kind: type, old: str, new: str) -> bool:
    """True if an object of `kind` made with `old` alone has that value as `new`, for a value unlike `new`'s default."""
    usual, hint = getattr(_made(kind, {}), new), typing.get_type_hints(kind)[old]
    tried = (value for value in _TRIED if value != usual and accepts(value, hint))
    return any(getattr(_made(kind, {old: value}), new, usual) == value for value in tried)


def _made(kind: type, values: Mapping[str, Any]) -> object | None:
    """An object of the dataclass `kind`, or None if it refuses `values`."""
    safe = {key: value for key, value in _SAFE.items() if key in {f.name for f in fields(kind)}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # these are deprecated names, given on purpose
        try:
            return kind(**{**safe, **values})  # type: ignore[no-any-return]
        except (ValueError, TypeError):
            return None
