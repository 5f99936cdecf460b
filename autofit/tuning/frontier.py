"""Trials as plain values, and the rules that rank them: the Pareto front, the winner, and why."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Literal, TypedDict, cast, get_args

from autofit.probing.result import ProbeResult, ProbeStatus
from autofit.space import TIERS, Tier
from autofit.units import format_bytes, format_seconds

Goal = Literal["speed", "memory", "utilisation"]
GOALS: tuple[Goal, ...] = get_args(Goal)
SLOWER_FRAC = 0.1  # goal memory: how much slower than the fastest that fits a config may be
_RELAX = "allow a lower tier (--allow approximate, then recipe) or raise --target-vram"
BAND = (0.75, 0.85)  # goal utilisation: shares of the target to fill (notes of seed 002)
# Two standard deviations of the difference of two probes, each known to 2 % (the noise that tuning.model assumes).
NOISE_FRAC = 2 * 2**0.5 * 0.02


class Rule(TypedDict):
    """What decides the winner besides the tier; `target_bytes` is the target less the headroom."""

    goal: Goal
    target_bytes: int | None


SPEED: Rule = {"goal": "speed", "target_bytes": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One candidate of a study and, once probed, what the device said. `changes` is empty for the baseline.

    `result` is the search's probe, `confirmed` the longer one that a finalist gets; figures are the longer one's.
    """

    number: int
    tier: Tier
    changes: Mapping[str, object]
    params: Mapping[str, object]
    result: ProbeResult | None = None
    confirmed: ProbeResult | None = None

    @property
    def status(self) -> ProbeStatus | None:
        return None if self.result is None else self.result.status

    @property
    def fits(self) -> bool:
        """Whether it fitted whenever it was probed."""
        return self.status is ProbeStatus.FIT and not self.fell

    @property
    def fell(self) -> bool:
        """Whether it ran out of memory, or failed, when it was to be confirmed."""
        return self.confirmed is not None and self.confirmed.status is not ProbeStatus.FIT

    @property
    def stopped_at_oom(self) -> bool:
        """Whether its bytes are those that it held when memory ran out: how much more it needs is not known."""
        return self.status is ProbeStatus.OOM and not (self.result is not None and self.result.is_graded)

    @property
    def figures(self) -> ProbeResult | None:
        """The probe that says most: the confirmation where there is one."""
        return self.confirmed if self.confirmed is not None else self.result

    @property
    def step_s(self) -> float | None:
        return None if self.figures is None else self.figures.median_step_s

    @property
    def device_used_bytes(self) -> int | None:
        return None if self.figures is None else self.figures.device_used_bytes

    @property
    def completions_per_s(self) -> float | None:
        return None if self.figures is None else self.figures.completions_per_s

    def speedup(self, baseline: "Trial | None") -> float | None:
        """Completions per second against the baseline's, or None where either was not measured."""
        ours = self.completions_per_s
        theirs = baseline.completions_per_s if baseline is not None else None
        return ours / theirs if ours is not None and theirs is not None else None


def measured(trials: Iterable[Trial]) -> list[Trial]:
    """The trials that fit and have a step time."""
    return [t for t in trials if t.fits and t.step_s is not None and t.device_used_bytes is not None]


def _cost(trial: Trial) -> tuple[float, int]:
    step_s, used = trial.step_s, trial.device_used_bytes
    assert step_s is not None
    assert used is not None
    return step_s, used


def pareto_front(trials: Iterable[Trial]) -> list[Trial]:
    """The fitting trials that no other beats in both step time and device-used bytes, fastest first."""
    front: list[Trial] = []
    least = math.inf
    for (_, used), trial in sorted(((_cost(t), t) for t in measured(trials)), key=itemgetter(0)):
        if used < least:
            front.append(trial)
            least = used
    return front


def winner(trials: Iterable[Trial], *, goal: Goal = "speed", target_bytes: int | None = None) -> Trial | None:
    """Among what fits: the highest tier kept, then what the goal asks for (DESIGN.md).

    speed: the fastest, then the least memory. memory: the least memory of those at most 10 % slower than the fastest.
    utilisation: the fastest that uses 75 to 85 % of the target; where none does, the nearest to that from below.

    The first by the search's own probes stays the winner when its confirmation differs by no more than noise. Once two
    are confirmed only those are compared: a machine that became slower must not have every trial probed again.
    """
    fitting = measured(trials)
    as_searched = [t if t.confirmed is None else replace(t, confirmed=None) for t in fitting]
    found = _first(as_searched, goal=goal, target_bytes=target_bytes)
    if found is None:
        return None
    first = next(t for t in fitting if t.number == found.number)
    sure = [t for t in fitting if t.confirmed is not None]
    now = _first(sure if len(sure) > 1 else fitting, goal=goal, target_bytes=target_bytes)
    assert now is not None
    return now if first.confirmed is not None and _clearly_ahead(now, first, goal) else first


def _clearly_ahead(one: Trial, other: Trial, goal: Goal) -> bool:
    """Whether `one`, which ranks first, does so by more than the noise of a probe."""
    (ours_s, ours_bytes), (theirs_s, theirs_bytes) = _cost(one), _cost(other)
    faster = ours_s < (1 - NOISE_FRAC) * theirs_s
    return one.tier != other.tier or faster or (goal != "speed" and ours_bytes < (1 - NOISE_FRAC) * theirs_bytes)


def finalist(trials: Iterable[Trial], rule: Rule) -> Trial | None:
    """The winner when it has still to be confirmed; None for the baseline, which is what is run without us."""
    best = winner(trials, **rule)
    return best if best is not None and best.confirmed is None and best.changes else None


def _first(fitting: Sequence[Trial], *, goal: Goal, target_bytes: int | None) -> Trial | None:
    """The winner by the figures as they are."""
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
    fell = [t for t in trials if t.fell]
    if not ooms and fell:
        return f"nothing fits: each of the {len(fell)} trials that fitted fell when it was to be confirmed"
    if not ooms:
        return "no trial was probed"
    used = [t for t in ooms if t.device_used_bytes is not None]
    if not used:
        return f"nothing fits: all {len(ooms)} probes ran out of memory; raise --target-vram"
    least = min(used, key=lambda t: t.device_used_bytes or 0)
    phase = least.result.oom_phase if least.result else None
    target = f" in {format_bytes(target_bytes)}" if target_bytes is not None else ""
    held = format_bytes(least.device_used_bytes or 0)
    held = f"held at least {held} when it stopped during {phase}" if least.stopped_at_oom else f"needs {held}"
    return f"nothing fits{target}: the smallest of {len(ooms)} probes (trial {least.number}) {held}; {_RELAX}"


def predicted_note(trials: Sequence[Trial], attrs: Mapping[str, object]) -> str:
    """What is said of candidates that were not probed because they are predicted not to fit, or an empty string."""
    predicted, limit = attrs.get("baseline_predicted"), rule_of(attrs)["target_bytes"]
    if not trials:
        least = cast("float | None", attrs.get("least_floor_bytes"))
        if least is None or limit is None or least <= limit:
            return "; run the same command again to go on"
        return (
            f": nothing fits in {format_bytes(limit)}, as every candidate is predicted to need "
            f"{format_bytes(int(least))} or more; {_RELAX}"
        )
    if not isinstance(predicted, Mapping) or limit is None or baseline(trials) is not None:
        return ""
    used = max(predicted.get("device_used_bytes", 0.0), predicted.get("floor_bytes", 0.0))
    return f"; the recipe as it is was not probed: predicted {format_bytes(int(used))}, which does not fit"


# -- the confirmation of the winner -----------------------------------------------------------------------------------


def confirmation_note(trials: Sequence[Trial], rule: Rule) -> str:
    """Whether the winner was confirmed, with what figures, and which finalists fell before it; "" without a winner."""
    best = winner(trials, **rule)
    parts = [_how_it_fell(t) for t in trials if t.confirmed is not None and t is not best]
    if best is not None:
        parts.append(_how_sure(best))
    return "; ".join(parts)


def _how_it_fell(trial: Trial) -> str:
    long, short = trial.confirmed, trial.result
    assert long is not None
    if long.status is ProbeStatus.OOM:
        held = "" if long.device_used_bytes is None else f" at {format_bytes(long.device_used_bytes)}"
        return f"trial {trial.number} fell in its confirmation: out of memory{held} during {long.oom_phase}"
    if long.status is not ProbeStatus.FIT:
        return f"trial {trial.number} fell in its confirmation: {long.status}: {long.reason}"
    before = short.median_step_s if short is not None else None
    times = f"{format_seconds(trial.step_s or 0)} a step" + (
        f", {format_seconds(before)} in the search" if before else ""
    )
    return f"trial {trial.number} was probed longer as well and is not the winner ({times})"


def _how_sure(best: Trial) -> str:
    long = best.confirmed
    if long is not None:
        return (
            f"trial {best.number} is confirmed: {len(long.step_s)} steps, saved and resumed, under the target as a "
            f"hard cap: {format_bytes(best.device_used_bytes or 0)}, {format_seconds(best.step_s or 0)} a step"
        )
    if best.result is not None and best.result.fidelity == "predicted":
        return f"trial {best.number} is predicted, not confirmed: no card of that kind was used"
    if not best.changes:
        return "the recipe as it is needs no confirmation"
    steps = len(best.result.step_s) if best.result is not None else 0
    return f"trial {best.number} is not confirmed: it was probed over {steps} steps only"


def confirmation_json(trials: Sequence[Trial], rule: Rule) -> dict[str, object] | None:
    """What `--json` says of the winner's confirmation; None without a winner."""
    best = winner(trials, **rule)
    if best is None:
        return None
    predicted = best.result is not None and best.result.fidelity == "predicted"
    open_status = "predicted" if predicted else "not confirmed" if best.changes else "baseline"
    long = best.confirmed
    return {
        "trial": best.number, "status": open_status if long is None else "confirmed",
        "measured_steps": None if long is None else len(long.step_s),
        "device_used_bytes": None if long is None else long.device_used_bytes,
        "step_s": None if long is None else long.median_step_s,
        "fallen": [
            {"trial": t.number, "status": str(t.confirmed.status), "reason": t.confirmed.reason,
             "device_used_bytes": t.confirmed.device_used_bytes, "step_s": t.confirmed.median_step_s}
            for t in trials if t.confirmed is not None and t is not best
        ],
    }  # fmt: skip
