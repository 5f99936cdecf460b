"""Which cards, and how many of them, run a recipe at its effective batch: each offer is simulated.

A card first gets the recipe as it is, then the mildest change that fits (autofit.forecast.ladders). What one card held
tells which changes another need not try: of the same compute capability it holds as many bytes, as kernels, workspaces
and the choice of attention are the same; of another, bytes differ by much less than `_OTHER_KERNELS`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum

from autofit.errors import ConfigError
from autofit.fakegpu.specs import GpuSpec
from autofit.forecast.ladders import Ladder, Rung, ladders
from autofit.forecast.margin import is_tight, shown_bytes
from autofit.hardware.hardware import Device, card_needs
from autofit.hardware.prices import Price
from autofit.probing.prepare import on_machines
from autofit.probing.result import ProbeResult, ProbeStatus
from autofit.recipe.findings import clashes
from autofit.recipe.keys import TIERS, Tier
from autofit.recipe.launch import LAUNCH, Launch
from autofit.recipe.recipe import Batch, Recipe, spread
from autofit.units import format_bytes, format_seconds

STEPS = 1000  # that a cost is of
_HOUR_S = 3600.0
_SOLD = 8 << 30  # cards are sold in multiples of 8 GB, of which drivers keep up to an eighth


class OfferVerdict(StrEnum):
    FITS = "fits"
    TIGHT = "tight"  # it does as predicted, with less to spare than the prediction may be off
    OVER = "does not fit"
    NONE = "not possible"  # the batch cannot be split, or the card lacks what the recipe needs


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A number of cards, and the recipe on them: as it is, or with the mildest change that fits."""

    card: str
    count: int
    capacity_bytes: int  # of one card
    verdict: OfferVerdict
    machines: int = 1  # that the cards are in
    changes: Mapping[str, object] = field(default_factory=dict)
    given: Mapping[str, object] = field(default_factory=dict)  # as a YAML takes them: with the keys that must go (None)
    tier: Tier = TIERS[0]
    batch: Mapping[str, object] = field(default_factory=dict)  # {key: value} of one rank, which `changes` may not name
    device_used_bytes: int | None = None  # of the rank with the most; of an offer over the card, what it would need
    cached_bytes: int = 0  # of them, those that PyTorch only keeps, where they fill the card
    host_bytes: int | None = None  # memory of the machine, of several ranks; None where it is not known
    step_s: float | None = None
    is_lower_bound: bool = False  # whether a step takes longer: the optimizer's part on the host is not timed
    samples_per_s: float | None = None
    usd_per_hour: float | None = None  # of all cards
    reason: str = ""  # why it is not possible, or does not fit

    @property
    def usd_per_1000_steps(self) -> float | None:
        """Cost of 1,000 optimizer steps; None without a price or seconds."""
        if self.usd_per_hour is None or self.step_s is None:
            return None
        return self.usd_per_hour * STEPS * self.step_s / _HOUR_S

    @property
    def shown_bytes(self) -> int | None:
        """The bytes to judge by: used, or where the allocator's cache fills the card, needed."""
        return None if self.device_used_bytes is None else self.device_used_bytes - self.cached_bytes

    @property
    def memory_bytes(self) -> int:
        """Memory of all cards."""
        return self.count * self.capacity_bytes

    @property
    def nominal_bytes(self) -> int:
        """Memory of all cards, as they are sold: that of an H100 and an A100, both of 80 GB, is the same."""
        return self.count * math.ceil(self.capacity_bytes / _SOLD) * _SOLD

    @property
    def fits(self) -> bool:
        return self.verdict is OfferVerdict.FITS

    @property
    def words(self) -> str:
        """`2 x h100`, `h100`, or on two machines `2 x 8 x h100`."""
        each = self.card if self.count == 1 else f"{self.count // self.machines} x {self.card}"
        return each if self.machines == 1 else f"{self.machines} x {each}"

    @property
    def step_words(self) -> str:
        """`3.15 s`, `over 9.53 s`, or `-` where nothing is known."""
        return "-" if self.step_s is None else f"{'over ' if self.is_lower_bound else ''}{format_seconds(self.step_s)}"

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "usd_per_1000_steps": self.usd_per_1000_steps}

    def __str__(self) -> str:
        if self.step_s is None or self.shown_bytes is None:
            return f"{self.words}: {self.verdict}{f', {self.reason}' if self.reason else ''}"
        used = f"{format_bytes(self.shown_bytes)} of {format_bytes(self.capacity_bytes)}"
        return f"{self.words}: {self.verdict}, {used}, {self.step_words} a step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The offers that stand out among those of the highest tier that has one."""

    cheapest: Offer | None  # for 1,000 steps; None without a price
    fastest: Offer | None
    smallest: Offer | None  # by the nominal memory of all cards, then by the number of them, then by cost


def choice(offers: Sequence[Offer]) -> Choice:
    """The cheapest, the fastest and the smallest offer that fit; tight ones count where nothing fits."""
    fitting = [o for o in offers if o.fits] or [o for o in offers if o.verdict is OfferVerdict.TIGHT]
    best = min((TIERS.index(o.tier) for o in fitting), default=0)
    pool = [o for o in fitting if TIERS.index(o.tier) == best]
    timed = [o for o in pool if not o.is_lower_bound] or pool
    inf = math.inf  # of what is not known
    priced = [o for o in timed if o.usd_per_1000_steps is not None]
    return Choice(
        cheapest=min(priced, key=lambda o: (o.usd_per_1000_steps or 0.0, o.step_s or 0.0), default=None),
        fastest=min((o for o in timed if o.step_s is not None), key=lambda o: (o.step_s or 0.0, o.count), default=None),
        smallest=min(
            pool,
            key=lambda o: (o.nominal_bytes, o.count, o.is_lower_bound, o.usd_per_1000_steps or inf, o.step_s or inf),
            default=None,
        ),
    )


# -------------------------------------------------------------------------------------------------------------- offers

_OTHER_KERNELS = 1.25  # a change that is over a card by more, as a card with other kernels held it, is not tried
_TRACED = 3  # micro-batches of a step that are simulated

ProbeOn = Callable[[Device, int, Mapping[str, object]], ProbeResult]  # (device, capacity in bytes, values of a recipe)


@dataclass(frozen=True)
class Shop:
    """Makes the offers for one recipe. `probe` simulates; `tell` hears of each offer as soon as it is made."""

    recipe: Recipe
    probe: ProbeOn
    prices: Mapping[str, Price]
    tell: Callable[[str], None] = lambda _: None
    cancel: Callable[[], None] = lambda: None  # ends the simulations at work, and lets none begin
    workers: int = 2
    # {values of a recipe: {compute capability: bytes held besides the context}}
    _held: dict[str, dict[tuple[int, int], int]] = field(default_factory=dict)

    def offers(self, cards: Sequence[GpuSpec], counts: Sequence[int]) -> tuple[Offer, ...]:
        """An offer for each card and count, by card in the order given; after a Ctrl-C, those that were finished.

        Each count is worked on by itself.
        """
        by_size = sorted(cards, key=lambda spec: -spec.capacity_bytes)  # the largest tell the most of the others
        found: dict[tuple[str, int], Offer] = {}

        def make(count: int) -> None:
            for spec in by_size:
                found[spec.name, count] = made = self._offer(spec, count)
                self.tell(str(made))

        with ThreadPoolExecutor(self.workers) as pool:
            try:
                for row in as_completed([pool.submit(make, count) for count in counts]):
                    row.result()
            except KeyboardInterrupt:
                self.cancel()
        return tuple(found[spec.name, count] for spec in cards for count in counts if (spec.name, count) in found)

    def _offer(self, spec: GpuSpec, count: int) -> Offer:
        lacking = card_needs(self.recipe.values).lacking(spec)
        if lacking:
            return self._none(spec, count, f"the card has no {', '.join(lacking)}")
        try:
            recipe = on_machines(spread(self.recipe, count), None, f"sim:{spec.name}")
        except ConfigError as error:
            return self._none(spec, count, str(error))
        row = _Row(spec=spec, count=count, recipe=recipe)
        for ladder in ladders(recipe, f"sim:{spec.name}"):
            if row.tight is not None and ladder[0].tier == TIERS[-1] != row.tight.tier:
                break  # rather with too little to spare than another training
            if (made := self._mildest(row, ladder)) is not None:
                return made
        return row.tight or self._over(row)

    def _mildest(self, row: "_Row", ladder: Ladder) -> Offer | None:
        """The offer with the mildest rung that fits. Where the first does not, the last says whether any can."""
        first, *others = ladder
        if (made := self._tried(row, first)) is not None or not others:
            return made
        leanest = self._tried(row, others[-1])
        if row.missed and row.missed[-1][1] is others[-1]:
            return None
        return next((made for rung in others[:-1] if (made := self._tried(row, rung)) is not None), leanest)

    def _tried(self, row: "_Row", rung: Rung) -> Offer | None:
        """The offer with this change if it fits; else the row has what came of it."""
        if clash := next(clashes(row.recipe, rung.values), None):
            own = clash in clashes(row.recipe)  # else the fix is of a change that was tried, not of the user's recipe
            row.problem = f"{clash.what}; {clash.fix}" if own else clash.what
            return None
        if (least := self._least_bytes(rung, row.spec) or row.missed_offloaded(rung)) is not None:
            row.missed.append((least, rung))
            return None
        result = self._result(row.spec, rung, row.recipe)
        if result.status not in (ProbeStatus.FIT, ProbeStatus.OOM):
            row.problem = result.reason
            return None
        self._learn(rung, row.spec, result)
        if result.status is ProbeStatus.OOM:
            row.missed.append((result.least_capacity_bytes or result.device_used_bytes or 0, rung))
            return None
        if not is_tight(result, row.spec.capacity_bytes):
            return self._made(row, rung, result, OfferVerdict.FITS)
        tight = self._made(row, rung, result, OfferVerdict.TIGHT)
        row.tight = min(row.tight or tight, tight, key=lambda offer: offer.device_used_bytes or 0)
        return None

    def _result(self, spec: GpuSpec, rung: Rung, recipe: Recipe) -> ProbeResult:
        """The simulation of a change; of many equal micro-batches in a step three are simulated.

        Bytes do not depend on the number of micro-batches from two on, and each adds as many seconds as the one before.
        """
        device, keys, values = f"sim:{spec.name}", recipe.keys, rung.values
        whole = int(str(values.get(keys.accumulation, recipe.grad_accum_steps)))
        if recipe.generates or whole <= _TRACED:
            return self.probe(device, spec.capacity_bytes, values)
        found = self.probe(device, spec.capacity_bytes, {**values, keys.accumulation: _TRACED})
        more_s = found.median_step_s
        if found.status is not ProbeStatus.FIT or more_s is None:
            return found
        less = self.probe(device, spec.capacity_bytes, {**values, keys.accumulation: _TRACED - 1})
        less_s = less.median_step_s
        if less_s is None:
            return less
        return replace(found, step_s=(more_s + (whole - _TRACED) * (more_s - less_s),))

    def _least_bytes(self, rung: Rung, spec: GpuSpec) -> int | None:
        """Bytes of a change that is known not to fit the card; None where it has to be tried."""
        weights = rung.least_bytes(self.recipe.weights_bytes) + spec.context_bytes
        held = self._held.get(rung.key, {})
        same = held.get(spec.compute_capability)
        other = min(held.values(), default=0)
        if same is not None and same + spec.context_bytes > spec.capacity_bytes:
            return same + spec.context_bytes
        if same is None and other > _OTHER_KERNELS * spec.allocatable_bytes:
            return other + spec.context_bytes
        return weights if weights > spec.capacity_bytes else None

    def _learn(self, rung: Rung, spec: GpuSpec, result: ProbeResult) -> None:
        """Keep what a change needs: its least capacity, or if it fits with none known, what it used."""
        needs = result.least_capacity_bytes or result.device_used_bytes or 0
        held = self._held.setdefault(rung.key, {})
        held[spec.compute_capability] = min(held.get(spec.compute_capability, needs), needs - spec.context_bytes)

    def _made(self, row: "_Row", rung: Rung, result: ProbeResult, verdict: OfferVerdict) -> Offer:
        step_s = result.median_step_s
        return Offer(
            card=row.spec.name, count=row.count, capacity_bytes=row.spec.capacity_bytes, verdict=verdict,
            machines=row.recipe.launch.machines, changes=rung.changes, given=row.given(rung), tier=rung.tier,
            batch=row.batch(rung),
            device_used_bytes=result.device_used_bytes,
            cached_bytes=(result.device_used_bytes or 0) - shown_bytes(result, row.spec.capacity_bytes)[0],
            step_s=step_s,
            host_bytes=None if result.host is None or result.host.kept_bytes is None else result.host.machine_bytes,
            is_lower_bound=Launch.of(rung.values).offload != "none",
            samples_per_s=None if step_s is None else self.recipe.effective_batch_size / step_s,
            usd_per_hour=self._usd(row.spec, row.count),
        )  # fmt: skip

    def _over(self, row: "_Row") -> Offer:
        least, rung = min(row.missed, key=lambda m: m[0], default=(0, None))
        if rung is None:
            return self._none(row.spec, row.count, row.problem or "nothing could be simulated")
        failed = f"; not simulated: {row.problem}" if row.problem else ""
        return Offer(
            card=row.spec.name, count=row.count, capacity_bytes=row.spec.capacity_bytes, verdict=OfferVerdict.OVER,
            machines=row.recipe.launch.machines, changes=rung.changes, tier=rung.tier, batch=row.batch(rung),
            device_used_bytes=least, usd_per_hour=self._usd(row.spec, row.count),
            reason=f"the smallest change tried needs {format_bytes(least)} a card{failed}",
        )  # fmt: skip

    def _none(self, spec: GpuSpec, count: int, reason: str) -> Offer:
        return Offer(
            card=spec.name, count=count, capacity_bytes=spec.capacity_bytes, verdict=OfferVerdict.NONE, reason=reason,
            usd_per_hour=self._usd(spec, count),
        )  # fmt: skip

    def _usd(self, spec: GpuSpec, count: int) -> float | None:
        price = self.prices.get(spec.name)
        return None if price is None else count * price.usd_per_hour


@dataclass(slots=True, kw_only=True)
class _Row:
    """What was tried for a number of cards of one kind, and did not fit."""

    spec: GpuSpec
    count: int
    recipe: Recipe  # on so many cards
    tight: Offer | None = None  # what fits with too little to spare, with the most of it
    missed: list[tuple[int, Rung]] = field(default_factory=list)  # (the bytes it needs, a change)
    problem: str = ""  # why one could not be simulated

    def batch(self, rung: Rung) -> dict[str, object]:
        """{key: value} of the micro-batch, the accumulation and, of a trainer that generates, the rollout.

        With the samples of passes without gradients, where the recipe has keys for them.
        """
        keys, values = self.recipe.keys, {**self.recipe.resolved, **rung.changes}
        others = {key: values[key] for key in (keys.scored, keys.referred) if key in values}
        return {**Batch.of(values, keys, self.recipe.world_size).to_keys(keys), **others}

    def given(self, rung: Rung) -> dict[str, object]:
        """The changes of a rung as a YAML takes them."""
        named = {f"launch.{key}" if key in Launch.__slots__ else key: value for key, value in rung.changes.items()}
        return {**named, **{key: None for key in self.recipe.values if key not in {*rung.values, LAUNCH}}}

    def missed_offloaded(self, rung: Rung) -> int | None:
        """Bytes of the rung with the recipe's own offload, where those were too many: without it there are no fewer."""
        if rung.changes.get("offload") != "none":
            return None
        rest = {**rung.values, LAUNCH: None}
        return next((nbytes for nbytes, tried in self.missed if {**tried.values, LAUNCH: None} == rest), None)
