"""A search on a real Slurm in a storm: its driver, nodes and jobs are killed, cancelled, requeued and preempted.

`python experiments/slurm/storm.py [--probes 200] [--events 100] [--seed 0]`, as root, with Debian's Slurm. The study
must then be the undisturbed one: every trial told once, with the same result. Adds a row to storm.json beside it.
"""

import argparse
import os
import random
import subprocess
import tempfile
import time
from collections import Counter
from contextlib import suppress
from datetime import date
from pathlib import Path

import common
import lawful
from at_once import AtOnce
from slurm_cluster import Cluster, cluster

from autofit.tuning.search import Search, open_study
from autofit.tuning.study import load_study
from experiments.kept import commit

AT_ONCE, PER_JOB = 12, 4
KINDS = ("driver", "scancel", "requeue", "step", "preempt", "node", "drain")
PREEMPTING = {
    "PreemptType": "preempt/partition_prio", "PreemptMode": "REQUEUE", "SlurmdTimeout": "6", "KillWait": "2",
    "PartitionName": "high Nodes=ALL PriorityTier=10 MaxTime=60 State=UP PreemptMode=OFF",
}  # fmt: skip


class Storm:
    """The events: each is one thing that happens to a cluster, at random."""

    def __init__(self, slurm: Cluster, seed: int, folder: Path, probes: int) -> None:
        self._slurm, self._random, self._folder, self._probes = slurm, random.Random(seed), folder, probes
        self.happened: Counter[str] = Counter()
        self._back: dict[str, float] = {}  # node -> when it is mended
        self.driver = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        arguments: list[object] = [self._folder, self._probes, AT_ONCE, PER_JOB]
        return common.start(arguments, self._folder / "driver.log", {"LAWFUL_S": "2"})

    def one(self) -> None:
        """Let one thing happen, and mend the nodes whose time has come."""
        for node in [n for n, at in self._back.items() if time.monotonic() > at]:
            self.mend(node)
        kind = self._random.choice(KINDS)
        with suppress(AssertionError):  # the job has ended meanwhile
            if getattr(self, f"_{kind}")():
                self.happened[kind] += 1

    def mend(self, node: str) -> None:
        """Bring the node back."""
        self._back.pop(node, None)
        with suppress(AssertionError):
            self._slurm.start_node(node)
        with suppress(AssertionError):
            self._slurm.run("scontrol", "update", f"NodeName={node}", "State=RESUME")

    def mend_all(self) -> None:
        for node in list(self._back):
            self.mend(node)

    def _job(self) -> str:
        """A running job of the search."""
        said = self._slurm.run("squeue", "--noheader", "--array", "--states=RUNNING", "--partition=main", "--format=%i")
        return self._random.choice(said.split() or ["0"])

    def _driver(self) -> bool:
        self.driver.kill()
        self.driver.wait()
        self.driver = self._start()
        return True

    def again(self) -> None:
        self.driver = self._start()

    def _scancel(self) -> bool:
        self._slurm.run("scancel", self._job())
        return True

    def _requeue(self) -> bool:
        self._slurm.run("scontrol", "requeue", self._job())
        return True

    def _step(self) -> bool:
        self._slurm.run("scancel", "--signal=KILL", self._job())
        return True

    def _preempt(self) -> bool:
        """Another user's job of higher priority needs a whole node for a moment."""
        self._slurm.run("sbatch", "--partition=high", "--exclusive", "--output=/dev/null", "--wrap=sleep 2")
        return True

    def _node(self) -> bool:
        up = [node for node in self._slurm.nodes if node not in self._back]
        if len(up) < 2:
            return False
        self._slurm.kill_node(node := self._random.choice(up))
        self._back[node] = time.monotonic() + self._random.choice((1, 12))
        return True

    def _drain(self) -> bool:
        up = [node for node in self._slurm.nodes if node not in self._back]
        if len(up) < 2:
            return False
        node = self._random.choice(up)
        self._slurm.run("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=storm")
        self._back[node] = time.monotonic() + 5
        return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--probes", type=int, default=200)
    parser.add_argument("--events", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as home, cluster(conf=PREEMPTING) as slurm:
        os.environ["SLURM_CONF"] = str(slurm.conf)
        row = storm(slurm, Path(home), asked)
    common.add_row(Path(__file__).with_suffix(".json"), row)


def storm(slurm: Cluster, folder: Path, asked: argparse.Namespace) -> dict[str, object]:
    began = time.monotonic()
    made = Storm(slurm, asked.seed, folder, asked.probes)
    ended_alone = 0
    while made.driver.poll() != 0:
        if made.driver.poll() is not None:
            ended_alone += 1
            assert ended_alone < 5, (folder / "driver.log").read_text()[-3000:]
            made.again()
        if sum(made.happened.values()) < asked.events:
            time.sleep(random.uniform(0.3, 1.5))
            made.one()
        else:
            made.mend_all()
            time.sleep(0.5)
    wanted = common.plan(folder, asked.probes, AT_ONCE)
    trials = load_study(folder, "law").trials
    truth = undisturbed(folder, asked.probes)
    found = common.told(folder)
    attempts = [int(path.name.rsplit("-", 1)[1]) for path in wanted.probes_folder.glob("trial-*")]
    left = [path.name for name in ("queue", "taken") for path in (wanted.probes_folder / "jobs" / name).iterdir()]
    time.sleep(3)
    return {
        "date": date.today().isoformat(), "commit": commit(), "seed": asked.seed,
        "slurm": slurm.run("sinfo", "--version").strip(), "probes": asked.probes, "events": dict(made.happened),
        "seconds": round(time.monotonic() - began),
        "states": dict(Counter(t.state.name for t in trials)), "trials": len(trials), "candidates": len(found),
        "equal_to_undisturbed": found == truth, "repeated_probes": sum(a > 1 for a in attempts),
        "most_attempts": max(attempts), "left_in_pool": left, "driver_ended_with_error": ended_alone,
        "jobs_left": slurm.run("squeue", "--noheader", "--format=%i").split(),
    }  # fmt: skip


def undisturbed(folder: Path, probes: int) -> dict[str, tuple[object, ...]]:
    """What the same search finds on this machine, with probes that answer at once."""
    quiet = folder / "quiet"
    wanted = common.plan(quiet, probes, 1)
    search = Search(wanted, open_study(wanted), server_socket=None, launcher=AtOnce(lawful.at_once))
    search.run()
    return common.told(quiet)


if __name__ == "__main__":
    main()
