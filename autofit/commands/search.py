"""`autofit search`: its options to the API, and what happens to the terminal."""

import argparse
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from autofit.commands.bar import Bar, words_of
from autofit.commands.common import (
    begin_server,
    executor_option,
    ignore_interrupts,
    launch_arguments,
    look_early,
    say,
    settings,
    streams,
    terminate_like_interrupt,
)
from autofit.commands.predict import ADVICE, READING
from autofit.commands.studies import show_result
from autofit.errors import ConfigError
from autofit.files import cache_folder
from autofit.lines import on_terminal

if TYPE_CHECKING:
    from rich.status import Status

    from autofit.api import Event, Progress

_DEMO_TRIALS = 6
PREDICTING = "predicting every candidate"


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
    with _display(bar, live=live, streaming=options.stream) as display:
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
            on_event=display.on_event, on_progress=display.on_progress, on_advice=display.on_advice,
        )  # fmt: skip
        bar.end()
    options.json |= options.stream
    return show_result(options, result)


def _device(options: argparse.Namespace, *, is_cluster: bool) -> str:
    """Where probes will run. Raises ConfigError for a card or a target that cannot be."""
    from autofit.api.arguments import size
    from autofit.hardware.hardware import choose_device_and_target
    from autofit.recipe.launching import launch_options

    gpu, _ = launch_options(gpu=options.gpu, **launch_arguments(options))
    if is_cluster:
        return "cuda"
    asked = "sim" if options.recipe is None and options.device == "auto" else options.device
    return choose_device_and_target(asked, gpu, size("target-vram", options.target_vram))[0]


def _demo_recipe() -> Path:
    from autofit.demo import prepare_smollm2

    return prepare_smollm2(cache_folder(), progress=say)


class _Display:
    """A live line on a terminal, unless a debugger may want it, plain lines elsewhere, both on stderr; or a stream."""

    def __init__(self, bar: Bar, *, live: bool, streaming: bool) -> None:
        from rich.console import Console

        self._console, self._live, self._streaming = Console(stderr=True), live and not streaming, streaming
        self._status: Status | None = None
        self._bar = bar
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
            self._console.print(on_terminal(event.text, is_terminal=True), markup=False, highlight=False)
            return
        self._still()
        say(str(event))
        if event.read:
            self._bar.begin(PREDICTING)

    def _update(self, progress: "Progress") -> None:
        from rich.text import Text

        self._bar.end()
        if self._status is None:
            self._status = self._console.status("starting")
            self._status.start()
        self._status.update(Text(str(progress)))

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
def _display(bar: Bar, *, live: bool, streaming: bool) -> Iterator[_Display]:
    display = _Display(bar, live=live, streaming=streaming)
    try:
        yield display
    finally:
        display.close()
