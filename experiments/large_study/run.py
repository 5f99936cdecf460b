"""A study of 1,000 trials: cost of the search besides its probes, and time of the other commands on that study.

Run: `python experiments/large_study/run.py`. The search, its database and MLflow's follower are those of `autofit
search`, with two probes at a time; the probes answer at once, by the formulas of experiments/search_efficiency. Times
are of one run on one machine: `wall_ms` includes waiting for the disk (a trial is some 20 commits, each flushed),
`cpu_ms` does not. Writes results.json next to this file.
"""

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "search_efficiency"))

import cases
import law
import psutil

from autofit.files import write_json
from autofit.probing.launch import Launcher
from autofit.probing.result import Fidelity, PhasePeak, ProbeRequest, ProbeResult, ProbeStatus
from autofit.promotion.promotion import choose
from autofit.tracking.follower import following
from autofit.tuning.record import record_of
from autofit.tuning.sampler import SamplerName
from autofit.tuning.search import Plan, Search, open_study
from autofit.tuning.study import load_study, trials_of
from experiments.kept import commit

AT = (10, 100, 300, 1000)
_WINDOW = 10  # trials over which a figure is a mean
_PHASES = ("load", "rollout", "scoring", "update", "optimizer", "save", "resume")


class AtOnce(Launcher):
    """Answers within the call, by the law. Records times and the memory of the process; excludes its own time."""

    def __init__(self, case: cases.LawCase) -> None:
        super().__init__()
        truth = law.truth(case.known, case.grid.codes, case.shape, case.card, misprediction=0.15, seed=0)
        figures = zip(*(values.tolist() for values in truth), strict=True)  # bytes, step and rollout seconds
        keys = (_key(case.space.yaml_changes(c)) for c in case.grid.candidates)
        self._truth = dict(zip(keys, figures, strict=True))
        self.wall_s, self.cpu_s = [0.0], [0.0]
        self.held_bytes: list[int] = []
        self._own_wall_s = self._own_cpu_s = 0.0

    def submit(self, request: ProbeRequest) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        self.wall_s.append(wall - self._own_wall_s)
        self.cpu_s.append(cpu - self._own_cpu_s)
        self.held_bytes.append(psutil.Process().memory_info().rss)
        write_json(request.request_path, request.to_json())
        write_json(request.answer_path, self._answer(request).to_json())
        self._own_wall_s += time.perf_counter() - wall
        self._own_cpu_s += time.process_time() - cpu

    def _answer(self, request: ProbeRequest) -> ProbeResult:
        held, step_s, rollout_s = self._truth[_key(request.values)]
        assert request.limit_bytes is not None
        used = int(held)
        oom = used > request.limit_bytes
        peaks = [
            PhasePeak(name=n, peak_allocated_bytes=used, peak_reserved_bytes=used, device_used_bytes=used)
            for n in _PHASES
        ]
        names = ("weights", "gradients", "optimizer", "activations", "logits", "cache", "context", "other")
        return ProbeResult(
            status=ProbeStatus.OOM if oom else ProbeStatus.FIT, device=request.device, device_used_bytes=used,
            oom_phase="update" if oom else None, peak_allocated_bytes=used, peak_reserved_bytes=used,
            limit_bytes=request.limit_bytes, phases=tuple(peaks), step_s=() if oom else (step_s, step_s),
            rollout_s=() if oom else (rollout_s,) * 2, update_s=() if oom else (step_s - rollout_s,) * 2,
            categories={phase: dict.fromkeys(names, used // len(names)) for phase in _PHASES},
            completions_per_step=64, tokens_per_step=10**5, fidelity=Fidelity.PREDICTED, wall_s=0.1, process_s=0.1,
        )  # fmt: skip


def _key(changes: object) -> str:
    return json.dumps(changes, sort_keys=True)


def main(trials: int, samplers: tuple[SamplerName, ...], short: int) -> None:
    case = cases.case_of(next(r for r in cases.RECIPES if r.allow == "recipe"), law.CARDS["h100"])
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        rows: dict[str, Any] = {name: searched(case, folder / name, name, short, mirrored=False) for name in samplers}
        whole = searched(case, folder, "autofit", trials, mirrored=True) | opened(case, folder, trials)
    content: dict[str, Any] = {
        "date": date.today().isoformat(), "commit": commit(),
        "device": f"cpu x {os.cpu_count()} ({platform.machine()})",
        "versions": {n: version(n) for n in ("optuna", "mlflow", "numpy", "scipy")},
        "python": platform.python_version(), "load_average_before": round(load, 2), "candidates": len(case.grid),
        "autofit": whole, **rows,
    }  # fmt: skip
    (Path(__file__).parent / "results.json").write_text(json.dumps(content, indent=1) + "\n")
    print(json.dumps(content, indent=1))


def searched(
    case: cases.LawCase, folder: Path, sampler: SamplerName, trials: int, *, mirrored: bool
) -> dict[str, object]:
    """A search of the given number of trials: {at trial N: cost of a trial, memory of the driver}, and the totals."""
    folder.mkdir(exist_ok=True)
    plan, launcher = _plan(case, folder, sampler, trials), AtOnce(case)
    began = time.perf_counter()
    study = open_study(plan)
    with following(folder, study) if mirrored else contextlib.nullcontext():
        Search(plan, study, server_socket=None, launcher=launcher).run()
        ended = time.perf_counter()
    launcher.held_bytes.append(launcher.held_bytes[-1])
    rows = {}
    for count in AT:
        if count <= trials:
            last, first = count, max(1, count - _WINDOW)
            rows[f"at_{count}"] = {
                "wall_ms": round(1000 * (launcher.wall_s[last] - launcher.wall_s[first]) / (last - first), 1),
                "cpu_ms": round(1000 * (launcher.cpu_s[last] - launcher.cpu_s[first]) / (last - first), 1),
                "driver_mib": round(launcher.held_bytes[count - 1] / 2**20, 1),
            }
    found: dict[str, object] = {"trials": trials, **rows, "whole_s": round(ended - began, 1)}
    if mirrored:
        found["mirror_behind_s"] = round(time.perf_counter() - ended, 1)
    return found


def _plan(case: cases.LawCase, folder: Path, sampler: SamplerName, trials: int) -> Plan:
    return Plan(
        recipe=case.space.recipe, space=case.space, folder=folder, device="sim:h100", target_bytes=case.target_bytes,
        max_trials=trials, sampler=sampler, predictions=case.predictions, parallel=2, study_name="large",
    )  # fmt: skip


def opened(case: cases.LawCase, folder: Path, trials: int) -> dict[str, object]:
    """Seconds of each command on the study of `searched`, and the study's size on disk."""
    from autofit.tracking.study_mirror import sync  # a search itself loads no MLflow, and its memory is measured
    from autofit.tracking.ui import pages

    def one_more() -> None:
        plan = _plan(case, folder, "autofit", trials + 1)
        Search(plan, open_study(plan), server_socket=None, launcher=AtOnce(case)).run()

    def chosen() -> None:
        study = load_study(folder, "large")
        choose(trials_of(study), "best", record_of(study).rule)

    def reported() -> None:
        command = [sys.executable, "-m", "autofit", "report", "--dir", str(folder), "--json"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    sizes = {name: (folder / name).stat().st_size for name in ("studies.db", "mlflow.db")}
    found: dict[str, object] = {f"{name.replace('.', '_')}_mib": round(size / 2**20, 1) for name, size in sizes.items()}
    found["resume_and_one_trial_s"] = _seconds(one_more)
    found["report_command_s"] = _seconds(reported)
    found["promote_lookup_s"] = _seconds(chosen)
    found["sync_of_one_s"] = _seconds(lambda: sync(folder, "large"))
    found["compare_page_s"] = _seconds(lambda: pages(folder, "large"))
    told = trials_of(load_study(folder, "large"))
    found["told"] = Counter(str(t.status) for t in told)
    found["distinct_candidates"] = len({tuple(sorted(t.params.items())) for t in told})
    return found


def _seconds(does: Callable[[], object]) -> float:
    began = time.perf_counter()
    does()
    return round(time.perf_counter() - began, 2)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--samplers", nargs="*", default=["tpe", "random"])
    parser.add_argument("--short", type=int, default=100, help="trials of the other samplers")
    options = parser.parse_args()
    main(options.trials, tuple(options.samplers), options.short)
