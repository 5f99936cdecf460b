"""`autofit doctor`: check a recipe and show what follows from it."""

import argparse
from pathlib import Path

from autofit.commands.common import DONE, at_least_one, prepared


def doctor(options: argparse.Namespace) -> int:
    from autofit.hardware import choose_device
    from autofit.probing.warm import WarmServer

    at_least_one("--world-size", options.world_size)
    import tempfile

    with tempfile.TemporaryDirectory(prefix="autofit-doctor-") as temporary:
        server = WarmServer(Path(temporary))
        try:
            device = choose_device(options.device)
            recipe = prepared(options.recipe, options, device, Path(temporary) / "inspection", server)
        finally:
            server.close()
    recipe.check()
    for name, text in recipe.describe():
        print(f"{name:>16}: {text}")
    return DONE
