"""`autofit fit-check`: a training script of one's own, on a simulated card."""

import argparse
import contextlib
import json
import sys

from autofit.commands.common import DONE, NOTHING_FITS, show_lines
from autofit.errors import ConfigError


def fit_check(options: argparse.Namespace) -> int:
    if options.gpu is None:
        raise ConfigError("name the card before the script: autofit fit-check --gpu NAME SCRIPT ...; what stands after "
                          "the script is its own")  # fmt: skip
    from autofit.fitscript import fit_script

    with contextlib.redirect_stdout(sys.stderr):  # what the script prints is no result
        found = fit_script(
            options.script, options.arguments, gpu=options.gpu, steps=options.steps, target_vram=options.target_vram
        )
    if options.json:
        print(json.dumps(found.to_dict()))
    else:
        show_lines(str(found).splitlines())
    return DONE if found.fits else NOTHING_FITS
