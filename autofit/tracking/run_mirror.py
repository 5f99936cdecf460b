"""Mirrors a promoted run to MLflow while it trains: `python -m autofit.tracking.run_mirror REQUEST`."""

import os
import sys
import time
from pathlib import Path

from autofit.errors import AutofitError
from autofit.files import read_json
from autofit.tracking.follower import told_to_end
from autofit.tracking.promoted_run import RunMirror
from autofit.tracking.runs import client, tracking_errors, trial_run_ids
from autofit.tracking.study_mirror import sync

_EVERY_S = 1.0
_LEAST_REST = 5  # times the seconds of an update: the mirror of a long run takes a sixth of a core at most


def main(request_path: str) -> None:
    """Mirror the run until standard input closes, then once more, and close MLflow's run."""
    told = told_to_end()
    os.nice(19)  # gives way to the training
    request = read_json(Path(request_path))
    assert request is not None
    folder, study, trial = Path(str(request["study_folder"])), str(request["study"]), int(str(request["trial"]))
    run = RunMirror(request)
    ended, has_trial, wait_s = False, False, _EVERY_S
    while not ended:
        ended = told.wait(wait_s)
        began = time.monotonic()
        try:
            with tracking_errors(folder):
                if not has_trial and not trial_run_ids(client(folder), folder, study, [trial]):
                    sync(folder, study)
                has_trial = True
                run.update(ended=ended)
        except (AutofitError, OSError) as error:
            print(f"MLflow: {error}", file=sys.stderr, flush=True)
        wait_s = max(_EVERY_S, _LEAST_REST * (time.monotonic() - began))


if __name__ == "__main__":
    main(sys.argv[1])
    os._exit(0)  # at once: to unload MLflow takes ten times as long as the last look, over a minute on a busy machine
