"""Offers: cards, and numbers of them, that run a recipe at its effective batch, each simulated.

A card first gets the recipe as it is, then the mildest change that fits (`ladders`). What one card held
tells which changes another need not try: of the same compute capability it holds as many bytes, as kernels, workspaces
and the choice of attention are the same; of another, bytes differ by much less than `_OTHER_KERNELS`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from itertools import groupby

from autofit.errors import ConfigError
from autofit.fakegpu.specs import GpuSpec
from autofit.forecast.change import LEAST_GAIN
from autofit.forecast.levers import CHECKPOINTING, MICRO, ROLLOUT, Assignment, Levers, number
from autofit.forecast.margin import is_safe, is_tight, needed_bytes, roomy_bytes, shown_bytes
from autofit.hardware.hardware import Device, card_needs
from autofit.hardware.prices import Price
from autofit.probing.prepare import on_machines
from autofit.probing.result import ProbeResult, ProbeStatus
from autofit.recipe.findings import clashes
from autofit.recipe.keys import LAUNCH, QUANT_STORAGE, SYNC_EACH_BATCH, TIERS, Tier, weight_bits
from autofit.recipe.launch import Launch, Sharding
from autofit.recipe.profile import profile
from autofit.recipe.recipe import Batch, Recipe, inner_value, merge, spread, with_launch
from autofit.space.space import QUANTIZATION, Value
from autofit.units import format_bytes, format_seconds

EIGHT_BIT = "adamw_8bit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """A change of a recipe: its values with the change, and how they differ from the user's."""

    values: Mapping[str, object]
    changes: Mapping[str, object]
    at: Assignment = field(default_factory=dict)  # the settings of its space that differ
    tier: Tier = TIERS[0]
    shards_weights: bool = False  # whether a rank holds less than all weights
    quantised: bool = False
    offloads: bool = False  # to host memory, which takes longest

    @property
    def key(self) -> str:
        """The same for the same values."""
        return repr(sorted(self.values.items(), key=lambda entry: entry[0]))

    def least_bytes(self, weights_bytes: int | None) -> int:
        """Bytes of the weights alone, where a rank holds them all as they are loaded; else 0."""
        return 0 if self.shards_weights or self.quantised or self.changes.get("dtype") else weights_bytes or 0


Ladder = tuple[Rung, ...]  # of one tier, mostly each with less memory than the one before it, and slower


def ladders(recipe: Recipe, device: Device) -> list[Ladder]:
    """The recipe as it is and with less and less memory for its batch, then so with other changes: the mildest first.

    Neutral ones shard what several ranks hold (with FSDP the gradients too, by one micro-batch a step, else in every
    micro-batch), checkpoint activations, shrink the micro-batch, then the rollout, and at last offload; approximate
    ones load bfloat16 or keep the optimizer in 8 bits; those of the recipe train an adapter, then on weights of 4 bits.
    A recipe that offloads is tried without it too: the offload may be all that fails.
    """
    try:
        levers = Levers.of(recipe, device)
    except ConfigError:  # nothing of this recipe can vary but its launch
        levers = None
    seen: set[str] = set()
    found: list[Ladder] = []
    for at in _bases(levers):
        for launch in _launches(recipe):
            settings = list(_leaner(levers, at))
            mildest = [_rung(recipe, levers, launch, setting) for setting in settings[:1]]
            made = mildest + [
                _rung(recipe, levers, launch, setting, leaner=True)
                for milder in settings
                for setting in (*_undivided(levers, launch, milder), milder)
            ]
            new = {rung.key: rung for rung in made if rung.key not in seen}
            seen |= new.keys()
            found += [tuple(rungs) for _, rungs in groupby(new.values(), lambda rung: rung.tier)]
    return sorted(found, key=lambda ladder: (TIERS.index(ladder[0].tier), ladder[0].offloads))


def _launches(recipe: Recipe) -> list[Launch]:
    """The launch as it is, then with no offload, then sharded, then in host memory too.

    A tool that launches by itself has settings of its own for these.
    """
    own = recipe.launch
    found = [own, replace(own, offload="none")]
    if own.ranks > 1 and not profile(recipe.trainer).own_launch:
        which: Sharding = "zero3" if own.is_deepspeeds else "fsdp2"
        sharded = own if _shards(own) else replace(own, sharding=which, reshard_after_forward=True)
        found += [sharded, replace(sharded, offload="parameters")]
    return _once(found)


def _once(found: list[Launch]) -> list[Launch]:
    return [launch for place, launch in enumerate(found) if launch not in found[:place]]


def _shards(launch: Launch) -> bool:
    """True if the launch shards the weights."""
    return launch.sharding in ("fsdp1", "fsdp2", "zero3")


def _bases(levers: Levers | None) -> Iterator[Assignment]:
    """Settings besides the launch and the batch, mildest first: each with what makes room before it."""
    yield {}
    if levers is None:
        return
    strongest = {name: values[-1] for name, values in levers.strengths.items()}
    base: dict[str, Value] = {}
    if "dtype" in strongest:
        base = {"dtype": strongest["dtype"]}
        yield base
    if EIGHT_BIT in (levers.strengths.get("optim") or ()):
        yield {**base, "optim": EIGHT_BIT}
    if strongest.get("use_peft") is True:
        base = {**base, "use_peft": True}
        yield base
    if QUANTIZATION in strongest:
        yield {**base, QUANTIZATION: strongest[QUANTIZATION]}


def _leaner(levers: Levers | None, base: Assignment) -> Iterator[Assignment]:
    """The settings `base`, then with less and less memory for the batch, as far as there are such candidates."""
    at: dict[str, Value] = dict(base)
    if levers is None or not at or levers.candidate(at) is not None:
        yield at
    if levers is None:
        return
    sizes = (levers.size, *levers.passes)
    for names in (CHECKPOINTING, sizes, (ROLLOUT,), (levers.space.keys.evaluation,), levers.offloads):
        if names == sizes:  # a smaller one is slower: the largest that fits is wanted
            halves = ({**at, **_halved(levers, by)} for by in _HALVES)
            yield from (half for half in halves if half != at and levers.candidate(half) is not None)
        at = {**at, **{name: levers.strengths[name][-1] for name in names if name in levers.strengths}}
        if at and levers.candidate(at) is not None:
            yield at


_HALVES = tuple(2**n for n in range(1, 11))


def _halved(levers: Levers, by: int) -> Assignment:
    """The recipe's micro-batch, and its gradient-free passes, divided by a number, down to two samples."""
    own = {name: levers.own[name] for name in (levers.size, *levers.passes) if name in levers.strengths}
    least = 2 if levers.size == MICRO else 1
    found: dict[str, Value] = {}
    for name, value in own.items():
        listed = [v for v in levers.strengths[name] if number(v) * by <= number(value) and number(v) >= least]
        found |= {name: max(listed, key=number)} if listed else {}
    return found if levers.size in found else {}


def _larger_sizes(levers: Levers, at: Assignment, name: str, result: ProbeResult, room_bytes: int) -> list[Value]:
    """The larger values of a size that may have room, in ascending order, by what `result` held with the settings `at`.

    Activations and logits grow with it, and what else does is not known before it is tried.
    """
    now = number(at.get(name, levers.own.get(name, 0)))
    values = levers.larger(MICRO) if name == MICRO and MICRO in levers.own else levers.values(name)
    peaks = {phase.name: phase.peak_allocated_bytes for phase in result.phases}
    beside = needed_bytes(result) - max(peaks.values(), default=0)
    grow = {p: sum(held.get(kind, 0) for kind in ("activations", "logits")) for p, held in result.categories.items()
            if p in levers.phases(name)}  # fmt: skip
    return [
        value for value in sorted(number(value) for value in values)
        if value > now and levers.candidate({**at, name: value}) is not None
        and all(peaks[p] + nbytes * (value / now - 1) + beside <= room_bytes for p, nbytes in grow.items())
    ]  # fmt: skip


def _undivided(levers: Levers | None, launch: Launch, at: Assignment) -> Iterator[Assignment]:
    """The settings `at` with all samples of a step in one micro-batch, under FSDP: it gathers and reduces once."""
    if levers is not None and MICRO in levers.own and MICRO not in at and launch.sharding.startswith("fsdp"):
        whole = levers.space.recipe.effective_batch_size // levers.space.recipe.world_size
        if whole in levers.larger(MICRO) and levers.candidate({**at, MICRO: whole}) is not None:
            yield {**at, MICRO: whole}


def _rung(recipe: Recipe, levers: Levers | None, launch: Launch, at: Assignment, *, leaner: bool = False) -> Rung:
    """The rung with these settings; a `leaner` one under FSDP adds up shards of gradients in place of whole ones."""
    changed = with_launch(recipe, launch)
    changes: dict[str, object] = {}
    values, tier = changed.values, TIERS[0]
    if levers is not None and at:
        changes = dict(levers.changes(at))
        values, tier = merge(changed.values, levers.changes(at, yaml=True)), levers.tier(at)
    if leaner and launch.sharding.startswith("fsdp") and _keeps_gradients(values, recipe):
        reduced: dict[str, object] = {SYNC_EACH_BATCH: True}
        if recipe.keys.unreduced is not None:
            reduced = {recipe.keys.unreduced: False}
        values, changes = merge(values, reduced), changes | reduced
    if (leaner or launch.sharding != recipe.launch.sharding) and launch.sharding == "fsdp2" and _in_integers(values):
        changes[QUANT_STORAGE] = storage = "float16" if values.get("fp16") else "bfloat16"
        values = merge(values, {QUANT_STORAGE: storage})
    if launch.sharding != recipe.launch.sharding:
        changes["sharding"] = launch.sharding
    if launch.offload != recipe.launch.offload:
        changes["offload"] = launch.offload
    return Rung(
        values=values, changes=changes, at=at, tier=tier, shards_weights=_shards(launch),
        offloads=launch.offload not in ("none", recipe.launch.offload),
        quantised=weight_bits(values) is not None,
    )  # fmt: skip


def _in_integers(values: Mapping[str, object]) -> bool:
    """True if weights of 4 bits are stored as integers, which FSDP2 leaves unsharded."""
    return weight_bits(values) == 4 and values.get(QUANT_STORAGE) in (None, "uint8")


def _keeps_gradients(values: Mapping[str, object], recipe: Recipe) -> bool:
    """True if whole gradients are held between two micro-batches, and this can be turned off."""
    micro_batches = values.get(recipe.keys.accumulation, recipe.grad_accum_steps)
    if recipe.keys.unreduced is not None:
        return micro_batches != 1 and bool({**recipe.resolved, **values}.get(recipe.keys.unreduced))
    try:
        return micro_batches != 1 and not inner_value(values, SYNC_EACH_BATCH)
    except ConfigError:  # a file has the settings that it belongs to
        return False


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
        """Cost of 1,000 optimizer steps, if the price and the seconds are known."""
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
        """`3.15 s`, `over 9.53 s`, or `-` if unknown."""
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
_LARGER = 3  # tries of larger sizes for a row
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
                return self._larger(row, made) if profile(recipe.trainer).own_launch else made
        return row.tight or self._over(row)

    def _mildest(self, row: "_Row", ladder: Ladder) -> Offer | None:
        """The offer with the mildest rung that fits. If the first fails, the last one shows whether any can."""
        first, *others = ladder
        if (made := self._tried(row, first)) is not None or not others:
            return made
        leanest = self._tried(row, others[-1])
        if row.missed and row.missed[-1][1] is others[-1]:
            return None
        return next((made for rung in others[:-1] if (made := self._tried(row, rung)) is not None), leanest)

    def _larger(self, row: "_Row", made: Offer) -> Offer:
        """The offer with the largest sizes that have room, if it is faster; else `made`.

        What a size too large needs says how bytes grow with it, and so which smaller one is tried next.
        """
        if row.fitting is None or made.step_s is None:
            return made
        rung, result = row.fitting
        spec, leaner = row.spec, self.recipe.keys.unreduced in rung.changes
        levers, room = Levers.of(row.recipe, f"sim:{spec.name}"), roomy_bytes(spec.capacity_bytes, f"sim:{spec.name}")
        sizes = {name: _larger_sizes(levers, rung.at, name, result, room) for name in (levers.size, *levers.passes)}
        for _ in range(_LARGER):
            at = {**rung.at, **{name: found[-1] for name, found in sizes.items() if found}}
            if at == rung.at:
                break
            larger = _rung(row.recipe, levers, Launch.of(rung.values), at, leaner=leaner)
            tried = self._result(spec, larger, row.recipe)
            if is_safe(tried, spec.capacity_bytes):
                faster = (tried.median_step_s or math.inf) <= (1 - LEAST_GAIN) * made.step_s
                return self._made(row, larger, tried, OfferVerdict.FITS) if faster else made
            if tried.status not in (ProbeStatus.FIT, ProbeStatus.OOM) or not sizes[levers.size]:
                break
            now, size = (number(where.get(levers.size, levers.own[levers.size])) for where in (rung.at, at))
            grows = (needed_bytes(tried) - needed_bytes(result)) / (size - now)
            sizes[levers.size] = [
                value for value in sizes[levers.size][:-1]
                if needed_bytes(result) + grows * (number(value) - now) <= room
            ]  # fmt: skip
        return made

    def _tried(self, row: "_Row", rung: Rung) -> Offer | None:
        """The offer with this change if it fits; else the row has what came of it."""
        if clash := next(clashes(row.recipe, rung.values), None):
            own = clash in clashes(row.recipe)  # else the fix is of a change that was tried, not of the user's recipe
            row.problem = row.problem or (f"{clash.what}; {clash.fix}" if own else clash.what)
            return None
        if (least := self._least_bytes(rung, row.spec) or row.missed_offloaded(rung)) is not None:
            row.missed.append((least, rung))
            return None
        result = self._result(row.spec, rung, row.recipe)
        if result.status not in (ProbeStatus.FIT, ProbeStatus.OOM):
            row.problem = row.problem or result.reason
            return None
        self._learn(rung, row.spec, result)
        if result.status is ProbeStatus.OOM:
            row.missed.append((result.least_capacity_bytes or result.device_used_bytes or 0, rung))
            return None
        if not is_tight(result, row.spec.capacity_bytes):
            row.fitting = rung, result
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
        """Bytes of a change that is known to exceed the card; None if it has to be tried."""
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
        """Keep the need of a change: its least capacity, or the used bytes if it fits and that is unknown."""
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
    """Tried settings for a number of cards of one kind that exceeded them."""

    spec: GpuSpec
    count: int
    recipe: Recipe  # on so many cards
    fitting: tuple[Rung, ProbeResult] | None = None  # the last that fits with room
    tight: Offer | None = None  # what fits with too little to spare, with the most of it
    missed: list[tuple[int, Rung]] = field(default_factory=list)  # (the bytes it needs, a change)
    problem: str = ""  # why the mildest of those that could not be simulated could not

    def batch(self, rung: Rung) -> dict[str, object]:
        """{key: value} of the micro-batch, the accumulation and, of a trainer that generates, the rollout.

        With the samples of passes without gradients and the ranks of an engine, where the recipe has keys for them.
        """
        keys, values = self.recipe.keys, {**self.recipe.resolved, **rung.changes}
        others = {key: values[key] for key in (keys.scored, keys.referred, keys.engine_ranks) if key in values}
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
