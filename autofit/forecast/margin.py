"""Error of a predicted peak against the card's: the margin that an answer needs before it says that a recipe fits.

Source: 65 reserved peaks that others measured, simulated (experiments/accuracy/table.md: 57 of PEFT's and 8 of
preflight's): the mean error is 0.7 %, and the worst prediction is 6.23 % below its measurement (prefix tuning of a 3B
model on an L40S). No least capacity was compared; it has the gaps between the allocator's blocks in it as reserved
peaks have, and counts as no better. The context of a card without a figure of its own is scaled from another card's,
and may be off by 150 MiB (fakegpu/specs.py).
"""

import math

from autofit.errors import option
from autofit.fakegpu.specs import gpu_spec
from autofit.hardware.hardware import Device
from autofit.probing.result import Fidelity, ProbeResult, ProbeStatus
from autofit.recipe.findings import clashes
from autofit.recipe.keys import ALLOCATOR, GROWING, GROWS
from autofit.recipe.recipe import Recipe, inner_value, merge
from autofit.units import format_bytes, format_seconds

WORST_ERROR_FRAC = 0.0623  # of the measured bytes, where the prediction is below them


def needed_bytes(result: ProbeResult) -> int:
    """Device-used bytes that a run needs at least: the least capacity, if it is known.

    The allocator may hold more, up to the whole card: it keeps freed blocks, and returns them before it raises an OOM.
    """
    return result.least_capacity_bytes or result.device_used_bytes or 0


def most_used_bytes(used_bytes: int, device: Device) -> int:
    """Device-used bytes of a card whose peak is as far above its prediction as the worst that was compared."""
    context = gpu_spec(device.removeprefix("sim:")).context_bytes
    return context + round(max(0, used_bytes - context) / (1 - WORST_ERROR_FRAC))


def roomy_bytes(capacity_bytes: int, device: Device) -> int:
    """The largest predicted device-used bytes that fit into `capacity_bytes` with the margin."""
    context = gpu_spec(device.removeprefix("sim:")).context_bytes
    return context + round(max(0, capacity_bytes - context) * (1 - WORST_ERROR_FRAC))


def is_tight(result: ProbeResult, capacity_bytes: int) -> bool:
    """True if the recipe fits as predicted, with less to spare than the possible error of the prediction."""
    return result.status is ProbeStatus.FIT and needed_bytes(result) > roomy_bytes(capacity_bytes, result.device)


def is_safe(result: ProbeResult, capacity_bytes: int) -> bool:
    """True if the recipe fits with room to spare."""
    return result.status is ProbeStatus.FIT and not is_tight(result, capacity_bytes)


def tight_words(result: ProbeResult, capacity_bytes: int) -> str:
    """Possible need of a predicted winner of a search, if it exceeds the target, and the way to search for a safe one;
    else "".
    """
    if result.fidelity is not Fidelity.PREDICTED or not is_tight(result, capacity_bytes):
        return ""
    most = format_bytes(most_used_bytes(needed_bytes(result), result.device))
    spare = f"{math.ceil((capacity_bytes - roomy_bytes(capacity_bytes, result.device)) / 1e8) / 10:.1f}GB"
    return (
        f"That is tight: up to {most} allowing for the largest error seen so far. {option('headroom', spare)} searches "
        "for what is safe."
    )


# The zone between "fits" and "does not fit": how far a prediction may be off, what decides, and what makes it safe.

_MATTERS_FRAC = 0.01  # of what is needed: fewer gaps, or a smaller reserve, are not worth a sentence
_LESS_WOULD_DO_FRAC = 0.25  # of what is needed: a card with room for what is used has no need of less


def shown_bytes(result: ProbeResult, capacity_bytes: int) -> tuple[int, str]:
    """(the bytes to judge by, their kind): used, or if the allocator's cache fills the card, needed."""
    used, needed = result.device_used_bytes or 0, needed_bytes(result)
    if used > needed and used > roomy_bytes(capacity_bytes, result.device):
        return needed, "needed"
    return used, "used"


def used_words(result: ProbeResult, capacity_bytes: int, where: str = "") -> str:
    """`77.02 GB of 84.93 GB needed. Up to 82.10 GB, allowing for the largest error seen so far.`

    `where` ends the first sentence: the phase and sample that need it.
    """
    count, what = shown_bytes(result, capacity_bytes)
    most = format_bytes(most_used_bytes(count, result.device))
    of = f"{format_bytes(count)} of {format_bytes(capacity_bytes)} {what}{where}"
    return f"{of}. Up to {most}, allowing for the largest error seen so far."


def step_words(result: ProbeResult, before: str = "") -> str:
    """` A step takes 1m45s (rollout 1m23s), in 9 of 10 cases 1m18s to 2m20s.`; "" if its seconds are unknown.

    `before` names a part of it.
    """
    step_s, interval = result.median_step_s, result.step_s_interval
    if step_s is None:
        return ""
    low_high = "" if interval is None else f", in 9 of 10 cases {' to '.join(map(format_seconds, interval))}"
    return f" A step takes {format_seconds(step_s)}{before}{low_high}."


def care_lines(result: ProbeResult, recipe: Recipe, capacity_bytes: int) -> list[str]:
    """The decisive error of a tight fit, and the remedy; why more is used than needed; and the gaps, if they alone keep
    it from fitting.

    Empty if none of these applies.
    """
    used, needed = result.device_used_bytes or 0, needed_bytes(result)
    _, what = shown_bytes(result, capacity_bytes)
    lines = []
    if used - needed > (_MATTERS_FRAC if what == "needed" else _LESS_WOULD_DO_FRAC) * needed:
        first = f"The card will look full, with {format_bytes(used)}" if what == "needed" else (
            f"{format_bytes(needed)} would do"
        )  # fmt: skip
        lines.append(
            f"{first}: PyTorch keeps blocks that the {_fullest(result)} has freed, and returns them when they are "
            "needed."
        )
    if is_tight(result, capacity_bytes):
        lines += [_decides(result, recipe, capacity_bytes), _safe(result, capacity_bytes)]
    return lines + _gap_lines(result, recipe, capacity_bytes)


def _gap_lines(result: ProbeResult, recipe: Recipe, capacity_bytes: int) -> list[str]:
    """Decisive gaps if all live tensors have room and the recipe fails to fit all the same; else []."""
    if result.status is ProbeStatus.FIT or result.least_capacity_bytes is None:
        return []
    found = _live(result)
    if found is None or found[1] > capacity_bytes or result.least_capacity_bytes <= capacity_bytes:
        return []
    return [_fragmentation(*found, result.least_capacity_bytes - found[1], result, recipe, capacity_bytes)]


def _fullest(result: ProbeResult) -> str:
    """The phase whose reserved bytes are the most."""
    return max(result.phases, key=lambda phase: phase.peak_reserved_bytes).name if result.phases else "run"


def _decides(result: ProbeResult, recipe: Recipe, capacity_bytes: int) -> str:
    """Which bytes decide: live ones, or the gaps between the allocator's blocks."""
    needed, found = needed_bytes(result), _live(result)
    if found is None:
        return f"What decides: {format_bytes(needed)}, of which no part is known."
    phase, live = found
    gaps = needed - live
    if gaps <= _MATTERS_FRAC * needed or most_used_bytes(live, result.device) > capacity_bytes:
        return f"What decides: the live tensors of the {phase}, {format_bytes(live)} with the CUDA context."
    return _fragmentation(phase, live, gaps, result, recipe, capacity_bytes)


def _live(result: ProbeResult) -> tuple[str, int] | None:
    """(the phase with the most live bytes, these bytes with the CUDA context), if any phase is known."""
    top = max(result.phases, key=lambda phase: phase.peak_allocated_bytes, default=None)
    if top is None:
        return None
    return top.name, top.peak_allocated_bytes + top.device_used_bytes - top.peak_reserved_bytes


def _fragmentation(phase: str, live: int, gaps: int, result: ProbeResult, recipe: Recipe, capacity_bytes: int) -> str:
    growing = _growing_bytes(result, recipe)
    if growing is None:
        closes = ""
    elif growing <= capacity_bytes:
        closes = f"; with {ALLOCATOR}={GROWS} it needs {format_bytes(growing)}"
    else:
        closes = f"; {ALLOCATOR}={GROWS} would leave {format_bytes(growing - capacity_bytes)} too much"
    return (
        f"What decides: fragmentation. {format_bytes(live)} are live in the {phase}, {format_bytes(gaps)} are gaps "
        f"between the allocator's blocks{closes}."
    )


def _growing_bytes(result: ProbeResult, recipe: Recipe) -> int | None:
    """Bytes that it needs with expandable segments, if they are known, and the recipe allows them."""
    if inner_value(recipe.values, GROWING) is not None or any(clashes(recipe, merge(recipe.values, {GROWING: GROWS}))):
        return None
    return result.growing_capacity_bytes


def _safe(result: ProbeResult, capacity_bytes: int) -> str:
    """By how much it must shrink, and what else may be on the card."""
    needed = needed_bytes(result)
    less = needed - roomy_bytes(capacity_bytes, result.device)
    most = format_bytes(most_used_bytes(needed, result.device))
    return (
        f"It is safe with {format_bytes(less)} less, or where {most} may be used. "
        f"If the prediction is exact, {format_bytes(capacity_bytes - needed)} of the card stays free."
    )
