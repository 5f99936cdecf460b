"""Runs MLflow's server until standard input closes: `python -m autofit.tracking.kept_server MLFLOW-ARGUMENTS`.

However the process at the other end of the pipe ends, `kill -9` included, the server and its workers end with it.
"""

import math
import select
import subprocess
import sys
from collections.abc import Sequence

from autofit.probing.supervise import keep


def main(arguments: Sequence[str]) -> int:
    """Run `mlflow server` with these arguments; its exit code, or 0 where the pipe ended it."""
    ending = keep(
        lambda: _start(arguments), deadline_s=math.inf, abandoned=lambda: bool(select.select([sys.stdin], [], [], 0)[0])
    )
    return 0 if ending.abandoned else abs(ending.exit_code)


def _start(arguments: Sequence[str]) -> int:
    process = subprocess.Popen([sys.executable, "-P", "-m", "mlflow", "server", *arguments], stdin=subprocess.DEVNULL)
    process.returncode = 0  # the keeper waits for it, not this object
    return process.pid


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
