"""A knob: one key of the recipe that may vary; and search space files, YAML files of knobs. Free of torch."""

import functools
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, cast

from autofit.errors import ConfigError, nearest, option
from autofit.recipe.keys import TIERS, Tier, divisors, weight_bits
from autofit.recipe.launch import Launch
from autofit.recipe.recipe import Recipe, inner_value
from autofit.recipe.yaml_file import read_yaml_mapping
from autofit.space.traits import NAMES, SHARED_FILE, Traits, read_traits, stated_traits, traits_of

Value = bool | int | float | str | None
Condition = tuple[str, tuple[Value, ...]]  # (a knob or a key of the recipe, the values under which it is met)
QUANTIZATION = "quantization"
ENV = "env."
SHARED = "launch."  # prefix of the knobs that say how ranks share the model
SERVER_RANKS = "launch.server_ranks"
LONGEST = "longest"  # in a space file the tokens of the longest prompt and completion, "longest x4" those of four
_SKIP = "\0skip"


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One key of the recipe that may vary. `values` are those of the space file, empty for a solved knob.

    A name with a dot is a key inside a mapping of the recipe: `model_init_kwargs.use_kernels`.
    """

    name: str
    tier: Tier
    values: tuple[Value, ...] = ()
    cpu_values: tuple[Value, ...] = ()  # further values if probes run on the CPU
    solved: bool = False
    memory_ascending: bool = False
    needs: tuple[str, ...] = ()
    scales: tuple[str, ...] = ()
    traced: bool = True  # False: the knob changes no allocation or kernel of a trace, so it needs none of its own
    when: tuple[Condition, ...] = ()  # all must be met, or the knob has no effect and keeps the recipe's value
    sets: tuple[tuple[str, Value], ...] = ()  # keys that are set with any change of this knob
    unset: Value = None  # what an inner key means that the recipe does not give
    values_need: tuple[tuple[str, tuple[Value, ...]], ...] = ()  # (a need, the values that have it)
    unless: tuple[tuple[str, tuple[Condition, ...]], ...] = ()  # (why it is left out, where the recipe has these)
    optional: bool = False  # True if a version that lacks the key leaves the knob out; else it is an error
    stated: Traits | None = None  # what its entry in a space says of it; None: there is no entry

    @property
    def traits(self) -> Traits:
        """Known properties of the knob besides its values."""
        return self.stated or traits_of(self.name)


def own_value(name: str, recipe: Recipe, unset: Value = None) -> Value:
    """The value that the recipe has for the knob `name`; `unset` for an inner key that it leaves out."""
    resolved = recipe.resolved
    if name == QUANTIZATION:
        bits = weight_bits(resolved)
        return "none" if bits is None else f"{bits}bit"
    if name.startswith(ENV):
        found = inner_value(recipe.values, name)
        return None if found is None else str(found)
    if name.startswith(SHARED) and name.removeprefix(SHARED) in Launch.__slots__:
        return cast(Value, getattr(recipe.launch, name.removeprefix(SHARED)))
    if "." in name:
        found = inner_value(resolved, name)
        return unset if found is None else cast(Value, found)
    if name == "attn_implementation" and resolved.get(name) is None:
        return "sdpa"  # transformers' default
    return cast(Value, resolved.get(name))


def choices_of(knob: Knob, recipe: Recipe) -> tuple[Value, ...]:
    """All values of `knob` in memory order: the solved divisors or the listed values, with the recipe's own value."""
    own = own_value(knob.name, recipe, knob.unset)
    if knob.solved:
        ranks = recipe.world_size if recipe.launch.server_ranks == 0 else 1  # a server may take or leave ranks
        per_rank = recipe.effective_batch_size // ranks
        solved = divisors(per_rank) | divisors(max(per_rank, recipe.generation_batch_size // ranks))
        return tuple(sorted(solved | {cast(int, own)}))
    values = list(listed_values(knob, recipe))
    if own not in values:
        values.append(own)
        if knob.memory_ascending and all(isinstance(v, int | float) for v in values):
            values.sort(key=lambda v: cast(float, v))
    return tuple(dict.fromkeys(values))


def listed_values(knob: Knob, recipe: Recipe) -> tuple[Value, ...]:
    """The values of the space file for this recipe; shares that its own value lacks are omitted.

    So are those with which a whole number that keeps its ratio would become a fraction, and those of a pass without
    gradients that fail to divide a rank's samples.
    """
    own = own_value(knob.name, recipe, knob.unset)
    values = [v for v in (_value(v, own, recipe) for v in knob.values) if v is not _SKIP]
    if knob.name in (recipe.keys.scored, recipe.keys.referred):
        each = recipe.passed_samples(knob.name)
        values = [v for v in values if isinstance(v, int) and each % v == 0]
    return tuple(v for v in values if all(_stays_whole(recipe.resolved.get(key), v, own) for key in knob.scales))


def _stays_whole(value: object, new: Value, old: Value) -> bool:
    numbers = (value, new, old)
    if not all(isinstance(number, int) and number > 0 for number in numbers):
        return True
    return isinstance(scaled_value(value, new, old), int)


def _value(listed: Value, own: Value, recipe: Recipe) -> Value:
    """`listed`, or for text such as "x0.5" that share of the recipe's own value.

    `_SKIP` if `own` is not a number, or if it is an integer and the share is not an integer above zero. Of the longest
    sample a rank has its part, where several share their samples.
    """
    if isinstance(listed, str) and listed.partition(" x")[0] == LONGEST:
        prompt, completion = recipe.longest_prompt_tokens, recipe.max_completion_tokens
        times = listed.partition(" x")[2] or "1"
        if prompt is None or completion is None or not times.isdecimal():
            return _SKIP
        return math.ceil((prompt + completion) / recipe.sharers) * int(times)
    if not (isinstance(listed, str) and listed[:1] == "x" and _is_number(listed[1:])):
        return listed
    if isinstance(own, bool) or not isinstance(own, int | float):
        return _SKIP
    scaled = float(listed[1:]) * own
    if isinstance(own, int):
        return round(scaled) if math.isclose(scaled, round(scaled)) and round(scaled) > 0 else _SKIP
    return scaled


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def scaled_value(value: object, new: Value, old: object) -> object:
    """`value` times new/old; an integer stays an integer if the result is whole."""
    assert isinstance(value, int | float)
    assert isinstance(new, int | float)
    assert isinstance(old, int | float)
    scaled = value * new / old
    return round(scaled) if isinstance(value, int) and math.isclose(scaled, round(scaled)) else scaled


_OURS = resources.files("autofit.search_spaces")
StatedSpace = str | os.PathLike[str] | Mapping[str, object] | Sequence[Knob]


def load_space(name: str | None, *, trainer: str | None) -> tuple[Knob, ...]:
    """The knobs of a space file: a path, a name in `search_spaces/`, or None for the trainer's own.

    Without `trainer`, a space for any trainer is accepted. Raises ConfigError.
    """
    path = _space_path(name or trainer or "")
    if path.resolve().parent == Path(str(_OURS)).resolve() and path.is_file():
        return _ours(path, path.stat().st_mtime_ns, trainer)
    return _knobs(read_yaml_mapping(path, what="search space"), f"the search space {path}", trainer)


@functools.cache  # 20 ms to parse each time, and a search reads its space in several places
def _ours(path: Path, _changed_ns: int, trainer: str | None) -> tuple[Knob, ...]:
    """The knobs of a file in `search_spaces/`, read again once it has changed."""
    knobs = _knobs(read_yaml_mapping(path, what="search space"), f"the search space {path}", trainer)
    return tuple(replace(knob, optional=True) for knob in knobs)


def read_space(given: StatedSpace, *, trainer: str | None) -> tuple[Knob, ...]:
    """The knobs of a space as `load_space` takes it, of {knob: its entry in such a file}, or the knobs themselves."""
    if isinstance(given, Mapping):
        content = dict(given) if "knobs" in given else {"knobs": dict(given)}
        return _knobs({"trainer": trainer, **content}, "the search space", trainer)
    if isinstance(given, str | os.PathLike):
        return load_space(os.fspath(given), trainer=trainer)
    if not given or not all(isinstance(knob, Knob) for knob in given):
        raise ConfigError(f"{option('space')} must be a file, a mapping of knobs, or at least one Knob; got {given!r}")
    return tuple(given)


def space_knobs(recipe: Recipe, given: StatedSpace | None = None) -> tuple[Knob, ...]:
    """The knobs of the space that is `given`, or of the default space of the recipe's trainer."""
    default = str(recipe.space or recipe.trainer)
    return read_space(default if given is None else given, trainer=recipe.trainer_name or recipe.trainer)


def stated_by(recipe: Recipe) -> dict[str, object]:
    """{knob: its traits, as JSON} for those that the default space of the recipe's trainer states itself."""
    with suppress(ConfigError):  # a trainer may have none
        return stated_traits((knob.name, knob.traits) for knob in space_knobs(recipe))
    return {}


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
    files = (Path(str(entry)) for entry in _OURS.iterdir())
    known = sorted(path.stem for path in files if path.suffix == ".yaml" and path.name != SHARED_FILE)
    if name not in known:
        raise ConfigError(f"there is no search space {name!r}{nearest(name, known)}; known: {', '.join(known)}")
    return Path(str(_OURS / f"{name}.yaml"))


def _knob(what: str, name: str, entry: object) -> Knob:
    where = f"{what}, knob {name}"
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: must be a mapping such as {{tier: neutral, values: [1, 2]}}; got {entry!r}")
    known = {"tier", "values", "cpu_values", "memory", "needs", "scales", "traced", "when", "sets", "unset",
             "values_need", "unless", *NAMES}  # fmt: skip
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
        name=name, tier=entry["tier"], values=listed, cpu_values=tuple(on_cpu), solved=values == "solved",
        memory_ascending=memory == "ascending", needs=_texts(where, "needs", entry.get("needs", [])),
        scales=_texts(where, "scales", entry.get("scales", [])),
        traced=_switch(where, "traced", entry.get("traced", True)), when=_conditions(where, entry.get("when", {})),
        sets=tuple(_settings(where, "sets", entry.get("sets", {})).items()), unset=entry.get("unset"),
        values_need=_conditions(where, entry.get("values_need", {}), key="values_need"),
        unless=_exceptions(where, entry.get("unless", {})), stated=read_traits(where, name, entry),
    )  # fmt: skip


def _conditions(where: str, value: object, *, key: str = "when") -> tuple[Condition, ...]:
    """`when` of a knob: {another knob: the value or values of it under which this one has an effect}.

    Also `values_need`: {a need: the value or values of this knob that have it}.
    """
    return tuple(
        (name, tuple(wanted) if isinstance(wanted, list) else (wanted,))
        for name, wanted in _settings(where, key, value, lists=True).items()
    )


def _exceptions(where: str, value: object) -> tuple[tuple[str, tuple[Condition, ...]], ...]:
    """`unless` of a knob: {why it is left out: {a key of the recipe: the value or values under which it is}}."""
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: unless must be a mapping of reasons to settings; got {value!r}")
    return tuple((str(why), _conditions(where, settings, key="unless")) for why, settings in value.items())


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
