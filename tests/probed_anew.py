"""A probe that has ended, run once more in a process of its own with something patched."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from autofit.files import read_json, write_json
from autofit.probing.result import ProbeRequest, ProbeResult

_PROGRAM = """
import sys
from unittest import mock
from autofit.probing import simulated, worker
from autofit.trainers.grpo import RolloutRun
with mock.patch.object({patched}):
    worker.run(sys.argv[1])
"""


def probed_anew(probe: Path, folder: Path, patched: str) -> ProbeResult:
    """The result of the probe in the folder `probe`, run again in the new `folder`.

    `patched` are the arguments of `mock.patch.object`, as code that sees `simulated`, `worker` and `RolloutRun`.
    """
    told = read_json(probe / "request.json")
    assert told is not None
    request = replace(ProbeRequest.from_json(told), folder=folder, server_socket=None)
    folder.mkdir()
    write_json(request.request_path, request.to_json())
    command = [sys.executable, "-c", _PROGRAM.format(patched=patched), str(request.request_path)]
    subprocess.run(command, cwd=folder.parent, check=True, capture_output=True, timeout=300)
    answer = read_json(request.answer_path)
    assert answer is not None
    return ProbeResult.from_json(answer)
