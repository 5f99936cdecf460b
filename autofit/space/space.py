"""The search space: knobs with tiers, and the candidates that hold the effective batch exactly. Free of torch.

A candidate is never rounded into shape. Micro-batch, accumulation and steps_per_generation are solved from the recipe's
effective batch, so a candidate that cannot hold it does not exist.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

from autofit.errors import ConfigError
from autofit.recipe.findings import Clash
from autofit.recipe.keys import SYNC_EACH_BATCH, TIERS, BatchKeys, Tier
from autofit.recipe.recipe import Recipe
from autofit.space.knob import (
    ENV,
    QUANTIZATION,
    SERVER_RANKS,
    SHARED,
    Knob,
    Value,
    choices_of,
    listed_values,
    own_value,
    scaled_value,
)
from autofit.space.narrow import (
    MOST_CANDIDATES,
    Launches,
    check_size,
    checked,
    describe_clash,
    narrowed,
    open_clashes,
    packages_of,
    packages_of_value,
    without_clash,
)
from autofit.space.traits import stated_traits

__all__ = ["QUANTIZATION", "Candidate", "Knob", "Space", "Value"]


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
    declared: tuple[Knob, ...] = ()  # every knob of the space file, of any tier
    left_out: Mapping[str, str] = field(default_factory=dict)  # {knob that may not vary here: why}
    idle: Mapping[str, str] = field(default_factory=dict)  # {knob without effect in any candidate: why}

    @classmethod
    def of(
        cls, recipe: Recipe, knobs: tuple[Knob, ...], *, allow: Tier = "neutral", device: str = "cpu",
        card: str | None = None,
    ) -> "Space":  # fmt: skip
        """The space of `recipe`, with the knobs permitted by `allow` (the lowest tier to change) and `device`."""
        recipe.check()
        declared = checked(knobs, recipe)
        free, left_out, idle = narrowed(declared, recipe, allow=allow, device=device, card=card)
        choices = tuple(choices_of(k, recipe) for k in free)
        for name, why in map(describe_clash, open_clashes(recipe, free)):
            left_out[name] = f"{left_out[name]}; {why}" if name in left_out else why
        space = cls(recipe, free, choices, allow, declared, left_out, idle)
        bound = space._solved_places
        check_size(math.prod(len(choices[i]) for i in bound))
        if not space._solved:
            raise ConfigError(space.why_empty())
        return space

    @property
    def keys(self) -> BatchKeys:
        return self.recipe.keys

    @property
    def stated(self) -> dict[str, object]:
        """{knob: its traits, as JSON} for those that the space says itself: `stated` of `traits_of`."""
        return stated_traits((knob.name, knob.traits) for knob in self.declared)

    # -- values ---------------------------------------------------------------------------------------------------

    @cached_property
    def baseline(self) -> Candidate:
        return Candidate(tuple(own_value(k.name, self.recipe, k.unset) for k in self.knobs))

    def params(self, candidate: Candidate) -> dict[str, Value]:
        """{knob: value} of `candidate`."""
        return {knob.name: value for knob, value in zip(self.knobs, candidate.values, strict=True)}

    def candidate(self, params: Mapping[str, Value]) -> Candidate:
        """The candidate with these {knob: value}."""
        return Candidate(tuple(params[knob.name] for knob in self.knobs))

    def settled(self, params: Mapping[str, Value]) -> Candidate:
        """The candidate with these {knob: value}, as far as they have an effect.

        A knob whose condition is not met has the recipe's value, and one that only now has an effect a listed value.
        """
        values: list[Value] = []
        for place, knob in enumerate(self.knobs):
            possible = self._possible(place, values) or (params[knob.name],)
            values.append(params[knob.name] if params[knob.name] in possible else possible[0])
        return Candidate(tuple(values))

    def _get(self, candidate: Candidate, name: str) -> Value:
        for knob, value in zip(self.knobs, candidate.values, strict=True):
            if knob.name == name:
                return value
        return own_value(name, self.recipe)

    # -- conditions -----------------------------------------------------------------------------------------------

    def _possible(self, place: int, before: Sequence[Value]) -> tuple[Value, ...]:
        """The values of knob `place` that are worth a candidate, where the knobs above it have the values `before`.

        Where its conditions are not met, only the recipe's own value: any other is the same training. Where they are
        met but not in the recipe, only the listed ones: the recipe's own was never chosen.
        """
        gates = self._gates[place]
        met = all(before[at] in wanted for at, wanted in gates)
        values = self._opened[place] if met else (self.baseline.values[place],)
        if self.knobs[place].name not in self._bound:
            return values
        return self._together(place, values, dict(zip((knob.name for knob in self.knobs), before, strict=False)))

    def _together(self, place: int, values: tuple[Value, ...], above: Mapping[str, Value]) -> tuple[Value, ...]:
        """The subset of `values` of knob `place` that is compatible with the values of the knobs `above` it."""
        name = self.knobs[place].name
        if name.startswith(SHARED):
            values = self._launches.possible(place, values, above)
        if name == SYNC_EACH_BATCH and self._is_one_micro_batch(above):
            values = (self.baseline.values[place],)
        return without_clash(self._clashes, name, values, above)

    def _is_one_micro_batch(self, above: Mapping[str, Value]) -> bool:
        """True if an optimizer step is one micro-batch, which leaves no place between two; False if unknown."""
        varies = any(knob.name == self.keys.micro_batch for knob in self.knobs)
        micro = above.get(self.keys.micro_batch, None if varies else own_value(self.keys.micro_batch, self.recipe))
        if not isinstance(micro, int) or self._divides_cards:
            return False
        return micro * self.recipe.world_size == self.recipe.effective_batch_size

    @cached_property
    def _clashes(self) -> tuple[Clash, ...]:
        return open_clashes(self.recipe, self.knobs)

    @cached_property
    def _bound(self) -> frozenset[str]:
        """The knobs whose values depend on the values of others."""
        clashing = [name for clash in self._clashes for name in clash.settings]
        launching = [knob.name for knob in self.knobs if knob.name.startswith(SHARED)]
        return frozenset((*clashing, *launching, SYNC_EACH_BATCH))

    @cached_property
    def _launches(self) -> Launches:
        return Launches(self.recipe.launch, self.knobs)

    @cached_property
    def _divides_cards(self) -> bool:
        return self._launches.divide_cards

    def ranks(self, candidate: Candidate) -> int:
        """Ranks of `candidate` that train: those of the recipe, or the cards that its vLLM server leaves."""
        if not self._divides_cards:
            return self.recipe.world_size
        return self._launches.ranks(self._get(candidate, SERVER_RANKS))

    @cached_property
    def _gates(self) -> tuple[tuple[tuple[int, tuple[Value, ...]], ...], ...]:
        """For every knob: (place of the knob that a condition names, its values that meet it)."""
        places = {knob.name: place for place, knob in enumerate(self.knobs)}
        return tuple(tuple((places[key], wanted) for key, wanted in knob.when) for knob in self.knobs)

    @cached_property
    def _conditional(self) -> tuple[int, ...]:
        """Places of the knobs that depend on others."""
        return tuple(place for place, knob in enumerate(self.knobs) if knob.when or knob.name in self._bound)

    @cached_property
    def _opened(self) -> tuple[tuple[Value, ...], ...]:
        """For every knob, the values that it may have where its conditions are met."""
        own = self.baseline.values
        found = []
        for place, knob in enumerate(self.knobs):
            met = all(own[at] in wanted for at, wanted in self._gates[place])
            found.append(self.choices[place] if met else tuple(dict.fromkeys(listed_values(knob, self.recipe))))
        return tuple(found)

    def _gained(self, candidate: Candidate) -> list[str]:
        """The knobs that have an effect in `candidate`, but are idle in the recipe."""
        own, new = self.baseline.values, candidate.values
        return [
            knob.name
            for knob, gates in zip(self.knobs, self._gates, strict=True)
            if all(new[at] in wanted for at, wanted in gates) and not all(own[at] in wanted for at, wanted in gates)
        ]

    def split(self, candidate: Candidate) -> tuple[int, int, int, int]:
        """(micro-batch, accumulation, micro-batches of a rollout, completions of a group); accumulation is exact."""
        keys, recipe, ranks = self.keys, self.recipe, self.ranks(candidate)
        micro = cast(int, self._get(candidate, keys.micro_batch))
        accumulation = recipe.effective_batch_size // (micro * ranks)
        if keys.rollout is None:
            return micro, accumulation, accumulation, 1
        if any(k.name == keys.rollout for k in self.knobs):
            chunk = cast(int, self._get(candidate, keys.rollout))
        else:
            chunk = recipe.generation_batch_size // (micro * ranks)
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
        sync = next((at for at, place in enumerate(free) if self.knobs[place].name == SYNC_EACH_BATCH), None)
        own = None if sync is None else self.baseline.values[free[sync]]
        alone = others if sync is None else [row for row in others if row[0][sync] == own]  # with one micro-batch
        for solved, tier in self._solved:
            if tier <= most:
                above = {self.knobs[at].name: value for at, value in zip(self._solved_places, solved, strict=True)}
                for values, other in alone if self._is_one_micro_batch(above) else others:
                    row = solved + values
                    yield Candidate(tuple([row[i] for i in order])), max(tier, other)

    @property
    def _solved_places(self) -> list[int]:
        """Indices of the knobs that the constraints involve."""
        bound = (self.keys.micro_batch, self.keys.rollout, self.keys.group, SERVER_RANKS)
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

    def _other_values(self, places: list[int]) -> list[tuple[tuple[Value, ...], int]]:
        """(values, index of their tier) of every combination of the unconstrained knobs at `places`."""
        own, where = self.baseline.values, {place: at for at, place in enumerate(places)}
        rows: list[tuple[tuple[Value, ...], int]] = [((), 0)]
        for place in places:
            tier = TIERS.index(self._tier_of(self.knobs[place].name))
            pairs = [(v, tier if v != own[place] else 0) for v in self._opened[place]]
            closed = [(own[place], 0)]
            gates = [(where[at], wanted) for at, wanted in self._gates[place]]
            longer = (
                ((*row, value), max(least, rank))
                for row, least in rows
                for value, rank in self._beside(
                    place, places, row, pairs if all(row[at] in wanted for at, wanted in gates) else closed
                )
            )
            rows = list(itertools.islice(longer, MOST_CANDIDATES + 1))
            check_size(len(rows) * len(self._solved))
        return rows

    def _beside(
        self, place: int, places: list[int], row: tuple[Value, ...], pairs: list[tuple[Value, int]]
    ) -> list[tuple[Value, int]]:
        """The subset of the (value, tier) `pairs` of knob `place` compatible with the `row` of the knobs above it."""
        if self.knobs[place].name not in self._bound:
            return pairs
        above = {self.knobs[at].name: value for at, value in zip(places, row, strict=False)}
        possible = self._together(place, tuple(value for value, _ in pairs), above)
        tier, own = TIERS.index(self._tier_of(self.knobs[place].name)), self.baseline.values[place]
        return [(value, tier if value != own else 0) for value in possible]

    def violated(self, candidate: Candidate) -> str | None:
        """The first constraint that `candidate` breaks, in words, if it breaks one."""
        clash = next((clash for clash in self._clashes if clash.is_met(self.params(candidate).get)), None)
        if clash is not None:
            return clash.what
        for place in self._conditional:
            knob = self.knobs[place]
            if candidate.values[place] not in self._possible(place, candidate.values[:place]):
                if not knob.when:
                    return f"there is a launch with {knob.name} {candidate.values[place]}"
                met = " and ".join(f"{key} is {' or '.join(map(str, wanted))}" for key, wanted in knob.when)
                return f"{knob.name} differs from the recipe's only where it has an effect (where {met})"
        recipe, ranks, keys = self.recipe, self.ranks(candidate), self.keys
        if ranks < 1:
            return f"a card is left to train ({SERVER_RANKS} below {recipe.launch.cards})"
        micro, _, chunk, groups = self.split(candidate)
        if chunk < 1:
            return f"generation batch = {recipe.generation_batch_size} completions, as in the recipe"
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
        if keys.group is not None and groups < min(2, recipe.num_generations):  # PPO's critic needs no others
            return f"a group has at least 2 completions ({keys.group} >= 2)"
        evaluated = groups if recipe.evaluated_group == recipe.num_generations else recipe.evaluated_group
        if recipe.evaluated_samples * ranks % evaluated:
            return f"an evaluation holds whole groups ({keys.group} divides {keys.evaluation} x world size)"
        if recipe.num_prompts is not None and generated // groups > recipe.num_prompts:
            return f"a generation batch needs no more prompts than the dataset has ({recipe.num_prompts})"
        return None

    @property
    def _generation_fixed(self) -> bool:
        """True if the generation batch must stay as in the recipe.

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
        wanted: dict[str, object] = {}
        if recipe.generates or any(knob.name == keys.micro_batch for knob in self.knobs):
            micro, accumulation, chunk, _ = self.split(candidate)
            split = {keys.micro_batch: micro, keys.accumulation: accumulation, keys.rollout: chunk}
            wanted = {k: v for k, v in split.items() if k is not None and v != recipe.resolved.get(k)}
        gained = self._gained(candidate)
        for knob, value, own in zip(self.knobs, candidate.values, self.baseline.values, strict=True):
            if knob.name in (keys.micro_batch, keys.rollout) or (value == own and knob.name not in gained):
                continue
            wanted |= _as_keys(knob, value, recipe)
        if SERVER_RANKS in wanted:
            wanted[f"{SHARED}ranks"] = self.ranks(candidate)
        env = {k.removeprefix(ENV): wanted.pop(k) for k in list(wanted) if k.startswith(ENV)}
        return wanted | ({"env": env} if env else {})

    def yaml_changes(self, candidate: Candidate) -> dict[str, object]:
        """`changes` plus the rollout key if the batch changes, and None for a key that would conflict.

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
        """{allowed candidate: its tier}, baseline first, which is always included; cached."""
        allowed: dict[Candidate, Tier] = {self.baseline: "neutral"}
        return allowed | {c: TIERS[tier] for c, tier in self._tiered(self.allow)}

    def packages(self, candidate: Candidate) -> tuple[str, ...]:
        """The packages for a real run of `candidate`, missing ones included, by the `needs` of the space file."""
        params = self.params(candidate)
        found: list[str] = []
        for knob in self.declared:
            value = params.get(knob.name, own_value(knob.name, self.recipe, knob.unset))
            if value in knob.values and value not in (False, None, "none"):
                found += packages_of(knob)
            found += packages_of_value(knob, value)
        return tuple(dict.fromkeys(found))

    # -- memory order ---------------------------------------------------------------------------------------------

    def needs_no_less(self, candidate: Candidate, other: Candidate) -> bool:
        """True if `candidate` needs at least as much memory as `other`, by the memory order that the knobs declare."""
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


def _as_keys(knob: Knob, value: Value, recipe: Recipe) -> dict[str, object]:
    """{key of the recipe: value} that give `knob` the value `value`, with the keys that go with it."""
    if knob.name == QUANTIZATION:
        loads = {"load_in_4bit": value == "4bit", "load_in_8bit": value == "8bit"}
        return {key: load for key, load in loads.items() if load != recipe.resolved.get(key)}
    found: dict[str, object] = {knob.name: value}
    for key in knob.scales:
        found[key] = scaled_value(recipe.resolved[key], value, recipe.resolved[knob.name])
    return found | dict(knob.sets)
