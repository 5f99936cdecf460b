"""What a space may hold: whole numbers where a batch or the cards are divided, and not too many candidates."""

import math
import re
from collections.abc import Sequence

from autofit.errors import ConfigError, quoted
from autofit.recipe.recipe import Recipe
from autofit.space.knob import SERVER_RANKS, Knob, Value, listed_values

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
