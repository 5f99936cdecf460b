"""The answer to one question, in a process of its own that the page's server ends after its time.

It writes its findings, a JSON object a line, to a file that the server reads meanwhile: plain values, with the words
that the commands print.
"""

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import yaml

from autofit.api.arguments import USUAL
from autofit.api.estimating import Asked, Check, estimator
from autofit.api.events import Event
from autofit.api.reading import source_of
from autofit.errors import AutofitError, ConfigError, EnvironmentFault, one_line, quoted, told
from autofit.fakegpu.specs import GpuSpec, gpu_spec
from autofit.forecast.advice import Advice, advice_lines, float32_words
from autofit.forecast.change import Change
from autofit.forecast.estimate import Estimator
from autofit.forecast.margin import care_lines, most_used_bytes, shown_bytes
from autofit.forecast.offers import Offer, Shop
from autofit.forecast.step_picture import in_order
from autofit.frontends.draft import NOT_SIMULATED, Explanation
from autofit.frontends.reading import explain
from autofit.frontends.sharing import OTHERWISE, UnreadFileError
from autofit.frontends.writing import own_text, own_words
from autofit.hardware.prices import Price, prices
from autofit.plugin.registry import load, trainer_for
from autofit.probing.result import Cause, ProbeResult, ProbeStatus
from autofit.recipe.findings import clashes
from autofit.recipe.launching import LaunchOptions
from autofit.recipe.profile import SeveralTrainersError, profile, profiles
from autofit.recipe.recipe import Recipe, merge
from autofit.recipe.yaml_file import Source, only_below
from autofit.space.knob import stated_by
from autofit.space.traits import describe_changes, reason_for, samples_word
from autofit.web.allowed import SUFFIXES, Allowed, allowed, allowed_launch, write_config, write_training
from autofit.web.simulator import Question, SharedServer

Told = dict[str, object]


def verdict_told(check: Check, given: Mapping[str, object], changes: Mapping[str, object]) -> Told:
    """The verdict, its reasons, and the bytes of each phase; `given` are the values with the `changes` in them."""
    result, recipe = check.result, check.recipe
    spec = gpu_spec(check.device.removeprefix("sim:"))
    shown, what = shown_bytes(result, check.capacity_bytes)
    return {
        "is": "verdict", "verdict": check.verdict, "why": check.line.removeprefix(f"{check.verdict}: "),
        "card": spec.name, "card_name": spec.full_name, "count": recipe.launch.cards, "model": _model(recipe, given),
        "trainer": recipe.trainer, "used_bytes": result.device_used_bytes, "shown_bytes": shown, "shown_as": what,
        "capacity_bytes": check.capacity_bytes, "most_bytes": most_used_bytes(shown, check.device),
        "least_bytes": result.least_capacity_bytes, "step_s": result.median_step_s,
        "step_s_90": result.step_s_interval, "rollout_s": next(iter(result.rollout_s), None),
        "batch": batch_words(recipe), "facts": [[name, text] for name, text in _facts(recipe, given)],
        "phases": _phases(result, spec.context_bytes, check.capacity_bytes), "context_bytes": spec.context_bytes,
        "course": result.course or None,
        "warnings": [
            *(line.removesuffix(".") for line in care_lines(result, recipe, check.capacity_bytes)),
            *float32_words(recipe, result, check.capacity_bytes),
        ],
        "yaml": _tuned(recipe, given, changes),
    }  # fmt: skip


def _tuned(recipe: Recipe, given: Mapping[str, object], changes: Mapping[str, object]) -> str:
    """The file that was pasted with the `changes`, in its own keys."""
    if not recipe.foreign:
        return yaml.safe_dump(dict(given), sort_keys=False, allow_unicode=True)
    try:
        return own_text(recipe.foreign, changes)
    except ConfigError:  # it would be read otherwise than it was meant
        return f"{recipe.foreign['text']}\n# to change: {own_words(recipe.foreign, changes)}\n"


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
        prompts = recipe.prompts_per_step
        completions = f"with {recipe.num_generations} completions"
        text += f", which are {prompts} prompts {completions} each" if prompts > 1 else f", of 1 prompt {completions}"
    return f"{text}."


def _model(recipe: Recipe, given: Mapping[str, object]) -> str:
    """The model's name; for a pasted config its name in the recipe, as the place of a file stays hidden."""
    return str(given.get("model_name_or_path") or "the pasted model") if recipe.model.startswith("/") else recipe.model


def _facts(recipe: Recipe, given: Mapping[str, object]) -> list[tuple[str, str]]:
    rows = [(name, text) for name, text in recipe.describe() if name not in ("note", "effective batch", "groups")]
    return [(name, _model(recipe, given) if name == "model" else text) for name, text in rows]


def _phases(result: ProbeResult, context_bytes: int, capacity_bytes: int) -> list[Told]:
    """Each phase that holds anything, with its bytes by category, in the order of a step."""
    found = []
    for phase in in_order(result.phases):
        if not phase.peak_allocated_bytes:
            continue
        held = context_bytes + phase.peak_allocated_bytes
        kept = max(0, min(phase.device_used_bytes, capacity_bytes) - held)
        found.append({"name": phase.name, "bytes": held, "cached_bytes": kept,
                      "categories": dict(result.categories.get(phase.name, {}))})  # fmt: skip
    return found


def advice_told(advice: Advice, check: Check) -> Told:
    """Changes that would make it fit, or faster; another card; and the words for both."""
    result, recipe = check.result, check.recipe
    step_s = result.median_step_s
    card, stated = advice.card, stated_by(recipe)
    lines = [told(line, str) for line in advice_lines(advice, recipe, result, check.capacity_bytes)]
    return {
        "is": "advice",
        "mends": [_change(change, recipe, step_s, stated) for change in advice.changes],
        "faster": [_change(change, recipe, step_s, stated) for change in advice.faster],
        "closest": None if advice.closest is None else _change(advice.closest, recipe, step_s, stated),
        "card": None if card is None else {
            "name": card.name, "full_name": gpu_spec(card.name).full_name, "used_bytes": card.shown_bytes,
            "capacity_bytes": card.capacity_bytes, "step_s": card.step_s,
            "smaller": card.capacity_bytes < check.capacity_bytes,
        },
        "lines": [line for line in lines if "--" not in line],
        "ended_early": advice.ending is not None,
    }  # fmt: skip


def _change(change: Change, recipe: Recipe, step_s: float | None, stated: Mapping[str, object]) -> Told:
    env = change.changes.get("env")
    keys = [*change.changes, *(f"env.{name}" for name in (env if isinstance(env, Mapping) else ()))]
    reasons = [text for key in keys if (text := reason_for(key, stated))]
    return {
        "words": change.own or describe_changes(change.changes, recipe.resolved),
        "set": dict(change.given), "tier": change.tier,
        "used_bytes": change.shown_bytes if change.fits else change.least_capacity_bytes,
        "step_s": change.step_s, "tight": change.tight, "fits": change.fits,
        "speedup": step_s / change.step_s if step_s and change.step_s else None, "reasons": reasons[:2],
    }  # fmt: skip


def card_told(offer: Offer, spec: GpuSpec, price: Price | None, recipe: Recipe) -> Told:
    """A row of the table of cards."""
    words = own_words(recipe.foreign, offer.changes) or describe_changes(offer.changes, recipe.resolved)
    return {
        "is": "card", "card": offer.card, "name": spec.full_name, "count": offer.count, "verdict": str(offer.verdict),
        "used_bytes": offer.shown_bytes, "capacity_bytes": offer.capacity_bytes, "step_s": offer.step_s,
        "over": offer.is_lower_bound, "samples_per_s": offer.samples_per_s, "usd_per_hour": offer.usd_per_hour,
        "usd_per_1000_steps": offer.usd_per_1000_steps, "tier": offer.tier if offer.changes else "",
        "words": words if offer.changes else "", "set": dict(offer.given), "reason": offer.reason,
        "price": None if price is None else f"{price.source}, {price.date}", "unit": samples_word(recipe.resolved),
    }  # fmt: skip


def explained_told(found: Explanation, why: str) -> Told:
    """Contents of another tool's file, and the reason why its simulation is impossible."""
    facts = [[line.name, line.text] for line in found.lines if line.name != NOT_SIMULATED]
    return {"is": "explained", "tool": found.tool, "why": why, "facts": facts, "wrong": list(found.wrong),
            "unread": list(found.unread)}  # fmt: skip


TOLD = "told.jsonl"  # file with the lines
_TRAINERS = tuple(p.name for p in profiles().values() if p.page)  # whose settings the list of allowed ones has
_TOKENS = 512  # of a prompt, where the question does not say
# {option of the commands: the page's field}
_FIELDS = {"prompt-tokens": "Tokens of the longest sample (under More)", "gpus": "Number of cards (under More)",
           "num_processes": "Number of cards (under More)", "gpu": "Card",
           "accelerate_config": "Shared by (under More)"}  # fmt: skip
# What is told, and the page's words for it. No place of this machine is told.
_TOLD = (
    *((f"{what} {{0}}/training{suffix}", what) for what in ("the recipe", "the script") for suffix in SUFFIXES),
    *((f"{{0}}/training{suffix}, read as", "read as") for suffix in SUFFIXES),
    *((f"{{0}}/training{suffix}", "the file") for suffix in SUFFIXES), ("{0}", ""),
    (OTHERWISE, "leave it out, and choose under More how the cards share the model"),
    ("--prompt-tokens N says others", "More has a field for others"),
    ("or share the model by FSDP2", "or choose FSDP2 under More"),
)  # fmt: skip
Tell = Callable[[Mapping[str, object]], None]


def run(request_path: str) -> int:
    """Answer the question in the file `request_path`; its folder takes the lines. Always returns 0."""
    path = Path(request_path)
    tempfile.tempdir = str(path.parent)
    request = json.loads(path.read_text(encoding="utf-8"))
    with (path.parent / TOLD).open("a", encoding="utf-8") as file:

        def tell(said: Mapping[str, object]) -> None:
            text = json.dumps(said, default=str)
            for words, here in _TOLD:
                text = text.replace(words.format(path.parent), here)
            file.write(text + "\n")
            file.flush()

        try:
            question = Question(**request["question"])
            with only_below(path.parent):
                _answer(question, SharedServer(request["socket"]), path.parent, request["seconds"], tell)
        except AutofitError as error:
            tell({"is": "error", "text": _words(error)})
        except MemoryError:
            tell({"is": "error", "text": "the simulation needed more memory than one answer may have here"})
    return 0


def _words(error: AutofitError) -> str:
    """Text of an error, with the page's fields for options of the commands."""
    return one_line(error.told(lambda found: _FIELDS.get(found.name, str(found))), 600)


def _answer(question: Question, server: SharedServer, folder: Path, seconds: Mapping[str, float], tell: Tell) -> None:
    path = write_training(question.text, folder)
    try:
        source = source_of(path)  # as the commands read it
    except ConfigError as error:
        found = None if isinstance(error, UnreadFileError) else _explained(path)
        if found is None:
            raise
        said = _words(error)
        tell(explained_told(found, said.partition(f"read as a file of {found.tool}: ")[2] or said))
        return
    given = merge(source.values, question.changes)
    try:
        named = {key: value for key, value in given.items() if key != "dataset_name"}  # no file of this machine is read
        trainer = trainer_for(named, _named(question.trainer or source.trainer))
    except SeveralTrainersError as error:
        tell({"is": "choose", "text": f"{error.what}: which one is it?", "trainers": list(error.trainers)})
        return
    made = _allowed(given, trainer, question, folder)
    for note in made.notes:
        tell({"is": "note", "text": note})
    tokens = question.tokens or source.prompt_tokens or _tokens(trainer, made.values)
    recipe = replace(source, values=made.values, launch=allowed_launch(source.launch))
    asked = Asked(
        recipe=recipe, gpu=question.card, target_vram=None, trainer=trainer, changes=None, prompt_tokens=tokens,
        deadline=seconds["verdict"],
        launch=_launch(question, recipe),
    )  # fmt: skip

    def hear(event: Event) -> None:
        if event.label:
            tell({"is": "note", "text": event.text})

    with estimator(asked, hear, server=server) as estimating:
        if question.kind == "cards":
            _cards(estimating, question.count or estimating.recipe.launch.cards, tell)
        else:
            _check(estimating, given, question.changes, seconds["advice"], tell)


def _launch(question: Question, recipe: Source) -> LaunchOptions:
    """Launch options from the page. A chosen sharing keeps the recipe's ranks: its config has 8 of its own."""
    gpus = question.count if question.kind == "check" else None
    if not question.sharing:
        return LaunchOptions(gpus=gpus)
    ranks = recipe.values.get("num_processes", recipe.launch.get("num_processes", 1))
    if ranks == 1 and question.count is None:
        raise ConfigError(
            "choose the number of cards under More too: the recipe is written for one, with none to share"
        )
    return LaunchOptions(accelerate_config=question.sharing, num_processes=cast(int, ranks), gpus=gpus)


def _explained(path: Path) -> Explanation | None:
    """Contents of a file that is only explained, not simulated, if they are known."""
    try:
        return explain(path)
    except ConfigError:
        return None


def _named(trainer: str | None) -> str | None:
    if trainer is not None and trainer not in _TRAINERS:
        raise ConfigError(f"the trainer must be one of {', '.join(_TRAINERS)} here; got {quoted(trainer)}")
    return trainer


def _allowed(given: Mapping[str, object], trainer: str, question: Question, folder: Path) -> Allowed:
    takes = getattr(load(trainer), "takes", set)
    pasted = question.config.strip()
    model, notes = write_config(question.config, folder / "model") if pasted else (None, ())
    made = allowed(given, known=takes(), trainer=trainer, model=model)
    return replace(made, notes=(*made.notes, *notes))


def _tokens(trainer: str, values: Mapping[str, object]) -> int | None:
    """Tokens of the longest prompt or sample, by default: as many as the recipe keeps of a sample.

    None if it has the length of its prompts itself, as an older TRL's recipe may.
    """
    most = values.get("max_length")
    if profile(trainer).generates:
        return None if values.get("max_prompt_length") else _TOKENS
    return most if isinstance(most, int) and 1 <= most <= 131_072 else 2 * _TOKENS


def _check(
    estimating: Estimator, given: Mapping[str, object], changes: Mapping[str, object], advice_s: float, tell: Tell
) -> None:
    """The verdict, then what to change."""
    estimating = replace(estimating, least_of_fits=False)  # a second less; the page shows it of a full card only
    if clash := next(clashes(estimating.recipe), None):
        raise ConfigError(f"{clash.key}: {clash.what}; {clash.fix}")
    result = estimating.probe(estimating.recipe.values)
    if result.cause is Cause.DEADLINE:
        raise ConfigError("the simulation takes longer than it may here; autofit on your own machine has no such limit")
    if result.status not in (ProbeStatus.FIT, ProbeStatus.OOM):
        raise EnvironmentFault(f"the simulation failed: {result.reason.partition(' (during ')[0]}")
    check = Check.of(estimating, result)
    tell(verdict_told(check, given, changes))
    for note in result.notes:
        tell({"is": "note", "text": note})
    if advice_s:

        def trying(text: str) -> None:
            tell({"is": "trying", "text": text.replace("--set ", "")})

        found = estimating.within(advice_s, lambda: estimating.advice(result, tell=trying), interrupted=lambda: None)
        tell(advice_told(found, check))


def _cards(estimating: Estimator, count: int, tell: Tell) -> None:
    """A row for each of the usual cards, the largest first."""
    listed = prices()
    shop = Shop(estimating.recipe, replace(estimating, least_of_fits=False).probe_on, listed, workers=1)
    for spec in sorted(map(gpu_spec, USUAL), key=lambda spec: -spec.capacity_bytes):
        for offer in shop.offers([spec], (count,)):
            tell(card_told(offer, spec, listed.get(spec.name), estimating.recipe))
