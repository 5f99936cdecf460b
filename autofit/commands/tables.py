"""What a search found, as a table for people and one JSON object for programs."""

from collections.abc import Callable, Mapping, Sequence

from rich.markup import escape
from rich.table import Table

from autofit.probing.result import ProbeStatus
from autofit.space.describe import describe_changes, samples_word
from autofit.tuning.frontier import SPEED, Rule, Trial, baseline, pareto_front, winner
from autofit.tuning.sensitivity import Margin, Neighbour
from autofit.tuning.sentences import confirmation_json
from autofit.units import format_bytes, format_seconds


def front_table(
    trials: Sequence[Trial], original: Mapping[str, object], target_bytes: int | None, rule: Rule | None = None
) -> Table:
    """The Pareto front and the baseline: tier, changes, device-used against the target, time, throughput, speed-up."""
    best, base = winner(trials, **(rule or SPEED)), baseline(trials)
    rows = _with_winner(pareto_front(trials), best)
    if base is not None and base.result is not None and base not in rows:
        rows.append(base)
    result = next((t.result for t in rows if t.result is not None), None)
    fidelity = "measured" if result is None else result.fidelity
    where = f" on {result.device_name}" if result is not None and result.device_name else ""
    table = Table(title=f"Pareto front (step time, device-used), {fidelity}{where}", title_justify="left")
    for name in ("trial", "tier", "changes"):
        table.add_column(name, overflow="fold")
    for name in ("device-used", "of target", "step", f"{samples_word(original)}/s", "speed-up"):
        table.add_column(name, justify="right", no_wrap=True)
    for trial in rows:
        mark = " *" if trial is best else ""
        table.add_row(
            f"{trial.number}{mark}",
            trial.tier,
            escape(describe_changes(trial.changes, original)),
            _or_dash(trial.device_used_bytes, format_bytes, at_least=trial.stopped_at_oom),
            _share(trial, target_bytes),
            _or_dash(trial.step_s, format_seconds),
            _or_dash(trial.completions_per_s, lambda v: f"{v:.2f}"),
            _or_dash(trial.speedup(base), lambda v: f"{v:.2f}x"),
        )
    return table


def trial_line(trial: Trial, original: Mapping[str, object]) -> str:
    """One line for a finished trial."""
    result = trial.result
    assert result is not None
    head = f"trial {trial.number} [{trial.tier}] {describe_changes(trial.changes, original)}: "
    used = _or_dash(result.device_used_bytes, format_bytes)
    if result.status is ProbeStatus.FIT:
        assert result.median_step_s is not None
        step = format_seconds(result.median_step_s)
        return f"{head}fit, {used}, {step} a step, {result.completions_per_s:.2f} {samples_word(original)}/s"
    if result.status is ProbeStatus.OOM:
        needs = "needs" if result.uncapped_bytes is None else "held without the cap"
        needs = "at least" if trial.stopped_at_oom else needs
        return f"{head}oom (pruned) during {result.oom_phase}, {needs} {used}"
    return f"{head}{result.status}: {result.reason}"


def counts(trials: Sequence[Trial], screened: int) -> dict[str, int]:
    """{asked, fit, oom, failed, lost, screened}."""
    by_status = {str(s): sum(t.status is s for t in trials) for s in ProbeStatus}
    return {"asked": len(trials), **by_status, "screened": screened}


def to_json(
    trials: Sequence[Trial],
    *,
    study: str,
    target_bytes: int | None,
    screened: int,
    stopped: str,
    sentence: str,
    rule: Rule | None = None,
) -> dict[str, object]:
    """The object that `--json` prints."""
    base = baseline(trials)
    best = winner(trials, **(rule or SPEED))
    return {
        "study": study,
        "target_bytes": target_bytes,
        "device": next((t.result.device for t in trials if t.result is not None), None),
        "fidelity": next((t.result.fidelity for t in trials if t.result is not None), "measured"),
        "winner": None if best is None else trial_json(best, base),
        "confirmation": confirmation_json(trials, rule or SPEED),
        "front": [trial_json(t, base) for t in _with_winner(pareto_front(trials), best)],
        "baseline": None if base is None else trial_json(base, base),
        "counts": counts(trials, screened),
        "stopped": stopped,
        "why": sentence,
    }


def trial_json(trial: Trial, base: Trial | None) -> dict[str, object]:
    """One trial of `--json`; what was not measured is null."""
    return {
        "trial": trial.number,
        "tier": trial.tier,
        "status": None if trial.status is None else str(trial.status),
        "changes": dict(trial.changes),
        "device_used_bytes": trial.device_used_bytes,
        "step_s": trial.step_s,
        "completions_per_s": trial.completions_per_s,
        "speedup": trial.speedup(base),
        "confirmed": None if trial.confirmed is None else not trial.fell,
    }


def _with_winner(front: list[Trial], best: Trial | None) -> list[Trial]:
    """The front, and the winner where its confirmation was, within noise, slower than the next trial's probe."""
    if best is None or best in front:
        return front
    return sorted([*front, best], key=lambda t: (t.step_s or 0.0, t.device_used_bytes or 0))


def sensitivity_table(kept: Mapping[str, object]) -> Table | None:
    """One step in each knob; None where nothing is known of any."""
    rows = [Neighbour(**row) for row in kept["neighbours"]]  # type: ignore[attr-defined]
    known = [row for row in rows if row.device_used_delta_bytes is not None]
    if not known:
        return None
    table = Table(title=f"One step from trial {kept['trial']}, all else held", title_justify="left")
    for name in ("knob", "from -> to", "tier"):
        table.add_column(name, overflow="fold")
    for name in ("device-used", "step"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("known from")
    for row in known:
        assert row.device_used_delta_bytes is not None
        used = _signed(row.device_used_delta_bytes, format_bytes) + ("" if row.fits else ", does not fit")
        used = f"at least {used}" if row.at_least else used
        step = "-" if row.step_delta_s is None else _signed(row.step_delta_s, format_seconds)
        source = f"{row.fidelity}" if row.trial is None else f"trial {row.trial}, {row.fidelity}"
        table.add_row(row.knob, f"{row.before} -> {row.after}", row.tier, used, step, source)
    return table


def _signed(value: float, text: Callable[[int], str]) -> str:
    shown = text(abs(value))  # type: ignore[arg-type]
    return "0" if not value else f"{'+' if value > 0 else '-'}{shown}"


def margin_sentence(kept: Mapping[str, object]) -> str:
    """How much room the winner has, in one sentence; "" where there is no target."""
    margin = Margin(**kept["margin"])  # type: ignore[arg-type]
    if margin.bytes_left is None:
        return ""
    head = f"Margin: {format_bytes(margin.bytes_left)} below the target less the headroom; "
    if margin.tokens is None:
        return f"{head}how much longer {margin.key} could be is not known here"
    more = "at least " if margin.at_least else ""
    return f"{head}{margin.key} could be {more}{margin.tokens} tokens longer ({margin.fidelity})"


def _share(trial: Trial, target_bytes: int | None) -> str:
    if trial.device_used_bytes is None or not target_bytes:
        return "-"
    return f"{trial.device_used_bytes / target_bytes:.0%}"


def _or_dash(value: object, text: object, *, at_least: bool = False) -> str:
    assert callable(text)
    return "-" if value is None else ("> " if at_least else "") + str(text(value))
