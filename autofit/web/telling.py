"""What an answer tells the page: plain values, with the words that the commands print."""

from collections.abc import Mapping

import yaml

from autofit.api.checking import Check
from autofit.fakegpu.specs import GpuSpec, gpu_spec
from autofit.forecast.advice import Advice
from autofit.forecast.advice_text import advice_lines, float32_words
from autofit.forecast.change import Change
from autofit.forecast.margin import most_used_bytes
from autofit.forecast.offers import Offer
from autofit.forecast.zone import care_lines, shown_bytes
from autofit.frontends.foreign import Explanation
from autofit.hardware.prices import Price
from autofit.probing.result import ProbeResult
from autofit.recipe.recipe import Recipe
from autofit.space.describe import describe_changes, samples_word
from autofit.space.reasons import reason_for

_ORDER = ("load", "wake-up", "sync", "rollout", "scoring", "update", "optimizer", "save", "resume")
Told = dict[str, object]


def verdict_told(check: Check, given: Mapping[str, object]) -> Told:
    """The verdict, its reasons, and the bytes of each phase."""
    result, recipe = check.result, check.recipe
    spec = gpu_spec(check.device.removeprefix("sim:"))
    return {
        "is": "verdict", "verdict": check.verdict, "why": check.line.removeprefix(f"{check.verdict}: "),
        "card": spec.name, "card_name": spec.full_name, "count": recipe.launch.cards, "model": _model(recipe, given),
        "trainer": recipe.trainer, "used_bytes": result.device_used_bytes, "capacity_bytes": check.capacity_bytes,
        "most_bytes": most_used_bytes(shown_bytes(result, check.capacity_bytes)[0], check.device),
        "least_bytes": result.least_capacity_bytes, "step_s": result.median_step_s,
        "step_s_90": result.step_s_interval, "rollout_s": next(iter(result.rollout_s), None),
        "batch": batch_words(recipe), "facts": [[name, text] for name, text in _facts(recipe, given)],
        "phases": _phases(result, spec.context_bytes, check.capacity_bytes), "context_bytes": spec.context_bytes,
        "warnings": [
            *(line.removesuffix(".") for line in care_lines(result, recipe, check.capacity_bytes)),
            *float32_words(recipe, result, check.capacity_bytes),
        ],
        "yaml": yaml.safe_dump(dict(given), sort_keys=False, allow_unicode=True),
    }  # fmt: skip


def batch_words(recipe: Recipe) -> str:
    """The effective batch in one sentence."""
    word, cards = samples_word(recipe.resolved), recipe.world_size
    text = (
        f"An optimizer step trains on {recipe.effective_batch_size} {word}: {recipe.micro_batch_size} at a time x "
        f"{recipe.grad_accum_steps} accumulation {'step' if recipe.grad_accum_steps == 1 else 'steps'} x {cards} "
        f"{'card' if cards == 1 else 'cards'}"
    )
    if recipe.sharers > 1:
        text = f"{text.rpartition(' ')[0]} groups of {recipe.sharers} cards"
    if recipe.generates:
        text += f", which are {recipe.prompts_per_step} prompts with {recipe.num_generations} completions each"
    return f"{text}."


def _model(recipe: Recipe, given: Mapping[str, object]) -> str:
    """The model's name; of a pasted config what the recipe calls it, and never the place of a file."""
    return str(given.get("model_name_or_path") or "the pasted model") if recipe.model.startswith("/") else recipe.model


def _facts(recipe: Recipe, given: Mapping[str, object]) -> list[tuple[str, str]]:
    rows = [(name, text) for name, text in recipe.describe() if name not in ("note", "effective batch", "groups")]
    return [(name, _model(recipe, given) if name == "model" else text) for name, text in rows]


def _phases(result: ProbeResult, context_bytes: int, capacity_bytes: int) -> list[Told]:
    """Each phase with its bytes by category, in the order of a step."""
    found = []
    places = {name: place for place, name in enumerate(_ORDER)}
    for phase in sorted(result.phases, key=lambda phase: places.get(phase.name, len(places))):
        held = context_bytes + phase.peak_allocated_bytes
        kept = max(0, min(phase.device_used_bytes, capacity_bytes) - held)
        found.append({"name": phase.name, "bytes": held, "cached_bytes": kept,
                      "categories": dict(result.categories.get(phase.name, {}))})  # fmt: skip
    return found


def advice_told(advice: Advice, check: Check) -> Told:
    """What would make it fit, or faster; another card; and the words for both."""
    result, recipe = check.result, check.recipe
    step_s = result.median_step_s
    card = advice.card
    return {
        "is": "advice",
        "mends": [_change(change, recipe, step_s) for change in advice.changes],
        "faster": [_change(change, recipe, step_s) for change in advice.faster],
        "closest": None if advice.closest is None else _change(advice.closest, recipe, step_s),
        "card": None if card is None else {
            "name": card.name, "full_name": gpu_spec(card.name).full_name, "used_bytes": card.device_used_bytes,
            "capacity_bytes": card.capacity_bytes, "step_s": card.step_s,
            "smaller": card.capacity_bytes < check.capacity_bytes,
        },
        "lines": [line for line in advice_lines(advice, recipe, result, check.capacity_bytes) if "--" not in line],
        "ended_early": advice.ending is not None,
    }  # fmt: skip


def _change(change: Change, recipe: Recipe, step_s: float | None) -> Told:
    env = change.changes.get("env")
    keys = [*change.changes, *(f"env.{name}" for name in (env if isinstance(env, Mapping) else ()))]
    reasons = [text for key in keys if (text := reason_for(key))]
    return {
        "words": describe_changes(change.changes, recipe.resolved), "set": dict(change.given), "tier": change.tier,
        "used_bytes": change.device_used_bytes, "step_s": change.step_s, "tight": change.tight, "fits": change.fits,
        "speedup": step_s / change.step_s if step_s and change.step_s else None, "reasons": reasons[:2],
    }  # fmt: skip


def card_told(offer: Offer, spec: GpuSpec, price: Price | None, recipe: Recipe) -> Told:
    """A row of the table of cards."""
    return {
        "is": "card", "card": offer.card, "name": spec.full_name, "count": offer.count, "verdict": str(offer.verdict),
        "used_bytes": offer.device_used_bytes, "capacity_bytes": offer.capacity_bytes, "step_s": offer.step_s,
        "over": offer.is_lower_bound, "samples_per_s": offer.samples_per_s, "usd_per_hour": offer.usd_per_hour,
        "usd_per_1000_steps": offer.usd_per_1000_steps, "tier": offer.tier if offer.changes else "",
        "words": describe_changes(offer.changes, recipe.resolved) if offer.changes else "", "reason": offer.reason,
        "price": None if price is None else f"{price.source}, {price.date}", "unit": samples_word(recipe.resolved),
    }  # fmt: skip


def explained_told(found: Explanation) -> Told:
    """What another tool's file says, where it cannot be simulated."""
    return {"is": "explained", "tool": found.tool, "facts": [[line.name, line.text] for line in found.lines],
            "wrong": list(found.wrong), "unread": list(found.unread)}  # fmt: skip
