"""Advice in words: a line each, with the option that makes the change; and as JSON."""

from collections.abc import Iterator

from autofit.errors import option
from autofit.forecast.advice import Advice, Ending
from autofit.forecast.change import Change, OtherCard
from autofit.forecast.margin import is_tight
from autofit.frontends.writing import in_16_bits
from autofit.plugin.protocol import UPDATE
from autofit.probing.result import ProbeResult, ProbeStatus
from autofit.recipe.as_of import Then
from autofit.recipe.recipe import Recipe, own_names
from autofit.space.traits import describe_changes
from autofit.units import format_bytes, format_seconds

_FLOAT32 = 3.5  # bytes of a parameter, from which on most of them are float32
_MATTERS_FRAC = 0.1  # of the card: smaller weights are not why a recipe does not fit


def advice_json(advice: Advice) -> dict[str, object]:
    """The advice as plain values."""
    return {
        "changes": [change.to_json() for change in advice.changes],
        "closest": None if advice.closest is None else advice.closest.to_json(),
        "untried": [{"changes": dict(c.changes), "reason": c.failure} for c in advice.untried],
        "faster": [change.to_json() for change in advice.faster],
        "card": None if advice.card is None else advice.card.to_json(),
        "advice_ended_by": None if advice.ending is None else str(advice.ending),
    }


def float32_words(recipe: Recipe, result: ProbeResult, capacity_bytes: int) -> list[str]:
    """A sentence where weights of float32 take a good part of a card that a recipe does not fit; [] without one."""
    count, nbytes = recipe.model_parameters, recipe.weights_bytes
    fits = result.status is ProbeStatus.FIT and not is_tight(result, capacity_bytes)
    if (
        fits
        or "dtype" not in recipe.resolved
        or not count
        or not nbytes
        or nbytes < max(_FLOAT32 * count, _MATTERS_FRAC * capacity_bytes)
    ):
        return []
    unset = "" if recipe.values.get("dtype") else "`dtype` is not set, so "
    halved = in_16_bits(recipe.foreign)
    return [
        f"{unset}the weights are loaded in float32: {format_bytes(nbytes)} for {count / 1e9:.2f} B parameters"
        + (f"; {halved} takes half of that" if halved else "")
    ]


def then_lines(then: Then | None, result: ProbeResult, capacity_bytes: int) -> list[str]:
    """What older libraries did with the recipe, in a line; [] where none were named."""
    if then is None:
        return []
    fits = result.status is ProbeStatus.FIT
    fitted = None
    if then.held_bytes:
        update = max((phase.device_used_bytes for phase in result.phases if phase.name == UPDATE), default=0)
        fitted = max(result.device_used_bytes or 0, update + then.held_bytes) <= capacity_bytes
    return [then.line(fits=fits, fitted=fitted)]


def ending_words(advice: Advice) -> list[str]:
    """A sentence where the search for advice was ended early; [] without one."""
    more = option("advice-time", "2m")
    words = {
        Ending.TIME: f"not every change was tried in the time for advice; give more, such as {more}",
        Ending.INTERRUPT: "interrupted: not every change was tried",
    }
    if advice.came_too_late and advice.ending is Ending.TIME:
        return [f"no change was simulated to its end in the time for advice; give more, such as {more}"]
    return [] if advice.ending is None else [words[advice.ending]]


def advice_lines(advice: Advice, recipe: Recipe, result: ProbeResult, capacity_bytes: int) -> list[str]:
    """What to change, a line each, under a heading."""
    fits = result.status is ProbeStatus.FIT
    lines = (
        [] if fits and not is_tight(result, capacity_bytes) else list(_mends(advice, recipe, capacity_bytes, fits=fits))
    )
    if advice.faster:
        lines.append("what would make it faster, predicted:")
        for change in advice.faster:
            lines.append(f"  {change_line(change, recipe, result.median_step_s)}")
    lines += [_untried(change, recipe) for change in advice.untried]
    if advice.card is not None:
        lines.append(card_line(advice.card, smaller=advice.card.capacity_bytes < capacity_bytes))
    return [*lines, *(f"{words}." for words in ending_words(advice))]


def _mends(advice: Advice, recipe: Recipe, capacity_bytes: int, *, fits: bool) -> Iterator[str]:
    what = "leave more room" if fits else "make it fit"
    if advice.changes:
        yield f"the cheapest changes that {what}, predicted:"
        for change in advice.changes:
            yield f"  {change_line(change, recipe)}"
        return
    if advice.came_too_late:
        return
    tried = f"no change {'of the recipe' if advice.proven else 'that was tried of the recipe'}'s settings"
    tried += " leaves more room" if fits else " makes it fit"
    if advice.closest is None or fits:
        yield f"{tried}."
        return
    yield f"{tried}; the closest change {_miss(advice.closest, recipe, capacity_bytes)}."


def _miss(closest: Change, recipe: Recipe, capacity_bytes: int) -> str:
    what = describe_changes(closest.changes, recipe.resolved, own_names(recipe.foreign))
    if closest.fits:
        spare = format_bytes(capacity_bytes - closest.shown_bytes)
        return f"leaves {spare}, less than the prediction may be off: {what}"
    return f"exceeds the limit by {format_bytes((closest.least_capacity_bytes or 0) - capacity_bytes)}: {what}"


def change_line(change: Change, recipe: Recipe, step_s: float | None = None) -> str:
    """`neutral: gradient_checkpointing False -> True (18.2 GB, 3.1 s a step)   --set gradient_checkpointing=true`.

    With `step_s`, the seconds of a step now, also the speed-up.
    """
    gain = f", {step_s / change.step_s:.2f}x" if step_s and change.step_s else ""
    tight = ", little to spare" if change.tight else ""
    used = format_bytes(change.shown_bytes)
    what = describe_changes(change.changes, recipe.resolved, own_names(recipe.foreign))
    return f"{change.tier}: {what} ({used}{change.step_words}{gain}{tight})   {change.how}"


def _untried(change: Change, recipe: Recipe) -> str:
    what = describe_changes(change.changes, recipe.resolved, own_names(recipe.foreign))
    return f"could not be tried: {what}: {_without_log(change.failure)}"


def _without_log(reason: str) -> str:
    """The reason of a failed probe without the place of its log, which is gone by then."""
    return " ".join(reason.partition(" (during ")[0].split())


def card_line(card: OtherCard, *, smaller: bool) -> str:
    """The other card on which the recipe runs as it is."""
    step = "" if card.step_s is None else f", {format_seconds(card.step_s)} a step"
    head = "a smaller card would do" if smaller else "as it is, it runs on a larger card"
    used = f"{format_bytes(card.shown_bytes)} of {format_bytes(card.capacity_bytes)}"
    return f"{head}: {card.name} ({used}{step})   {card.options}"
