"""Trials as plain values, and the rules that rank them: the Pareto front, the winner, and why.

And candidates that no probe has reached but that are predicted to be on the front.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from operator import itemgetter
from typing import Any, Literal, TypedDict, cast, get_args

from autofit.probing.result import ProbeResult, ProbeStatus
from autofit.recipe.keys import TIERS, Tier
from autofit.tuning.comparison import NOISE_FRAC, Comparison, alike, measured_equal_frac, plainest, preferred

Goal = Literal["speed", "memory", "utilisation", "speed-at-any-tier"]
GOALS: tuple[Goal, ...] = get_args(Goal)
FASTEST: tuple[Goal, ...] = ("speed", "speed-at-any-tier")
SLOWER_FRAC = 0.1  # goal memory: how much slower than the fastest that fits a config may be
BAND = (0.75, 0.85)  # goal utilisation: shares of the target to fill (notes of seed 002)
_AS_NEAR = 0.02  # shares of the limit that two trials may differ by and be as near to the band
_HEADROOM_FRAC = 0.02  # of the target, which the limit leaves out unless the user says otherwise
_FINALISTS = 4  # goal speed: how many of the search's fastest trials may be compared with the baseline
_BUSY = 2.0  # how much slower than on an idle machine a probe of the search may have been


class Rule(TypedDict):
    """The rule that picks the winner; `target_bytes` is the target less the headroom."""

    goal: Goal
    target_bytes: int | None


SPEED: Rule = {"goal": "speed", "target_bytes": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One candidate of a study and, once probed, its results. `changes` is empty for the baseline.

    `yaml_changes` are the changes as keys of the recipe's YAML, where None removes a key.
    `result` is the probe of the search, `confirmed` the longer confirmation run of a finalist or the baseline. If both
    exist, all figures come from `confirmed`. `first` is the first probe of a trial that was probed again because it was
    slower than expected; `result` is then the one that other work disturbed less. `comparison` has a finalist's times
    in turns with the baseline.
    """

    number: int
    tier: Tier
    changes: Mapping[str, object]
    params: Mapping[str, object]
    yaml_changes: Mapping[str, object] = field(default_factory=dict)
    needs: tuple[str, ...] = ()  # packages without which it does not run; a simulated probe does without them
    result: ProbeResult | None = None
    confirmed: ProbeResult | None = None
    comparison: Comparison | None = None
    first: ProbeResult | None = None

    def repeated(self, again: ProbeResult | None) -> "Trial":
        """The trial with the result of its second probe, if there is one."""
        if again is None or self.result is None or self.first is not None:
            return self
        return replace(self, first=self.result, result=less_disturbed(self.result, again))

    @property
    def status(self) -> ProbeStatus | None:
        return None if self.result is None else self.result.status

    @property
    def fits(self) -> bool:
        """True if it fitted in every probe."""
        return self.status is ProbeStatus.FIT and not self.fell

    @property
    def fell(self) -> bool:
        """True if its confirmation run failed, out of memory or otherwise."""
        return self.confirmed is not None and self.confirmed.status is not ProbeStatus.FIT

    @property
    def stopped_at_oom(self) -> bool:
        """True if its bytes are a lower bound (censored): the bytes held when memory ran out."""
        return self.status is ProbeStatus.OOM and not (self.result is not None and self.result.is_graded)

    @property
    def figures(self) -> ProbeResult | None:
        """The result to report: the confirmation run if there is one, else the probe of the search."""
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
        """Completions per second divided by the baseline's, if both were measured.

        From the pairs of the comparison if there was one; else probes of the search are compared with each other.
        """
        if self.comparison is not None:
            return self.comparison.speedup
        if baseline is None or self.figures is None:
            return None
        against = baseline.result if self.confirmed is None else baseline.figures
        ours, theirs = self.figures.completions_per_s, None if against is None else against.completions_per_s
        return ours / theirs if ours is not None and theirs is not None else None

    @property
    def before_confirmation(self) -> "Trial":
        """The trial with the figures of its probe in the search."""
        return self if self.confirmed is None else replace(self, confirmed=None, comparison=None)


def less_disturbed(first: ProbeResult, again: ProbeResult) -> ProbeResult:
    """The result to believe of two probes of one config: the faster; or an OOM, which the first only just escaped."""
    if again.status is ProbeStatus.OOM:
        return again
    if again.fastest_step_s is None or first.fastest_step_s is None:
        return first
    return min(first, again, key=lambda r: r.fastest_step_s or 0.0)


def measured(trials: Iterable[Trial]) -> list[Trial]:
    """The trials that fit and have a step time."""
    return [t for t in trials if t.fits and t.step_s is not None and t.device_used_bytes is not None]


def cost(trial: Trial) -> tuple[float, int]:
    step_s, used = trial.step_s, trial.device_used_bytes
    assert step_s is not None
    assert used is not None
    return step_s, used


def pareto_front(trials: Iterable[Trial]) -> list[Trial]:
    """The Pareto front, fastest first: fitting trials undominated in step time and device-used bytes."""
    front: list[Trial] = []
    least = math.inf
    for (_, used), trial in sorted(((cost(t), t) for t in measured(trials)), key=itemgetter(0)):
        if used < least:
            front.append(trial)
            least = used
    return front


def leanest(trials: Iterable[Trial]) -> Trial | None:
    """The trial on the front that needs the least memory, if any trial fits."""
    return next(reversed(pareto_front(trials)), None)


def winner(trials: Iterable[Trial], *, goal: Goal = "speed", target_bytes: int | None = None) -> Trial | None:
    """The winner among the fitting trials: highest tier first, then the goal. None if no trial fits.

    speed: the fastest, unless a leaner one is as fast (`tuning.comparison`). speed-at-any-tier: the same whatever the
    tier, and the highest of equally fast ones. memory: the least memory of those at most 10 % slower than the fastest.
    utilisation: the fastest that uses 75 to 85 % of the target, of the highest tier that has one; if none does, the one
    nearest to that from below, of any allowed tier.

    Where speed is the goal and the baseline fits: once finalists were compared with it in turns, only a clearly faster
    one wins; if there is none, the baseline does.

    Otherwise the first by the search's own probes stays the winner unless confirmation changes the order by more than
    noise. Once two trials are confirmed, only confirmed trials are compared: otherwise a machine that became slower
    would cause a new probe of every trial.
    """
    fitting = measured(trials)
    base = compared_with(fitting, goal)
    if base is not None and (base.confirmed is not None or any(t.comparison is not None for t in fitting)):
        return _in_turns(fitting, base, goal, target_bytes)
    found = _first([t.before_confirmation for t in fitting], goal=goal, target_bytes=target_bytes)
    if found is None:
        return None
    first = next(t for t in fitting if t.number == found.number)
    sure = [t for t in fitting if t.confirmed is not None]
    now = _first(sure if len(sure) > 1 else fitting, goal=goal, target_bytes=target_bytes)
    assert now is not None
    return now if first.confirmed is not None and _clearly_ahead(now, first, goal) else first


def _clearly_ahead(one: Trial, other: Trial, goal: Goal) -> bool:
    """True if `one`, which ranks first, is ahead of `other` by more than the noise of a probe."""
    (ours_s, ours_bytes), (theirs_s, theirs_bytes) = cost(one), cost(other)
    faster = ours_s < (1 - NOISE_FRAC) * theirs_s
    return one.tier != other.tier or faster or (goal not in FASTEST and ours_bytes < (1 - NOISE_FRAC) * theirs_bytes)


def compared_with(trials: Iterable[Trial], goal: Goal) -> Trial | None:
    """The baseline that a finalist is compared with in turns, if it fits, and speed is the goal."""
    return next((t for t in measured(trials) if not t.changes), None) if goal in FASTEST else None


def finalist(trials: Sequence[Trial], rule: Rule) -> Trial | None:
    """The trial to confirm next, unless the winner is confirmed. Goal speed: see `_to_compare`."""
    best, base = winner(trials, **rule), compared_with(trials, rule["goal"])
    if base is None or best is None or (best is base and best.confirmed is None):
        return best if best is not None and best.confirmed is None else None
    return _to_compare(measured(trials), base, rule)


def _in_turns(fitting: Sequence[Trial], base: Trial, goal: Goal, target_bytes: int | None) -> Trial:
    """The first of the trials that are clearly faster than `base`, by their times in turns with it; or `base`."""
    faster = [t for t in fitting if t.comparison is not None and t.comparison.faster]
    seconds = {t.number: 1 / t.comparison.speedup for t in faster if t.comparison is not None}
    return _fastest(faster, goal, target_bytes, seconds) if faster else base


def _to_compare(fitting: Sequence[Trial], base: Trial, rule: Rule) -> Trial | None:
    """The first by the search that may be faster than `base` and is still to be compared with it; None if one is.

    A trial that was slower than `base` in the search is compared only if the machine was found to be unsteady. After a
    comparison without a verdict there are no more: the machine is too busy.
    """
    open_to = TIERS if rule["goal"] == "speed-at-any-tier" else (base.tier,)
    rivals = sorted((t for t in fitting if t.tier in open_to and t.changes), key=lambda t: (_searched_s(t), t.number))
    if rivals:
        first = _first([t.before_confirmation for t in rivals], **rule)
        rivals.sort(key=lambda t: first is None or t.number != first.number)  # stable: the others stay in their order
    slowest_s = _searched_s(base) * (1.0 if _steady(fitting) else _BUSY)
    for trial in rivals[:_FINALISTS]:
        if trial.comparison is None:
            return trial if _searched_s(trial) < slowest_s else None
        if trial.comparison.faster or trial.comparison.at_bound:
            return None
    return None


def _searched_s(trial: Trial) -> float:
    return cost(trial.before_confirmation)[0]


def _steady(fitting: Sequence[Trial]) -> bool:
    """True if the machine was equally fast each time the same work was measured: steps of a probe, or probes of a
    trial.

    All trials that fit must show this.
    """
    for trial in fitting:
        probes = [r for r in (trial.first, trial.result, trial.confirmed) if r is not None]
        fastest = [r.fastest_step_s for r in probes if r.fastest_step_s is not None]
        steady = all(alike(r.step_s) for r in probes if r.steps_are_alike)
        if not steady or not alike(fastest) or (trial.comparison is not None and not trial.comparison.steady):
            return False
    return True


def _first(fitting: Sequence[Trial], *, goal: Goal, target_bytes: int | None) -> Trial | None:
    """The winner by the given figures, taken as exact."""
    if not fitting:
        return None
    if goal == "speed-at-any-tier":
        return _fastest(fitting, goal, target_bytes)
    if goal == "utilisation" and target_bytes is not None:
        return min(fitting, key=lambda t: (*_by_band(t, target_bytes), *cost(t), t.number))
    kept = min(TIERS.index(t.tier) for t in fitting)
    rivals = [t for t in fitting if TIERS.index(t.tier) == kept]
    if goal == "memory":
        slowest = (1 + SLOWER_FRAC) * min(cost(t)[0] for t in rivals)
        return min((t for t in rivals if cost(t)[0] <= slowest), key=lambda t: (*cost(t)[::-1], t.number))
    return _fastest(rivals, goal, target_bytes)


def _fastest(
    rivals: Sequence[Trial], goal: Goal, target_bytes: int | None, seconds: Mapping[int, float] | None = None
) -> Trial:
    """The fastest of `rivals`, or a leaner one that is as fast; at any tier the highest tier of those as fast.

    `seconds` replaces their step times.
    """
    equal = measured_equal_frac([t.figures for t in rivals if t.figures is not None])
    ordered = sorted(rivals, key=lambda t: t.number)
    costs = {t.number: (cost(t)[0] if seconds is None else seconds[t.number], float(cost(t)[1])) for t in ordered}
    if goal == "speed-at-any-tier":
        slowest_s = (1 + equal) * min(costs.values())[0]
        as_fast = [t for t in ordered if costs[t.number][0] <= slowest_s]
        kept = min(as_fast, key=lambda t: TIERS.index(t.tier)).tier
        ordered = [t for t in ordered if t.tier == kept]
    rows = [costs[t.number] for t in ordered]
    found = preferred(rows, equal_frac=equal, limit_bytes=target_bytes)
    if ordered[found].tier != TIERS[0]:
        found = plainest(rows, [[*t.changes.items()] for t in ordered], found, equal_frac=equal)
    return ordered[found]


def _by_band(trial: Trial, target_bytes: int) -> tuple[int, int, int]:
    """Order of trials for the goal utilisation: in the band, then the nearest to it; of those as near the tier."""
    where, away = _from_band(cost(trial)[1], target_bytes)
    return where, round(away / _AS_NEAR), TIERS.index(trial.tier)


def _from_band(used_bytes: float, limit_bytes: int) -> tuple[int, float]:
    """(0 in the band, 1 below it, 2 above it; distance from the band as a share of the limit)."""
    low, high = band_bytes(limit_bytes)
    if low <= used_bytes <= high:
        return 0, 0.0
    return (1, (low - used_bytes) / limit_bytes) if used_bytes < low else (2, (used_bytes - high) / limit_bytes)


def in_band(trial: Trial, limit_bytes: int | None) -> bool:
    """True if a trial that fits fills the band of goal utilisation."""
    return limit_bytes is not None and _from_band(cost(trial)[1], limit_bytes)[0] == 0


def band_bytes(limit_bytes: int) -> tuple[float, float]:
    """(least, most) bytes of the band: between these shares of the limit and of a target 2 % above it."""
    return BAND[0] * limit_bytes / (1 - _HEADROOM_FRAC), BAND[1] * limit_bytes


def baseline(trials: Iterable[Trial]) -> Trial | None:
    """The trial of the unchanged recipe; None if it was skipped because it is predicted to exceed the memory."""
    return next((t for t in trials if not t.changes and (t.number == 0 or t.result is not None)), None)


# -- candidates that are predicted to be ahead ------------------------------------------------------------------------

Costs = Sequence[tuple[float, float]]  # (seconds of a step, device-used bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreseen:
    """An unprobed candidate on the front; its figures are predicted, corrected by the study's probes."""

    name: str = ""  # p1, p2, ... in its study: a number is a trial's; "" in a study of an earlier autofit
    tier: Tier
    changes: Mapping[str, object]
    step_s: float
    device_used_bytes: int
    params: Mapping[str, Any] = field(default_factory=dict)  # {knob: value}, with which it becomes a trial
    yaml_changes: Mapping[str, object] = field(default_factory=dict)
    needs: tuple[str, ...] = ()  # packages without which it does not run

    def to_json(self) -> dict[str, object]:
        return asdict(self) | {"needs": list(self.needs)}

    @classmethod
    def from_json(cls, content: Mapping[str, object]) -> "Foreseen":
        return cls(**{**content, "needs": tuple(cast("list[str]", content.get("needs", ())))})  # type: ignore[arg-type]


def common_front(trials: Iterable[Trial], foreseen: Iterable[Foreseen]) -> tuple[list[Trial], list[Foreseen]]:
    """The undominated ones among the trials and the foreseen candidates, each fastest first."""
    probed = pareto_front(trials)
    ahead = sorted(foreseen, key=lambda f: (f.step_s, f.device_used_bytes))
    costs = [*map(cost, probed), *((f.step_s, float(f.device_used_bytes)) for f in ahead)]
    kept = set(undominated(costs))
    return (
        [t for place, t in enumerate(probed) if place in kept],
        [f for place, f in enumerate(ahead, start=len(probed)) if place in kept],
    )


def leanest_foreseen(trials: Iterable[Trial], foreseen: Iterable[Foreseen]) -> Foreseen | None:
    """The candidate of least memory on the common front, if it is still unprobed; None if a trial needs less."""
    front, ahead = common_front(trials, foreseen)
    if not ahead or (front and cost(front[-1])[1] <= ahead[-1].device_used_bytes):
        return None
    return ahead[-1]


def undominated(costs: Costs) -> list[int]:
    """The indices of the front of `costs`, fastest first; of equal ones the first."""
    front: list[int] = []
    least = math.inf
    for place in sorted(range(len(costs)), key=lambda i: (*costs[i], i)):
        if costs[place][1] < least:
            front.append(place)
            least = costs[place][1]
    return front
