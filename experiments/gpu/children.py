"""Calls in forks of autofit's fork server: each configuration has a process and a CUDA context of its own."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from autofit.files import read_json, write_json
from autofit.hardware.hardware import gpus
from autofit.probing.fork_server import ForkServer, call_ranks
from autofit.probing.result import ProbeRequest
from autofit.probing.supervise import free_port
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


def on_one_card() -> dict[str, str]:
    """The environment of a process that sees the first visible card alone: a trainer would split its batch over all."""
    found = gpus()
    return {"CUDA_VISIBLE_DEVICES": found[0].uuid} if found else {}


def answered(fork_server: ForkServer, entry: str, request: ProbeRequest) -> Row:
    """What `entry` answers to the request; where it died, how, and the end of its log."""
    request.folder.mkdir(parents=True, exist_ok=True)
    write_json(request.request_path, request.to_json())
    ending = fork_server.call({
        "entry": entry, "argument": str(request.request_path), "cwd": str(Path.cwd()),
        "env": on_one_card() if request.device == "cuda" else {}, "log": str(request.log_path),
        "deadline_s": request.deadline_s,
    })  # fmt: skip
    answer = read_json(request.answer_path)
    if answer is not None:
        return answer
    from autofit.probing.job import classified

    log = request.log_path.read_text(errors="replace") if request.log_path.exists() else ""
    return {**classified(ending, request).to_json(), "log": log[-2000:]}


def answered_by_ranks(fork_server: ForkServer, entry: str, request: ProbeRequest, ranks: int) -> Row:
    """What `entry` answers on the rank that holds most; the end of the log of one that does not answer."""
    request.folder.mkdir(parents=True, exist_ok=True)
    if not fork_server.is_ready():
        raise RuntimeError("the fork server did not start; see its log beside the results")
    port = free_port()
    requests = [replace(request, rank=rank, port=port) for rank in range(ranks)]
    for one in requests:
        write_json(one.request_path, one.to_json())
    call_ranks(fork_server.socket_path, {
        "entry": entry, "cwd": str(Path.cwd()), "env": {}, "deadline_s": request.deadline_s,
        "cancel": str(request.folder / "cancel"),
        "ranks": [{"argument": str(one.request_path), "log": str(one.log_path)} for one in requests],
    })  # fmt: skip
    rows: list[Row] = []
    for one in requests:
        row = read_json(one.answer_path)
        if row is None or row["status"] != "fit":
            log = one.log_path.read_text(errors="replace")[-2000:] if one.log_path.exists() else ""
            return {"status": "lost", "reason": f"rank {one.rank} did not answer", **(row or {}), "log": log}
        rows.append(row)
    return max(rows, key=lambda row: int(str(row["device_used_bytes"])))
