"""Limits of a space: launches that exist, settings that do not clash, whole numbers, and not too many candidates.

No torch here.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from autofit.errors import ConfigError, quoted
from autofit.recipe.clashes import OFFLOAD, Clash, clashes_of
from autofit.recipe.launch import LAUNCH, Launch
from autofit.recipe.recipe import Recipe
from autofit.space.knob import SERVER_RANKS, SHARED, Knob, Value, choices_of, listed_values, own_value

_MILDEST: dict[str, Value] = {OFFLOAD: "none"}  # what goes with every sharding


@dataclass(frozen=True)
class Launches:
    """The launches that the `knobs` of a space can make of the recipe's `own`."""

    own: Launch
    knobs: Sequence[Knob]
    _known: dict[tuple[object, ...], tuple[Value, ...]] = field(default_factory=dict)

    @property
    def divide_cards(self) -> bool:
        """Whether a knob divides the cards between training and a vLLM server."""
        return any(knob.name == SERVER_RANKS for knob in self.knobs)

    def ranks(self, server_ranks: Value) -> int:
        """Ranks that train beside so many of a server."""
        return self.own.cards - cast(int, server_ranks)

    def possible(self, place: int, values: tuple[Value, ...], before: Mapping[str, Value]) -> tuple[Value, ...]:
        """Those of `values` of the knob at `place` with which there is a launch, given the knobs `before` it.

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
    """Those of `values` of the knob `name` that complete no clash with the knobs `above` it."""
    for clash in clashes:
        others = [key for key in clash.settings if key != name]
        if name in clash.settings and all(key in above and above[key] in clash.settings[key] for key in others):
            values = tuple(value for value in values if value not in clash.settings[name])
    return values


def describe_clash(clash: Clash) -> tuple[str, str]:
    """(the last of its knobs, its values there with the others they clash with, and why): what a space leaves out."""
    *others, last = clash.settings
    beside = " and ".join(f"{key} {_listed(clash.settings[key])}" for key in others)
    return last, f"{_listed(clash.settings[last])}{f' with {beside}' if beside else ''}: {clash.what}"


def _listed(values: Sequence[object]) -> str:
    return " or ".join(map(str, values))


MOST_CANDIDATES = 2_000_000  # ours reach 300,000 at the lowest tier; as many take some 10 s to list
_MOST_OF_A_COUNT = 10**6
_NEED = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,80}")  # a fact, or the name under which a package is imported


def check_values(knobs: Sequence[Knob], recipe: Recipe) -> None:
    """Raise ConfigError for values and needs with which no candidate can be made."""
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
