"""A report as one self-contained web page: the same figures as the terminal's, the picture, and the reasons."""

import io
import time
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any, cast

from autofit import __version__
from autofit.api.events import TrialResult
from autofit.api.lower_tiers import outside_lines
from autofit.api.markup import STYLE, Html, Text, bullets, element, escaped, joined, table
from autofit.api.promoted import PromotedRun
from autofit.api.results import SearchResult
from autofit.api.tables import html_of, sensitivity_table, sentence
from autofit.probing.result import ProbeStatus
from autofit.recipe.recipe import inner_value, own_value
from autofit.space.traits import describe_changes, reason_for, samples_word
from autofit.tuning.sensitivity import Neighbour
from autofit.units import format_bytes, format_seconds

_KEPT = {True: element("span", "yes", kind="good"), False: element("span", "NO", kind="bad"), None: Html("-")}


def page_of(result: SearchResult) -> str:
    """One web page, whole: the front, the changes with their reasons, the trials, and the full runs."""
    model = PurePath(str(result.original.get("model_name_or_path") or "")).name or result.study
    title = f"{model} {result.trainer.upper() if ':' not in result.trainer else result.trainer}".strip()
    device = result.device_name or result.device
    where = f"{result.fidelity} on {device}" if device else "nothing was probed yet"
    body = joined(
        [
            element("h1", f"{title}: {where}"), element("p", f"Study {result.study}", kind="soft"),
            element("p", f"{sentence(result.why)}"), _tiles(result), element("h2", "The front"), _picture(result),
            *_changed(result), *_trials(result), *_beside(result), *_outside(result), *_runs(result), _foot(result),
        ]
    )  # fmt: skip
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escaped(f'autofit: {title}, {result.study}')}</title><style>{STYLE}</style>"
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body.text}\n</body></html>\n'


# -- the head ---------------------------------------------------------------------------------------------------------


def _tiles(result: SearchResult) -> Html:
    """The winner's figures beside the baseline's."""
    best, base = result.winner, result.baseline
    if best is None:
        return element("div", _tile("nothing fits", _of_target(None, result.target_bytes)), kind="tiles")
    before = "" if base is None or base is best else _before(base)
    tiles = [_tile(f"trial {best.number}", f"the winner, tier {best.tier}")]
    if best.speedup is not None and best.changes:
        tiles.append(_tile(f"{best.speedup:.2f}x", f"{samples_word(result.original)}/s of the recipe as it is"))
    if best.step_s is not None:
        tiles.append(_tile(format_seconds(best.step_s), f"an optimizer step{before}"))
    if best.device_used_bytes is not None:
        used = format_bytes(best.device_used_bytes)
        tiles.append(_tile(used, f"device-used{_of_target(best.device_used_bytes, result.target_bytes)}"))
    return element("div", *tiles, kind="tiles")


def _tile(figure: str, what: str) -> Html:
    return element("div", element("b", figure), element("span", what), kind="tile")


def _before(base: TrialResult) -> str:
    if base.step_s is None:
        return "; the recipe as it is does not fit"
    return f", {format_seconds(base.step_s)} with the recipe as it is"


def _of_target(used: int | None, target: int | None) -> str:
    if target is None:
        return ""
    share = "" if used is None else f", {used / target:.0%}"
    return f" of {format_bytes(target)}{share}"


def _picture(result: SearchResult) -> Html:
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "autofit", "svg.fonttype": "path"}):
        result.plot().savefig(text := io.StringIO(), format="svg", metadata={"Date": None})
    svg = text.getvalue()
    label = escaped(
        f"device-used against step time of {len(result.trials)} trials; the figures are in the tables below"
    )
    drawn = svg[svg.index("<svg") :].replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
    return element("div", Html(drawn), kind="picture")


# -- the winner -------------------------------------------------------------------------------------------------------


def _changed(result: SearchResult) -> list[Html]:
    """Each changed setting: old and new, tier, its effect, and its measured effect alone; then the proof."""
    best = result.winner
    if best is None:
        return []
    head = element("h2", "What was changed, and why")
    notes = [sentence(note) for note in (result.confirmation_note, result.repeat_note, result.proof) if note]
    if free := result.margin_words():
        notes.append(f"{free}.")
    if not best.changes:
        return [head, element("p", "Nothing: the recipe as it is wins."), bullets(notes)]
    rows = [
        (element("code", result.names.get(key, key)), element("code", _value(own_value(result.names, key, old))),
         element("code", _value(own_value(result.names, key, new))),
         _tier(key, best, result), joined([reason_for(key, result.traits),
                 *(element("div", line, kind="soft") for line in _alone(key, old, result))]))
        for key, old, new in _settings(best, result.original)
    ]  # fmt: skip
    return [head, table(("setting", "was", "is", "tier", "what it does to memory and time"), rows), bullets(notes)]


def _settings(best: TrialResult, original: Mapping[str, object]) -> list[tuple[str, object, object]]:
    """(key, old value, new value) of each change; the variables of `env` one by one."""
    found: list[tuple[str, object, object]] = []
    for key, value in best.changes.items():
        old = inner_value(original, key) if "." in key else original.get(key)
        if key == "env" and isinstance(value, Mapping):
            was = cast("Mapping[str, object]", old) if isinstance(old, Mapping) else {}
            found += [(f"env.{name}", was.get(name), setting) for name, setting in value.items()]
        else:
            found.append((key, old, value))
    return found


def _tier(key: str, best: TrialResult, result: SearchResult) -> str:
    """The change's own tier where it is known: all are neutral in a neutral trial."""
    if best.tier == "neutral":
        return "neutral"
    known = [row.tier for row in result.neighbours or () if row.knob == key]
    return known[0] if known and known[0] == best.tier else f"{best.tier}, or above it"


def _alone(key: str, old: object, result: SearchResult) -> list[str]:
    """Effects of moving this setting alone, away from the winner; its old value first."""
    rows = [row for row in result.neighbours or () if row.knob == key and row.device_used_delta_bytes is not None]

    def other(row: Neighbour) -> str:
        return "its old value" if row.after == old else _value(own_value(result.names, key, row.after))

    return [_moved(row, f"with {other(row)}") for row in sorted(rows, key=lambda row: row.after != old)]


def _moved(row: Neighbour, with_what: str) -> str:
    assert row.device_used_delta_bytes is not None
    used = _signed(row.device_used_delta_bytes, format_bytes) or "as many bytes"
    parts = [f"{'at least ' if row.at_least else ''}{used}"]
    if row.step_delta_s is not None:
        step = _signed(row.step_delta_s, format_seconds)
        parts.append(f"{step} a step" if step else "the same step time")
    parts += [] if row.fits is not False else ["it would not fit"]
    source = f"{row.fidelity}" if row.trial is None else f"{row.fidelity}, trial {row.trial}"
    return f"All else equal, {with_what}: {', '.join(parts)} ({source})."


def _signed(value: float, text: Callable[[Any], str]) -> str:
    """`value` with its sign; "" if the difference vanishes in the text."""
    shown = text(abs(value))
    return "" if shown == text(0) else f"{'+' if value > 0 else '-'}{shown}"


def _value(value: object) -> str:
    return "not set" if value is None else str(value)


# -- the tables -------------------------------------------------------------------------------------------------------


def _trials(result: SearchResult) -> list[Html]:
    """Every trial, the front and the winner marked."""
    if not result.trials:
        return []
    front = {row.number for row in result.front}
    word = samples_word(result.original)
    heads = ("trial", "tier", "status", "changes", "device-used", "step", f"{word}/s", "speed-up")
    best = None if result.winner is None else result.winner.number
    rows = [_trial(row, result, front) for row in result.trials]
    marked = [place for place, row in enumerate(result.trials) if row.number == best]
    counts = [f"{count} {name}" for name, count in result.counts.items() if count and name in list(ProbeStatus)]
    caption = f"{len(result.trials)} trials: {', '.join(counts)}. * is on the front; the winner is shaded."
    if screened := result.counts.get("screened"):
        caption += f" {screened} candidates were ruled out by their prediction."
    return [element("h2", "Trials"), table(heads, rows, numbers=(4, 5, 6, 7), marked=marked, caption=caption)]


def _trial(row: TrialResult, result: SearchResult, front: set[int]) -> tuple[Text, ...]:
    status = "waits" if row.status is None else str(row.status)
    status = "fell in its confirmation" if row.fits is False and status == "fit" else status
    why = [element("div", row.reason, kind="soft")] if row.reason else []
    used = (
        "-" if row.device_used_bytes is None else f"{'> ' if row.at_least else ''}{format_bytes(row.device_used_bytes)}"
    )
    return (
        f"{row.number}{' *' if row.number in front else ''}", row.tier, status,
        joined([describe_changes(row.changes, result.original, result.names), *why]), used,
        "-" if row.step_s is None else format_seconds(row.step_s),
        "-" if row.completions_per_s is None else f"{row.completions_per_s:.2f}",
        "-" if row.speedup is None else f"{row.speedup:.2f}x",
    )  # fmt: skip


def _beside(result: SearchResult) -> list[Html]:
    if result.neighbours is None or result.winner is None:
        return []
    found = sensitivity_table(result.winner.number, result.neighbours, result.names)
    return (
        [] if found is None else [element("h2", "Around the winner"), element("div", Html(html_of(found)), kind="wide")]
    )


def _outside(result: SearchResult) -> list[Html]:
    """Changes beyond the allowed tier; the gain of a lower of the allowed ones."""
    lines = outside_lines(
        result.outside, result.original, result.allow, fits=result.winner is not None, names=result.names
    )
    relaxed = [sentence(result.relaxed)] if result.relaxed else []
    if not lines and not relaxed:
        return []
    head = element("h2", "What lies outside the allowed tier" if result.winner else "What would make it fit")
    parted = [line.strip().partition("   ") for line in lines if line.startswith("  ")]
    shown = bullets(joined([what, element("div", element("code", how))]) for what, _, how in parted)
    said = [element("p", line) for line in lines if not line.startswith("  ")]
    return [head, bullets([*relaxed]), *said[:1], shown, *said[1:]]


# -- the full runs ----------------------------------------------------------------------------------------------------


def _runs(result: SearchResult) -> list[Html]:
    if not result.promoted:
        return []
    return [element("h2", "Full runs"), *(part for run in result.promoted for part in _run(run))]


def _run(run: PromotedRun) -> list[Html]:
    """Promised against actual, the verdict, and every event."""
    of = "" if run.last_step is None else f" of {run.last_step}"
    head = element("h3", f"Trial {run.trial} on {run.device}: {run.state}, step {run.step}{of}")
    verdict = [element("p", sentence(run.verdict))] if run.verdict else []
    rows = [(row.what, row.promised_text, row.actual_text, _KEPT[row.kept]) for row in run.rows]
    contract = [table(("", "promised", "actual", "kept"), rows)] if rows else []
    told = [e for e in run.events if e.text != run.verdict]
    lines = [(_clock(e.time), str(e.step), str(e.kind), element("div", e.text, kind="lines")) for e in told]
    events = [table(("UTC", "step", "about", "event"), lines, numbers=(0, 1), caption="Events")] if lines else []
    return [head, *verdict, *contract, *events]


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))


def _foot(result: SearchResult) -> Html:
    at = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    text = f"autofit {__version__}, {at}; the study {result.study} is in {result.folder}"
    return element("p", text, kind="soft")
