"""The driver's own cost at 10,000 trials: a search in grid order whose probes answer within the call.

`python experiments/slurm/cost.py [--trials 10000]`. Seconds are CPU time of the process, means over the last tenth of
the trials at hand; bytes are its resident set. Writes cost.json beside it.
"""

import argparse
import json
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path

import common
import lawful
import psutil

from autofit.files import write_json
from autofit.probing.launch import Launcher
from autofit.probing.result import ProbeRequest
from autofit.tuning.search import Search, open_study
from experiments.kept import commit

AT = (100, 300, 1000, 3000, 10000)


class AtOnce(Launcher):
    """Answers within the call, and notes what the search has cost until then."""

    poll_s = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.cpu_s = [time.process_time()]
        self.held_bytes: dict[int, int] = {}

    def submit(self, request: ProbeRequest) -> None:
        write_json(request.request_path, request.to_json())
        lawful.at_once(str(request.request_path))
        self.cpu_s.append(time.process_time())
        if (number := len(self.cpu_s) - 1) in AT:
            self.held_bytes[number] = psutil.Process().memory_info().rss
            print(number, self.row(number), flush=True)

    def row(self, number: int) -> dict[str, float]:
        since = number - number // 10
        return {
            "cpu_ms_per_trial": round(1000 * (self.cpu_s[number] - self.cpu_s[since]) / (number - since), 1),
            "rss_mb": round(self.held_bytes[number] / 1e6),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=10000)
    trials = parser.parse_args().trials
    launcher = AtOnce()
    with tempfile.TemporaryDirectory() as folder:
        wanted = common.plan(Path(folder), trials, 64)
        Search(wanted, open_study(wanted), server_socket=None, launcher=launcher).run()
    found = {
        "date": date.today().isoformat(), "commit": commit(), "optuna": version("optuna"),
        "at": {number: launcher.row(number) for number in AT if number <= trials},
    }  # fmt: skip
    Path(__file__).with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
