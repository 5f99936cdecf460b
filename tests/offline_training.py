"""A promoted run without its mirror, and TRL's own script, as entries of the fork server."""

import json
import os
import runpy
import sys
from pathlib import Path
from unittest import mock

import torch

from autofit.promotion import training
from autofit.promotion.reports import Following
from autofit.promotion.run_folder import ask_to_end, listen


def run(request_path: str) -> int:
    training.start_mirror = lambda *_: None
    return training.main(request_path)


def run_rank(request_path: str) -> int:
    """One rank of a run of several; its pid is in the file `pid-RANK` of its folder."""
    folder = Path(request_path).parent
    listen(lambda: ask_to_end(folder))
    (folder / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
    with mock.patch("autofit.promotion.training.start_mirror", return_value=None):
        return training.main(request_path)


def trl_grpo(arguments: str) -> int:
    """TRL's own script with a JSON list of arguments, unchanged: a process of its own imports for 8 s."""
    sys.argv = ["grpo.py", *json.loads(arguments)]
    runpy.run_module("trl.scripts.grpo", run_name="__main__")
    return 0


def run_listening(request_path: str) -> int:
    """The run as a process of its own: it hears signals, and its pid is in the file `pid` of its folder."""
    listen()
    Path(request_path).with_name("pid").write_text(str(os.getpid()))
    return run(request_path)


def ready(_: str) -> int:
    """Returns once the server answers."""
    return 0


def fail_on_rank_1(request_path: str) -> int:
    """Rank 1 fails in the third step."""
    return _raising(request_path, ValueError("told to fail"))


def out_of_memory_on_rank_1(request_path: str) -> int:
    """Rank 1 is out of memory in the third step, once."""
    once = Path(request_path).with_name("was-out-of-memory")
    if once.exists():
        return run_rank(request_path)
    return _raising(request_path, torch.OutOfMemoryError("told to be out of memory"), once)


def _raising(request_path: str, error: Exception, note: Path | None = None) -> int:
    if os.environ["RANK"] != "1":
        return run_rank(request_path)
    begins = Following.step_begins

    def step_begins(report: Following, step: int) -> None:
        begins(report, step)
        if step == 2:
            if note is not None:
                note.touch()
            raise error

    with mock.patch.object(Following, "step_begins", step_begins):
        return run_rank(request_path)
