"""The keeper of a run's vLLM server: starts TRL's command, tells where it answers and why it ended, and ends all of it.

A process of its own (`python -m autofit.promotion.server_keeper REQUEST NAME NUMBER ADDRESS NODE`), so that the server
ends with a killed job, and the engines of a killed server with it. No torch here.
"""

import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from autofit.errors import AutofitError, one_line
from autofit.files import read_json
from autofit.probing.supervise import ProcessEnding, die_with_parent, free_port, keep, started_by
from autofit.promotion.run_folder import LOOPBACK, deaf_children, start_deaf
from autofit.promotion.server import Post, log_of_server
from autofit.recipe.launching import COMMAND, RolloutServer
from autofit.recipe.secrets import opened

_LOOK_S = 1.0  # between two questions whether the server answers
_ANSWER_S = 2.0
_END_BYTES = 1 << 16  # of the log, in which its last words are
_ANY_ADDRESS = "0.0.0.0"  # noqa: S104  # only where the node's own address cannot be listened on
_MEMORY = re.compile(r"out of memory|No available memory|less than desired GPU memory", re.IGNORECASE)
_ERROR = re.compile(r"\b\w*(Error|Exception)\b: (?!.*See root cause above)")  # vLLM's last one names no cause


def serve(
    post: Post, request_path: Path, *, address: str, env: Mapping[str, str], over: Callable[[], bool], where: str = ""
) -> None:
    """Keep the server of the requested run until it ends or `over`; all its processes have ended then.

    It listens on `address`. `where` is " on n3" for a server on a node of its own.
    """
    request = read_json(request_path) or {}
    try:
        values = opened(cast("dict[str, object]", request["values"]))
        own = cast("Mapping[str, object]", values.get("env") or {})
        started = _Started(post, RolloutServer.of(values), address, str(request["cwd"]),
                           {**env, **{key: str(value) for key, value in own.items()}})  # fmt: skip
        ending = keep(started.start, abandoned=lambda: over() or started.is_late())
        reason = None if ending.abandoned and not started.late else started.why(ending)
    except (AutofitError, OSError) as error:
        reason = f"could not be started: {one_line(str(error))}"
    if reason is not None:
        post.ended(f"the vLLM server{where} {reason}; see {log_of_server(post.folder)}")


@dataclass(slots=True)
class _Started:
    """One process of the server."""

    post: Post
    server: RolloutServer
    address: str
    cwd: str
    env: Mapping[str, str]
    late: bool = False
    port: int = 0
    began: float = math.inf
    looked: float = -math.inf
    answered: bool = False
    log_starts: int = 0

    def start(self) -> int:
        """Start the command; its pid. Its processes get no signals of the job: the step at work needs the server."""
        log, parent = log_of_server(self.post.folder), os.getpid()
        host, self.port = self._place()
        command = [_program(self.env), *COMMAND[1:], *self.server.arguments(host, self.port)]
        with log.open("ab") as file, deaf_children():
            self.log_starts = file.tell()
            process = subprocess.Popen(
                command, cwd=self.cwd, env=self.env, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                preexec_fn=lambda: die_with_parent(parent),  # no thread runs here
            )  # fmt: skip
        process.returncode = 0  # the keeper waits for it, not this object
        self.began = time.monotonic()
        return process.pid

    def _place(self) -> tuple[str, int]:
        """(address to listen on, free port of it): that by which others reach this node, where it is one of its own."""
        try:
            return self.address, free_port(self.address)
        except OSError:
            return _ANY_ADDRESS, free_port(_ANY_ADDRESS)

    def is_late(self) -> bool:
        """Whether the server has not answered in time; tells once that it answers."""
        now = time.monotonic()
        if self.answered or now - self.looked < _LOOK_S:
            return False
        self.looked = now
        url = f"http://{self.address}:{self.port}"
        self.answered = _answers(f"{url}/health")
        if self.answered:
            self.post.answers(url)
        self.late = not self.answered and now - self.began > self.server.timeout_s
        return self.late

    def why(self, ending: ProcessEnding) -> str:
        """Why the server has ended, as a predicate."""
        said = last_words(log_of_server(self.post.folder), self.log_starts)
        if self.late:
            how = f"did not answer within {self.server.timeout_s:.0f} s (vllm_server_timeout)"
        elif ending.kernel_oom:
            how = "was killed by the kernel, as the machine had no memory left"
        elif ending.exit_code < 0:
            how = f"was killed by {signal.Signals(-ending.exit_code).name}"
        else:
            how = f"ended with exit code {ending.exit_code}"
        return f"{how}{f' ({said})' if said else ''}"


def last_words(log: Path, start: int) -> str:
    """The line of a server's log, from the byte `start`, that says best why it ended: memory, an error, or the last."""
    with log.open("rb") as file:
        file.seek(max(start, log.stat().st_size - _END_BYTES))
        lines = [line for text in file.read().decode("utf-8", errors="replace").splitlines() if (line := text.strip())]
    for telling in (_MEMORY, _ERROR):
        found = [line for line in lines if telling.search(line)]
        if found:
            return one_line(found[-1], 200)
    return one_line(lines[-1], 200) if lines else ""


def _program(env: Mapping[str, str]) -> str:
    """TRL's command: that of the PATH, which may be of another environment, or that beside this Python."""
    places = f"{env.get('PATH', '')}{os.pathsep}{Path(sys.executable).parent}"
    found = shutil.which(COMMAND[0], path=places)
    if found is None:
        raise FileNotFoundError(f"`{' '.join(COMMAND)}` is not there: `{COMMAND[0]}` is not on the PATH")
    return found


def _answers(url: str) -> bool:
    """Whether a server is ready, asked without a proxy."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=_ANSWER_S) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def start_keeper(
    request_path: Path, post: Post, *, cwd: str, env: Mapping[str, str], address: str = LOOPBACK, node: str = ""
) -> int:
    """Start the keeper of a server that listens on `address`, which is this machine's; its pid.

    `node` is the name of a node that the server has for itself.
    """
    return start_deaf(
        "autofit.promotion.server_keeper", request_path, post.name, str(post.number), address, node,
        log=log_of_server(post.folder), cwd=cwd, env=env,
    )  # fmt: skip


def main(request_path: Path, name: str, number: int, address: str, node: str) -> None:
    """Keep a server until the run dismisses it, or the process of the job that started this one is gone."""
    parent = started_by()
    post = Post(folder=request_path.parent, name=name, number=number)
    serve(
        post, request_path, address=address, env=os.environ, where=f" on {node}" if node else "",
        over=lambda: not post.ordered() or os.getppid() != parent,
    )  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5])
