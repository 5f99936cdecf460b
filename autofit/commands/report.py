"""`autofit report`: a study's front, its winner and why; what a search ends with."""

import argparse
import json
from typing import TYPE_CHECKING

from autofit.commands.common import DONE, INTERRUPTED, NOTHING_FITS, dir_option, say, show, show_line
from autofit.errors import ConfigError
from autofit.tuning.stop import Stop, StopKind
from autofit.tuning.storage import check_there, database_of

if TYPE_CHECKING:
    from autofit.api import SearchResult


def report(options: argparse.Namespace) -> int:
    if options.trial is not None and options.verl_log is None:
        raise ConfigError("--trial goes with --verl-log: give the log of the run too, or omit --trial")
    check_there(database_of(options.dir.absolute()))  # before imports that take a second
    from autofit import api

    if options.verl_log is not None:
        from autofit.api.verl_log import compare_verl_log

        found = compare_verl_log(options.verl_log, study=options.study, folder=options.dir,
                                 trial=options.trial or "best")  # fmt: skip
        print(json.dumps(found.to_dict()) if options.json else found)
        return DONE
    result = api.report(options.study, folder=options.dir, html=options.html)
    if options.html is not None:
        say(f"wrote {options.html}")
    return show_result(options, result)


def show_result(options: argparse.Namespace, result: "SearchResult") -> int:
    """Print a result, as words or as JSON; the exit code that follows from it."""
    if options.json:
        print(json.dumps(result.to_dict()))
    else:
        show(result)
        if result.winner is not None:
            where = dir_option(options.dir)
            show_line(f"Next: autofit promote best{where}   then: autofit ui{where}")
    return exit_code(result.stop, fits=result.winner is not None)


def exit_code(stop: Stop | None, *, fits: bool) -> int:
    """Of a search that ended so, or of a report (None); `fits` says whether there is a winner."""
    if stop is not None and stop.kind is StopKind.INTERRUPTED:
        return INTERRUPTED
    return DONE if fits else NOTHING_FITS
