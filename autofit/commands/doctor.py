"""`autofit doctor`: check a recipe and show what follows from it."""

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING

from autofit.commands.common import DONE, NOTHING_FITS, launch_arguments, say
from autofit.errors import ConfigError

if TYPE_CHECKING:
    from autofit.recipe.finding import Finding
    from autofit.recipe.recipe import Recipe


def doctor(options: argparse.Namespace) -> int:
    if options.calibrate:
        _calibrate()
    if options.recipe is None:
        if not options.calibrate:
            raise ConfigError("doctor checks a recipe: name its YAML, or give --calibrate")
        return DONE
    from autofit.api.reading import check_prompt_tokens, launch_options, read_recipe
    from autofit.cluster.executor_findings import executor_findings
    from autofit.hardware.hardware import choose_device
    from autofit.probing.fork_server import ForkServer
    from autofit.recipe.source import read_source
    from autofit.scratch import Scratch

    source = read_source(options.recipe)
    gpu, launch = launch_options(gpu=options.gpu, **launch_arguments(options))

    with Scratch("doctor-") as folder:
        server = ForkServer(folder)
        try:
            device = choose_device(options.device, gpu)
            check_prompt_tokens(options.prompt_tokens, device)
            recipe = read_recipe(
                source, trainer=options.trainer, device=device, server=server,
                scratch=folder / "inspection", launch=launch,
                prompt_tokens=options.prompt_tokens, trains=False, say=say,
            )  # fmt: skip
        finally:
            server.close()
    beside = executor_findings(options.recipe.resolve().parent, cards=recipe.launch.cards)
    found = [*_findings(options, source.values, recipe, device), *beside]
    for finding in found:
        print(f"{finding.severity:>16}: {finding}")
    recipe.check()
    for name, text in recipe.describe():
        print(f"{name:>16}: {text}")
    return NOTHING_FITS if any(finding.stops for finding in found) else DONE


def _findings(
    options: argparse.Namespace, values: Mapping[str, object], recipe: "Recipe", device: str
) -> "list[Finding]":
    """What is wrong with the launch, the worst first."""
    from autofit.hardware.hardware import gpus
    from autofit.recipe.finding import Asked
    from autofit.recipe.launch import read_accelerate_config
    from autofit.recipe.launch_findings import findings

    given = options.accelerate_config or values.get("accelerate_config") or values.get("config_file")
    config = read_accelerate_config(str(given))[0] if given is not None else {}
    simulated = device.startswith("sim:")
    asked = Asked(
        recipe=recipe, file=str(options.recipe), values=values, config=config, num_processes=options.num_processes,
        config_name=f"the accelerate config {given}" if given is not None else f"{options.recipe} (launch)",
        card=device.removeprefix("sim:") if simulated else "", cards_here=0 if simulated else len(gpus()),
    )  # fmt: skip
    return findings(asked)


def _calibrate() -> None:
    from autofit.hardware.calibration import costs_path, measure

    costs = measure()
    print(f"{'host costs':>16}: {costs.launch_s * 1e6:.1f} us a kernel, "
          f"{costs.backward_launch_s * 1e6:.1f} us one of backward, {costs.view_s * 1e6:.1f} us a view (in "
          f"{costs_path()}); simulated cards take them from now on")  # fmt: skip
