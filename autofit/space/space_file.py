"""Search space files: YAML files of knobs, checked before the search starts."""

import os
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import cast

from autofit.errors import ConfigError, nearest
from autofit.recipe.keys import TIERS
from autofit.recipe.recipe import Recipe, read_yaml_mapping
from autofit.space.space import Knob, Value

StatedSpace = str | os.PathLike[str] | Mapping[str, object] | Sequence[Knob]


def load_space(name: str | None, *, trainer: str | None) -> tuple[Knob, ...]:
    """The knobs of a space file: a path, a name in `search_spaces/`, or None for the trainer's own.

    Without `trainer`, a space for any trainer is accepted. Raises ConfigError.
    """
    path = _space_path(name or trainer or "")
    return _knobs(read_yaml_mapping(path, what="search space"), f"the search space {path}", trainer)


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
    folder = resources.files("autofit.search_spaces")
    known = sorted(Path(str(entry)).stem for entry in folder.iterdir() if str(entry).endswith(".yaml"))
    if name not in known:
        raise ConfigError(f"there is no search space {name!r}{nearest(name, known)}; known: {', '.join(known)}")
    return Path(str(folder / f"{name}.yaml"))


def _knob(what: str, name: str, entry: object) -> Knob:
    where = f"{what}, knob {name}"
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: must be a mapping such as {{tier: neutral, values: [1, 2]}}; got {entry!r}")
    known = {"tier", "values", "cpu_values", "memory", "needs", "scales", "traced"}
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
    )


def _switch(where: str, key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{where}: {key} must be true or false; got {value!r}")
    return value


def _texts(where: str, key: str, value: object) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise ConfigError(f"{where}: {key} must be a name or a list of names; got {value!r}")
    return tuple(items)
