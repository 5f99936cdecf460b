"""Child processes for work with torch or the network: the caller imports neither and cannot hang."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from autofit.demo.errors import DemoError

_ROOT = Path(__file__).resolve().parents[2]


def run_module(module: str, arguments: Sequence[str], *, timeout_s: float) -> str:
    """Stdout of `python -m module arguments`; a DemoError with its last line if it fails or takes too long."""
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    # PYTHONSAFEPATH: a file named token.py in the working directory must not shadow the standard library's.
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", module, *arguments]
    with subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as child:
        try:
            output, complaints = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise DemoError(f"{module} did not finish within {timeout_s:g} s") from None
        finally:
            _end_group(child)
    if child.returncode:
        raise DemoError(f"{module} failed: {_last_line(complaints) or f'exit status {child.returncode}'}")
    return output


def _end_group(child: subprocess.Popen[str]) -> None:
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or [""])[-1]
