"""The warm server of the page's simulations: a fork server with an environment and limits of its own."""

import resource
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from autofit.probing.fork_server import ForkServer, call
from autofit.probing.supervise import Ending, computing_env

# Variables that a simulation gets of this process' environment; tokens and passwords are not among them.
_PASSED = (
    "PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "OMP_NUM_THREADS", "OMP_WAIT_POLICY",
    "TOKENIZERS_PARALLELISM", "PYTORCH_NVML_BASED_CUDA_CHECK", "AUTOFIT_PARENT",
)  # fmt: skip


class WarmServer(ForkServer):
    """A fork server whose files are in `home`, with no hub, no home of the user's, no secrets, and bounded memory."""

    def __init__(self, home: Path, *, memory_bytes: int) -> None:
        self.socket_path = str(home / "warm" / "socket")
        (home / "warm").mkdir(exist_ok=True)
        Path(self.socket_path).unlink(missing_ok=True)  # of one before it that has died
        with (home / "server.log").open("ab") as log:
            self._server = subprocess.Popen(
                [sys.executable, "-P", "-m", "autofit.probing.fork_server", self.socket_path],
                stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True, cwd=home, env=_environment(home),
            )  # fmt: skip
        for kind, most in ((resource.RLIMIT_DATA, memory_bytes), (resource.RLIMIT_CORE, 0)):
            resource.prlimit(self._server.pid, kind, (most, most))

    @property
    def pid(self) -> int:
        """Its process, of which those of the simulations are forks."""
        return self._server.pid

    def call(self, message: Mapping[str, object]) -> Ending:
        return call(self.socket_path, message, alive=self.lives)

    def lives(self) -> bool:
        return self._server.poll() is None

    def is_ready(self) -> bool:
        """Whether it has loaded its libraries; waits until it has, or has failed to."""
        while self.lives() and not Path(self.socket_path).exists():
            try:
                self._server.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
        return self.lives()

    def close(self) -> None:
        if self._server.stdin is not None:
            self._server.stdin.close()
        self._server.terminate()
        self._server.wait(timeout=30)


class Shared(ForkServer):
    """A server that another process keeps: calls reach it, and `close` leaves it running."""

    def __init__(self, socket_path: str) -> None:
        self.socket_path = socket_path

    def call(self, message: Mapping[str, object]) -> Ending:
        return call(self.socket_path, message)

    def is_ready(self) -> bool:
        return True

    def close(self) -> None:
        """Nothing: it is another's."""


def _environment(home: Path) -> dict[str, str]:
    for name in ("cache", "hub", "tmp"):
        (home / name).mkdir(exist_ok=True)
    return {
        **{name: value for name, value in computing_env().items() if name in _PASSED},
        "HOME": str(home), "TMPDIR": str(home / "tmp"), "AUTOFIT_CACHE": str(home / "cache"),
        "HF_HOME": str(home / "hub"), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
