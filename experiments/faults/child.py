"""The training process of a run of the campaign, as an entry of the fork server."""

import os
from pathlib import Path

from autofit.files import read_json
from autofit.promotion import training
from autofit.promotion.checkpoints import print_leniently
from autofit.promotion.run_folder import listen


def run(request_path: str) -> int:
    """The run as a promoted one: it hears signals, and its pid is in the file `pid` of its folder.

    MLflow's mirror starts only where the request says so, as its start takes longer than the training.
    """
    listen()
    print_leniently()
    Path(request_path).with_name("pid").write_text(str(os.getpid()))
    request = read_json(Path(request_path))
    assert request is not None
    if not request["mirror"]:
        training.start_mirror = lambda *_: None
    return training.main(request_path)
