"""A probe that has ended, run once more in a child of the fork server with something patched."""

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Literal
from unittest import mock

from autofit.files import read_json, write_json
from autofit.probing.fork_server import ForkServer
from autofit.probing.result import ProbeRequest, ProbeResult

Patched = Literal["all layers", "all micro-batches", "played micro-batches"]


def probed_anew(probe: Path, folder: Path, patched: Patched, server: ForkServer) -> ProbeResult:
    """The result of the probe in the folder `probe`, run again in the new `folder` with none of `patched` left out."""
    told = read_json(probe / "request.json")
    assert told is not None
    request = replace(ProbeRequest.from_json(told), folder=folder, server_socket=None)
    folder.mkdir()
    write_json(request.request_path, request.to_json())
    ending = server.call(
        {"entry": "probed_anew:probe_again", "argument": json.dumps([str(request.request_path), patched]),
         "cwd": str(folder.parent), "env": {}, "log": str(folder / "log"), "deadline_s": 300}
    )  # fmt: skip
    assert ending.exit_code == 0, (folder / "log").read_text()
    answer = read_json(request.answer_path)
    assert answer is not None
    return ProbeResult.from_json(answer)


def probe_again(argument: str) -> int:
    """In the child: the probe itself."""
    from autofit.fakegpu.patches import same_calls
    from autofit.plugin import transformers_run
    from autofit.probing import simulated, worker

    request_path, patched = json.loads(argument)
    patches = {
        "all layers": [mock.patch.object(simulated, "needs_all_layers", return_value=True)],
        "all micro-batches": [mock.patch.object(transformers_run, "leave_out_repeated")],
        "played micro-batches": [mock.patch.object(same_calls, "_may_play", return_value=False)],
    }
    patches["all micro-batches"] += patches["played micro-batches"]
    with ExitStack() as stack:
        for each in patches[patched]:
            stack.enter_context(each)
        worker.run(request_path)
    return 0
