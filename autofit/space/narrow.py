"""Knobs and values that a space leaves free: by recipe, device, packages, launches; and its limits. Free of torch."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from itertools import chain
from typing import cast

from autofit.errors import ConfigError, nearest, quoted
from autofit.fakegpu.specs import gpu_spec
from autofit.hardware.hardware import BFLOAT16_CAPABILITY, simulated_twin
from autofit.recipe.catalogue import attention_heads
from autofit.recipe.findings import OFFLOAD, Clash, clashes_of
from autofit.recipe.keys import LAUNCH, TIERS, Tier
from autofit.recipe.launch import Launch
from autofit.recipe.recipe import Recipe, inner_value
from autofit.space.knob import (
    ENV,
    QUANTIZATION,
    SERVER_RANKS,
    SHARED,
    Condition,
    Knob,
    Value,
    choices_of,
    listed_values,
    own_value,
)

_TO_SIMULATE = ("deepspeed",)  # packages whose own code runs on the simulated card too
_OF_RANKS = ("ranks", "server", "divides-heads")  # needs without which there is nothing to choose
_EVALUATION = "evaluation"
_FACTS = ("lora", "cuda", "card", "bf16", _EVALUATION, *_OF_RANKS)  # every other need is a package


def checked(knobs: Sequence[Knob], recipe: Recipe) -> tuple[Knob, ...]:
    """`knobs` by the names that the recipe uses. Raises ConfigError for one that is impossible in the recipe."""
    knobs = tuple(_called(knob, recipe) for knob in knobs)
    unknown = [k.name for k in knobs if not _known(k.name, recipe) and not k.optional]
    if unknown:
        of = f" ({recipe.version})" if recipe.version else ""
        raise ConfigError(
            f"every knob of a search space must be a key of the trainer {recipe.trainer}{of}; unknown: "
            f"{', '.join(unknown)}{nearest(unknown[0], recipe.resolved)}"
        )
    names = [k.name for k in knobs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"a search space must have one knob for {twice}, by any of its names; it has several")
    batch = [key for key in (recipe.keys.micro_batch, recipe.keys.rollout) if key is not None]
    unsolved = [k.name for k in knobs if k.solved and k.name not in batch]
    if unsolved:
        raise ConfigError(
            f"only {' and '.join(batch)} can be solved; list the values of the knob {', '.join(unsolved)}"
        )
    _check_conditions(knobs, recipe)
    check_values([k for k in knobs if _known(k.name, recipe)], recipe)
    return knobs


def _check_conditions(knobs: Sequence[Knob], recipe: Recipe) -> None:
    """Raise ConfigError unless every condition is on a knob above, or a key of the recipe, that is not solved."""
    bound = {recipe.keys.micro_batch, recipe.keys.rollout, recipe.keys.group}
    for place, knob in enumerate(knobs):
        for key, _ in knob.when:
            below = key in [k.name for k in knobs[place:]]
            if key in bound or knob.name in bound or below or not (_known(key, recipe) or knob.optional):
                raise ConfigError(
                    f"a condition (when) of the knob {knob.name} must name a knob above it or a key of the recipe, and "
                    f"neither may batch its samples; got {key}{nearest(key, recipe.resolved)}"
                )


def narrowed(
    knobs: Sequence[Knob], recipe: Recipe, *, allow: Tier, device: str, card: str | None
) -> tuple[tuple[Knob, ...], dict[str, str], dict[str, str]]:
    """(the knobs that may vary, {knob left out: why}, {ineffective knob: its condition that the recipe fails}).

    Knobs below the tier `allow` are in none of them, nor is a knob that has no value besides the recipe's own.
    """
    free: list[Knob] = []
    left_out: dict[str, str] = {}
    idle: dict[str, str] = {}
    for knob in (k for k in knobs if _tier(k, recipe) <= TIERS.index(allow) and _concerns(k, recipe)):
        reason = why_left_out(knob, recipe, device, card)
        if reason:
            left_out[knob.name] = reason
            continue
        knob, reason = _with_possible_values(knob, recipe, device, card)
        if reason:
            left_out[knob.name] = reason
        if device == "cpu":
            knob = replace(knob, values=knob.values + knob.cpu_values)
        unmet = _unmet(knob, free, knobs, recipe)
        if unmet:
            idle[knob.name] = unmet
        elif len(choices_of(knob, recipe)) > 1:
            free.append(replace(knob, when=_open(knob, free)))
    return tuple(free), left_out, idle


def _concerns(knob: Knob, recipe: Recipe) -> bool:
    """True if the recipe has the subject of the knob: several ranks, a vLLM server beside them, or an evaluation."""
    has = {
        "ranks": recipe.launch.ranks > 1, "server": recipe.launch.server_ranks > 0,
        _EVALUATION: recipe.evaluated_samples > 0,
    }  # fmt: skip
    return all(has.get(need, True) for need in knob.needs)


def _with_possible_values(knob: Knob, recipe: Recipe, device: str, card: str | None) -> tuple[Knob, str]:
    """(`knob` with the values that this device and machine have, why others are left out); the CPU's own go unsaid."""
    reasons = [(_missing(need, recipe, device, card), values) for need, values in knob.values_need]
    gone = {value for reason, values in reasons if reason for value in values}
    if "divides-heads" in knob.needs:
        heads, ranks = attention_heads(recipe.model) or 1, recipe.world_size
        gone |= {n for n in knob.values if isinstance(n, int) and (ranks % n or heads % n)}
    if _EVALUATION in knob.needs:  # TRL evaluates whole groups
        found = {v: next(iter(listed_values(replace(knob, values=(v,)), recipe)), None) for v in knob.values}
        gone |= {v for v, n in found.items() if isinstance(n, int) and n * recipe.world_size % recipe.evaluated_group}
    said = [f"{', '.join(map(str, values))}: {reason}" for reason, values in reasons if reason and device != "cpu"]
    return replace(knob, values=tuple(v for v in knob.values if v not in gone)), "; ".join(said)


def _tier(knob: Knob, recipe: Recipe) -> int:
    """The index of the tier that every change of `knob` has under this recipe: some changes of a batch are above."""
    batch = (recipe.keys.micro_batch, recipe.keys.rollout, recipe.keys.group)
    under = "neutral" if knob.name in batch else recipe.tiers.get(knob.name, "neutral")
    return max(TIERS.index(knob.tier), TIERS.index(under))


def _unmet(knob: Knob, free: Sequence[Knob], knobs: Sequence[Knob], recipe: Recipe) -> str:
    """The first condition of `knob` unmet by the recipe and by every choice of the `free` knobs, or ""."""
    for key, wanted in knob.when:
        unset = next((k.unset for k in knobs if k.name == key), None)
        possible = next((choices_of(k, recipe) for k in free if k.name == key), (own_value(key, recipe, unset),))
        if not set(possible) & set(wanted):
            return f"it has no effect without {key}: {' or '.join(map(str, wanted))}"
    return ""


def _open(knob: Knob, free: Sequence[Knob]) -> tuple[Condition, ...]:
    """The conditions of `knob` that depend on a `free` knob; the recipe meets the others."""
    names = {k.name for k in free}
    return tuple((key, wanted) for key, wanted in knob.when if key in names)


def why_left_out(knob: Knob, recipe: Recipe, device: str, card: str | None = None) -> str:
    """Why `knob` keeps the recipe's value on this device; "" if it may vary."""
    said = recipe.left_out.get(knob.name)
    if said or not _known(knob.name, recipe):
        return said or f"{recipe.version or 'the installed version'} has no such key"
    if "." in knob.name and not knob.name.startswith((ENV, SHARED)):
        try:  # a change of it goes into the mapping as the recipe has it
            inner_value(recipe.values, knob.name)
        except ConfigError as error:
            return str(error)
    excepted = (why for why, settings in knob.unless if all(own_value(key, recipe) in v for key, v in settings))
    missing = (_missing(need, recipe, device, card) for need in knob.needs)
    return next((reason for reason in chain(excepted, missing) if reason), "")


def _missing(need: str, recipe: Recipe, device: str, card: str | None) -> str:
    simulated = device.startswith("sim:")
    if need == "lora":
        return "" if recipe.uses_lora else "the recipe trains without LoRA (use_peft)"
    if need == "cuda":
        return "it needs a GPU, and probes run on the CPU" if device == "cpu" else ""
    if need in (*_OF_RANKS, _EVALUATION):
        return ""
    if need == "card":
        return "" if device == "cuda" else "only a real card shows the effect"
    if need == "bf16":
        return _without_bfloat16(device, card)
    return "" if simulated and need not in _TO_SIMULATE else missing_packages([need])


def _without_bfloat16(device: str, card: str | None) -> str:
    twin = simulated_twin(device, card)
    if twin is None:  # a card that the table lacks
        return ""
    spec = gpu_spec(twin.removeprefix("sim:"))
    return "" if spec.compute_capability >= BFLOAT16_CAPABILITY else f"{spec.name} has no arithmetic in bfloat16"


@cache
def is_installed(package: str) -> bool:
    return find_spec(package) is not None


def missing_packages(needs: Sequence[str]) -> str:
    """`needs vllm, which is not installed (pip install vllm)`; "" if all of `needs` are installed."""
    missing = [need for need in needs if not is_installed(need)]
    if not missing:
        return ""
    named, are = " and ".join(missing), "are" if len(missing) > 1 else "is"
    return f"needs {named}, which {are} not installed (pip install {' '.join(missing).replace('_', '-')})"


def packages_of(knob: Knob) -> tuple[str, ...]:
    """The packages that the listed values of `knob` need."""
    return tuple(need for need in knob.needs if need not in _FACTS)


def packages_of_value(knob: Knob, value: Value) -> tuple[str, ...]:
    """The packages that this value of `knob` needs besides."""
    return tuple(need for need, values in knob.values_need if value in values and need not in _FACTS)


def _called(knob: Knob, recipe: Recipe) -> Knob:
    """`knob` by the names that the recipe uses, where a key has several."""
    return replace(
        knob,
        name=_name(knob.name, recipe.other_names),
        scales=tuple(_name(key, recipe.other_names) for key in knob.scales),
        when=tuple((_name(key, recipe.other_names), wanted) for key, wanted in knob.when),
        unless=tuple(
            (why, tuple((_name(key, recipe.other_names), wanted) for key, wanted in settings))
            for why, settings in knob.unless
        ),
        sets=tuple((_name(key, recipe.other_names), value) for key, value in knob.sets),
    )


def _name(key: str, other_names: Mapping[str, str]) -> str:
    head, dot, rest = key.partition(".")
    return f"{other_names.get(head, head)}{dot}{rest}"


def _known(name: str, recipe: Recipe) -> bool:
    quantised = name == QUANTIZATION and "load_in_4bit" in recipe.resolved
    shared = name.startswith(SHARED) and name.removeprefix(SHARED) in Launch.__slots__
    return quantised or shared or name.startswith(ENV) or name.partition(".")[0] in recipe.resolved


_MILDEST: dict[str, Value] = {OFFLOAD: "none"}  # what goes with every sharding


@dataclass(frozen=True)
class Launches:
    """The launches that the `knobs` of a space can make of the recipe's `own`."""

    own: Launch
    knobs: Sequence[Knob]
    _known: dict[tuple[object, ...], tuple[Value, ...]] = field(default_factory=dict)

    @property
    def divide_cards(self) -> bool:
        """True if a knob divides the cards between training and a vLLM server."""
        return any(knob.name == SERVER_RANKS for knob in self.knobs)

    def ranks(self, server_ranks: Value) -> int:
        """Ranks that train beside a server with this number of cards."""
        return self.own.cards - cast(int, server_ranks)

    def possible(self, place: int, values: tuple[Value, ...], before: Mapping[str, Value]) -> tuple[Value, ...]:
        """The subset of `values` of the knob at `place` for which there is a launch, given the knobs `before` it.

        The knobs below it may still change. Where none is possible, the value that goes with every launch.
        """
        name = self.knobs[place].name
        given = tuple((key, value) for key, value in before.items() if key.startswith(SHARED))
        if (name, values, given) not in self._known:
            below = {k.name: _MILDEST[k.name] for k in self.knobs[place + 1 :] if k.name in _MILDEST}
            found = tuple(v for v in values if self._exists(below | dict(given) | {name: v}))
            self._known[name, values, given] = found or ((_MILDEST[name],) if name in _MILDEST else values)
        return self._known[name, values, given]

    def _exists(self, changed: Mapping[str, Value]) -> bool:
        new: dict[str, object] = {name.removeprefix(SHARED): value for name, value in changed.items()}
        if SERVER_RANKS in changed:
            new["ranks"] = self.ranks(changed[SERVER_RANKS])
        try:
            Launch.of({LAUNCH: {**self.own.to_values(), **new}})
        except ConfigError:
            return False
        return True


def open_clashes(recipe: Recipe, knobs: Sequence[Knob]) -> tuple[Clash, ...]:
    """The clashes that the `knobs` can bring about, by their values there. One of the recipe itself is its user's."""
    found = []
    for clash in clashes_of(recipe):
        free = {
            knob.name: tuple(value for value in choices_of(knob, recipe) if value in clash.settings[knob.name])
            for knob in knobs if knob.name in clash.settings
        }  # fmt: skip
        met = all(own_value(key, recipe) in values for key, values in clash.settings.items() if key not in free)
        if free and all(free.values()) and met and not clash.is_met(lambda key: own_value(key, recipe)):
            found.append(replace(clash, settings=free))
    return tuple(found)


def without_clash(
    clashes: Sequence[Clash], name: str, values: tuple[Value, ...], above: Mapping[str, Value]
) -> tuple[Value, ...]:
    """The subset of `values` of the knob `name` that avoid every clash with the knobs `above` it."""
    for clash in clashes:
        others = [key for key in clash.settings if key != name]
        if name in clash.settings and all(key in above and above[key] in clash.settings[key] for key in others):
            values = tuple(value for value in values if value not in clash.settings[name])
    return values


def describe_clash(clash: Clash) -> tuple[str, str]:
    """(the last of its knobs, its values there with the others they clash with, and why): the part left out."""
    *others, last = clash.settings
    beside = " and ".join(f"{key} {_listed(clash.settings[key])}" for key in others)
    return last, f"{_listed(clash.settings[last])}{f' with {beside}' if beside else ''}: {clash.what}"


def _listed(values: Sequence[object]) -> str:
    return " or ".join(map(str, values))


MOST_CANDIDATES = 2_000_000  # ours reach 300,000 at the lowest tier; as many take some 10 s to list
_MOST_OF_A_COUNT = 10**6
_NEED = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,80}")  # a fact, or the name under which a package is imported


def check_values(knobs: Sequence[Knob], recipe: Recipe) -> None:
    """Raise ConfigError for values and needs that rule out every candidate."""
    least = dict.fromkeys((recipe.keys.micro_batch, recipe.keys.rollout, recipe.keys.group), 1) | {SERVER_RANKS: 0}
    for knob in knobs:
        if knob.name in least:
            _check_counts(knob, (*listed_values(knob, recipe), *knob.cpu_values), least[knob.name])
        for need in (*knob.needs, *(need for need, _ in knob.values_need)):
            if not _NEED.fullmatch(need):
                raise ConfigError(
                    f"the knob {knob.name}: needs must be a fact such as cuda, or the name under which a package is "
                    f"imported; got {quoted(need)}"
                )
        for key in (knob.name, *knob.scales) if knob.scales else ():
            if not _is_number(recipe.resolved.get(key)):
                raise ConfigError(
                    f"the knob {knob.name} scales keys of the recipe, so it and they must be numbers other than 0 in "
                    f"it; {quoted(key)} is {quoted(recipe.resolved.get(key))}"
                )
        if knob.scales and not all(_is_number(value) for value in listed_values(knob, recipe)):
            raise ConfigError(f"the knob {knob.name} scales keys of the recipe, so its values must be numbers")


def check_size(combinations: int) -> None:
    """Raise ConfigError for more combinations of the knobs' values than can be listed."""
    if combinations > MOST_CANDIDATES:
        raise ConfigError(
            f"a search space may have at most {MOST_CANDIDATES:,} combinations of values, and this one has more; take "
            f"knobs or values out of it"
        )


def _check_counts(knob: Knob, values: Sequence[Value], least: int) -> None:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST_OF_A_COUNT:
            raise ConfigError(
                f"the values of the knob {knob.name} must be whole numbers from {least} to {_MOST_OF_A_COUNT:,}, or "
                f"shares such as x0.5 of the recipe's own; got {quoted(value)}"
            )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value != 0
