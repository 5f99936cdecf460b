"""`autofit doctor`: check a recipe and show its consequences; by default, the cards of this machine."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from autofit.commands.common import (
    DONE,
    NOTHING_FITS,
    launch_arguments,
    look_early,
    say,
    settings,
    show_fact,
    show_line,
    stream,
)
from autofit.errors import ConfigError
from autofit.files import write_atomically
from autofit.recipe.profile import TRAINERS, recipe_text, trainer_of_data
from autofit.units import format_bytes

if TYPE_CHECKING:
    from autofit.hardware.health import Look
    from autofit.probing.fork_server import ForkServer
    from autofit.recipe.findings import Finding
    from autofit.recipe.recipe import Recipe


def init(options: argparse.Namespace) -> int:
    trainer = options.trainer or TRAINERS[0]
    if options.trainer is None and options.dataset is not None and Path(options.dataset).suffix:
        trainer = trainer_of_data(options.dataset)
        say(f"{trainer}: by the columns of {options.dataset}")
    path = options.out or Path(f"{trainer}.yaml")
    if path.exists():
        raise ConfigError(f"{path} exists, and init does not overwrite it; give another name with --out FILE")
    write_atomically(path, recipe_text(trainer, model=options.model, dataset=options.dataset))
    show_line(f"wrote {path}; next:")
    show_line(f"  autofit check {path} --gpu rtx4090")
    show_line(f"  autofit search {path} --target-vram 24GB")
    if not options.model or not Path(options.model).is_dir():
        show_line("without a way to the model hub add --prompt-tokens N, the tokens of your longest prompt or sample")
    return DONE


class Printed:
    """Writer of the findings: lines on stdout, or JSON objects as they come, or one object at the end."""

    def __init__(self, *, as_json: bool, streaming: bool) -> None:
        self._as_json, self._streaming = as_json or streaming, streaming
        self._lines: list[dict[str, str]] = []

    def __call__(self, label: str, text: str) -> None:
        self._lines.append({"label": label, "text": text})
        if self._streaming:
            stream("note", self._lines[-1])
        elif not self._as_json:
            show_fact(label, text)

    def ended(self, code: int) -> int:
        """The exit code `code`, once the whole is printed."""
        if self._as_json:
            print(json.dumps({"ok": code == DONE, "lines": self._lines}))
        return code


def doctor(options: argparse.Namespace) -> int:
    told = Printed(as_json=options.json, streaming=options.stream)
    for name, given in (("--as-of", options.as_of), ("--set", options.set)):
        if options.recipe is None and given:
            raise ConfigError(f"{name} is about a recipe; name one: autofit doctor run.yaml {name} ...")
    if options.calibrate:
        told("host costs", _calibrate())
    if options.recipe is not None:
        return told.ended(_of_recipe(options, told))
    return told.ended(DONE if options.calibrate else _of_machine(told))


def _of_machine(told: Printed) -> int:
    """Say which cards this machine has, and whether CUDA starts on them."""
    from autofit.files import ScratchFolder
    from autofit.hardware.health import look_at_cards
    from autofit.hardware.nvml import why_none
    from autofit.probing.fork_server import ForkServer

    look = look_at_cards()
    if not look.cards and not look.faults:
        told("card", f"none, {why_none()}; probes are simulated (--gpu NAME) or run on the CPU (--device cpu)")
        return NOTHING_FITS if look.refused else DONE
    with ScratchFolder("doctor-") as folder:
        server = ForkServer(folder)
        try:
            return DONE if _cards_work(look, server, folder, told) else NOTHING_FITS
        finally:
            server.close()


def _cards_work(look: "Look", server: "ForkServer", folder: Path, told: Printed) -> bool:
    """True if probes can run on the cards; reports that, and the cards' faults."""
    from autofit.hardware.health import compiling_faults
    from autofit.probing.slots import cuda_start, held_cards, start_problem

    start = cuda_start(server, folder, look.cards)
    for gpu in look.cards:
        told("card", f"{gpu.name} ({gpu.uuid}), {format_bytes(gpu.capacity_bytes)}")
    problem = start_problem(look, start)
    if not problem:
        told("cuda", f"starts with driver {look.driver}, torch {start.torch} for CUDA {start.cuda}")
    errors = (*held_cards(look), *([problem] if problem else ()))
    warnings = (*look.refused, *look.faults, compiling_faults()) if look.cards else ()
    for severity, lines in (("error", errors), ("warning", filter(None, warnings))):
        for line in lines:
            told(severity, line)
    return not errors


def _of_recipe(options: argparse.Namespace, told: Printed) -> int:
    from autofit.hardware.hardware import choose_device
    from autofit.recipe.launching import launch_options

    gpu, launch = launch_options(gpu=options.gpu, **launch_arguments(options))
    device = choose_device(options.device, gpu)
    look_early(options, device=device)
    from autofit.api.reading import check_prompt_tokens, read_recipe, source_of
    from autofit.cluster.nodes import executor_findings
    from autofit.files import ScratchFolder
    from autofit.frontends.writing import changed, on_card
    from autofit.hardware.hardware import has_bfloat16
    from autofit.hardware.health import look_at_cards
    from autofit.probing.fork_server import ForkServer
    from autofit.recipe.as_of import read_libraries, then_of, without_proposal
    from autofit.recipe.recipe import merge

    if options.as_of is not None:
        read_libraries(options.as_of)
    own = on_card(
        changed(source_of(options.recipe, launch=launch), settings(options.set)), bfloat16=has_bfloat16(device)
    )
    with ScratchFolder("doctor-") as folder:
        server = ForkServer(folder)
        try:
            check_prompt_tokens(options.prompt_tokens, device)
            cards_work = device != "cuda" or _cards_work(look_at_cards(), server, folder, told)
            recipe = read_recipe(
                own, trainer=options.trainer, device=device, server=server, scratch=folder / "inspection",
                launch=launch, prompt_tokens=options.prompt_tokens, trains=False, say=say,
            )  # fmt: skip
        finally:
            server.close()
    beside = executor_findings(options.recipe.resolve().parent, cards=recipe.launch.cards)
    found = [*_findings(options, merge(own.source.values, own.changes), recipe, device), *beside]
    for finding in found:
        told(str(finding.severity), str(finding))
    if options.as_of is not None:
        told("as of", then_of(recipe, options.as_of).line())
        recipe = without_proposal(recipe)
    recipe.check()
    for name, text in recipe.describe():
        told(name, text)
    if cards_work and not found:
        say("nothing wrong was found; whether it fits: autofit check")
    return NOTHING_FITS if not cards_work or any(finding.stops for finding in found) else DONE


def _findings(
    options: argparse.Namespace, values: Mapping[str, object], recipe: "Recipe", device: str
) -> "list[Finding]":
    """Faults of the launch, the worst first."""
    from autofit.hardware.hardware import gpus
    from autofit.recipe.findings import StatedLaunch, findings
    from autofit.recipe.launch import read_accelerate_config

    given = options.accelerate_config or values.get("accelerate_config") or values.get("config_file")
    config = read_accelerate_config(str(given))[0] if given is not None else {}
    simulated = device.startswith("sim:")
    asked = StatedLaunch(
        recipe=recipe, file=str(options.recipe), values=values, config=config, num_processes=options.num_processes,
        config_name=f"the accelerate config {given}" if given is not None else f"{options.recipe} (launch)",
        card=device.removeprefix("sim:") if simulated else "", cards_here=0 if simulated else len(gpus()),
    )  # fmt: skip
    return findings(asked)


def _calibrate() -> str:
    """Measure the host's costs; returns them in words."""
    from autofit.hardware.calibration import costs_path, measure

    costs = measure()
    return (
        f"{costs.launch_s * 1e6:.1f} us a kernel, {costs.recorded_launch_s * 1e6:.1f} us one of a forward that is "
        f"trained, {costs.backward_launch_s * 1e6:.1f} us one of backward, "
        f"{costs.view_s * 1e6:.1f} us a view (in {costs_path()}); simulated cards take them from now on"
    )
