"""How busy a search keeps 64 slots: 1,000 probes of 5 to 60 s on a real Slurm of 8 nodes.

`python experiments/slurm/scale.py [--probes 1000] [--per-job 8]`, as root, with Debian's Slurm: about 10 minutes;
`--smoke` is four short probes on two nodes, without a row.
A slot is busy while its probe sleeps, so the start of jobs and probes counts as idle, like the queue. Adds a row to
scale.json beside it.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Iterable
from datetime import date
from importlib.metadata import version
from pathlib import Path

import common
import psutil
from lawful import seconds_of
from slurm_cluster import CPUS, cluster

from experiments.kept import commit

NODES = 8
LAWFUL_S = "5-60"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--probes", type=int, default=1000)
    parser.add_argument("--per-job", type=int, default=8)
    parser.add_argument("--smoke", action="store_true")
    asked = parser.parse_args()
    nodes, probe_s = (2, "0-1") if asked.smoke else (NODES, LAWFUL_S)
    probes, per_job = (4, 2) if asked.smoke else (asked.probes, asked.per_job)
    with tempfile.TemporaryDirectory() as home, cluster(nodes=nodes) as slurm:
        os.environ["SLURM_CONF"] = str(slurm.conf)
        row = {
            "date": date.today().isoformat(), "commit": commit(), "slurm": slurm.run("sinfo", "--version").strip(),
            "optuna": version("optuna"), "slots": nodes * CPUS, "probes": probes, "probe_s": probe_s,
            "probes_per_job": per_job, "cpus_of_this_machine": psutil.cpu_count(),
            **measured(Path(home), probes, per_job, nodes * CPUS, probe_s),
        }  # fmt: skip
    if asked.smoke:
        print(row)
    else:
        common.add_row(Path(__file__).with_suffix(".json"), row)


def measured(folder: Path, probes: int, per_job: int, slots: int, probe_s: str) -> dict[str, object]:
    log = folder / "driver.log"
    driver = common.start([folder, probes, slots, per_job], log, {"LAWFUL_S": probe_s})
    cost_s, most_bytes = 0.0, 0
    while driver.poll() is None:
        try:
            told = psutil.Process(driver.pid)
            cost_s = sum(told.cpu_times()[:2])
            most_bytes = max(most_bytes, told.memory_info().rss)
        except psutil.NoSuchProcess:
            break
        time.sleep(0.5)
    assert driver.wait() == 0, log.read_text()[-3000:]
    folders = list(common.plan(folder, probes, slots).probes_folder.glob("trial-*"))
    spans = [(path.name, *_span(path)) for path in folders]
    began, asked_last = min(s for _, s, _ in spans), max(s for _, s, _ in spans)
    ended = max(e for _, _, e in spans)
    slept = {name: (end - seconds_of(name, probe_s), end) for name, _, end in spans}
    return {
        "busy": round(_busy(slept.values(), began, ended, slots), 3),
        "busy_until_the_last_probe_started": round(_busy(slept.values(), began, asked_last, slots), 3),
        "seconds": round(ended - began), "trials_told": len(common.told(folder)), "attempts": len(folders),
        "driver_cpu_ms_per_trial": round(1000 * cost_s / probes, 1), "driver_rss_mb": round(most_bytes / 1e6),
    }  # fmt: skip


def _span(folder: Path) -> tuple[float, float]:
    """When the probe was asked for, and when it answered: seconds since the epoch."""
    return (folder / "request.json").stat().st_mtime, (folder / "answer.json").stat().st_mtime


def _busy(slept: Iterable[tuple[float, float]], began: float, ended: float, slots: int) -> float:
    """The share of all slots' time from `began` to `ended` in which a probe slept."""
    return sum(max(0.0, min(e, ended) - max(s, began)) for s, e in slept) / (slots * (ended - began))


if __name__ == "__main__":
    main()
