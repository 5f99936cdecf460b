"""`autofit estimate`: one config on a simulated card."""

import argparse
import json

from autofit.commands.common import DONE, NOTHING_FITS, launch_arguments, say, settings, show


def estimate(options: argparse.Namespace) -> int:
    from autofit import api

    found = api.estimate(
        options.recipe, gpu=options.gpu, target_vram=options.target_vram, trainer=options.trainer,
        **launch_arguments(options),
        changes=settings(options.set), prompt_tokens=options.prompt_tokens, advice=not options.no_advice,
        deadline=options.deadline, on_event=lambda event: say(str(event)),
    )  # fmt: skip
    if options.plot is not None:
        found.plot().savefig(options.plot, dpi=110)
    if options.json:
        print(json.dumps(found.to_dict()))
    else:
        show(found)
    return DONE if found.fits else NOTHING_FITS
