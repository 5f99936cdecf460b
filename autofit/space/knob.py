"""A knob: one key of the recipe that may vary, and the values that a recipe has and may have for it. No torch here."""

import math
from dataclasses import dataclass
from typing import cast

from autofit.recipe.keys import Tier, divisors
from autofit.recipe.launch import Launch
from autofit.recipe.recipe import Recipe, inner_value

Value = bool | int | float | str | None
Condition = tuple[str, tuple[Value, ...]]  # (a knob or a key of the recipe, the values under which it is met)
QUANTIZATION = "quantization"
ENV = "env."
SHARED = "launch."  # prefix of the knobs that say how ranks share the model
SERVER_RANKS = "launch.server_ranks"
LONGEST = "longest"  # a value of a space file: the tokens of the longest prompt and the longest completion
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
    optional: bool = False  # whether an installed version without the key leaves the knob out; else it is an error


def own_value(name: str, recipe: Recipe, unset: Value = None) -> Value:
    """The value that the recipe has for the knob `name`; `unset` for an inner key that it does not give."""
    resolved = recipe.resolved
    if name == QUANTIZATION:
        return "4bit" if resolved.get("load_in_4bit") else "8bit" if resolved.get("load_in_8bit") else "none"
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
    """The values of the space file for this recipe; those that its own value has no such share of are omitted."""
    own = own_value(knob.name, recipe, knob.unset)
    return tuple(v for v in (_value(v, own, recipe) for v in knob.values) if v is not _SKIP)


def _value(listed: Value, own: Value, recipe: Recipe) -> Value:
    """`listed`, or for text such as "x0.5" that share of the recipe's own value.

    `_SKIP` if `own` is not a number, or if it is an integer and the share is not an integer above zero.
    """
    if listed == LONGEST:
        prompt, completion = recipe.longest_prompt_tokens, recipe.max_completion_tokens
        return _SKIP if prompt is None or completion is None else prompt + completion
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
