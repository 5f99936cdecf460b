"""Sentences for people: the reasons why a trial won, advice when nothing fits, and the state of the confirmation."""

from collections.abc import Mapping, Sequence

from autofit.probing.result import Fidelity, ProbeStatus
from autofit.recipe.keys import TIERS, Tier
from autofit.space.traits import describe_changes, samples_word
from autofit.tuning.comparison import EDGE_EQUAL_FRAC, EDGE_FRAC, EQUAL_FRAC, LEANER_FRAC, Comparison, alike, edge_bytes
from autofit.tuning.frontier import BAND, FASTEST, SLOWER_FRAC, Rule, Trial, baseline, cost, in_band, measured, winner
from autofit.tuning.record import StudyRecord
from autofit.units import format_bytes, format_seconds

_RELAX: dict[Tier, str] = {
    "neutral": "allow a lower tier (--allow approximate, then recipe) or raise --target-vram",
    "approximate": "allow the recipe tier (--allow recipe) or raise --target-vram",
    "recipe": "raise --target-vram: every tier is allowed already",
}

_WINS = {
    "speed": "the fastest",
    "speed-at-any-tier": "the fastest",
    "memory": f"the least memory, at most {SLOWER_FRAC:.0%} slower than the fastest,",
    "utilisation": f"the fastest that uses {BAND[0]:.0%} to {BAND[1]:.0%} of the target, or the nearest to it,",
}


def why(
    trials: Sequence[Trial], original: Mapping[str, object], target_bytes: int | None, rule: Rule | None = None, *,
    allow: Tier = "neutral",
) -> str:  # fmt: skip
    """The sentences of `reasons` in one line, less the last full stop."""
    return ". ".join(reasons(trials, original, target_bytes, rule, allow=allow))


def reasons(
    trials: Sequence[Trial], original: Mapping[str, object], target_bytes: int | None, rule: Rule | None = None, *,
    allow: Tier = "neutral", names: Mapping[str, str] | None = None,
) -> list[str]:  # fmt: skip
    """Changes of the winner and their gain; then why a faster trial lost. Full stops are left out.

    One sentence of advice when nothing fits.
    """
    rule = rule or Rule(goal="speed", target_bytes=target_bytes)
    best = winner(trials, **rule)
    if best is None:
        return [_what_to_relax(trials, target_bytes, rule["target_bytes"], allow)]
    fitting = measured(trials)
    at_any = rule["goal"] in ("speed-at-any-tier", "utilisation")
    rivals = fitting if at_any else [t for t in fitting if t.tier == best.tier]
    used = format_bytes(best.device_used_bytes or 0)
    of = f" of {format_bytes(target_bytes)}" if target_bytes is not None else ""
    lower = [t for t in fitting if TIERS.index(t.tier) > TIERS.index(best.tier)]
    faster = [] if at_any else [t for t in lower if cost(t) < cost(best)]
    one = "1 faster trial changes" if len(faster) == 1 else f"{len(faster)} faster trials change"
    notes = [f"{one} more than the {best.tier} tier allows"] if faster else []
    compared = [t for t in rivals if t.comparison is not None]
    if compared and not best.changes:
        head = f"trial {best.number} wins: the recipe as it is, at {used}{of}"
        return [
            head,
            f"No other trial that was compared with it in turns ({len(compared)} of {len(rivals) - 1}) is clearly "
            "faster",
            *notes,
        ]
    level = [t for t in rivals if cost(t)[0] < cost(best)[0]] if rule["goal"] in FASTEST else []
    if level and not compared:
        notes.insert(0, _level(best, min(level, key=cost), rule["target_bytes"]))
    if rule["goal"] == "utilisation" and not in_band(best, rule["target_bytes"]):
        notes.insert(0, f"No trial is between {BAND[0]:.0%} and {BAND[1]:.0%}")
    keeps = f"keeps the {best.tier} tier" if len(rivals) == 1 else f"keep the {best.tier} tier"
    tier = f", whatever their tier (its own is {best.tier})" if at_any else f" and {keeps}"
    of_which = "the only one probed that fits" if len(rivals) == 1 else (
        f"{_WINS[rule['goal']]} of the {len(rivals)} probed that fit"
    )  # fmt: skip
    gives = f"{format_seconds(best.step_s or 0)} a step{_against(best, baseline(trials), samples_word(original))}"
    return [
        f"trial {best.number} wins with {describe_changes(best.changes, original, names)}: {'among ' if level else ''}"
        f"{of_which}{tier}",
        f"It takes {gives}, and {used}{of}",
        *notes,
    ]


def _level(best: Trial, quick: Trial, limit_bytes: int | None) -> str:
    """Reason why `quick`, which is faster than the winner `best`, lost."""
    ahead_s, more_bytes = cost(best)[0] - cost(quick)[0], cost(quick)[1] - cost(best)[1]
    if more_bytes <= 0:
        return f"Trial {quick.number} was {format_seconds(ahead_s)} a step faster, within the noise of two probes"
    most = edge_bytes(limit_bytes)
    at_edge = ""
    if limit_bytes is not None and most is not None and cost(quick)[1] > most:
        at_edge = f" and leaves only {format_bytes(limit_bytes - cost(quick)[1])}"
    return (
        f"Trial {quick.number} is {100 * ahead_s / cost(quick)[0]:.1f} % faster, but needs {format_bytes(more_bytes)} "
        f"more{at_edge}; {best.number} is chosen"
    )


def _against(best: Trial, base: Trial | None, word: str) -> str:
    """The winner's speed-up, and its spread if it was compared in turns; "" for the baseline itself."""
    if best.comparison is not None:
        return f", {best.comparison.speedup:.2f}x the baseline's {word}/s ({_spread(best.comparison)})"
    if not best.changes:
        return ""
    if base is not None and base.result is not None and not base.fits:
        return " (the recipe as it is does not fit)"
    speed = best.speedup(base)
    return "" if speed is None else f", {speed:.2f}x the baseline's {word}/s"


def _spread(comparison: Comparison) -> str:
    """The range of the speed-ups, and in how many pairs."""
    told, count = len(comparison.told), len(comparison.pairs)
    pairs = f"{count} pairs" if told == count else f"{told} undisturbed of {count} pairs"
    return f"{comparison.low:.2f}x to {comparison.high:.2f}x in {pairs}"


def _what_to_relax(trials: Sequence[Trial], target_bytes: int | None, limit_bytes: int | None, allow: Tier) -> str:
    ooms = [t for t in trials if t.status is ProbeStatus.OOM]
    broken = [t for t in trials if t.status in (ProbeStatus.FAILED, ProbeStatus.LOST) and t.result is not None]
    if not ooms and broken:
        assert broken[0].result is not None
        return f"no probe ran to its end; trial {broken[0].number}: {broken[0].result.reason}"
    fell = [t for t in trials if t.fell]
    if not ooms and fell:
        return f"nothing fits: all {len(fell)} trials that fitted in the search failed their confirmation run"
    if not ooms:
        return "no trial was probed"
    used = [t for t in ooms if t.device_used_bytes is not None]
    if not used:
        return f"nothing fits: all {len(ooms)} probes ran out of memory; raise --target-vram"
    least = min(used, key=lambda t: t.device_used_bytes or 0)
    phase = least.result.oom_phase if least.result else None
    target = f" in {format_bytes(target_bytes)}" if target_bytes is not None else ""
    if target_bytes is not None and limit_bytes is not None and limit_bytes < target_bytes:
        target += f" less {format_bytes(target_bytes - limit_bytes)} of headroom"
    held = format_bytes(least.device_used_bytes or 0)
    held = f"held at least {held} when it stopped during {phase}" if least.stopped_at_oom else f"needs {held}"
    which = f"the smallest of {len(ooms)} probes" if len(ooms) > 1 else "the one probe that ran out of memory"
    return f"nothing fits{target}: {which} (trial {least.number}) {held}; {_RELAX[allow]}"


def predicted_note(trials: Sequence[Trial], record: StudyRecord) -> str:
    """The reason why candidates were skipped: they are predicted to exceed the memory. Empty if all were probed."""
    predicted, limit = record.baseline_predicted, record.limit_bytes
    if not trials:
        least = record.least_floor_bytes
        if least is None or limit is None or least <= limit:
            return "; run the same command again to go on"
        return (
            f": nothing fits in {format_bytes(limit)}, as every candidate is predicted to need "
            f"{format_bytes(int(least))} or more; {_RELAX[record.allow]}"
        )
    if predicted is None or limit is None or baseline(trials) is not None:
        return ""
    floor = predicted.get("floor_bytes", 0.0)
    used = max(predicted.get("device_used_bytes", 0.0), floor)
    more = " or more" if used == floor else ""  # live tensors alone, without gaps between the allocator's blocks
    return f"; the unchanged recipe was not probed: it does not fit, predicted {format_bytes(int(used))}{more}"


def repeat_note(trials: Sequence[Trial]) -> str:
    """Trials that were probed again because they were slower than expected, with the outcome; "" if there are none."""
    return "; ".join(repeat_words(t) for t in trials if t.first is not None)


def repeat_words(trial: Trial) -> str:
    """Comparison of the second probe of `trial` with the first."""
    first, now = trial.first, trial.result
    assert first is not None
    assert now is not None
    head = f"trial {trial.number} was probed again"
    if now.status is not ProbeStatus.FIT:
        return f"{head} and then was {now.status}, so it does not fit"
    before_s, after_s = first.median_step_s or 0.0, now.median_step_s or 0.0
    if now is first:
        return f"{head} and was no faster than {format_seconds(before_s)} a step"
    if alike([before_s, after_s]):
        return f"{head}: {format_seconds(after_s)} a step, as before"
    return (
        f"{head}: {format_seconds(after_s)} a step; its first probe of {format_seconds(before_s)} was disturbed and "
        f"does not count"
    )


def confirmation_note(trials: Sequence[Trial], rule: Rule) -> str:
    """Outcome of the winner's confirmation, its figures, and finalists that failed before it; "" without finalists."""
    best = winner(trials, **rule)
    parts = [_how_it_fell(t) for t in trials if _had_its_chance(t) and t is not best]
    if best is not None:
        parts.append(_how_sure(best))
    return "; ".join(parts)


def _had_its_chance(trial: Trial) -> bool:
    """True if it was confirmed as a finalist, or fell: the baseline is probed in turns with each finalist."""
    return trial.confirmed is not None and bool(trial.changes or trial.fell)


def _how_it_fell(trial: Trial) -> str:
    long, short = trial.confirmed, trial.result
    assert long is not None
    if long.status is ProbeStatus.OOM:
        held = "" if long.device_used_bytes is None else f" at {format_bytes(long.device_used_bytes)}"
        return f"trial {trial.number} failed its confirmation run: out of memory{held} during {long.oom_phase}"
    if long.status is not ProbeStatus.FIT:
        return f"trial {trial.number} failed its confirmation run: {long.status}: {long.reason}"
    if trial.comparison is not None:
        return _how_fast(trial.number, trial.comparison)
    before = short.median_step_s if short is not None else None
    times = f"{format_seconds(trial.step_s or 0)} a step" + (
        f", {format_seconds(before)} in the search" if before else ""
    )
    return f"trial {trial.number} also had a confirmation run and is not the winner ({times})"


def _how_fast(number: int, comparison: Comparison) -> str:
    end = "" if comparison.faster else ": not clearly faster"
    return f"trial {number} had {comparison.speedup:.2f}x the baseline's speed ({_spread(comparison)}){end}"


def _how_sure(best: Trial) -> str:
    long = best.confirmed
    if best.comparison is not None and not best.comparison.faster:
        return _how_fast(best.number, best.comparison)
    if long is not None:
        return (
            f"trial {best.number} is confirmed: {len(long.step_s)} steps, saved and resumed, under the target as a "
            f"hard cap: {format_bytes(best.device_used_bytes or 0)}, {format_seconds(best.step_s or 0)} a step"
            + ("" if best.comparison is None else f", {best.comparison.speedup:.2f}x the baseline's speed")
        )
    if best.result is not None and best.result.fidelity is Fidelity.PREDICTED:
        return f"trial {best.number} is predicted, not confirmed: no card of that kind was used"
    if not best.changes:
        return "the winner is the recipe as it is"
    steps = len(best.result.step_s) if best.result is not None else 0
    return f"trial {best.number} is not confirmed: it was probed for {steps} steps only"


def confirmation_json(trials: Sequence[Trial], rule: Rule) -> dict[str, object] | None:
    """The winner's confirmation as `--json` prints it, if there is a winner."""
    best = winner(trials, **rule)
    if best is None:
        return None
    predicted = best.result is not None and best.result.fidelity is Fidelity.PREDICTED
    open_status = "predicted" if predicted else "not confirmed" if best.changes else "baseline"
    long = best.confirmed
    return {
        "trial": best.number, "status": open_status if long is None or not best.changes else "confirmed",
        "measured_steps": None if long is None else len(long.step_s),
        "device_used_bytes": None if long is None else long.device_used_bytes,
        "step_s": None if long is None else long.median_step_s,
        "comparison": _comparison_json(best),
        "fallen": [
            {"trial": t.number, "status": str(t.confirmed.status), "reason": t.confirmed.reason,
             "device_used_bytes": t.confirmed.device_used_bytes, "step_s": t.confirmed.median_step_s,
             "comparison": _comparison_json(t)}
            for t in trials if t.confirmed is not None and _had_its_chance(t) and t is not best
        ],
    }  # fmt: skip


def rule_json(rule: Rule, allow: Tier) -> dict[str, object]:
    """The rule that picked the winner, as `--json` prints it; the shares are those of tuning.comparison."""
    by_speed = rule["goal"] in FASTEST
    return {
        "goal": rule["goal"], "allow": allow, "limit_bytes": rule["target_bytes"],
        "tiers": "all compete" if rule["goal"] == "speed-at-any-tier" else "the highest that has a fit",
        "equal_frac": EQUAL_FRAC if by_speed else None, "leaner_frac": LEANER_FRAC if by_speed else None,
        "edge_frac": EDGE_FRAC if by_speed else None, "edge_equal_frac": EDGE_EQUAL_FRAC if by_speed else None,
    }  # fmt: skip


def _comparison_json(trial: Trial) -> dict[str, object] | None:
    """The speed-up over the baseline in turns with its spread, if it was compared."""
    found = trial.comparison
    if found is None:
        return None
    return {
        "speedup": found.speedup, "low": found.low, "high": found.high, "faster": bool(found.faster),
        "pairs": len(found.pairs), "undisturbed": len(found.undisturbed), "baseline_step_s":
        [p.baseline_s for p in found.pairs], "step_s": [p.finalist_s for p in found.pairs],
    }  # fmt: skip
