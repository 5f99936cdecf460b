"""`autofit check`: whether a config runs on a card, in one line and an exit code."""

import argparse
import json

from autofit.commands.common import DONE, NOTHING_FITS, launch_arguments, say, settings


def check(options: argparse.Namespace) -> int:
    from autofit import api

    found = api.check(
        options.recipe, gpu=options.gpu, target_vram=options.target_vram, trainer=options.trainer,
        **launch_arguments(options),
        changes=settings(options.set), prompt_tokens=options.prompt_tokens, deadline=options.deadline,
        on_event=lambda event: say(str(event)),
    )  # fmt: skip
    print(json.dumps(found.to_dict()) if options.json else found.line)
    return DONE if found.fits else NOTHING_FITS
