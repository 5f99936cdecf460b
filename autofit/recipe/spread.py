"""A recipe on other ranks than it was written for, at the same effective batch. No torch here."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autofit.errors import ConfigError
from autofit.recipe.keys import BatchKeys, divisors
from autofit.recipe.launch import LAUNCH, Launch
from autofit.recipe.recipe import Recipe, merge


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """How a recipe batches its samples over `ranks`; `rollout` is None for a trainer that does not generate."""

    micro: int
    accumulation: int
    rollout: int | None
    ranks: int

    @property
    def effective(self) -> int:
        """Samples of an optimizer step, over all ranks."""
        return self.micro * self.accumulation * self.ranks

    @property
    def generated(self) -> int | None:
        """Completions of one rollout, over all ranks."""
        return None if self.rollout is None else self.micro * self.rollout * self.ranks

    @classmethod
    def of(cls, resolved: Mapping[str, object], keys: BatchKeys, ranks: int) -> "Batch":
        """The batch of a recipe whose keys have been resolved."""
        rollout = None if keys.rollout is None else _integer(resolved, keys.rollout)
        micro, accumulation = (_integer(resolved, key) for key in (keys.micro_batch, keys.accumulation))
        return cls(micro=micro, accumulation=accumulation, rollout=rollout, ranks=ranks)

    def on(self, ranks: int, keys: BatchKeys) -> "Batch":
        """The same samples over `ranks`: the largest micro-batch, up to this one, that divides them.

        The effective batch and the generation batch stay exactly as they are, so groups stay whole over all ranks.
        Raises ConfigError, with the numbers of ranks that work, where the samples cannot be divided.
        """
        whole = self.effective if self.generated is None else math.gcd(self.effective, self.generated)
        if whole % ranks:
            raise ConfigError(self._cannot(ranks, whole, keys))
        each = whole // ranks
        micro = max(size for size in divisors(each) if size <= self.micro)
        rollout = None if self.generated is None else self.generated // (micro * ranks)
        return Batch(micro=micro, accumulation=self.effective // (micro * ranks), rollout=rollout, ranks=ranks)

    def to_keys(self, keys: BatchKeys) -> dict[str, object]:
        """{key of the recipe: value}."""
        found: dict[str, object] = {keys.micro_batch: self.micro, keys.accumulation: self.accumulation}
        return found if keys.rollout is None else {**found, keys.rollout: self.rollout}

    def _cannot(self, ranks: int, whole: int, keys: BatchKeys) -> str:
        batch = f"the effective batch {self.effective}"
        if self.generated not in (None, self.effective):
            batch += f" and the {self.generated} completions of a rollout"
        works = sorted(divisors(whole))
        near = ", ".join(map(str, [n for n in works if n < ranks][-6:] + [n for n in works if n > ranks][:3]))
        return (
            f"{batch} ({keys.micro_batch}={self.micro} x {keys.accumulation}={self.accumulation} x {self.ranks} "
            f"rank(s)) cannot be divided by {ranks} ranks; numbers that work: {near}"
        )


def spread(recipe: Recipe, ranks: int) -> Recipe:
    """`recipe` on `ranks` ranks, at exactly the same effective batch and rollout; a note says how it is split.

    Raises ConfigError where it cannot be, with the numbers of ranks that work.
    """
    if ranks == recipe.launch.ranks:
        return recipe
    keys = recipe.keys
    if ranks % recipe.sharers:
        raise ConfigError(
            f"{keys.sharers} {recipe.sharers} must divide the ranks; got {ranks}; numbers that work: "
            f"{', '.join(str(n * recipe.sharers) for n in range(1, 5))}"
        )
    old = Batch.of(recipe.resolved, keys, recipe.world_size)
    new = old.on(ranks // recipe.sharers, keys)
    changes: dict[str, object] = {k: v for k, v in new.to_keys(keys).items() if v != recipe.resolved.get(k)}
    resolved = {**recipe.resolved, **changes}
    if keys.rollout is not None and keys.rollout_batch is not None:  # a recipe has one of the two
        changes |= {keys.rollout: new.rollout, keys.rollout_batch: None}
    splits = _split(new, keys, recipe.sharers), _split(old, keys, recipe.sharers)
    note = f"{splits[0]}: the effective batch {old.effective}, as {splits[1]} in the recipe"
    spread_out = replace(recipe, values=merge(recipe.values, changes), resolved=resolved, notes=(*recipe.notes, note))
    return with_launch(spread_out, _on(recipe.launch, ranks))


def with_launch(recipe: Recipe, launch: Launch) -> Recipe:
    """`recipe` with another launch of as many ranks as its batch is split over."""
    given = {} if launch.is_plain else {LAUNCH: launch.to_values()}
    values, resolved = ({k: v for k, v in m.items() if k != LAUNCH} for m in (recipe.values, recipe.resolved))
    return replace(recipe, values={**values, **given}, resolved={**resolved, **given}, launch=launch)


def _on(launch: Launch, ranks: int) -> Launch:
    """The launch on `ranks` cards of one machine; a single one shards nothing, as it has nobody to share with."""
    if ranks == 1 and launch.offload == "none" and launch.server_ranks == 0:
        return Launch()
    machines = launch.machines if ranks % launch.machines == 0 else 1
    return replace(launch, ranks=ranks, machines=machines)


def _split(batch: Batch, keys: BatchKeys, sharers: int) -> str:
    said = ", ".join(f"{key} {value}" for key, value in batch.to_keys(keys).items())
    ranks = batch.ranks * sharers
    return f"{said} on {ranks} rank{'s' if ranks > 1 else ''}"


def _integer(resolved: Mapping[str, object], key: str) -> int:
    value = resolved[key]
    assert isinstance(value, int), (key, value)
    return value
