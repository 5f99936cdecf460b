"""The answer to one question, in a process of its own that the page's server ends after its time.

It tells what it finds, a JSON object a line, in a file that the server reads meanwhile.
"""

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from autofit.api.card_advice import USUAL
from autofit.api.checking import Check
from autofit.api.estimating import Asked, estimator
from autofit.api.events import Event
from autofit.api.reading import source_of
from autofit.errors import AutofitError, ConfigError, EnvironmentFault, one_line, quoted
from autofit.fakegpu.specs import gpu_spec
from autofit.forecast.crash import crash_of
from autofit.forecast.estimate import Estimator
from autofit.forecast.margin import is_tight
from autofit.forecast.shop import Shop
from autofit.hardware.prices import prices
from autofit.plugin.registry import load, trainer_for
from autofit.probing.result import Cause, ProbeResult, ProbeStatus
from autofit.recipe.clashes import clashes
from autofit.recipe.launching import LaunchOptions
from autofit.recipe.recipe import merge
from autofit.web.allowed import Allowed, allowed
from autofit.web.config import write_config
from autofit.web.pasted import read
from autofit.web.question import Question
from autofit.web.telling import advice_told, card_told, explained_told, verdict_told
from autofit.web.warm import Shared

TOLD = "told.jsonl"  # file with the lines
_TRAINERS = ("grpo", "sft", "dpo", "reward", "rloo", "hf")  # whose settings the list of allowed ones has
_TOKENS = 512  # of a prompt, where the question does not say
Tell = Callable[[Mapping[str, object]], None]


def run(request_path: str) -> int:
    """Answer the question in the file `request_path`; its folder takes the lines. Always returns 0."""
    path = Path(request_path)
    tempfile.tempdir = str(path.parent)
    request = json.loads(path.read_text(encoding="utf-8"))
    with (path.parent / TOLD).open("a", encoding="utf-8") as file:

        def tell(said: Mapping[str, object]) -> None:
            text = json.dumps(said, default=str).replace(f"{path.parent}/recipe", "the file")
            text = text.replace(str(path.parent), "")  # no place of this machine is told
            file.write(text + "\n")
            file.flush()

        try:
            question = Question(**request["question"])
            _answer(question, Shared(request["socket"]), path.parent, request["seconds"], tell)
        except AutofitError as error:
            tell({"is": "error", "text": one_line(str(error), 600)})
        except MemoryError:
            tell({"is": "error", "text": "the simulation needed more memory than one answer may have here"})
    return 0


def _answer(question: Question, server: Shared, folder: Path, seconds: Mapping[str, float], tell: Tell) -> None:
    pasted = read(question.text, folder)
    for note in pasted.notes:
        tell({"is": "note", "text": note})
    source = source_of(pasted.values)  # another tool's file as the commands take it
    if pasted.explained is not None and source.trainer not in _TRAINERS:
        tell(explained_told(pasted.explained))
        return
    given = merge(source.values, question.changes)
    trainer = trainer_for(given, _named(question.trainer or source.trainer or pasted.trainer))
    made = _allowed(given, trainer, question, folder)
    for note in made.notes:
        tell({"is": "note", "text": note})
    tokens = question.tokens or source.prompt_tokens or _tokens(trainer, made.values)
    asked = Asked(
        recipe=replace(source, values=made.values), gpu=question.card, target_vram=None, trainer=trainer, changes=None,
        prompt_tokens=tokens, deadline=seconds["verdict"],
        launch=LaunchOptions(
            accelerate_config=question.sharing or pasted.sharing or None, num_processes=pasted.ranks,
            gpus=question.count if question.kind == "check" else None,
        ),
    )  # fmt: skip

    def hear(event: Event) -> None:
        if event.label:
            tell({"is": "note", "text": event.text})

    with estimator(asked, hear, server=server) as estimating:
        if question.kind == "cards":
            _cards(estimating, question.count or estimating.recipe.launch.cards, tell)
        else:
            _check(estimating, given, seconds["advice"], tell)


def _named(trainer: str | None) -> str | None:
    if trainer is not None and trainer not in _TRAINERS:
        raise ConfigError(f"the trainer must be one of {', '.join(_TRAINERS)} here; got {quoted(trainer)}")
    return trainer


def _allowed(given: Mapping[str, object], trainer: str, question: Question, folder: Path) -> Allowed:
    takes = getattr(load(trainer), "takes", set)
    model = write_config(question.config, folder / "model") if question.config.strip() else None
    return allowed(given, known=takes(), model=model)


def _tokens(trainer: str, values: Mapping[str, object]) -> int:
    """Tokens of the longest prompt or sample, where nobody says: as many as the recipe keeps of a sample."""
    most = values.get("max_length")
    if trainer in ("grpo", "rloo"):
        return _TOKENS
    return most if isinstance(most, int) and 1 <= most <= 131_072 else 2 * _TOKENS


def _check(estimating: Estimator, given: Mapping[str, object], advice_s: float, tell: Tell) -> None:
    """The verdict, then what to change."""
    estimating = replace(estimating, least_of_fits=False)  # a second less; the page does not show it
    if clash := next(clashes(estimating.recipe), None):
        raise ConfigError(f"{clash.key}: {clash.what}; {clash.fix}")
    result = estimating.probe(estimating.recipe.values)
    if result.cause is Cause.DEADLINE:
        raise ConfigError("the simulation takes longer than it may here; autofit on your own machine has no such limit")
    if result.status not in (ProbeStatus.FIT, ProbeStatus.OOM):
        raise EnvironmentFault(f"the simulation failed: {result.reason.partition(' (during ')[0]}")
    fits = result.status is ProbeStatus.FIT and not is_tight(result, estimating.capacity_bytes)
    recipe, capacity = estimating.recipe, estimating.capacity_bytes
    check = Check(
        recipe=recipe, device=estimating.device, capacity_bytes=capacity, result=result,
        crash=None if fits else crash_of(result, recipe, capacity),
    )  # fmt: skip
    tell(verdict_told(check, given))
    for note in result.notes:
        tell({"is": "note", "text": note})
    if advice_s:
        found = estimating.within(
            advice_s, lambda: estimating.advice(result, tell=lambda text: tell({"is": "trying", "text": text})),
            interrupted=lambda: None,
        )  # fmt: skip
        tell(advice_told(found, check))


def _cards(estimating: Estimator, count: int, tell: Tell) -> None:
    """A row for each of the usual cards, the largest first."""
    listed = prices()

    def probe(device: str, capacity_bytes: int, values: Mapping[str, object]) -> ProbeResult:
        return replace(estimating, device=device, capacity_bytes=capacity_bytes, least_of_fits=False).probe(values)

    shop = Shop(estimating.recipe, probe, listed, workers=1)
    for spec in sorted(map(gpu_spec, USUAL), key=lambda spec: -spec.capacity_bytes):
        for offer in shop.offers([spec], (count,)):
            tell(card_told(offer, spec, listed.get(spec.name), estimating.recipe))
