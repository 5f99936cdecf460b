"""`autofit report`: a study's front, its winner and why; what a search ends with."""

import argparse
import json
from typing import TYPE_CHECKING

from autofit.commands.common import DONE, INTERRUPTED, NOTHING_FITS, dir_option, show

if TYPE_CHECKING:
    from autofit.api import SearchResult


def report(options: argparse.Namespace) -> int:
    from autofit import api

    return show_result(options, api.report(options.study, folder=options.dir))


def show_result(options: argparse.Namespace, result: "SearchResult") -> int:
    """Print a result, as words or as JSON; the exit code that follows from it."""
    if options.json:
        print(json.dumps(result.to_dict()))
    else:
        show(result)
        if result.winner is not None:
            where = dir_option(options.dir)
            print(f"Next: autofit promote best{where}   then: autofit ui{where}")
    if result.interrupted:
        return INTERRUPTED
    return DONE if result.winner is not None else NOTHING_FITS
