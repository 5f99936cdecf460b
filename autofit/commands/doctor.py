"""`autofit doctor`: check a recipe and show what follows from it."""

import argparse
from pathlib import Path

from autofit.commands.common import DONE
from autofit.errors import ConfigError


def doctor(options: argparse.Namespace) -> int:
    if options.calibrate:
        _calibrate()
    if options.recipe is None:
        if not options.calibrate:
            raise ConfigError("doctor checks a recipe: name its YAML, or give --calibrate")
        return DONE
    from autofit.api.arguments import at_least_one
    from autofit.api.reading import read_recipe
    from autofit.hardware.hardware import choose_device
    from autofit.probing.fork_server import ForkServer
    from autofit.recipe.launch import Launch
    from autofit.recipe.source import read_source

    at_least_one("--world-size", options.world_size)
    import tempfile

    with tempfile.TemporaryDirectory(prefix="autofit-doctor-") as temporary:
        server = ForkServer(Path(temporary))
        try:
            device = choose_device(options.device, options.gpu)
            recipe = read_recipe(
                read_source(options.recipe), trainer=options.trainer, device=device, server=server,
                scratch=Path(temporary) / "inspection", launch=Launch(ranks=options.world_size),
            )  # fmt: skip
        finally:
            server.close()
    recipe.check()
    for name, text in recipe.describe():
        print(f"{name:>16}: {text}")
    return DONE


def _calibrate() -> None:
    from autofit.hardware.calibration import costs_path, measure

    costs = measure()
    print(f"{'host costs':>16}: {costs.launch_s * 1e6:.1f} us a kernel, "
          f"{costs.backward_launch_s * 1e6:.1f} us one of backward, {costs.view_s * 1e6:.1f} us a view (in "
          f"{costs_path()}); simulated cards take them from now on")  # fmt: skip
