"""A promoted run without its mirror, as an entry of the fork server."""

import os
from pathlib import Path

from autofit.promotion import training
from autofit.promotion.interruption import listen


def run(request_path: str) -> int:
    training._start_mirror = lambda *_: None
    return training.main(request_path)


def run_listening(request_path: str) -> int:
    """The run as a process of its own: it hears signals, and its pid is in the file `pid` of its folder."""
    listen()
    Path(request_path).with_name("pid").write_text(str(os.getpid()))
    return run(request_path)
