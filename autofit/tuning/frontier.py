"""Trials as plain values, and the rules that rank them: the Pareto front, the winner, and why."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict, cast, get_args

from autofit.probing.result import ProbeResult, ProbeStatus
from autofit.space import TIERS, Tier
from autofit.units import format_bytes

Goal = Literal["speed", "memory", "utilisation"]
GOALS: tuple[Goal, ...] = get_args(Goal)
SLOWER_FRAC = 0.1  # goal memory: how much slower than the fastest that fits a config may be
BAND = (0.75, 0.85)  # goal utilisation: shares of the target to fill (notes of seed 002)


class Rule(TypedDict):
    """What decides the winner besides the tier; `target_bytes` is the target less the headroom."""

    goal: Goal
    target_bytes: int | None


SPEED: Rule = {"goal": "speed", "target_bytes": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One candidate of a study and, once probed, what the device said. `changes` is empty for the baseline."""

    number: int
    tier: Tier
    changes: Mapping[str, object]
    params: Mapping[str, object]
    result: ProbeResult | None = None

    @property
    def status(self) -> ProbeStatus | None:
        return None if self.result is None else self.result.status

    @property
    def fits(self) -> bool:
        return self.status is ProbeStatus.FIT

    @property
    def step_s(self) -> float | None:
        return None if self.result is None else self.result.median_step_s

    @property
    def device_used_bytes(self) -> int | None:
        return None if self.result is None else self.result.device_used_bytes

    @property
    def completions_per_s(self) -> float | None:
        return None if self.result is None else self.result.completions_per_s

    def speedup(self, baseline: "Trial | None") -> float | None:
        """Completions per second against the baseline's, or None where either was not measured."""
        ours = self.completions_per_s
        theirs = baseline.completions_per_s if baseline is not None else None
        return ours / theirs if ours is not None and theirs is not None else None


def measured(trials: Iterable[Trial]) -> list[Trial]:
    """The trials that fit and have a step time."""
    return [t for t in trials if t.fits and t.step_s is not None and t.device_used_bytes is not None]


def _cost(trial: Trial) -> tuple[float, int]:
    assert trial.step_s is not None
    assert trial.device_used_bytes is not None
    return trial.step_s, trial.device_used_bytes


def pareto_front(trials: Iterable[Trial]) -> list[Trial]:
    """The fitting trials that no other beats in both step time and device-used bytes, fastest first."""
    front: list[Trial] = []
    for trial in sorted(measured(trials), key=_cost):
        if not front or _cost(trial)[1] < _cost(front[-1])[1]:
            front.append(trial)
    return front


def winner(trials: Iterable[Trial], *, goal: Goal = "speed", target_bytes: int | None = None) -> Trial | None:
    """Among what fits: the highest tier kept, then what the goal asks for (DESIGN.md).

    speed: the fastest, then the least memory. memory: the least memory of those at most 10 % slower than the fastest.
    utilisation: the fastest that uses 75 to 85 % of the target; where none does, the nearest to that from below.
    """
    fitting = measured(trials)
    kept = min((TIERS.index(t.tier) for t in fitting), default=0)
    rivals = [t for t in fitting if TIERS.index(t.tier) == kept]
    if not rivals:
        return None
    if goal == "memory":
        slowest = (1 + SLOWER_FRAC) * min(_cost(t)[0] for t in rivals)
        return min((t for t in rivals if _cost(t)[0] <= slowest), key=lambda t: (*_cost(t)[::-1], t.number))
    if goal == "utilisation" and target_bytes is not None:
        return min(rivals, key=lambda t: (*_from_band(_cost(t)[1] / target_bytes), *_cost(t), t.number))
    return min(rivals, key=lambda t: (*_cost(t), t.number))


def _from_band(share: float) -> tuple[int, float]:
    """(0 in the band, 1 below it, 2 above it; how far from it)."""
    low, high = BAND
    return (0, 0.0) if low <= share <= high else (1, low - share) if share < low else (2, share - high)


def baseline(trials: Iterable[Trial]) -> Trial | None:
    """The recipe as it is, or None when it was not probed because it is predicted not to fit."""
    return next((t for t in trials if not t.changes and (t.number == 0 or t.result is not None)), None)


def samples_word(original: Mapping[str, object]) -> str:
    """What a trainer of the recipe `original` counts: GRPO's completions, or samples."""
    return "completions" if "num_generations" in original else "samples"


def describe_changes(changes: Mapping[str, object], original: Mapping[str, object]) -> str:
    """`per_device_train_batch_size 2 -> 8, gradient_checkpointing True -> False`, or `the recipe as it is`."""
    parts = []
    for key, value in changes.items():
        if key == "env" and isinstance(value, Mapping):
            parts += [f"{name}={setting}" for name, setting in value.items()]
        else:
            parts.append(f"{key} {original.get(key)} -> {value}")
    return ", ".join(parts) or "the recipe as it is"


def rule_of(attrs: Mapping[str, object]) -> Rule:
    """The winner rule of a study, from its user attributes: `winner(trials, **rule_of(study.user_attrs))`."""
    target, headroom = attrs.get("target_bytes"), attrs.get("headroom_bytes") or 0
    limit = target - headroom if isinstance(target, int) and isinstance(headroom, int) else None
    return {"goal": cast(Goal, attrs.get("goal", "speed")), "target_bytes": limit}


_WINS = {
    "speed": "the fastest",
    "memory": f"the least memory, at most {SLOWER_FRAC:.0%} slower than the fastest,",
    "utilisation": f"the fastest that fills {BAND[0]:.0%} to {BAND[1]:.0%} of the target, or the nearest to it,",
}


def why(
    trials: Sequence[Trial], original: Mapping[str, object], target_bytes: int | None, rule: Rule | None = None
) -> str:
    """One sentence: why the winner won, or what to relax when nothing fits."""
    rule = rule or Rule(goal="speed", target_bytes=target_bytes)
    best = winner(trials, **rule)
    if best is None:
        return _what_to_relax(trials, target_bytes)
    fitting = measured(trials)
    rivals = [t for t in fitting if t.tier == best.tier]
    used = format_bytes(best.device_used_bytes or 0)
    of = f" of {format_bytes(target_bytes)}" if target_bytes is not None else ""
    speed = best.speedup(baseline(trials))
    against = f", {speed:.2f}x the baseline's {samples_word(original)}/s" if speed is not None and best.number else ""
    lower = [t for t in fitting if TIERS.index(t.tier) > TIERS.index(best.tier)]
    faster = [t for t in lower if _cost(t) < _cost(best)]
    note = f"; {len(faster)} faster ones change more than the {best.tier} tier" if faster else ""
    change = describe_changes(best.changes, original)
    return (
        f"trial {best.number} wins: {_WINS[rule['goal']]} of the {len(rivals)} that fit and keep the {best.tier} tier"
        f"{against}, at {used}{of}, with {change}{note}"
    )


def _what_to_relax(trials: Sequence[Trial], target_bytes: int | None) -> str:
    ooms = [t for t in trials if t.status is ProbeStatus.OOM]
    broken = [t for t in trials if t.status in (ProbeStatus.FAILED, ProbeStatus.LOST) and t.result is not None]
    if not ooms and broken:
        assert broken[0].result is not None
        return f"no probe ran to its end; trial {broken[0].number}: {broken[0].result.reason}"
    if not ooms:
        return "no trial was probed yet; run the same command again to go on"
    used = [t for t in ooms if t.device_used_bytes is not None]
    if not used:
        return f"nothing fits: all {len(ooms)} probes ran out of memory; raise --target-vram"
    least = min(used, key=lambda t: t.device_used_bytes or 0)
    phase = least.result.oom_phase if least.result else None
    target = f" in {format_bytes(target_bytes)}" if target_bytes is not None else ""
    return (
        f"nothing fits{target}: the smallest of {len(ooms)} probes (trial {least.number}) held at least "
        f"{format_bytes(least.device_used_bytes or 0)} when it stopped during {phase}; allow a lower tier "
        f"(--allow approximate, then recipe) or raise --target-vram"
    )


def predicted_baseline(trials: Sequence[Trial], attrs: Mapping[str, object]) -> str:
    """What is said of a recipe that was not probed as it is because it is predicted not to fit, or an empty string."""
    predicted, limit = attrs.get("baseline_predicted"), rule_of(attrs)["target_bytes"]
    if not isinstance(predicted, Mapping) or limit is None or baseline(trials) is not None or not trials:
        return ""
    used = max(predicted.get("device_used_bytes", 0.0), predicted.get("floor_bytes", 0.0))
    return f"; the recipe as it is was not probed: predicted {format_bytes(int(used))}, which does not fit"
