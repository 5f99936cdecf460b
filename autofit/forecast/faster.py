"""Changes of one setting that make a config faster, each simulated: also those that a search may not try."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

from autofit.errors import Cancelled
from autofit.fakegpu.specs import gpu_spec
from autofit.forecast.bounds import Bounds, Known
from autofit.forecast.change import Change, Trier
from autofit.forecast.levers import CHECKPOINTING, MICRO, ROLLOUT, SHARE, SLEEP, Assignment, Levers
from autofit.forecast.margin import roomy_bytes
from autofit.probing.result import ProbeResult
from autofit.recipe.keys import TIERS, Tier

LEAST_GAIN = 0.01  # share of the step's seconds
_SPEEDS = ("first", "early")  # the order in which settings are tried for their speed


def faster_changes(
    levers: Levers, trier: Trier, base: ProbeResult, *, below: Tier | None = None, most: int = 3, workers: int = 2
) -> tuple[tuple[Change, ...], tuple[Change, ...]]:
    """(changes of one setting that are faster than `base` and leave room, changes that could not be tried).

    One that raises Cancelled ends with what was tried before.

    With `below`, only changes of the tiers below it, at most `most`. The highest tier comes first, then the fastest.
    """
    ideas = _ideas(levers, trier, base, below)[:most]

    def tried(at: Assignment) -> list[Change]:
        changes, given = levers.changes(at), levers.changes(at, yaml=True)
        with contextlib.suppress(Cancelled):
            return [trier.result(changes, given, tier=levers.tier(at), settings=len(at))[0]]
        return []

    with ThreadPoolExecutor(workers) as pool:
        found = [change for row in pool.map(tried, ideas) for change in row]
    before = base.median_step_s
    quick = [c for c in found if c.fits and not c.tight and before is not None
             and c.step_s is not None and c.step_s <= (1 - LEAST_GAIN) * before]  # fmt: skip
    return tuple(sorted(quick, key=lambda c: c.cost)), tuple(c for c in found if c.failure)


def asks_of_sizes(levers: Levers, *, below: Tier) -> bool:
    """Whether larger micro-batches or rollouts count among the changes of the tiers below `below`.

    Only these depend on how little memory is enough for the base (its least capacity).
    """
    sizes = ({name: size} for name in (MICRO, ROLLOUT) if name in levers.own for size in levers.larger(name))
    return any(TIERS.index(levers.tier(at)) > TIERS.index(below) for at in sizes)


def _ideas(levers: Levers, trier: Trier, base: ProbeResult, below: Tier | None) -> list[Assignment]:
    """Changes of one setting, the most promising first: those of the phase that takes longer, then the others."""
    over = -1 if below is None else TIERS.index(below)
    of_rollout = bool(base.rollout_s) and 2 * base.rollout_s[0] > (base.median_step_s or 0.0)
    batches = [_larger(levers, trier, base, ROLLOUT), _larger(levers, trier, base, MICRO)]
    unchecked: Assignment = {n: False for n in CHECKPOINTING if levers.own.get(n) is True}
    update: list[Assignment] = [unchecked, batches[1]]
    neutral = [batches[0], *update] if of_rollout else [*update, batches[0]]
    known = [_asleep(at, levers, trier, base) for at in _others(levers)]
    engines = [at for at in known if any(levers.traits(name).speed == "first" for name in at)]
    rest = [at for at in known if at not in engines]
    order = [*neutral[:1], *engines, *neutral[1:], *rest]
    return [at for at in order if at and TIERS.index(levers.tier(at)) > over and _is_meant(levers, at)]


def _others(levers: Levers) -> list[Assignment]:
    keys = levers.space.keys
    sizes = (MICRO, ROLLOUT, keys.group, keys.completion, keys.length, *CHECKPOINTING)
    tried = [n for n in levers.own if n not in sizes and levers.traits(n).speed != "none"]
    return [
        {name: value} for name in sorted(tried, key=lambda n: _turn(levers, n)) for value in levers.others(name)[:1]
    ]


def _turn(levers: Levers, name: str) -> tuple[int, int]:
    """When a setting is tried for its speed: those of `_SPEEDS` in the practitioner's order, then the others."""
    speed = levers.traits(name).speed
    return (_SPEEDS.index(speed), levers.rank(name)) if speed in _SPEEDS else (len(_SPEEDS), 0)


def _asleep(at: Assignment, levers: Levers, trier: Trier, base: ProbeResult) -> Assignment:
    """`at`, with vLLM asleep during the update where its share of the card has no room beside it."""
    share, used = levers.own.get(SHARE), base.device_used_bytes or 0
    room = roomy_bytes(trier.capacity_bytes, trier.device)
    if not at.get("use_vllm") or SLEEP not in levers.own or not isinstance(share, float):
        return at
    return at if used + share * trier.capacity_bytes <= room else {**at, SLEEP: True}


def _is_meant(levers: Levers, at: Assignment) -> bool:
    return levers.tier(at) != "recipe" or any(levers.traits(name).advised for name in at)


def _larger(levers: Levers, trier: Trier, base: ProbeResult, name: str) -> Assignment:
    """The largest micro-batch or rollout that is expected to leave room; {} if there is none."""
    known = Known.of({}, base, gpu_spec(trier.device.removeprefix("sim:")).context_bytes)
    if name not in levers.own or known is None:
        return {}
    room = roomy_bytes(trier.capacity_bytes, trier.device)
    bounds = Bounds(levers.space.recipe, levers.own, levers.space.stated)
    fitting = [n for n in levers.larger(name) if bounds.expected_bytes(known, {name: n}) <= room]
    return {name: fitting[-1]} if fitting else {}
