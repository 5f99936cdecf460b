"""Changes that make a config faster, each simulated: also those that a search may not try.

An idea is one setting, with what it needs of others to fit: vLLM a share of the card that holds the weights, a step
without checkpoints a smaller micro-batch.
"""

import contextlib
from concurrent.futures import ThreadPoolExecutor

from autofit.errors import Cancelled
from autofit.forecast.change import Change, Trier
from autofit.forecast.levers import CHECKPOINTING, MADE, MICRO, ROLLOUT, SHARE, SLEEP, Assignment, Bounds, Known, Levers
from autofit.plugin.protocol import ROLLOUT as ROLLOUT_PHASE
from autofit.probing.result import ProbeResult
from autofit.recipe.keys import TIERS, Tier

LEAST_GAIN = 0.01  # share of the step's seconds
_TRIES = 2  # of an idea: as it is, and so that it fits
_BESIDE_WEIGHTS = 1.15  # times the weights: what vLLM's profiling and graphs take lies beside them
_SPEEDS = ("first", "early")  # the order in which settings are tried for their speed


def faster_changes(
    levers: Levers, trier: Trier, base: ProbeResult, *, below: Tier | None = None, most: int = 3, workers: int = 2
) -> tuple[tuple[Change, ...], tuple[Change, ...]]:
    """(changes that are faster than `base` and leave room, changes that could not be tried).

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
                changes, given = levers.changes(at), levers.changes(at, yaml=True)
                change, result = trier.result(changes, given, tier=levers.tier(at), settings=len(at))
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
    """Whether larger micro-batches or rollouts count among the changes of the tiers below `below`.

    Only these depend on how little memory is enough for the base (its least capacity).
    """
    sizes = ({name: size} for name in (MICRO, ROLLOUT) if name in levers.own for size in levers.larger(name))
    return any(TIERS.index(levers.tier(at)) > TIERS.index(below) for at in sizes)


def _ideas(levers: Levers, trier: Trier, base: ProbeResult, below: Tier | None) -> list[Assignment]:
    """Changes of one setting and what it needs, the most promising first: those of the longer phase, then others."""
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
    return [at for at in order if at and TIERS.index(levers.tier(at)) > over and _is_meant(levers, at)]


def _others(levers: Levers) -> list[Assignment]:
    keys = levers.space.keys
    sizes = (MICRO, ROLLOUT, keys.group, keys.completion, keys.length, *CHECKPOINTING)
    tried = [n for n in levers.own if n not in sizes and levers.traits(n).speed != "none"]
    return [{name: value} for name in sorted(tried, key=lambda n: _turn(levers, n)) for value in levers.quicker(name)]


def _turn(levers: Levers, name: str) -> tuple[int, int]:
    """When a setting is tried for its speed: those of `_SPEEDS` in the practitioner's order, then the others."""
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
    """What vLLM holds beside the cache of its completions, about."""
    return (levers.space.recipe.weights_bytes or 0) * _BESIDE_WEIGHTS


def _leaner(at: Assignment, levers: Levers, trier: Trier, result: ProbeResult) -> Assignment | None:
    """`at` with what may make it fit after its `result` did not: a smaller share for vLLM or a smaller micro-batch."""
    if at.get("use_vllm"):
        shares = [one for one, _ in _shares(at, levers, trier)]
        return next(iter(shares[shares.index(at) + 1 :]), None) if at in shares else None
    known = Known.of(at, result, trier.context_bytes)
    if known is None or MICRO in at or not any(at.get(name) is False for name in CHECKPOINTING):
        return None
    sizes = [{**at, MICRO: size} for size in levers.strengths.get(MICRO, ())]
    return next((one for one in sizes if levers.candidate(one) and _has_room(one, known, levers, trier)), None)


def _has_room(at: Assignment, known: Known, levers: Levers, trier: Trier) -> bool:
    """Whether these settings are expected to leave room, by what is known of others."""
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
