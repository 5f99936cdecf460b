"""Calls in forks of autofit's fork server: each configuration has a process and a CUDA context of its own."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autofit.files import read_json, write_json
from autofit.probing.fork_server import ForkServer
from autofit.probing.result import ProbeRequest
from gpu.folder import Row


@contextmanager
def server(log_folder: Path) -> Iterator[ForkServer]:
    """A fork server whose children can import this package."""
    here = str(Path(__file__).parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    found = ForkServer(log_folder)
    try:
        yield found
    finally:
        found.close()


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for one probe."""
    with tempfile.TemporaryDirectory(prefix="campaign-", ignore_cleanup_errors=True) as path:
        yield Path(path)


def answered(fork_server: ForkServer, entry: str, request: ProbeRequest) -> Row:
    """What `entry` answers to the request; where it died, how, and the end of its log."""
    request.folder.mkdir(parents=True, exist_ok=True)
    write_json(request.request_path, request.to_json())
    ending = fork_server.call({
        "entry": entry, "argument": str(request.request_path), "cwd": str(Path.cwd()), "env": {},
        "log": str(request.log_path), "deadline_s": request.deadline_s,
    })  # fmt: skip
    answer = read_json(request.answer_path)
    if answer is not None:
        return answer
    from autofit.probing.job import classified

    log = request.log_path.read_text(errors="replace") if request.log_path.exists() else ""
    return {**classified(ending, request).to_json(), "log": log[-2000:]}
