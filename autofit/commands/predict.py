"""The commands that search and predict: `autofit search`, `estimate`, `check`, `advise`, `explain` and `fit-check`."""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from autofit.commands.common import (
    DONE,
    INTERRUPTED,
    NOTHING_FITS,
    Bar,
    begin_server,
    ended,
    executor_option,
    hears,
    ignore_interrupts,
    launch_arguments,
    look_early,
    say,
    settings,
    show,
    show_fact,
    show_found,
    show_lines,
    show_parts,
    stream,
    streams,
    terminate_like_interrupt,
    words_of,
)
from autofit.commands.studies import exit_code, show_rest, show_result
from autofit.errors import ConfigError, quoted
from autofit.files import cache_folder
from autofit.lines import on_terminal
from autofit.units import format_bytes

if TYPE_CHECKING:
    from rich.status import Status
    from rich.text import Text

    from autofit.api import Check, Estimate, Event, Progress, SearchResult
    from autofit.scripts.changes import ScriptChange
    from autofit.scripts.running import ScriptCheck


Answer = TypeVar("Answer", "Check", "Estimate")
READING, SIMULATING = "reading the recipe", "simulating the recipe"  # steps of a prediction
LENGTHS, ADVICE = "simulating steps by length", "looking for changes"


def check(options: argparse.Namespace) -> int:
    _look_at(options)
    from autofit import api

    return _answered(options, api.check)


def _look_at(options: argparse.Namespace) -> None:
    """Look at the card and the recipe before any heavy import, and report certain facts already."""
    _, limit_bytes = _look_at_card(options)
    looked = look_early(options, device="sim:")
    begin_server()
    held = looked.held_bytes
    if sum(held.values()) <= limit_bytes or options.json:
        return
    parts = " + ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in held.items())
    whole = "" if len(held) == 1 else f" = {format_bytes(sum(held.values()))}"
    text = f"does not fit: {parts}{whole} alone, of {format_bytes(limit_bytes)}; the whole is simulated now"
    if options.stream:
        stream("certain", {"held_bytes": held, "capacity_bytes": limit_bytes, "text": text})
    else:
        say(text)


def advise(options: argparse.Namespace) -> int:
    from autofit.api.arguments import cards_of, counts_of
    from autofit.hardware.prices import prices

    cards_of(options.cards)
    counts = counts_of(_numbers(options.counts))
    prices(options.prices)  # all this before imports of seconds
    look_early(options, device="sim:")
    from autofit import api

    terminate_like_interrupt()
    found = api.advise(
        options.recipe, cards=options.cards, counts=counts, prices=options.prices,
        trainer=options.trainer, changes=settings(options.set), prompt_tokens=options.prompt_tokens,
        accelerate_config=options.accelerate_config, num_processes=options.num_processes,
        deadline=options.deadline, parallel=options.parallel, on_event=hears,
    )  # fmt: skip
    show_found(found, as_json=options.json)
    if found.interrupted:
        return INTERRUPTED
    return DONE if found.fits else NOTHING_FITS


def _numbers(given: str) -> list[int]:
    try:
        return [int(number) for number in given.split(",")]
    except ValueError as error:
        raise ConfigError(f"--counts takes numbers of cards, for example 1,2,4,8; got {quoted(given)}") from error


def explain(options: argparse.Namespace) -> int:
    from autofit.plugin.registry import explained

    found = explained([str(options.file), *options.words], settings(options.set), ranks=options.num_processes)
    if options.json:
        print(json.dumps(found.to_json()))
    else:
        for name, text in found.shown():
            show_fact(name, text)
    return NOTHING_FITS if found.wrong else DONE


def fit_check(options: argparse.Namespace) -> int:
    if options.gpu is None:
        raise ConfigError("name the card before the script: autofit fit-check --gpu NAME SCRIPT ...; what stands after "
                          "the script is its own")  # fmt: skip
    from autofit.api.arguments import seconds_or_none
    from autofit.scripts.running import Script, fit_script, path_of_module

    module = str(options.script) if options.as_module else None
    path = options.script if module is None else path_of_module(module)
    script = Script(
        path=path, module=module, arguments=options.arguments, prompt_tokens=options.prompt_tokens,
        changes=settings(options.set),
    )  # fmt: skip
    advice_s = seconds_or_none("advice-time", options.advice_time)
    with contextlib.redirect_stdout(sys.stderr):  # what the script prints is no result
        checked = fit_script(script, gpu=options.gpu, steps=options.steps, target_vram=options.target_vram, tell=say)
    found = checked.found
    if not options.json:
        show_lines(str(found).splitlines())
    made, sought, until = list["ScriptChange"](), _lacks_room(checked) and advice_s > 0, time.monotonic() + advice_s
    for offer in _offers(options, checked, until) if sought else ():
        made.append(offer)
        if not options.json:
            show_lines([str(offer) if len(made) > 1 else f"what makes it fit at the same effective batch:\n{offer}"])
    if sought and not made and not options.json:
        show_lines(["no smaller micro-batch was found with which it fits, with checkpoints of activations or without"])
        if time.monotonic() > until:
            show_lines(["not every change was tried in the time for advice; give more, such as --advice-time 2m"])
    if options.json:
        print(json.dumps(found.to_dict() | {"offers": [offer.to_dict() for offer in made]}))
    return DONE if found.fits else NOTHING_FITS


def _lacks_room(checked: "ScriptCheck") -> bool:
    """True if a script exceeds the card and its TrainingArguments are known, so that changes of them may help."""
    return not checked.found.fits and checked.found.least_capacity_bytes is not None and bool(checked.arguments)


def _offers(options: argparse.Namespace, checked: "ScriptCheck", until: float) -> "Iterator[ScriptChange]":
    """Changes that make a failing script fit, as they are found `until` then."""
    from autofit.scripts.changes import ScriptAdvice, asked_again

    given = {"--gpu": options.gpu, "--target-vram": options.target_vram, "--prompt-tokens": options.prompt_tokens,
             "--steps": options.steps}  # fmt: skip
    words = [f"{name}={value}" for name, value in given.items() if value is not None]
    words += [f"--set={text}" for text in options.set]
    bar = Bar("fit-check", str(options.script))
    bar.begin(ADVICE, most_s=until - time.monotonic())
    try:
        named = ["-m"] * options.as_module + [str(options.script)]
        ask = asked_again(words, [*named, *options.arguments], until)
        yield from ScriptAdvice(seen=checked.arguments, ask=ask).offers(checked.found.to_dict())
    finally:
        bar.end()


_PICTURES = (".png", ".svg", ".pdf", ".jpg", ".jpeg", ".webp")


def estimate(options: argparse.Namespace) -> int:
    if options.plot is not None and options.plot.suffix.lower() not in _PICTURES:
        raise ConfigError(
            f"--plot must name a picture that ends in {', '.join(_PICTURES)}; got {quoted(str(options.plot))}"
        )
    if options.libraries is not None:
        from autofit.scripts.libraries import Libraries

        Libraries(options.libraries)
    _look_at(options)
    from autofit import api

    def drawn(found: "Estimate") -> None:
        if options.plot is not None:
            found.plot().savefig(options.plot, dpi=110)
            say(f"wrote {options.plot}")

    return _answered(options, api.estimate, first=drawn, advice=not options.no_advice, libraries=options.libraries)


def _answered(
    options: argparse.Namespace, ask: Callable[..., Answer], *, first: Callable[[Answer], None] = lambda _: None,
    **own: object,
) -> int:  # fmt: skip
    """Ask for a prediction, with the command's own arguments, and show it as it becomes known; its exit code."""

    bar = Bar(options.command, words_of([options.recipe, options.gpu, options.trainer]), shown=not options.stream)

    def hear(event: "Event") -> None:
        if event.trying and bar.tell(event.text):
            return
        (streams if options.stream else hears)(event)
        if event.read:
            bar.begin(SIMULATING)

    def shown(found: Answer) -> None:
        bar.end()
        first(found)
        if options.stream:
            stream("verdict", found.to_dict())
        elif not options.json:
            show(found)
        if options.command == "estimate" or not found.fits:
            bar.begin(LENGTHS)

    def then_typical(found: Answer) -> None:
        bar.end()
        if not (options.stream or options.json):
            show_lines(found.of_typical)

    def looks(limit_s: float | None) -> None:
        bar.begin(ADVICE, most_s=limit_s)

    terminate_like_interrupt()
    bar.begin(READING)
    try:
        found = ask(
            options.recipe, gpu=options.gpu, target_vram=options.target_vram, trainer=options.trainer,
            **launch_arguments(options),
            changes=settings(options.set), prompt_tokens=options.prompt_tokens, deadline=options.deadline,
            advice_time=options.advice_time, as_of=options.as_of, lengths=options.lengths,
            on_event=hear, on_result=shown, on_typical=then_typical, on_advice=looks, **own,
        )  # fmt: skip
    finally:
        bar.close()
    return ended(found, as_json=options.json or options.stream)


# -- autofit search ---------------------------------------------------------------------------------------------------

_DEMO_TRIALS = 6
PREDICTING, MIRRORING = "predicting every candidate", "copying the trials to MLflow"


def search(options: argparse.Namespace) -> int:
    if options.demo and options.recipe is not None:
        raise ConfigError(f"give a recipe or --demo, not both; got {options.recipe} and --demo")
    open_ended = options.time_budget is not None or options.plateau is not None
    if options.demo and options.device == "auto" and options.gpu is None:
        options.device = "cpu"
    where = executor_option(options)
    if not options.demo:
        look_early(options, device=_device(options, is_cluster=where.is_cluster))
    begin_server()
    from autofit import api

    terminate_like_interrupt()
    live = where.kind != "debug"
    about = words_of([options.recipe, options.gpu, options.target_vram, options.trainer, options.allow])
    bar = Bar("search", about, shown=live and not options.stream)
    with _display(options, bar, live=live) as display:
        result = api.search(
            _demo_recipe if options.demo else options.recipe,
            target_vram=options.target_vram, device=options.device, gpu=options.gpu,
            trainer=options.trainer, space=options.space, allow=options.allow, headroom=options.headroom,
            changes=settings(options.set), prompt_tokens=options.prompt_tokens,
            **launch_arguments(options),
            trials=_DEMO_TRIALS if options.demo and options.trials is None and not open_ended else options.trials,
            time_budget=options.time_budget, plateau=options.plateau, min_gain=options.min_gain, goal=options.goal,
            sampler=options.sampler, measured_steps=options.measured_steps, deadline=options.deadline,
            parallel=options.parallel, confirm=not options.no_confirm, seed=options.seed, study=options.study,
            folder=options.dir, mlflow=not options.no_mlflow, advice=not options.no_advice, executor=where,
            on_event=display.on_event, on_progress=display.on_progress, on_result=display.on_result,
            on_advice=display.on_advice,
        )  # fmt: skip
        bar.end()
    options.json |= options.stream
    if options.json or not display.heard:
        return show_result(options, result)
    if display.heard == 1:
        show_rest(options, result)
    return exit_code(result.stop, fits=result.winner is not None)


def _device(options: argparse.Namespace, *, is_cluster: bool) -> str:
    """Device of the probes. Raises ConfigError for an impossible card or target."""
    if is_cluster:
        return "cuda"
    return _look_at_card(options, "sim" if options.recipe is None and options.device == "auto" else options.device)[0]


def _look_at_card(options: argparse.Namespace, asked: str = "sim") -> tuple[str, int]:
    """The device that the options choose, and the target in bytes. Raises ConfigError for an impossible one."""
    from autofit.api.arguments import size
    from autofit.hardware.hardware import choose_device_and_target
    from autofit.recipe.launching import launch_options

    gpu, _ = launch_options(gpu=options.gpu, **launch_arguments(options))
    return choose_device_and_target(asked, gpu, size("target-vram", options.target_vram))


def _demo_recipe() -> Path:
    from autofit.demo.smollm2 import prepare_smollm2

    return prepare_smollm2(cache_folder(), progress=say)


@dataclass
class _Moving:
    """A search's progress as a live line, with the seconds of now."""

    now: "Progress"
    said_s: float

    def __rich__(self) -> "Text":
        from rich.text import Text

        return Text(str(self.now.later(time.monotonic() - self.said_s)))


class _Display:
    """A live line on a terminal, unless a debugger may want it, plain lines elsewhere, both on stderr; or a stream."""

    def __init__(self, options: argparse.Namespace, bar: Bar, *, live: bool) -> None:
        from rich.console import Console

        self._options, self._streaming = options, options.stream
        self._console, self._live = Console(stderr=True), live and not options.stream
        self._status: Status | None = None
        self._moving: _Moving | None = None
        self._bar = bar
        self.heard = 0  # results: at most the one before the advice, and the one with it
        bar.begin(READING)

    @property
    def on_progress(self) -> "Callable[[Progress], None] | None":
        return self._update if self._live and self._console.is_terminal else None

    def on_event(self, event: "Event") -> None:
        if self._streaming:
            streams(event)
            return
        if event.interrupted:
            ignore_interrupts()
        if event.trial is not None and self._console.is_terminal:
            if self._moving is not None:
                self._moving.now = self._moving.now.without(event.trial.number)
            self._console.print(on_terminal(event.text, is_terminal=True), markup=False, highlight=False)
            return
        if event.trying and self._bar.tell(event.text):
            return
        self._still()
        say(str(event))
        if event.read:
            self._bar.begin(PREDICTING)

    def _update(self, progress: "Progress") -> None:
        self._bar.end()
        self._moving = _Moving(progress, time.monotonic())
        if self._status is None:
            self._status = self._console.status("starting")
            self._status.start()
        self._status.update(self._moving)

    def on_result(self, found: "SearchResult") -> None:
        """Show the verdict, and with the second result the rest, before MLflow has both."""
        self._still()
        self._bar.end()
        self.heard += 1
        is_verdict = self.heard == 1
        if self._streaming:
            if is_verdict:
                stream("verdict", found.to_dict())
        elif not self._options.json:
            if is_verdict:
                show_parts(found.verdict_parts())
            else:
                show_rest(self._options, found)
        if not is_verdict and not self._options.no_mlflow:
            self._bar.begin(MIRRORING)

    def on_advice(self, limit_s: float | None) -> None:
        self._still()
        self._bar.begin(ADVICE, most_s=limit_s)

    def close(self) -> None:
        """End the live lines."""
        self._bar.close()
        self._still()

    def _still(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None


@contextlib.contextmanager
def _display(options: argparse.Namespace, bar: Bar, *, live: bool) -> Iterator[_Display]:
    display = _Display(options, bar, live=live)
    try:
        yield display
    finally:
        display.close()
