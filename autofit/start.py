"""Where the `autofit` command begins: a kept server of imported libraries runs it, or `autofit.cli` does."""

import sys

from autofit.commands.warm import run_warm


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
