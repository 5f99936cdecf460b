"""`autofit server`: what the kept server of imported libraries does, and its end."""

import argparse

from autofit.commands.common import DONE, NOTHING_FITS, show_line
from autofit.probing import kept_place, kept_server
from autofit.units import format_seconds


def server(options: argparse.Namespace) -> int:
    # Servers of other versions answer too, with what they know.
    told = [answer for path in kept_place.sweep() if (answer := kept_server.ask(path, options.action))]
    for one in told:
        running, whose = (
            int(one.get("running", 0)),
            f"process {one.get('pid')} of {one.get('python', 'another version')}",
        )
        if options.action == "stop":
            show_line(f"stopped {whose}" + (f"; it ends after what it runs ({running})" if running else ""))
        else:
            show_line(
                f"{whose}, up for {format_seconds(one.get('up_s', 0))}: {one.get('commands')} commands, {running} "
                f"running; ends after {format_seconds(one.get('ends_after_s', 0))} without one"
            )
    if not told:
        show_line("no server is kept" + ("" if kept_place.is_allowed() else " (AUTOFIT_SERVER, CI or Slurm)"))
    return DONE if told or options.action == "stop" else NOTHING_FITS
