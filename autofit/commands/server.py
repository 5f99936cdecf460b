"""`autofit server`: the kept server of imported libraries, and which commands are its."""

import argparse
import os
import sys
from collections.abc import Sequence

from autofit.commands.common import DONE, NOTHING_FITS, show_line
from autofit.probing import kept_place, kept_server
from autofit.units import format_seconds

_WARM = ("check", "estimate", "doctor", "search", "advise")  # commands whose imports take longer than their work
_OF_CARDS = ("doctor", "search")  # those that may look at this machine's cards
_CARDS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
_COLD = ("-h", "--help", "--executor", "--calibrate")  # options with which a command is run without the server


def run_warm(given: Sequence[str]) -> int | None:
    """The exit code of the command line `given`, where a kept server ran it; None: it is to be run here.

    The command then leaves its server behind for the next one.
    """
    if kept_server.is_here() or not _pays(given):
        return None
    code = kept_server.run_there(list(given))
    if code is None:
        kept_place.ask_for_one()
    return code


def _pays(given: Sequence[str]) -> bool:
    command = given[0] if given else ""
    if command not in _WARM or any(word.partition("=")[0] in _COLD for word in given):
        return False
    if None in (sys.stdin, sys.stdout, sys.stderr) or sys.gettrace() is not None:
        return False
    simulated = any(word.partition("=")[0] == "--gpu" for word in given) or not any(map(os.path.exists, _CARDS))
    return command not in _OF_CARDS or simulated


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
