"""Search space files: YAML files of knobs, checked before the search starts."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any, cast

from autofit.errors import ConfigError, nearest
from autofit.recipe.keys import TIERS
from autofit.recipe.recipe import Recipe
from autofit.recipe.yaml_file import read_yaml_mapping
from autofit.space.knob import Condition, Knob, Value

_OURS = resources.files("autofit.search_spaces")
StatedSpace = str | os.PathLike[str] | Mapping[str, object] | Sequence[Knob]


def load_space(name: str | None, *, trainer: str | None) -> tuple[Knob, ...]:
    """The knobs of a space file: a path, a name in `search_spaces/`, or None for the trainer's own.

    Without `trainer`, a space for any trainer is accepted. Raises ConfigError.
    """
    path = _space_path(name or trainer or "")
    knobs = _knobs(read_yaml_mapping(path, what="search space"), f"the search space {path}", trainer)
    ours = path.resolve().parent == Path(str(_OURS)).resolve()
    return tuple(replace(knob, optional=True) for knob in knobs) if ours else knobs


def read_space(given: StatedSpace, *, trainer: str | None) -> tuple[Knob, ...]:
    """The knobs of a space as `load_space` takes it, of {knob: its entry in such a file}, or the knobs themselves."""
    if isinstance(given, Mapping):
        content = dict(given) if "knobs" in given else {"knobs": dict(given)}
        return _knobs({"trainer": trainer, **content}, "the search space", trainer)
    if isinstance(given, str | os.PathLike):
        return load_space(os.fspath(given), trainer=trainer)
    if not given or not all(isinstance(knob, Knob) for knob in given):
        raise ConfigError(f"--space must be a file, a mapping of knobs, or at least one Knob; got {given!r}")
    return tuple(given)


def space_knobs(recipe: Recipe, given: StatedSpace | None = None) -> tuple[Knob, ...]:
    """The knobs of the space that is `given`, or of the default space of the recipe's trainer."""
    default = str(recipe.space or recipe.trainer)
    return read_space(default if given is None else given, trainer=recipe.trainer_name or recipe.trainer)


def _knobs(content: Mapping[str, object], what: str, trainer: str | None) -> tuple[Knob, ...]:
    """The knobs of a space file's `content`; `what` names it in the errors."""
    wrong = sorted(set(content) - {"trainer", "knobs"})
    if wrong:
        raise ConfigError(f"{what} may only have the keys trainer and knobs; got {', '.join(wrong)}")
    if trainer is not None and content.get("trainer") != trainer:
        raise ConfigError(f"{what} is for trainer {content.get('trainer')!r}, but the recipe is for {trainer!r}")
    knobs = content.get("knobs")
    if not isinstance(knobs, dict) or not knobs:
        raise ConfigError(f"{what} must have a mapping `knobs` with at least one knob")
    return tuple(_knob(what, str(name), entry) for name, entry in knobs.items())


def _space_path(name: str) -> Path:
    if name.endswith((".yaml", ".yml")) or "/" in name:
        return Path(name)
    known = sorted(Path(str(entry)).stem for entry in _OURS.iterdir() if str(entry).endswith(".yaml"))
    if name not in known:
        raise ConfigError(f"there is no search space {name!r}{nearest(name, known)}; known: {', '.join(known)}")
    return Path(str(_OURS / f"{name}.yaml"))


def _knob(what: str, name: str, entry: object) -> Knob:
    where = f"{what}, knob {name}"
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: must be a mapping such as {{tier: neutral, values: [1, 2]}}; got {entry!r}")
    known = {"tier", "values", "cpu_values", "memory", "needs", "scales", "traced", "when", "sets", "unset",
             "values_need"}  # fmt: skip
    wrong = sorted(set(entry) - known)
    if wrong:
        raise ConfigError(f"{where}: unknown key {wrong[0]!r}{nearest(str(wrong[0]), known)}")
    if entry.get("tier") not in TIERS:
        raise ConfigError(f"{where}: tier must be one of {', '.join(TIERS)}; got {entry.get('tier')!r}")
    values, memory = entry.get("values"), entry.get("memory", "any")
    if memory not in ("ascending", "any"):
        raise ConfigError(f"{where}: memory must be ascending or any; got {memory!r}")
    if values != "solved" and (not isinstance(values, list) or not values):
        raise ConfigError(f"{where}: values must be a list with at least one value; got {values!r}")
    listed = () if values == "solved" else tuple(cast(list[Value], values))
    on_cpu = entry.get("cpu_values", [])
    if not isinstance(on_cpu, list) or (on_cpu and values == "solved"):
        raise ConfigError(f"{where}: cpu_values must be a list of further values; got {on_cpu!r}")
    if any(isinstance(v, list | dict) for v in (*listed, *on_cpu)):
        raise ConfigError(f"{where}: values must be plain (numbers, text, true, false); got {values!r}")
    return Knob(
        name=name,
        tier=entry["tier"],
        values=listed,
        cpu_values=tuple(on_cpu),
        solved=values == "solved",
        memory_ascending=memory == "ascending",
        needs=_texts(where, "needs", entry.get("needs", [])),
        scales=_texts(where, "scales", entry.get("scales", [])),
        traced=_switch(where, "traced", entry.get("traced", True)),
        when=_conditions(where, entry.get("when", {})),
        sets=tuple(_settings(where, "sets", entry.get("sets", {})).items()),
        unset=entry.get("unset"),
        values_need=_conditions(where, entry.get("values_need", {}), key="values_need"),
    )


def _conditions(where: str, value: object, *, key: str = "when") -> tuple[Condition, ...]:
    """`when` of a knob: {another knob: the value or values of it under which this one has an effect}.

    Also `values_need`: {a need: the value or values of this knob that have it}.
    """
    return tuple(
        (name, tuple(wanted) if isinstance(wanted, list) else (wanted,))
        for name, wanted in _settings(where, key, value, lists=True).items()
    )


def _settings(where: str, key: str, value: object, *, lists: bool = False) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"{where}: {key} must be a mapping such as {{use_vllm: true}}; got {value!r}")
    inner = [v for found in value.values() for v in (found if lists and isinstance(found, list) else [found])]
    if any(isinstance(v, list | dict) for v in inner):
        raise ConfigError(f"{where}: the values of {key} must be plain (numbers, text, true, false); got {value!r}")
    return value


def _switch(where: str, key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{where}: {key} must be true or false; got {value!r}")
    return value


def _texts(where: str, key: str, value: object) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise ConfigError(f"{where}: {key} must be a name or a list of names; got {value!r}")
    return tuple(items)
