"""The executor `debug`: each probe in this terminal, so that `breakpoint()` in a reward function stops there.

Not in this very process: a probe needs a fresh one (its memory is measured, its trainer may crash), and a child that
inherits stdin, stdout and stderr serves a debugger as well.
"""

import math
import subprocess
import sys
from dataclasses import replace

from autofit.files import write_json
from autofit.probing.launch import Launcher
from autofit.probing.result import ProbeRequest

# Ctrl-C ends the job without a traceback of its own, and its probe with it.
_QUIET = "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL)"


class DebugLauncher(Launcher):
    """Runs a probe to its end in the foreground when it is submitted: no server, no deadline, no kept answer."""

    def submit(self, request: ProbeRequest) -> None:
        """Write the request, and run its probe; Ctrl-C ends both the probe and the search."""
        request = replace(request, server_socket=None, terminal=True, deadline_s=math.inf)
        write_json(request.request_path, request.to_json())
        function = self._function
        call = f"from {function.__module__} import {function.__name__} as run; run(sys.argv[1])"
        subprocess.run([sys.executable, "-P", "-c", f"{_QUIET}; {call}", str(request.request_path)], check=False)
