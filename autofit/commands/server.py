"""`autofit server`: what the kept server of imported libraries does, and its end."""

import argparse

from autofit.commands.common import DONE, NOTHING_FITS, show_line
from autofit.probing import kept_place, kept_server
from autofit.units import format_seconds


def server(options: argparse.Namespace) -> int:
    folder = kept_place.own_folder()
    found = 0
    for path in sorted(folder.iterdir()) if folder is not None else ():
        told = kept_server.ask(path, options.action)
        if not told:
            path.unlink(missing_ok=True)  # of one that was killed
            continue
        found += 1
        running = int(told["running"])
        if options.action == "stop":
            show_line(f"stopped process {told['pid']}" + (f"; it ends after what it runs ({running})" * bool(running)))
        else:
            show_line(
                f"process {told['pid']}, up for {format_seconds(told['up_s'])}: {told['commands']} commands, {running} "
                f"running; ends after {format_seconds(told['ends_after_s'])} without one"
            )
    if not found:
        show_line("no server is kept" + ("" if kept_place.is_allowed() else " (AUTOFIT_SERVER, CI or Slurm)"))
    return DONE if found or options.action == "stop" else NOTHING_FITS
