"""Processes that make both databases of a folder: several at once, or killed meanwhile. For tests; prints JSON."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import optuna

from autofit.tracking.runs import client, experiment_id
from autofit.tuning.study import open_storage


def make(folder: Path, name: str) -> None:
    """What a first search does: a study in Optuna, and its experiment in MLflow."""
    optuna.create_study(study_name=name, storage=open_storage(folder, create=True))
    experiment_id(client(folder), folder, name)


def start(folder: Path, name: str, begin: float) -> int:
    """The id of a process that makes both databases from the time `begin` on. Its imports are done already."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        time.sleep(max(0.0, begin - time.monotonic()))
        make(folder, name)
        code = 0
    finally:
        os._exit(code)


def together(folder: Path, processes: int) -> list[int]:
    """The exit codes of that many processes that begin at the same moment."""
    begin = time.monotonic() + 0.3
    pids = [start(folder, f"study-{number}", begin) for number in range(processes)]
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def killed(folder: Path, kills: int) -> list[int]:
    """The exit codes of processes that are killed at evenly spread moments of the creation, then of one that is not."""
    began = time.monotonic()
    first = together(folder / "timed", 1)
    whole_s = time.monotonic() - began - 0.3
    codes = []
    for number in range(kills):
        place = folder / str(number)
        pid = start(place, "law", 0.0)
        time.sleep(whole_s * (number + 0.5) / kills)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        codes += together(place, 1)
    return first + codes


def names(folder: Path) -> dict[str, list[str]]:
    """The studies of both databases, and the files of the folder."""
    studies = optuna.get_all_study_names(f"sqlite:///{folder / 'studies.db'}")
    experiments = [e.name for e in client(folder).search_experiments()]
    files = [p.name for p in folder.iterdir() if p.is_file()]
    return {"studies": sorted(studies), "experiments": sorted(experiments), "files": sorted(files)}


if __name__ == "__main__":
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    how, place, count = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    codes = together(place, count) if how == "together" else killed(place, count)
    places = [place] if how == "together" else [place / str(number) for number in range(count)]
    print(json.dumps({"codes": codes, "places": [names(p) for p in places]}))
