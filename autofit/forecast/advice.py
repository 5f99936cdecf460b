"""The cheapest changes that would make a config fit: found by probing on its simulated card, mildest first.

Cost order: the highest tier first, then the fewest changed settings, then the fastest step. Each answer has been probed
on the simulated card, so each one fits there. One rule prunes the search: a setting at its strongest value needs no
more memory than at a milder value, so a set of settings that does not fit at its strongest values never fits.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, product

from autofit.errors import ConfigError
from autofit.hardware.hardware import Device
from autofit.probing.result import ProbeResult, ProbeStatus
from autofit.recipe.keys import TIERS, Tier
from autofit.recipe.recipe import Recipe, merge
from autofit.space.space import Candidate, Space, Value
from autofit.space.space_file import space_knobs

WANTED = 3
MOST_TOGETHER = 3  # most settings changed at once
MOST_PROBES = 16  # probes after which no larger sets are tried, so that an answer takes at most a minute
MICRO, ROLLOUT = "micro-batch", "rollout"
Probe = Callable[[Mapping[str, object]], ProbeResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of the recipe, in TRL's own keys, and its result on the simulated card."""

    changes: Mapping[str, object]
    tier: Tier
    settings: int  # number of changed settings; derived keys do not count
    device_used_bytes: int
    least_capacity_bytes: int
    step_s: float | None
    fits: bool

    @property
    def _cost(self) -> tuple[int, int, float]:
        return TIERS.index(self.tier), self.settings, self.step_s or 0.0

    def to_json(self) -> dict[str, object]:
        return {
            "changes": dict(self.changes),
            "tier": self.tier,
            "device_used_bytes": self.device_used_bytes,
            "step_s": self.step_s,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The up to three cheapest changes that fit; if there is none, the closest one that does not fit."""

    changes: tuple[Change, ...] = ()
    closest: Change | None = None


def cheapest_changes(recipe: Recipe, device: Device, probe: Probe, *, workers: int = 2) -> Advice:
    """The cheapest changes that make `recipe` fit, if any, by `probe` (values of a recipe -> result on the card)."""
    try:
        space = Space.of(recipe, space_knobs(recipe), allow="recipe", device=device)
    except ConfigError:
        return Advice()
    return _Search(space=space, probe=probe, workers=workers).run()


@dataclass(frozen=True, slots=True)
class _Found:
    settings: frozenset[str]
    change: Change


@dataclass(frozen=True)
class _Search:
    space: Space
    probe: Probe
    workers: int
    results: dict[Candidate, Change] = field(default_factory=dict)

    def run(self) -> Advice:
        found: list[_Found] = []
        with ThreadPoolExecutor(self.workers) as pool:
            for tier in TIERS:
                within = [name for name in self.strengths if TIERS.index(self._tier_of(name)) <= TIERS.index(tier)]
                for count in range(1, MOST_TOGETHER + 1):
                    sets = [s for s in self._sets(within, count, tier) if not any(f.settings <= s for f in found)]
                    if len(found) >= WANTED or len(self.results) >= MOST_PROBES:
                        break
                    if not sets or not self._can_fit(within, found):
                        break
                    fitting = pool.map(self._mildest, sets)
                    found += [_Found(s, change) for s, change in zip(sets, fitting, strict=True) if change is not None]
                if not found and (names := self._whittled(within)) and (change := self._mildest(names)) is not None:
                    found.append(_Found(names, change))
        cheapest = sorted((f.change for f in found), key=lambda change: change._cost)[:WANTED]
        missed = [change for change in self.results.values() if not change.fits]
        closest = min(missed, key=lambda c: c.least_capacity_bytes, default=None) if not cheapest else None
        return Advice(changes=tuple(cheapest), closest=closest)

    # -- settings and their strengths -----------------------------------------------------------------------------

    @cached_property
    def by_settings(self) -> dict[tuple[Value, ...], Candidate]:
        """{values of all settings: the candidate with these values}."""
        return {tuple(self._settings(c).values()): c for c in self.space.allowed()}

    def _settings(self, candidate: Candidate) -> dict[str, Value]:
        """{setting: value}: the micro-batch, the completions of a rollout, and all other knobs.

        The first two determine the two solved knobs.
        """
        micro, _, chunk, _ = self.space.split(candidate)
        others = {
            k: v
            for k, v in self.space.params(candidate).items()
            if k not in (self.space.keys.micro_batch, self.space.keys.rollout)
        }
        rollout = {ROLLOUT: micro * chunk} if self.space.recipe.generates else {}
        return {MICRO: micro, **rollout, **others}

    @cached_property
    def own(self) -> dict[str, Value]:
        return self._settings(self.space.baseline)

    @cached_property
    def strengths(self) -> dict[str, tuple[Value, ...]]:
        """{setting: its values that need less memory than the recipe's own, from the mildest to the strongest}."""
        values: dict[str, tuple[Value, ...]] = {}
        listed = list(self.own)
        for name in (MICRO, ROLLOUT):
            if name in self.own:
                found = {key[listed.index(name)] for key in self.by_settings}
                values[name] = tuple(
                    sorted((v for v in found if _number(v) < _number(self.own[name])), key=_number)[::-1]
                )
        for knob, choices in zip(self.space.knobs, self.space.choices, strict=True):
            keys = self.space.keys  # the group's size changes no bytes at the same effective batch
            if knob.name in (keys.micro_batch, keys.rollout, keys.group):
                continue
            own = self.own[knob.name]
            if knob.memory_ascending:
                values[knob.name] = choices[: choices.index(own)][::-1]
            elif knob.name != "attn_implementation" or own == "eager":
                values[knob.name] = tuple(v for v in choices if v != own)
        return {name: strong for name, strong in values.items() if strong}

    def _with(self, changed: Mapping[str, Value]) -> Candidate | None:
        return self.by_settings.get(tuple({**self.own, **changed}.values()))

    def _tier_of(self, name: str) -> Tier:
        candidates = (self._with({name: value}) for value in self.strengths[name])
        tiers = [self.space.tier(c) for c in candidates if c is not None]
        return max(tiers, key=TIERS.index) if tiers else "neutral"

    def _sets(self, names: Sequence[str], count: int, tier: Tier) -> list[frozenset[str]]:
        """Sets of `count` of the settings whose tier together is `tier`."""
        sets = (frozenset(s) for s in combinations(names, count))
        return [s for s in sets if max((self._tier_of(n) for n in s), key=TIERS.index) == tier]

    # -- probing --------------------------------------------------------------------------------------------------

    def _can_fit(self, names: Sequence[str], found: Sequence[_Found]) -> bool:
        """Whether the settings of `names` that do not fit alone fit together, each at its strongest value."""
        alone = {next(iter(f.settings)) for f in found if len(f.settings) == 1}
        left = [name for name in names if name not in alone]
        return bool(left) and self._fitting(self._strongest(left)) is not None

    def _strongest(self, names: Collection[str]) -> dict[str, Value]:
        """{setting: value}: the strongest combination of these settings that exists as a candidate; {} if none."""
        order = sorted(names, key=lambda name: name != MICRO)
        rows = (dict(zip(order, r, strict=True)) for r in product(*(self.strengths[n][::-1] for n in order)))
        return next((row for row in rows if self._with(row) is not None), {})

    def _whittled(self, names: Sequence[str]) -> frozenset[str]:
        """A minimal subset of `names` that still fits (each setting is needed); empty if all together do not fit."""
        kept = list(names)
        if not self._can_fit(kept, []):
            return frozenset()
        for name in sorted(names, key=lambda n: -TIERS.index(self._tier_of(n))):
            fewer = [n for n in kept if n != name]
            if fewer and self._fitting(self._strongest(fewer)) is not None:
                kept = fewer
        return frozenset(kept)

    def _mildest(self, names: frozenset[str]) -> Change | None:
        """The mildest change of these settings that fits, searched one setting at a time, lowest tier first."""
        at = self._strongest(names)
        best = self._fitting(at) if at else None
        for name in sorted(names, key=lambda n: (-TIERS.index(self._tier_of(n)), n)) if best is not None else ():
            mild = [v for v in self.strengths[name] if self._with({**at, name: v}) is not None]
            low, high = 0, len(mild) - 1  # mild[high] fits
            while low < high:
                middle = (low + high) // 2
                better = self._fitting({**at, name: mild[middle]})
                low, high = (low, middle) if better is not None else (middle + 1, high)
                best = better or best
            at[name] = mild[high]
        return best

    def _fitting(self, at: Mapping[str, Value]) -> Change | None:
        candidate = self._with(at)
        if candidate is None:
            return None
        change = self._ask(candidate, settings=len(at))
        return change if change.fits else None

    def _ask(self, candidate: Candidate, *, settings: int) -> Change:
        if candidate not in self.results:
            result = self.probe(merge(self.space.recipe.values, self.space.yaml_changes(candidate)))
            least = result.least_capacity_bytes
            self.results[candidate] = Change(
                changes=self.space.changes(candidate), tier=self.space.tier(candidate), settings=settings,
                device_used_bytes=result.device_used_bytes or 0, step_s=result.median_step_s,
                least_capacity_bytes=1 << 62 if least is None else least, fits=result.status is ProbeStatus.FIT,
            )  # fmt: skip
        return self.results[candidate]


def _number(value: Value) -> float:
    assert isinstance(value, int | float)
    return value
