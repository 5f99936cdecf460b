"""The search space: knobs with tiers, and the candidates that hold the effective batch exactly. No torch here.

A candidate is never rounded into shape. Micro-batch, accumulation and steps_per_generation are solved from the recipe's
effective batch, so a candidate that cannot hold it does not exist.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from typing import cast

from autofit.errors import ConfigError, nearest
from autofit.recipe.keys import TIERS, BatchKeys, Tier
from autofit.recipe.recipe import Recipe

Value = bool | int | float | str | None
QUANTIZATION = "quantization"
_ENV = "env."


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One key of the recipe that may vary. `values` are those of the space file, empty for a solved knob."""

    name: str
    tier: Tier
    values: tuple[Value, ...] = ()
    cpu_values: tuple[Value, ...] = ()  # further values if probes run on the CPU
    solved: bool = False
    memory_ascending: bool = False
    needs: tuple[str, ...] = ()
    scales: tuple[str, ...] = ()
    traced: bool = True  # False: the knob changes no allocation or kernel of a trace, so it needs none of its own


@dataclass(frozen=True, slots=True)
class Candidate:
    """One configuration: a value for every knob of its space, in the space's order."""

    values: tuple[Value, ...]


@dataclass(frozen=True)
class Space:
    """All candidates for one recipe. Build it with `Space.of`, which checks and narrows the knobs.

    The constraints involve three knobs only (the recipe's keys for micro-batch, rollout and group): their combinations
    are solved first and multiplied by the other knobs, so 10^5 candidates are listed in a fraction of a second.
    """

    recipe: Recipe
    knobs: tuple[Knob, ...]
    choices: tuple[tuple[Value, ...], ...]
    allow: Tier

    @classmethod
    def of(cls, recipe: Recipe, knobs: tuple[Knob, ...], *, allow: Tier = "neutral", device: str = "cpu") -> "Space":
        """The space of `recipe`, with the knobs permitted by `allow` (the lowest tier to change) and `device`."""
        recipe.check()
        knobs = tuple(_called(k, recipe) for k in knobs)
        unknown = [k.name for k in knobs if not _known(k.name, recipe)]
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
        free = tuple(k for k in knobs if TIERS.index(k.tier) <= TIERS.index(allow) and _usable(k, recipe, device))
        if device == "cpu":
            free = tuple(replace(k, values=k.values + k.cpu_values) for k in free)
        space = cls(recipe, free, tuple(_choices(k, recipe) for k in free), allow)
        if not space._solved:
            raise ConfigError(space.why_empty())
        return space

    @property
    def keys(self) -> BatchKeys:
        return self.recipe.keys

    # -- values ---------------------------------------------------------------------------------------------------

    @cached_property
    def baseline(self) -> Candidate:
        return Candidate(tuple(_own_value(k.name, self.recipe) for k in self.knobs))

    def params(self, candidate: Candidate) -> dict[str, Value]:
        """{knob: value} of `candidate`."""
        return {knob.name: value for knob, value in zip(self.knobs, candidate.values, strict=True)}

    def candidate(self, params: Mapping[str, Value]) -> Candidate:
        """The candidate with these {knob: value}."""
        return Candidate(tuple(params[knob.name] for knob in self.knobs))

    def _get(self, candidate: Candidate, name: str) -> Value:
        for knob, value in zip(self.knobs, candidate.values, strict=True):
            if knob.name == name:
                return value
        return _own_value(name, self.recipe)

    def split(self, candidate: Candidate) -> tuple[int, int, int, int]:
        """(micro-batch, accumulation, micro-batches of a rollout, completions of a group); accumulation is exact."""
        keys, recipe = self.keys, self.recipe
        micro = cast(int, self._get(candidate, keys.micro_batch))
        accumulation = recipe.effective_batch_size // (micro * recipe.world_size)
        if keys.rollout is None:
            return micro, accumulation, accumulation, 1
        if any(k.name == keys.rollout for k in self.knobs):
            chunk = cast(int, self._get(candidate, keys.rollout))
        else:
            chunk = recipe.generation_batch_size // (micro * recipe.world_size)
        return micro, accumulation, chunk, cast(int, self._get(candidate, keys.group)) if keys.group else 1

    # -- enumeration ----------------------------------------------------------------------------------------------

    def candidates(self) -> Iterator[Candidate]:
        """Every valid candidate, the baseline among them, each once."""
        return (candidate for candidate, _ in self._tiered(TIERS[-1]))

    def _tiered(self, limit: Tier) -> Iterator[tuple[Candidate, int]]:
        """(candidate, index of its tier) of every valid candidate whose tier is `limit` or above it."""
        most = TIERS.index(limit)
        free = [i for i in range(len(self.knobs)) if i not in self._solved_places]
        where = [*self._solved_places, *free]
        order = [where.index(i) for i in range(len(where))]
        others = [(values, tier) for values, tier in self._other_values(free) if tier <= most]
        for solved, tier in self._solved:
            if tier <= most:
                for values, other in others:
                    row = solved + values
                    yield Candidate(tuple([row[i] for i in order])), max(tier, other)

    @property
    def _solved_places(self) -> list[int]:
        """Indices of the knobs that the constraints involve."""
        bound = (self.keys.micro_batch, self.keys.rollout, self.keys.group)
        return [i for i, knob in enumerate(self.knobs) if knob.name in bound]

    @cached_property
    def _solved(self) -> tuple[tuple[tuple[Value, ...], int], ...]:
        """(values, index of their tier) of every valid combination of the constrained knobs."""
        combinations = itertools.product(*(self.choices[i] for i in self._solved_places))
        valid = [(values, c) for values in combinations if self.violated(c := self._with(values)) is None]
        return tuple((values, TIERS.index(self.tier(candidate))) for values, candidate in valid)

    def _with(self, solved: tuple[Value, ...]) -> Candidate:
        """The baseline with the values `solved` for the constrained knobs."""
        row = list(self.baseline.values)
        for place, value in zip(self._solved_places, solved, strict=True):
            row[place] = value
        return Candidate(tuple(row))

    def _other_values(self, places: list[int]) -> Iterator[tuple[tuple[Value, ...], int]]:
        """(values, index of their tier) of every combination of the unconstrained knobs at `places`."""
        own = self.baseline.values
        tiers = {i: TIERS.index(self._tier_of(self.knobs[i].name)) for i in places}
        pairs = [[(v, tiers[i] if v != own[i] else 0) for v in self.choices[i]] for i in places]
        for row in itertools.product(*pairs):
            yield tuple([value for value, _ in row]), max((tier for _, tier in row), default=0)

    def violated(self, candidate: Candidate) -> str | None:
        """The first constraint that `candidate` breaks, in words, or None when it is valid."""
        micro, _, chunk, groups = self.split(candidate)
        recipe, ranks, keys = self.recipe, self.recipe.world_size, self.keys
        if recipe.effective_batch_size % (micro * ranks):
            return f"micro-batch x accumulation x world size = effective batch {recipe.effective_batch_size}"
        if not recipe.generates:
            return None
        generated = micro * ranks * chunk
        if self._generation_fixed and generated != recipe.generation_batch_size:
            return f"generation batch = {recipe.generation_batch_size} completions, as in the recipe"
        if not self._generation_fixed and recipe.effective_batch_size % generated:
            return f"the optimizer step is a multiple of the generation batch ({keys.rollout} divides accumulation)"
        if generated % groups:
            return f"a generation batch holds whole groups ({keys.group} divides it)"
        if recipe.effective_batch_size % groups:
            return f"an optimizer step holds whole groups ({keys.group} divides the effective batch)"
        if keys.group is not None and groups < 2:
            return f"a group has at least 2 completions ({keys.group} >= 2)"
        if recipe.num_prompts is not None and generated // groups > recipe.num_prompts:
            return f"a generation batch needs no more prompts than the dataset has ({recipe.num_prompts})"
        return None

    @property
    def _generation_fixed(self) -> bool:
        """Whether the generation batch must stay as in the recipe.

        True if the space has no rollout knob, or if a rollout serves several optimizer steps: another size would change
        how stale the rollouts become.
        """
        return self.recipe.reuses_rollouts or all(k.name != self.keys.rollout for k in self.knobs)

    def why_empty(self) -> str:
        """One sentence: the number of combinations that each constraint excludes."""
        others = math.prod(len(c) for i, c in enumerate(self.choices) if i not in self._solved_places)
        excluded: Counter[str | None] = Counter()
        for values in itertools.product(*(self.choices[i] for i in self._solved_places)):
            excluded[self.violated(self._with(values))] += others
        reasons = "; ".join(f"{count} by '{reason}'" for reason, count in excluded.most_common() if reason)
        return f"the search space has no valid candidate: of {sum(excluded.values())} combinations, {reasons}"

    # -- changes of a candidate -----------------------------------------------------------------------------------

    def changes(self, candidate: Candidate) -> dict[str, object]:
        """{key: value} that differs from the recipe, derived keys included; {} for the baseline.

        A value of None means the key is removed from the YAML.
        """
        recipe, keys = self.recipe, self.keys
        params = self.params(candidate)
        wanted: dict[str, object] = {}
        if recipe.generates or keys.micro_batch in params:
            micro, accumulation, chunk, _ = self.split(candidate)
            wanted |= {keys.micro_batch: micro, keys.accumulation: accumulation}
            if keys.rollout is not None:
                wanted[keys.rollout] = chunk
        for knob in self.knobs:
            value = params[knob.name]
            if knob.name in (keys.micro_batch, keys.rollout) or value == _own_value(knob.name, recipe):
                continue
            if knob.name == QUANTIZATION:
                wanted |= {"load_in_4bit": value == "4bit", "load_in_8bit": value == "8bit"}
            elif knob.name.startswith(_ENV):
                wanted["env"] = {**cast(dict[str, object], wanted.get("env", {})), knob.name.removeprefix(_ENV): value}
            else:
                wanted[knob.name] = value
            for key in knob.scales:
                wanted[key] = _scaled(recipe.resolved[key], value, recipe.resolved[knob.name])
        return {k: v for k, v in wanted.items() if k == "env" or v != recipe.resolved.get(k)}

    def yaml_changes(self, candidate: Candidate) -> dict[str, object]:
        """`changes` plus the rollout key where the batch changes, and None for a key that would conflict.

        None removes a key of the YAML, here the rollout batch (generation_batch_size).
        """
        changes, keys = self.changes(candidate), self.keys
        if {keys.rollout, keys.micro_batch, keys.accumulation} & set(changes):
            if keys.rollout is not None:
                changes[keys.rollout] = self.split(candidate)[2]
            if keys.rollout_batch is not None and self.recipe.values.get(keys.rollout_batch) is not None:
                changes[keys.rollout_batch] = None
        return changes

    def tier(self, candidate: Candidate) -> Tier:
        """The lowest tier that `candidate` touches, by the space's declaration and the recipe's own loss."""
        tiers: list[Tier] = ["neutral"]
        baseline, keys = self.baseline, self.keys
        micro, _, chunk, _ = self.split(candidate)
        base_micro, _, base_chunk, _ = self.split(baseline)
        for knob, value, own in zip(self.knobs, candidate.values, baseline.values, strict=True):
            if value != own and knob.name not in (keys.micro_batch, keys.rollout):
                tiers.append(self._tier_of(knob.name))
        if micro != base_micro:
            tiers.append(self._tier_of(keys.micro_batch))
        if keys.rollout is not None and micro * chunk != base_micro * base_chunk:
            tiers.append(self._tier_of(keys.rollout))
        return max(tiers, key=TIERS.index)

    def _tier_of(self, name: str) -> Tier:
        """The lower of a knob's declared tier and its tier under this recipe."""
        declared = [k.tier for k in self.knobs if k.name == name]
        return max([self.recipe.tiers.get(name, "neutral"), *declared], key=TIERS.index)

    def allowed(self) -> list[Candidate]:
        """The candidates in the allowed tiers, baseline first."""
        return list(self.tiers)

    @cached_property
    def tiers(self) -> dict[Candidate, Tier]:
        """{allowed candidate: its tier}, baseline first; cached. Contains the baseline even if no other is valid."""
        allowed: dict[Candidate, Tier] = {self.baseline: "neutral"}
        return allowed | {c: TIERS[tier] for c, tier in self._tiered(self.allow)}

    # -- memory order ---------------------------------------------------------------------------------------------

    def needs_no_less(self, candidate: Candidate, other: Candidate) -> bool:
        """Whether `candidate` needs at least as much memory as `other`, by the memory order that the knobs declare."""
        micro, _, chunk, _ = self.split(candidate)
        other_micro, _, other_chunk, _ = self.split(other)
        if micro < other_micro or micro * chunk < other_micro * other_chunk:
            return False
        for knob, choices, value, against in zip(self.knobs, self.choices, candidate.values, other.values, strict=True):
            if knob.name in (self.keys.micro_batch, self.keys.rollout) or value == against:
                continue
            if not knob.memory_ascending or choices.index(value) < choices.index(against):
                return False
        return True


def _called(knob: Knob, recipe: Recipe) -> Knob:
    """`knob` by the names that the recipe uses, where a key has several."""
    names = recipe.other_names
    scales = tuple(names.get(key, key) for key in knob.scales)
    return replace(knob, name=names.get(knob.name, knob.name), scales=scales)


def _known(name: str, recipe: Recipe) -> bool:
    quantised = name == QUANTIZATION and "load_in_4bit" in recipe.resolved
    return quantised or name.startswith(_ENV) or name in recipe.resolved


def _usable(knob: Knob, recipe: Recipe, device: str) -> bool:
    fixed = not recipe.resolved.get("sync_ref_model")  # TRL refuses precomputed scores of a synchronized reference
    met = {"lora": recipe.uses_lora, "cuda": device != "cpu", "fixed-reference": fixed}
    return all(met[need] if need in met else find_spec(need) is not None for need in knob.needs)


def _own_value(name: str, recipe: Recipe) -> Value:
    resolved = recipe.resolved
    if name == QUANTIZATION:
        return "4bit" if resolved.get("load_in_4bit") else "8bit" if resolved.get("load_in_8bit") else "none"
    if name.startswith(_ENV):
        env = recipe.values.get("env")
        return str(env[name.removeprefix(_ENV)]) if isinstance(env, dict) and name.removeprefix(_ENV) in env else None
    if name == "attn_implementation" and resolved.get(name) is None:
        return "sdpa"  # transformers' default
    return cast(Value, resolved.get(name))


def _choices(knob: Knob, recipe: Recipe) -> tuple[Value, ...]:
    """All values of `knob` in memory order: the solved divisors or the listed values, with the recipe's own value."""
    own = _own_value(knob.name, recipe)
    if knob.solved:
        per_rank = recipe.effective_batch_size // recipe.world_size
        top = max(per_rank, recipe.generation_batch_size // recipe.world_size)
        solved = {n for n in range(1, top + 1) if top % n == 0 or per_rank % n == 0}
        return tuple(sorted(solved | {cast(int, own)}))
    values: list[Value] = [v for v in (_value(v, own) for v in knob.values) if v is not _SKIP]
    if own not in values:
        values.append(own)
        if knob.memory_ascending and all(isinstance(v, int | float) for v in values):
            values.sort(key=lambda v: cast(float, v))
    return tuple(dict.fromkeys(values))


_SKIP = "\0skip"


def _value(listed: Value, own: Value) -> Value:
    """`listed`, or for text such as "x0.5" that share of the recipe's own value.

    `_SKIP` if `own` is not a number, or if it is an integer and the share is not an integer above zero.
    """
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


def _scaled(value: object, new: Value, old: object) -> object:
    """`value` times new/old; an integer stays an integer if the result is whole."""
    assert isinstance(value, int | float)
    assert isinstance(new, int | float)
    assert isinstance(old, int | float)
    scaled = value * new / old
    return round(scaled) if isinstance(value, int) and math.isclose(scaled, round(scaled)) else scaled
