"""The job that submitit runs for a promoted trial: the training in a child process, on its own slot. Never raises."""

import math
import subprocess
import sys
from pathlib import Path
from typing import cast

import psutil

from autofit.files import read_json, write_json
from autofit.probing.slots import slot
from autofit.probing.supervise import computing_env, keep
from autofit.promotion.ending import write_ending
from autofit.promotion.interruption import ask_to_end, asked_to_end, listen
from autofit.promotion.rescue import goes_on


def run_promoted(request_path: str) -> None:
    """Run the requested training. The outcome is final.json, failed.json or a resumable checkpoint in its folder."""
    request = read_json(Path(request_path))
    assert request is not None
    folder = Path(str(request["folder"]))
    process = psutil.Process()
    listen(lambda: ask_to_end(folder))
    write_json(folder / "started.json", {"pid": process.pid, "create_time": process.create_time()})
    with slot(tuple(cast(list[str], request["slots"])), abandoned=lambda: asked_to_end(folder)) as name:
        if name is None:
            return
        env = computing_env()
        if name.startswith("cuda-"):
            env["CUDA_VISIBLE_DEVICES"] = name.removeprefix("cuda-")
        again = True
        while again:  # after an OOM, with the next setting that needs less memory
            ending = keep(lambda: _start(request_path, folder, str(request["cwd"]), env), deadline_s=math.inf)
            again = goes_on(Path(request_path), ending)
        write_ending(folder, ending)


def _start(request_path: str, folder: Path, cwd: str, env: dict[str, str]) -> int:
    with (folder / "run.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "autofit.promotion.training", request_path], cwd=cwd, env=env,
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    process.returncode = 0  # the keeper waits for it, not this object
    return process.pid
