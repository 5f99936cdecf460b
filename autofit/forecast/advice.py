"""The cheapest changes that would make a config fit, each simulated.

Cost order: the highest tier first, then the fewest changed settings, then the fastest step. Few probes are enough,
because lower bounds from the parts of what was simulated (autofit.forecast.levers) say which settings can help at all
and at what value. One rule prunes the rest: a setting at its strongest value needs no more memory than at a milder one,
so a set of settings that does not fit at its strongest values never fits.

Only changes with room to spare are advised. Weights of 16 bits in place of float32 are tried beside all others: they
are offered even where a setting of a higher tier suffices.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import combinations
from typing import TypeVar

from autofit.errors import Cancelled, ConfigError, option
from autofit.forecast.change import Change, OtherCard, Probe, Tell, Trier
from autofit.forecast.levers import CHECKPOINTING, ROLLOUT, Assignment, Bounds, Known, Levers
from autofit.forecast.margin import is_safe
from autofit.frontends.writing import in_16_bits
from autofit.hardware.hardware import Device
from autofit.plugin.protocol import LOAD, UPDATE
from autofit.plugin.protocol import ROLLOUT as IN_ROLLOUT
from autofit.probing.result import ProbeResult, ProbeStatus, least_share
from autofit.recipe.as_of import Then
from autofit.recipe.findings import clashes
from autofit.recipe.keys import GROWING, TIERS, Tier
from autofit.recipe.recipe import Recipe, merge, own_names
from autofit.space.space import QUANTIZATION, Value
from autofit.space.traits import describe_changes
from autofit.units import format_bytes, format_seconds

T = TypeVar("T")
WANTED = 3
MOST_TOGETHER = 3  # most settings changed at once, except where only all of them suffice
MOST_PROBES = 6  # once something fits; without anything that fits, twice as many


class Ending(StrEnum):
    """Cause that ended a piece of work before it was done."""

    TIME = "time"
    INTERRUPT = "interrupt"


def within(limit_s: float, work: Callable[[], T], *, cancel: Callable[[Ending], None]) -> tuple[T, Ending | None]:
    """Result of `work`, and the cause that ended it: `cancel` is called after `limit_s` seconds or at Ctrl-C.

    `work` runs in a thread of its own, and must return soon after `cancel`, with what it has.
    """
    ending: Ending | None = None
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(work)
        try:
            if not wait([made], timeout=limit_s).done:
                ending = Ending.TIME
        except KeyboardInterrupt:
            ending = Ending.INTERRUPT
        if ending is not None:
            cancel(ending)
        return made.result(), ending


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Changes to fit (or to leave room), to be faster, or to another card. Each has been simulated."""

    changes: tuple[Change, ...] = ()  # that make it fit with room to spare, the cheapest first
    closest: Change | None = None  # without such a change, the one that misses by the least
    proven: bool = False  # without such a change: whether all settings at their strongest values do not fit either
    untried: tuple[Change, ...] = ()  # that failed when they were tried, for another reason than memory
    misses: int = 0  # changes that were simulated to their end and do not fit
    faster: tuple[Change, ...] = ()  # the highest tier first, then the fastest
    card: OtherCard | None = None  # the smallest other card that runs the recipe as it is
    ending: Ending | None = None  # what ended the search for it early; None where it came to its end

    @property
    def came_too_late(self) -> bool:
        """True if the search was ended before any change was simulated."""
        return self.ending is not None and not (
            self.changes or self.faster or self.untried or self.closest or self.misses
        )


def cheapest_changes(
    recipe: Recipe, device: Device, probe: Probe, *, capacity_bytes: int, base: ProbeResult | None = None,
    wanted: int = WANTED, workers: int = 2, tell: Tell = lambda _: None,
) -> Advice:  # fmt: skip
    """The cheapest changes that make `recipe` fit, if any, by `probe` (values of a recipe -> result on the card).

    `base` is the result of the recipe as it is. A `probe` that raises Cancelled ends it with what was found.
    """
    try:
        levers = Levers.of(recipe, device)
    except ConfigError:
        return Advice()
    trier = Trier(recipe=recipe, device=device, capacity_bytes=capacity_bytes, probe=probe, tell=tell)
    beside: Assignment = {}
    if base is not None and (share := _starting_share(levers, base)) is not None:
        beside = {levers.share: share}
        try:
            change, base = trier.change(levers, beside)
        except Cancelled:
            return Advice()
        if change.fits and not change.tight:
            return Advice(changes=(change,))
    missed = base if base is not None and base.status is ProbeStatus.OOM else None
    unloaded = missed is not None and missed.oom_phase == LOAD
    rolls = missed is not None and not unloaded and IN_ROLLOUT in (missed.oom_phase, _largest_phase(missed))
    search = _Search(
        levers=levers, trier=trier, beside=beside, wanted=wanted, workers=workers, unloaded=unloaded, rolls=rolls
    )
    if base is not None:
        search.learn({}, base)
        if GROWING in levers.strengths:
            search.learn_growing(base.with_growing_segments(capacity_bytes))
    return search.run()


def _starting_share(levers: Levers, base: ProbeResult) -> float | None:
    """The smallest share of the card with which a failed rollout engine starts, if its share is the cause."""
    least = least_share(base.reason) if base.status is ProbeStatus.OOM else None
    larger = (v for v in levers.values(levers.share) if least is not None and isinstance(v, float) and v >= least)
    return min((value for value in larger if levers.candidate({levers.share: value})), default=None)


def _largest_phase(result: ProbeResult) -> str | None:
    """The phase in which most bytes are live; gaps that it leaves may be too many only in a later one."""
    held = result.categories
    return max(held, key=lambda phase: sum(held[phase].values()), default=None)


@dataclass(frozen=True)
class _Search:
    levers: Levers
    trier: Trier
    beside: Assignment  # settings that every change has that can have them
    wanted: int
    workers: int
    unloaded: bool  # whether the recipe runs out of memory before there is a batch
    rolls: bool  # whether it runs out because of its rollout
    results: dict[tuple[tuple[str, Value], ...], Change] = field(default_factory=dict)
    known: list[Known] = field(default_factory=list)
    found: dict[frozenset[str], Change] = field(default_factory=dict)
    apart: dict[frozenset[str], Change] = field(default_factory=dict)  # that are told whatever else fits
    beaten: set[frozenset[str]] = field(default_factory=set)  # sets that do not fit at their strongest values
    broken: set[frozenset[str]] = field(default_factory=set)  # settings that could not be tried

    def run(self) -> Advice:
        proven = False
        with contextlib.suppress(Cancelled), ThreadPoolExecutor(self.workers) as pool:
            apart = [pool.submit(self._halve), pool.submit(self._generate_fewer)]
            for tier in TIERS:
                self._try_sizes(pool, self._names(tier), tier)
                for settled in apart:
                    settled.result()
                if self._enough:
                    break
            for tier in TIERS if self.found else ():  # a choice of more, where what suffices alone is too little of one
                self._try(pool, self._names(tier), 2, tier)
            proven = not self.found and self._is_beaten()
        best = sorted(self.found.values(), key=lambda change: change.cost)
        chosen = bool(best) and best[0].tier == TIERS[-1]  # each trains something else: which one is the user's choice
        best = best[: max(self.wanted, WANTED) if chosen else self.wanted]
        found = sorted([*best, *(c for c in self.apart.values() if c not in best)], key=lambda change: change.cost)
        tried = self.results.values()
        missed = [c for c in tried if not c.failure and (c.fits or c.least_capacity_bytes is not None)]
        nearest = min(missed, key=lambda c: (not c.fits, c.least_capacity_bytes or 0), default=None)
        own = next((k.least_bytes for k in self.known if not k.at), math.inf)
        closer = nearest is not None and (nearest.fits or (nearest.least_capacity_bytes or 0) < own)
        closest = nearest if closer and not found else None
        untried = tuple(change for change in tried if change.failure)
        misses = sum(not (change.fits or change.failure) for change in tried)
        return Advice(changes=tuple(found), closest=closest, proven=proven, untried=untried, misses=misses)

    def _names(self, tier: Tier) -> list[str]:
        """The settings of `tier` and of those above it."""
        return [n for n in self._open if TIERS.index(self._tier_of(n)) <= TIERS.index(tier)]

    @property
    def _open(self) -> list[str]:
        return [n for n in self.levers.strengths if n not in self.beside]

    def _halve(self) -> None:
        """Settle weights of 16 bits in place of float32; if they are too large, with checkpoints."""
        if "dtype" not in self.levers.strengths:
            return
        half = frozenset({"dtype"})
        for names in dict.fromkeys((half, half.union(n for n in CHECKPOINTING if n in self.levers.strengths))):
            if half not in self.apart and self._is_open(names):
                self._settle(names, self._start(names), self.apart)

    def _generate_fewer(self) -> None:
        """Settle fewer completions at once where they fill the card: a smaller micro-batch leaves the rollout as it is.

        Where that is no neutral change, all neutral ones would be tried before it, in vain or for minutes.
        """
        names = frozenset({ROLLOUT})
        if self.rolls and ROLLOUT in self.levers.strengths and self._tier_of(ROLLOUT) != TIERS[0]:
            self._settle(names, self._start(names), self.apart)

    def _is_beaten(self) -> bool:
        """True if even all possible settings together, at their strongest values, exceed the memory."""
        names = frozenset(n for n in self._open if frozenset({n}) not in self.broken)
        at = self.levers.strongest(names)
        return not at or not (self._ask(at).fits or self._ask(at).failure)

    def _try_sizes(self, pool: ThreadPoolExecutor, names: Sequence[str], tier: Tier) -> None:
        """Settings of `names` by themselves; sets of two and three that promise room; as few as possible of all; more.

        Nothing is tried where all of them together are known not to suffice. Quantisation, which is slow to try, waits
        for the sets of which room is expected where none is of it.
        """
        if self._is_hopeless(frozenset(names)):
            return
        slow = [n for n in names if n == QUANTIZATION and not self._is_promising(frozenset({n}))]
        self._try(pool, [n for n in names if n not in slow], 1, tier)
        for count in range(2, MOST_TOGETHER + 1) if not self.unloaded else ():  # of which little is expected yet
            if not self.found:
                unbroken = [n for n in names if frozenset({n}) not in self.broken]
                self._try(pool, unbroken, count, tier, promising=True)
        if not self.found:
            self._try(pool, slow, 1, tier)
        if self.found:
            return
        every = [n for n in names if frozenset({n}) not in self.broken]
        if self._is_hopeless(frozenset(every)):  # by what was learned since
            return
        spared = ({QUANTIZATION, self.levers.share}, {QUANTIZATION}, set[str]())  # a share may be too small to start in
        for within in dict.fromkeys(frozenset(every) - some for some in spared):
            if len(within) > 1 and not self.found and self._is_open(within):
                self._settle(within, self._start(within))
                if within in self.found:
                    self._whittle(within)
        for count in range(2, MOST_TOGETHER + 1):
            self._try(pool, every, count, tier)

    def _try(
        self, pool: ThreadPoolExecutor, names: Sequence[str], count: int, tier: Tier, *, promising: bool = False
    ) -> None:
        """Settle the sets of `count` settings whose tier together is `tier`, until there are enough.

        With `promising` only those of which room is expected: the mildest first, until one suffices.
        """
        while not self._enough and not (promising and self.found):
            sets = self._sets(names, count, tier)
            if promising:
                likely = [s for s in sets if self._is_promising(s)]
                sets = sorted(likely, key=lambda s: (QUANTIZATION in s, self._strength(self._start(s))))
            if not (sets := sets[: self.workers]):
                break
            list(pool.map(lambda names: self._settle(names, self._start(names)), sets))

    @property
    def _enough(self) -> bool:
        most = MOST_PROBES if self.found else 2 * MOST_PROBES
        return len(self.found) >= self.wanted or len(self.results) >= most

    def _sets(self, names: Iterable[str], count: int, tier: Tier) -> list[frozenset[str]]:
        sets = [frozenset(s) for s in combinations(names, count)]
        of_tier = [s for s in sets if max((self._tier_of(n) for n in s), key=TIERS.index) == tier]
        later = {
            s: (QUANTIZATION in s, not self._is_promising(s)) for s in of_tier if self._is_open(s)
        }  # slow, in vain
        return sorted(later, key=lambda s: later[s])

    def _is_promising(self, names: frozenset[str]) -> bool:
        """True if these settings are expected to leave room, beyond the lower bounds."""
        return self._expected(self.levers.strongest(names)) <= self.trier.room_bytes

    def _is_open(self, names: frozenset[str]) -> bool:
        """True if it is still open whether these settings suffice, and no smaller set does."""
        if any(f <= names for f in self.found) or any(names <= b for b in self.beaten):
            return False
        if any(b <= names for b in self.broken):
            return False
        if self.unloaded and not any(self.levers.traits(name).loads for name in names):
            return False
        at = self.levers.strongest(names)
        return bool(at) and self._least_bytes(at) <= self.trier.room_bytes

    def _is_hopeless(self, names: frozenset[str]) -> bool:
        """True if these settings at their strongest, and so any of them, are known to be too weak."""
        at = self.levers.strongest(names)
        return bool(at) and self._least_bytes(at) > self.trier.room_bytes

    def _tier_of(self, name: str) -> Tier:
        return self.levers.tier_of(name)

    # -- one set of settings --------------------------------------------------------------------------------------

    def _settle(self, names: frozenset[str], at: Assignment, into: dict[frozenset[str], Change] | None = None) -> None:
        """Find the mildest change of these settings that fits with room, beginning with the values `at`."""
        into = self.found if into is None else into
        strongest = self.levers.strongest(names)
        best: Change | None = None
        while True:
            change = self._ask(at)
            if change.failure:
                self.broken.add(names)
                break
            best = change if change.fits and not change.tight else best
            if best is not None or dict(at) == strongest:
                break
            further = self._start(names)
            at = further if self._strength(further) > self._strength(at) else strongest
        if best is not None:
            into[names] = best
        elif dict(at) == strongest:
            self.beaten.add(names)

    def _start(self, names: frozenset[str]) -> dict[str, Value]:
        """The mildest values of these settings that are expected to fit; the lowest tier is spared first."""
        at = self.levers.strongest(names)
        for name in sorted(names, key=lambda n: (-TIERS.index(self._tier_of(n)), self.levers.rank(n), n)):
            mild = ({**at, name: value} for value in self.levers.strengths[name])
            fitting = (
                m for m in mild if self.levers.candidate(m) is not None and self._expected(m) <= self.trier.room_bytes
            )
            at = next(fitting, at)
        return at

    def _whittle(self, every: frozenset[str]) -> None:
        """Leave out the settings of `every` that the bounds can do without, and look whether the others fit."""
        for _ in range(MOST_TOGETHER):
            kept = every
            for name in sorted(every, key=lambda n: (-TIERS.index(self._tier_of(n)), -self.levers.rank(n), n)):
                fewer = kept - {name}
                if (
                    fewer
                    and self._is_new(fewer)
                    and self._expected(self.levers.strongest(fewer)) <= self.trier.room_bytes
                ):
                    kept = fewer
            if kept == every:
                return
            self._settle(kept, self._start(kept))
            if kept in self.found:
                del self.found[every]
                return

    def _is_new(self, names: frozenset[str]) -> bool:
        return bool(self.levers.strongest(names)) and not any(names <= b for b in self.beaten | self.broken)

    def _strength(self, at: Assignment) -> int:
        return sum(self.levers.strengths[name].index(value) for name, value in at.items())

    # -- what is known --------------------------------------------------------------------------------------------

    def _least_bytes(self, at: Assignment) -> int:
        return max((self._bounds.least_bytes(known, at) for known in self._below(at)), default=0)

    def _expected(self, at: Assignment) -> int:
        """The bytes expected with `at`, from the run that is closest to it; 0 if there is none."""
        closest = max(self._below(at), key=lambda k: (len(k.at), self._strength(k.at)), default=None)
        return 0 if closest is None else self._bounds.expected_bytes(closest, at)

    def _below(self, at: Assignment) -> list[Known]:
        """The simulated runs whose settings are among `at`, at most as strong as there."""
        order = self.levers.strengths
        return [
            known for known in list(self.known)
            if all(n in at and order[n].index(v) <= order[n].index(at[n]) for n, v in known.at.items())
        ]  # fmt: skip

    @property
    def _bounds(self) -> Bounds:
        return Bounds(self.levers.space.recipe, self.levers.own, self.levers.space.stated)

    def learn(self, at: Assignment, result: ProbeResult) -> None:
        """Keep the bytes of a simulated run with the settings `at`."""
        known = Known.of(at, result, self.trier.context_bytes)
        if known is not None:
            self.known.append(known)

    def learn_growing(self, result: ProbeResult | None) -> None:
        """Keep the result with expandable segments, where the recipe's own run told it."""
        if result is not None and (at := self.levers.strongest(frozenset({GROWING}))):
            self.results[tuple(at.items())], _ = self.trier.change(self.levers, at, result)
            self.learn(at, result)
            self._settle(frozenset({GROWING}), at)

    def _ask(self, at: Assignment) -> Change:
        key = tuple(sorted(at.items()))
        if key not in self.results:
            both = {**at, **self.beside}  # a share of the card is none of a recipe that generates without an engine
            change, result = self.trier.change(self.levers, both if self.levers.candidate(both) is not None else at)
            self.results[key] = change
            if not change.failure:
                self.learn(at, result)
        return self.results[key]


# -- in words ---------------------------------------------------------------------------------------------------------

_FLOAT32 = 3.5  # bytes of a parameter, from which on most of them are float32
_MATTERS_FRAC = 0.1  # of the card: smaller weights are not why a recipe does not fit


def advice_json(advice: Advice) -> dict[str, object]:
    """The advice as plain values."""
    return {
        "changes": [change.to_json() for change in advice.changes],
        "closest": None if advice.closest is None else advice.closest.to_json(),
        "untried": [{"changes": dict(c.changes), "reason": c.failure} for c in advice.untried],
        "faster": [change.to_json() for change in advice.faster],
        "card": None if advice.card is None else advice.card.to_json(),
        "advice_ended_by": None if advice.ending is None else str(advice.ending),
    }


def float32_words(recipe: Recipe, result: ProbeResult, capacity_bytes: int) -> list[str]:
    """A sentence if float32 weights take a good part of a card that a recipe exceeds; else []."""
    count, nbytes = recipe.model_parameters, recipe.weights_bytes
    if (
        is_safe(result, capacity_bytes)
        or "dtype" not in recipe.resolved
        or not count
        or not nbytes
        or nbytes < max(_FLOAT32 * count, _MATTERS_FRAC * capacity_bytes)
    ):
        return []
    unset = "" if recipe.values.get("dtype") else "`dtype` is not set, so "
    fails = any(clashes(recipe, merge(recipe.values, {"dtype": "bfloat16"})))
    halved = "" if fails else in_16_bits(recipe.foreign)
    return [
        f"{unset}the weights are loaded in float32: {format_bytes(nbytes)} for {count / 1e9:.2f} B parameters"
        + (f"; {halved} takes half of that" if halved else "")
    ]


def then_lines(then: Then | None, result: ProbeResult, capacity_bytes: int) -> list[str]:
    """Behaviour of older libraries with the recipe, in a line; [] if none were named."""
    if then is None:
        return []
    fits = result.status is ProbeStatus.FIT
    fitted = None
    if then.held_bytes:
        update = max((phase.device_used_bytes for phase in result.phases if phase.name == UPDATE), default=0)
        fitted = max(result.device_used_bytes or 0, update + then.held_bytes) <= capacity_bytes
    return [then.line(fits=fits, fitted=fitted)]


def ending_words(advice: Advice) -> list[str]:
    """A sentence if the search for advice was ended early; else []."""
    more = option("advice-time", "2m")
    words = {
        Ending.TIME: f"not every change was tried in the time for advice; give more, such as {more}",
        Ending.INTERRUPT: "interrupted: not every change was tried",
    }
    if advice.came_too_late and advice.ending is Ending.TIME:
        return [f"no change was simulated to its end in the time for advice; give more, such as {more}"]
    return [] if advice.ending is None else [words[advice.ending]]


def advice_lines(advice: Advice, recipe: Recipe, result: ProbeResult, capacity_bytes: int) -> list[str]:
    """Changes to make, a line each, under a heading."""
    fits = result.status is ProbeStatus.FIT
    lines = [] if is_safe(result, capacity_bytes) else list(_mends(advice, recipe, capacity_bytes, fits=fits))
    if advice.faster:
        lines.append("what would make it faster, predicted:")
        for change in advice.faster:
            lines.append(f"  {change_line(change, recipe, result.median_step_s)}")
    for change in advice.untried:
        what = describe_changes(change.changes, recipe.resolved, own_names(recipe.foreign))
        lines.append(f"could not be tried: {what}: {change.why}")
    if advice.card is not None:
        lines.append(card_line(advice.card, smaller=advice.card.capacity_bytes < capacity_bytes))
    return [*lines, *(f"{words}." for words in ending_words(advice))]


def _mends(advice: Advice, recipe: Recipe, capacity_bytes: int, *, fits: bool) -> Iterator[str]:
    what = "leave more room" if fits else "make it fit"
    if advice.changes:
        yield f"the cheapest changes that {what}, predicted:"
        for change in advice.changes:
            yield f"  {change_line(change, recipe)}"
        return
    if advice.came_too_late:
        return
    tried = f"no change {'of the recipe' if advice.proven else 'that was tried of the recipe'}'s settings"
    tried += " leaves more room" if fits else " makes it fit"
    if advice.closest is None or fits:
        yield f"{tried}."
        return
    yield f"{tried}; the closest change {_miss(advice.closest, recipe, capacity_bytes)}."


def _miss(closest: Change, recipe: Recipe, capacity_bytes: int) -> str:
    what = describe_changes(closest.changes, recipe.resolved, own_names(recipe.foreign))
    if closest.fits:
        spare = format_bytes(capacity_bytes - closest.shown_bytes)
        return f"leaves {spare}, less than the prediction may be off: {what}"
    return f"exceeds the limit by {format_bytes((closest.least_capacity_bytes or 0) - capacity_bytes)}: {what}"


def change_line(change: Change, recipe: Recipe, step_s: float | None = None) -> str:
    """`neutral: gradient_checkpointing False -> True (18.2 GB, 3.1 s a step)   --set gradient_checkpointing=true`.

    With `step_s`, the seconds of a step now, also the speed-up.
    """
    gain = f", {step_s / change.step_s:.2f}x" if step_s and change.step_s else ""
    tight = ", little to spare" if change.tight else ""
    used = format_bytes(change.shown_bytes)
    what = describe_changes(change.changes, recipe.resolved, own_names(recipe.foreign))
    return f"{change.tier}: {what} ({used}{change.step_words}{gain}{tight})   {change.how}"


def card_line(card: OtherCard, *, smaller: bool) -> str:
    """The other card on which the recipe runs as it is."""
    step = "" if card.step_s is None else f", {format_seconds(card.step_s)} a step"
    head = "a smaller card would do" if smaller else "as it is, it runs on a larger card"
    used = f"{format_bytes(card.shown_bytes)} of {format_bytes(card.capacity_bytes)}"
    return f"{head}: {card.name} ({used}{step})   {card.options}"
