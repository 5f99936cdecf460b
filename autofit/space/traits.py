"""Traits: all that is known of a knob besides its values, from its entry in a search space or from `knobs.yaml`.

And the changes of a candidate in words: as options of the command line, and what each does to memory and time.
"""

import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, cast, get_args

import yaml

from autofit.errors import ConfigError
from autofit.recipe.recipe import inner_value, own_value
from autofit.recipe.yaml_file import read_yaml_mapping

SHARED_FILE = "knobs.yaml"  # in search_spaces/: what the entries of all spaces have in common
Less = Literal["any", "lower"]
Speed = Literal["first", "early", "none"]


class Reach(StrEnum):
    COMPARED = "compared"  # the proof trains with it
    HARMLESS = "harmless"  # by construction, cannot change a gradient
    KERNEL = "kernel"  # computes the same function, but does not run on a CPU
    OTHER = "other"  # has effects that a gradient on fixed rollouts in float32 does not show


UNPROVEN = {
    Reach.COMPARED: "",
    Reach.HARMLESS: "neutral by construction: it changes memory or logs, not arithmetic",
    Reach.KERNEL: "the same function with other kernels or on other devices, which the proof cannot run on one CPU",
    Reach.OTHER: "it has effects that a gradient on fixed samples in float32 does not show, or the trainer's "
    "`compared` lacks it",
}
_LAST = 10**6  # the place of a knob that has none


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Effects of a knob, and its use in estimates, searches, proofs and rescues; `knobs.yaml` explains each field."""

    what: str = ""  # its effect on memory and time, for people
    also: tuple[str, ...] = ()  # other keys of a recipe by which it is known
    less: Less | tuple[object, ...] | None = None  # values that may need less memory, where no order of memory says it
    than: tuple[object, ...] | None = None  # the recipe's values than which those may need less; None: any
    frees: Literal["all"] | tuple[str, ...] | None = None  # categories that it may free; None: those of a batch
    phases: tuple[str, ...] | None = None  # that it changes, of a step; None: any
    offloads: bool = False  # whether it moves something into the memory of the host
    loads: bool = False  # it changes the bytes held once the models are loaded, before any batch
    beside: Mapping[str, object] | None = None  # settings of other knobs that it is tried with where it needs them
    joint: tuple[str, ...] = ()  # knobs whose effect it changes, or `padding`: both changes have a trace together
    place: int = _LAST  # in the order in which a practitioner tries settings that need less memory
    speed: Speed | None = None  # when it is tried for its speed; None: after the others, `none`: never
    shortens: tuple[str, ...] | None = None  # the only phases of a step that it may make shorter; None: any
    advised: bool = False  # for its speed, though it changes the recipe
    proof: Reach | None = None  # how far a gradient proof reaches; None: the trainer's `compared` says it
    why: str = ""  # why the proof does not reach it; "": as for others of its kind
    restarts: bool = False  # a checkpoint is of no use after a change: the run starts anew

    def to_json(self) -> dict[str, object]:
        """The stated traits, as an entry of a space file has them."""
        plain = Traits()
        said = {name: value for name, value in asdict(self).items() if value != getattr(plain, name)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in said.items()}

    @property
    def unproven(self) -> str:
        """Reason why a gradient proof leaves the knob out; "" if it compares it."""
        return self.why or UNPROVEN[self.proof or Reach.COMPARED]


NAMES = tuple(field.name for field in fields(Traits))


def read_traits(where: str, name: str, entry: Mapping[str, object]) -> Traits:
    """The traits of the knob `name`: those of its `entry`, over the common ones of all spaces. Raises ConfigError."""
    return replace(_shared(name), **_stated(where, entry))


def traits_of(key: str, stated: Mapping[str, object] | None = None) -> Traits:
    """The traits of a recipe's key; `stated` has those that a study's space sets itself. By default the table's."""
    own = (stated or {}).get(key)
    if isinstance(own, Mapping):
        return Traits(**_stated(key, own))
    return _shared(key)


def stated_traits(knobs: Iterable[tuple[str, Traits]]) -> dict[str, object]:
    """{knob: its traits} for those that differ from what all spaces have in common, as JSON for `traits_of`."""
    return {name: traits.to_json() for name, traits in knobs if traits != _shared(name)}


@cache
def shared_traits() -> Mapping[str, Traits]:
    """{key: its traits} of `knobs.yaml`, which all space files have in common."""
    path = Path(str(resources.files("autofit.search_spaces").joinpath(SHARED_FILE)))
    entries = cast("Mapping[str, Mapping[str, object]]", read_yaml_mapping(path, what="table of knobs"))
    return {name: Traits(**_stated(f"{SHARED_FILE}, knob {name}", entry)) for name, entry in entries.items()}


def _shared(key: str) -> Traits:
    """The traits of a key that all spaces have in common, by whichever of its names."""
    return shared_traits().get(key) or _by_other_name().get(key) or Traits()


@cache
def _by_other_name() -> Mapping[str, Traits]:
    return {other: traits for traits in shared_traits().values() for other in traits.also}


def _stated(where: str, entry: Mapping[str, object]) -> dict[str, Any]:
    """The arguments of `Traits` that an `entry` gives, checked. Raises ConfigError."""
    given = {name: entry[name] for name in NAMES if name in entry}
    kinds: Mapping[str, tuple[type, ...]] = {
        "what": (str,), "why": (str,), "place": (int,), "advised": (bool,), "restarts": (bool,),
        "loads": (bool,), "offloads": (bool,), "beside": (dict,),
        "also": (list, tuple), "than": (list, tuple), "phases": (list, tuple), "joint": (list, tuple),
        "shortens": (list, tuple),
    }  # fmt: skip
    for name, kind in kinds.items():
        if name in given and (not isinstance(given[name], kind) or (kind == (int,) and isinstance(given[name], bool))):
            raise ConfigError(f"{where}: {name} must be {_KINDS[kind[0]]}; got {given[name]!r}")
    for name in ("also", "than", "less", "frees", "phases", "joint", "shortens"):
        if isinstance(given.get(name), list):
            given[name] = tuple(cast("list[object]", given[name]))
    if "less" in given and not isinstance(given["less"], tuple) and given["less"] not in get_args(Less):
        raise ConfigError(f"{where}: less must be any, lower or a list of values; got {given['less']!r}")
    if "frees" in given and not isinstance(given["frees"], tuple) and given["frees"] != "all":
        raise ConfigError(f"{where}: frees must be all or a list of categories of memory; got {given['frees']!r}")
    if "speed" in given and given["speed"] not in get_args(Speed):
        raise ConfigError(f"{where}: speed must be one of {', '.join(get_args(Speed))}; got {given['speed']!r}")
    if "proof" in given:
        if given["proof"] not in list(Reach):
            raise ConfigError(f"{where}: proof must be one of {', '.join(Reach)}; got {given['proof']!r}")
        given["proof"] = Reach(str(given["proof"]))
    return given


_KINDS: Mapping[type, str] = {
    str: "text", int: "a whole number", bool: "true or false", list: "a list",
    dict: "a mapping such as {use_peft: true}",
}  # fmt: skip


# -- in words ---------------------------------------------------------------------------------------------------------


def reason_for(key: str, stated: Mapping[str, object] | None = None) -> str:
    """Effect of the setting `key` on memory and time; "" if both `stated` and the table of knobs lack it."""
    return traits_of(key, stated).what


def samples_word(original: Mapping[str, object]) -> str:
    """The name of the samples that the trainer of the recipe `original` counts: "completions" (GRPO) or "samples"."""
    return "completions" if "num_generations" in original else "samples"


def describe_changes(
    changes: Mapping[str, object], original: Mapping[str, object], names: Mapping[str, str] | None = None
) -> str:
    """`per_device_train_batch_size 2 -> 8, gradient_checkpointing True -> False`, or `the recipe as it is`.

    `names` are those that the user's own file has for keys of the recipe, "" for a key that follows from others.
    """
    parts, known = [], names or {}
    for key, value in changes.items():
        if not (name := _short(known.get(key, key), known.values())):
            continue
        own = inner_value(original, key) if "." in key else original.get(key)
        if key == "env" and isinstance(value, Mapping):
            parts += [f"{variable}={setting}" for variable, setting in value.items()]
        elif own == value or (own is None and "." in key):  # it had no effect before, or is a default by another name
            parts.append(f"{name} {own_value(names, key, value)}")
        else:
            parts.append(f"{name} {own_value(names, key, own)} -> {own_value(names, key, value)}")
    return ", ".join(parts) or "the recipe as it is"


def _short(name: str, others: Iterable[str] = ()) -> str:
    """The name of a setting; of one far inside, which is long, the fewest last parts that are unique to it."""
    parts = name.split(".")
    endings = (".".join(parts[at:]) for at in range(len(parts) - 1, 0, -1))
    shared = {other for other in others if other != name}
    return next((end for end in endings if len(parts) > 2 and not any(_ends(o, end) for o in shared)), name)


def _ends(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def describe_left_out(left_out: Mapping[str, str]) -> str:
    """`use_vllm: vllm is not installed (pip install vllm); dtype, optim: it needs a GPU`, one part for each reason."""
    by_reason: dict[str, list[str]] = {}
    for knob, reason in left_out.items():
        by_reason.setdefault(reason, []).append(_short(knob))
    return "; ".join(f"{', '.join(knobs)}: {reason}" for reason, knobs in by_reason.items())


def set_options(changes: Mapping[str, object]) -> str:
    """The changes as a shell takes them: `--set lora_r=8 --set dtype=bfloat16`; None removes a key (`null`)."""
    return " ".join(f"--set {shlex.quote(f'{key}={_as_yaml(value)}')}" for key, value in changes.items())


def _as_yaml(value: object) -> str:
    if isinstance(value, Mapping | list | tuple):
        return json.dumps(value if isinstance(value, list | tuple) else dict(value))  # JSON is YAML
    return yaml.safe_dump(value, width=10**6).removesuffix("...\n").strip()
