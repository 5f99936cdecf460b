"""Start of the `autofit` command: a kept server of imported libraries runs it, or `autofit.cli` does.

Imports nothing else: this decides how soon a command answers.
"""

import os
import sys
from collections.abc import Sequence

from autofit.probing import kept_place, kept_server

_WARM = ("check", "estimate", "doctor", "search", "advise")  # commands whose imports take longer than their work
_OF_CARDS = ("doctor", "search")  # those that may look at this machine's cards
_CARDS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
_COLD = ("-h", "--help", "--executor", "--calibrate")  # options with which a command is run without the server


def run_warm(given: Sequence[str]) -> int | None:
    """The exit code of the command line `given`, if a kept server ran it; None: it is to be run here.

    The command then leaves its server behind for the next one.
    """
    if kept_server.is_here() or not pays(given):
        return None
    code = kept_server.run_there(list(given))
    if code is None:
        kept_place.ask_for_one()
    return code


def pays(given: Sequence[str]) -> bool:
    """True if a server may run the command line `given`, and saves time."""
    command = given[0] if given else ""
    if command not in _WARM or any(word.partition("=")[0] in _COLD for word in given):
        return False
    if os.path.exists("executor.yaml"):  # may ask for this terminal, or for other machines
        return False
    if None in (sys.stdin, sys.stdout, sys.stderr) or sys.gettrace() is not None:
        return False
    simulated = any(word.partition("=")[0] == "--gpu" for word in given) or not any(map(os.path.exists, _CARDS))
    return command not in _OF_CARDS or simulated


def main() -> int:
    """Run the command line of this process; its exit code."""
    try:
        code = run_warm(sys.argv[1:])
        if code is not None:
            return code
        from autofit.cli import main as run

        return run(sys.argv[1:])
    except KeyboardInterrupt:  # before the command has begun, or after it has ended
        return 130
