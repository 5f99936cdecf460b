"""Possible changes: a recipe's settings, or its card. Each with its result on a simulated card."""

import contextlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

from autofit.errors import Cancelled
from autofit.fakegpu.specs import GPU_SPECS, GpuSpec, gpu_spec
from autofit.forecast.levers import CHECKPOINTING, MADE, MICRO, ROLLOUT, SHARE, SLEEP, Assignment, Bounds, Known, Levers
from autofit.forecast.margin import is_safe, is_tight, needed_bytes, roomy_bytes, shown_bytes
from autofit.frontends.writing import own_words
from autofit.hardware.hardware import BFLOAT16_CAPABILITY, Device
from autofit.plugin.protocol import ROLLOUT as ROLLOUT_PHASE
from autofit.probing.result import ProbeResult, ProbeStatus
from autofit.recipe.findings import OFFLOAD
from autofit.recipe.keys import TIERS, Tier
from autofit.recipe.launch import Launch
from autofit.recipe.recipe import Recipe, merge
from autofit.space.traits import describe_changes, set_options
from autofit.units import format_bytes, format_seconds

Probe = Callable[[Mapping[str, object]], ProbeResult]
Tell = Callable[[str], None]
_SMALLER_FRAC = 0.95  # of the bytes: cards sold as 80 GB differ by less than a thousandth


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of the recipe, in TRL's own keys, and its result on the simulated card."""

    changes: Mapping[str, object]
    given: Mapping[str, object]  # as a YAML takes them: with the keys that must go (None)
    tier: Tier
    settings: int  # number of changed settings; derived keys do not count
    device_used_bytes: int
    shown_bytes: int  # to judge it by: `margin.shown_bytes`
    least_capacity_bytes: int | None  # None where it ran out before all was asked for
    step_s: float | None
    fits: bool
    tight: bool = False  # it fits with less to spare than the prediction may be off
    own: str = ""  # the change in the keys of the file that the recipe was; "" where that was none
    failure: str = ""  # why it could not be tried; "" where it could

    @classmethod
    def of(
        cls, result: ProbeResult, *, changes: Mapping[str, object], given: Mapping[str, object], tier: Tier,
        settings: int, capacity_bytes: int, own: str = "",
    ) -> "Change":  # fmt: skip
        """The change with the `result` of its probe."""
        used, least = result.device_used_bytes, result.least_capacity_bytes
        tried = result.status in (ProbeStatus.FIT, ProbeStatus.OOM)
        fits = result.status is ProbeStatus.FIT
        return cls(
            changes=changes, given=given, tier=tier, settings=settings, device_used_bytes=used or 0,
            shown_bytes=shown_bytes(result, capacity_bytes)[0], least_capacity_bytes=least,
            step_s=result.median_step_s, fits=fits, tight=is_tight(result, capacity_bytes), own=own,
            failure="" if tried else result.reason or str(result.status),
        )  # fmt: skip

    @property
    def cost(self) -> tuple[int, bool, int, float]:
        """The order of advice: the highest tier, room to spare, the fewest settings, the fastest step."""
        return TIERS.index(self.tier), self.tight, self.settings, self.step_s or 0.0

    @property
    def options(self) -> str:
        """The options of the command line that make the change: `--set gradient_checkpointing=true`."""
        return set_options(self.given)

    @property
    def how(self) -> str:
        """Way to make the change: in the user's own file if that is another tool's, else by options."""
        return f"in your file: {self.own}" if self.own else self.options

    @property
    def step_words(self) -> str:
        """`, 3.15 s a step`; "over" if the optimizer steps on the host, which is untimed; "" if unknown."""
        if self.step_s is None:
            return ""
        over = "" if self.given.get(OFFLOAD, "none") == "none" else "over "
        return f", {over}{format_seconds(self.step_s)} a step"

    @property
    def why(self) -> str:
        """Reason why it could not be tried in one line, without the place of a log; "" where it could."""
        return " ".join(self.failure.partition(" (during ")[0].split())

    @property
    def outcome(self) -> str:
        """`fits: 18.20 GB, 3.15 s a step`; what came of trying it."""
        if self.failure:
            return f"could not be tried: {self.why}"
        if not self.fits:
            least = self.least_capacity_bytes
            return "does not fit" if least is None else f"does not fit: it needs {format_bytes(least)}"
        spare = "leaves too little to spare" if self.tight else "fits"
        return f"{spare}: {format_bytes(self.shown_bytes)}{self.step_words}"

    def to_json(self) -> dict[str, object]:
        return {
            "changes": dict(self.changes), "options": self.options, **({"own": self.own} if self.own else {}),
            "tier": self.tier, "device_used_bytes": self.device_used_bytes, "shown_bytes": self.shown_bytes,
            "step_s": self.step_s, "tight": self.tight,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Trier:
    """Tries changes of one recipe on the simulated card, and tells each."""

    recipe: Recipe
    device: Device
    capacity_bytes: int
    probe: Probe
    tell: Tell

    @property
    def room_bytes(self) -> int:
        """The most device-used bytes that leave room to spare."""
        return roomy_bytes(self.capacity_bytes, self.device)

    @property
    def context_bytes(self) -> int:
        """Bytes of the CUDA context on the card."""
        return gpu_spec(self.device.removeprefix("sim:")).context_bytes

    def change(self, levers: Levers, at: Assignment, known: ProbeResult | None = None) -> tuple[Change, ProbeResult]:
        """The change to the settings `at` with its result, and that result: `known`, or that of a probe."""
        changes, given, tier = levers.changes(at), levers.changes(at, yaml=True), levers.tier(at)
        own = own_words(self.recipe.foreign, given)
        if known is None:
            self.tell(f"trying {own or describe_changes(changes, self.recipe.resolved)} ({tier})")
        result = known or self.probe(merge(self.recipe.values, given))
        change = Change.of(
            result, changes=changes, given=given, tier=tier, settings=len(at), capacity_bytes=self.capacity_bytes,
            own=own,
        )  # fmt: skip
        self.tell(f"{change.own or change.options} {change.outcome}")
        return change, result


# -------------------------------------------------------------------------------------------------------- another card


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherCard:
    """A card, and the recipe's bytes and seconds on it."""

    name: str
    capacity_bytes: int
    device_used_bytes: int
    shown_bytes: int  # to judge it by: `margin.shown_bytes`
    step_s: float | None
    options: str  # of the command line, for as many of these cards as the recipe trains on

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def other_card(
    result: ProbeResult, capacity_bytes: int, probe_on: Callable[[Device, int], ProbeResult], launch: Launch
) -> OtherCard | None:
    """The smallest card that runs the recipe of `result` with room: smaller if it fits so now, else larger.

    `probe_on` simulates the recipe on a card (device, capacity). None if no such card is known.
    """
    spec = _likely(result, capacity_bytes)
    if spec is None:
        return None
    found = probe_on(f"sim:{spec.name}", spec.capacity_bytes)
    if not is_safe(found, spec.capacity_bytes):
        return None
    return OtherCard(
        name=spec.name, capacity_bytes=spec.capacity_bytes, device_used_bytes=found.device_used_bytes or 0,
        shown_bytes=shown_bytes(found, spec.capacity_bytes)[0], step_s=found.median_step_s,
        options=f"--gpu {_count(launch)}{spec.name}",
    )  # fmt: skip


def _count(launch: Launch) -> str:
    """Prefix of the name of one card: `8x`, `4x8x` on machines of 8; "" for one."""
    if launch.machines > 1:
        return f"{launch.machines}x{launch.cards // launch.machines}x"
    return f"{launch.cards}x" if launch.cards > 1 else ""


def _likely(result: ProbeResult, capacity_bytes: int) -> GpuSpec | None:
    """The smallest card with room for as many bytes that computes in bfloat16, if the present one does."""
    own = gpu_spec(result.device.removeprefix("sim:"))
    fits = is_safe(result, capacity_bytes)
    need = needed_bytes(result)
    cards = [
        spec for spec in GPU_SPECS.values()
        if (spec.capacity_bytes < _SMALLER_FRAC * capacity_bytes if fits else spec.capacity_bytes > capacity_bytes)
        if spec.compute_capability >= min(own.compute_capability, BFLOAT16_CAPABILITY)
        if roomy_bytes(spec.capacity_bytes, f"sim:{spec.name}") >= need - own.context_bytes + spec.context_bytes
    ]  # fmt: skip
    return min(cards, key=lambda spec: spec.capacity_bytes, default=None)


# -- changes that make a config faster, each simulated: also those that a search may not try --------------------------
# An idea is one setting, with what it needs of others to fit: vLLM a share of the card that holds the weights, a step
# without checkpoints a smaller micro-batch.

LEAST_GAIN = 0.01  # share of the step's seconds
_TRIES = 2  # of an idea: as it is, and so that it fits
_BESIDE_WEIGHTS = 1.15  # times the weights: what vLLM's profiling and graphs take lies beside them
_SPEEDS = ("first", "early")  # the order in which settings are tried for their speed


def faster_changes(
    levers: Levers, trier: Trier, base: ProbeResult, *, below: Tier | None = None, most: int = 3, workers: int = 2
) -> tuple[tuple[Change, ...], tuple[Change, ...]]:
    """(changes that are faster than `base` and leave room, changes that failed when tried).

    One that raises Cancelled ends with what was tried before.

    With `below`, only changes of the tiers below it, at most `most`. The highest tier comes first, then the fastest.
    """
    ideas = _ideas(levers, trier, base, below)[:most]

    def tried(idea: Assignment) -> list[Change]:
        """The idea as it fits, or as it was tried last."""
        found: list[Change] = []
        at: Assignment | None = idea
        with contextlib.suppress(Cancelled):
            for _ in range(_TRIES):
                if at is None:
                    break
                change, result = trier.change(levers, at)
                found = [change]
                done = change.failure or (change.fits and not change.tight)
                at = None if done else _leaner(at, levers, trier, result)
        return found

    with ThreadPoolExecutor(workers) as pool:
        found = [change for row in pool.map(tried, ideas) for change in row]
    before = base.median_step_s
    quick = [c for c in found if c.fits and not c.tight and before is not None
             and c.step_s is not None and c.step_s <= (1 - LEAST_GAIN) * before]  # fmt: skip
    return tuple(sorted(quick, key=lambda c: c.cost)), tuple(c for c in found if c.failure)


def asks_of_sizes(levers: Levers, *, below: Tier) -> bool:
    """True if larger micro-batches or rollouts count among the changes of the tiers below `below`.

    Only these depend on how little memory is enough for the base (its least capacity).
    """
    sizes = ({name: size} for name in (MICRO, ROLLOUT) if name in levers.own for size in levers.larger(name))
    return any(TIERS.index(levers.tier(at)) > TIERS.index(below) for at in sizes)


def _ideas(levers: Levers, trier: Trier, base: ProbeResult, below: Tier | None) -> list[Assignment]:
    """Changes of one setting and its requirements, the most promising first: those of the longer phase, then others."""
    over = -1 if below is None else TIERS.index(below)
    of_rollout = bool(base.rollout_s) and 2 * base.rollout_s[0] > (base.median_step_s or 0.0)
    batches = [_larger(levers, trier, base, ROLLOUT), _larger(levers, trier, base, MICRO)]
    unchecked: Assignment = {n: False for n in CHECKPOINTING if levers.own.get(n) is True}
    update: list[Assignment] = [unchecked, batches[1]]
    neutral = [batches[0], *update] if of_rollout else [*update, batches[0]]
    known = [_started(at, levers, trier, base) for at in _others(levers)]
    engines = [at for at in known if any(levers.traits(name).speed == "first" for name in at)]
    rest = [at for at in known if at not in engines]
    order = [*neutral[:1], *engines, *neutral[1:], *rest]
    tried = (at for at in order if at and TIERS.index(levers.tier(at)) > over and _is_meant(levers, at))
    return [at for at in tried if _may_gain(levers, at, base)]


def _may_gain(levers: Levers, at: Assignment, base: ProbeResult) -> bool:
    """False where all that these settings may shorten takes less of a step than the least gain."""
    shortens = [levers.traits(name).shortens for name in at]
    if base.median_step_s is None or not all(phases and base.phase_s.keys() >= set(phases) for phases in shortens):
        return True  # it is not known what they shorten, or what that takes
    taken = {phase for phases in shortens for phase in phases or ()}
    return sum(base.phase_s[phase] for phase in taken) >= LEAST_GAIN * base.median_step_s


def _others(levers: Levers) -> list[Assignment]:
    keys = levers.space.keys
    sizes = (MICRO, ROLLOUT, keys.group, keys.completion, keys.length, *CHECKPOINTING)
    tried = [n for n in levers.own if n not in sizes and levers.traits(n).speed != "none"]
    return [{name: value} for name in sorted(tried, key=lambda n: _turn(levers, n)) for value in levers.quicker(name)]


def _turn(levers: Levers, name: str) -> tuple[int, int]:
    """Place of a setting among those tried for speed: `_SPEEDS` in the practitioner's order, then the others."""
    speed = levers.traits(name).speed
    return (_SPEEDS.index(speed), levers.rank(name)) if speed in _SPEEDS else (len(_SPEEDS), 0)


def _started(at: Assignment, levers: Levers, trier: Trier, base: ProbeResult) -> Assignment:
    """`at`; one that starts vLLM with the least share of the card that holds all completions of a rollout at once.

    Where that has no room beside the rest, with the largest that has. vLLM sleeps outside of rollouts where no share
    that holds the weights has room beside the update.
    """
    known = Known.of({}, base, trier.context_bytes)
    if not at.get("use_vllm") or known is None or not isinstance(levers.own.get(SHARE), float):
        return at
    update = max((sum(held.values()) for name, held in known.parts.items() if name != ROLLOUT_PHASE), default=0)
    rollout = known.parts.get(ROLLOUT_PHASE, {})
    kept = sum(nbytes for name, nbytes in rollout.items() if name not in MADE)
    ways = [(update, at)]
    if SLEEP in levers.own:
        ways.append((kept, {**at, SLEEP: True}))
    room = trier.room_bytes - known.context_bytes
    wanted = _engine_bytes(levers) + rollout.get("KV cache", 0)
    for held, way in ways:
        if roomy := [(one, nbytes) for one, nbytes in _shares(way, levers, trier) if held + nbytes <= room]:
            return next((one for one, nbytes in reversed(roomy) if nbytes >= wanted), roomy[0][0])
    return ways[-1][1]


def _shares(at: Assignment, levers: Levers, trier: Trier) -> list[tuple[Assignment, float]]:
    """[(`at` with a share of the card for vLLM that may hold the weights, its bytes)], the largest share first."""
    least, own = _engine_bytes(levers), levers.own.get(SHARE)
    listed = sorted({share for share in (own, *levers.values(SHARE)) if isinstance(share, float)}, reverse=True)
    every = [({**at, SHARE: share} if share != own else at, share * trier.capacity_bytes) for share in listed]
    return [(one, nbytes) for one, nbytes in every if nbytes >= least and levers.candidate(one)]


def _engine_bytes(levers: Levers) -> float:
    """Bytes that vLLM holds beside the cache of its completions, about."""
    return (levers.space.recipe.weights_bytes or 0) * _BESIDE_WEIGHTS


def _leaner(at: Assignment, levers: Levers, trier: Trier, result: ProbeResult) -> Assignment | None:
    """`at` with a setting that may make it fit after its `result` failed: a smaller share for vLLM or micro-batch."""
    if at.get("use_vllm"):
        shares = [one for one, _ in _shares(at, levers, trier)]
        return next(iter(shares[shares.index(at) + 1 :]), None) if at in shares else None
    known = Known.of(at, result, trier.context_bytes)
    if known is None or MICRO in at or not any(at.get(name) is False for name in CHECKPOINTING):
        return None
    sizes = [{**at, MICRO: size} for size in levers.strengths.get(MICRO, ())]
    return next((one for one in sizes if levers.candidate(one) and _has_room(one, known, levers, trier)), None)


def _has_room(at: Assignment, known: Known, levers: Levers, trier: Trier) -> bool:
    """True if these settings are expected to leave room, by the known run of others."""
    bounds = Bounds(levers.space.recipe, levers.own, levers.space.stated)
    return bounds.expected_bytes(known, at) <= trier.room_bytes


def _is_meant(levers: Levers, at: Assignment) -> bool:
    return levers.tier(at) != "recipe" or any(levers.traits(name).advised for name in at)


def _larger(levers: Levers, trier: Trier, base: ProbeResult, name: str) -> Assignment:
    """The largest micro-batch or rollout that is expected to leave room; {} if there is none."""
    known = Known.of({}, base, trier.context_bytes)
    if name not in levers.own or known is None:
        return {}
    fitting = [n for n in levers.larger(name) if _has_room({name: n}, known, levers, trier)]
    return {name: fitting[-1]} if fitting else {}
