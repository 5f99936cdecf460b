"""Number of probes that a search needs: our sampler against Optuna's samplers and two common manual methods.

Run: `python experiments/search_efficiency/run.py`. Truth tables are exhaustive (law.py); every sampler asks and tells
through plain Optuna. Writes results.json, summary.json and probes.png next to this file. `--truth module:function`
replaces `law.truth` by another cost model, `--recipes module:NAME` replaces `cases.RECIPES`, `--first-seed N` selects
other seeds.

Every search has PROBES probes: the stop rule that would end ours earlier is recorded, not applied.
`oom_probes_median` counts the OOMs among all probes; `oom_probes_12_*` those of the first 12, `oom_probes_to_stop_*`
those until the stop rule (or the budget) ends the search.

A probe on a simulated card runs to its end, like a probe under a target emulated on a larger card: an OOM reports the
bytes it needs and its seconds. With `--stop-at-oom` the probe ends at the failed allocation, as on a card of the
target's size.
"""

import argparse
import importlib
import json
import math
import multiprocessing
import os
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))

import cases
import law
import numpy as np
import optuna
from habits import grid_early_stop, halve_on_oom

from autofit.tuning.sampler import make_sampler

PROBES = 20  # the same for every sampler: few enough for Optuna's GP, which takes 0.2 s a proposal
MISPREDICTIONS = (0.05, 0.15, 0.30)
STEP_NOISE, BYTES_NOISE = 0.01, 0.002  # of one probe, as a share
SAMPLERS = ("autofit", "tpe", "gp", "random", "grid", "halving")
MIN_GAIN_FRAC = 0.01
_HERE = Path(__file__).parent
_CASES: dict[str, cases.LawCase] = {}


class Prober:
    """Answers probes from a truth table, with noise, and records the winner's true speed after each probe."""

    def __init__(
        self, case: cases.Case, used: law.Floats, step: law.Floats, rollout: law.Floats | None, seed: int, *,
        stops_at_oom: bool,
    ) -> None:  # fmt: skip
        self.case, self.used, self.step, self.rollout = case, used, step, rollout
        self._stops_at_oom = stops_at_oom
        self._chance = np.random.default_rng([seed, 7])
        self.best: tuple[int, float, int] | None = None  # tier, measured seconds, place
        self.oom_at: list[bool] = []  # for every probe, whether it ran out of memory
        self.stopped: int | None = None  # probes after which the rule of the least gain would have ended it
        self.attrs: dict[str, object] = {}  # further results of the last probe, as attributes of its trial
        self.speed: list[float] = []  # the winner's true speed over the optimum's, after each probe
        found = cases.optimum(case, used, step)
        assert found is not None
        self.tier, self.optimum_s = found

    def probe(self, place: int) -> tuple[float | None, float]:
        """(step seconds, or None for an OOM; device-used bytes, at least)."""
        used = float(self.used[place]) * float(np.exp(self._chance.normal(0, BYTES_NOISE)))
        step = float(self.step[place]) * float(np.exp(self._chance.normal(0, STEP_NOISE)))
        fits = used <= self.case.target_bytes
        if fits:
            tier = int(self.case.grid.tiers[place])
            if self.best is None or (tier, step) < self.best[:2]:
                self.best = (tier, step, place)
        self.oom_at.append(not fits)
        rollout_s = None if self.rollout is None else step * float(self.rollout[place] / self.step[place])
        known = self.best is not None and self.best[0] == self.tier
        self.speed.append(self.optimum_s / float(self.step[self.best[2]]) if known and self.best else 0.0)
        if not fits and self._stops_at_oom:  # it held the target and a part of what it still needed
            self.attrs = {}
            return None, self.case.target_bytes + self._chance.uniform() * (used - self.case.target_bytes)
        rollouts = [] if rollout_s is None else [rollout_s]
        needed = {} if fits else {"least_capacity_bytes": used}
        self.attrs = {"result": {"step_s": [step], "rollout_s": rollouts, **needed}}
        return (step if fits else None), used


def with_sampler(name: str, prober: Prober, *, seed: int, probes: int) -> None:
    """Ask and tell. An OOM is complete with a graded constraint; autofit's study has both objectives."""
    case = prober.case
    sampler = make_sampler(
        name, case.grid, predictions=case.predictions if name == "autofit" else None,  # type: ignore[arg-type]
        target_bytes=case.target_bytes, seed=seed, min_gain_frac=MIN_GAIN_FRAC,
    )  # fmt: skip
    ours = name == "autofit"
    study = optuna.create_study(directions=["minimize"] * (2 if ours else 1), sampler=sampler)
    slowest = 0.0
    for _ in range(probes):
        if sampler.worth_another(study, min_gain_frac=None) is not None:
            break
        if prober.stopped is None and sampler.worth_another(study, min_gain_frac=MIN_GAIN_FRAC) is not None:
            prober.stopped = len(prober.speed)  # goes on all the same, so that every search has as many probes
        trial = study.ask(sampler.distributions())
        place = case.grid.find(trial.params)
        assert place is not None
        step, held = prober.probe(place)
        slowest = max(slowest, step or 0.0)
        for name, value in prober.attrs.items():
            trial.set_user_attr(name, value)
        trial.set_constraint("bytes_over_target", float(max(held - case.target_bytes, 1) if step is None else
                                                        held - case.target_bytes))  # fmt: skip
        values = [step if step is not None else slowest or 1.0, held]
        study.tell(trial, values if ours else values[0])


def search(task: tuple[str, str, float, int, str, int, bool]) -> dict[str, Any]:
    """One search: (sampler, case, misprediction, seed, truth, probes, whether a probe ends where memory does)."""
    name, case_name, misprediction, seed, source, probes, stops_at_oom = task
    case = _CASES[case_name]
    used, step, *more = _function(source)(
        case.known, case.grid.codes, case.shape, case.card, misprediction=misprediction, seed=seed
    )
    row: dict[str, Any] = {"sampler": name, "case": case_name, "misprediction": misprediction, "seed": seed}
    if cases.optimum(case, used, step) is None:
        return {**row, "speed": None}
    prober = Prober(case, used, step, more[0] if more else None, seed, stops_at_oom=stops_at_oom)
    return {**row, **searched(name, prober, seed, probes)}


def searched(name: str, prober: Prober, seed: int, probes: int) -> dict[str, Any]:
    """The result of one search by the sampler or manual method of that name."""
    began = time.perf_counter()
    if name == "halving":
        halve_on_oom(prober.case, prober.probe, probes)
    elif name == "grid":
        grid_early_stop(prober.case, prober.probe, probes)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with_sampler(name, prober, seed=seed, probes=probes)
    seconds = time.perf_counter() - began
    return {
        "speed": [round(s, 4) for s in prober.speed],
        "ooms": sum(prober.oom_at),
        "oom_at": prober.oom_at,
        "stopped": prober.stopped,
        "seconds": round(seconds, 3),
    }


def _function(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)  # type: ignore[no-any-return]


def probes_to(speed: Sequence[float], share: float, never: int) -> int:
    return next((n for n, s in enumerate(speed, start=1) if s >= share), never)


def median_interval(values: Sequence[float]) -> list[float]:
    """The two values between which the median lies with 95 %: order statistics, whatever the distribution."""
    ordered, half = sorted(values), 0.98 * len(values) ** 0.5
    low, high = math.floor(len(values) / 2 - half), math.ceil(len(values) / 2 + half)
    return [float(ordered[max(0, low - 1)]), float(ordered[min(len(values) - 1, high)])]


def summary_of(rows: Sequence[dict[str, Any]], probes: int) -> dict[str, Any]:
    """Summary over searches with at least one fit. A search that never reaches 95 % counts `probes` + 1."""
    rows = [r for r in rows if r["speed"] is not None]
    if not rows:  # a model that is too large for its card
        return {"searches": 0}
    reached = [probes_to(r["speed"], 0.95, probes + 1) for r in rows]
    ends = [(r["stopped"], 1 - r["speed"][r["stopped"] - 1]) for r in rows if r.get("stopped")]
    stops = {
        "stopped_frac": round(len(ends) / len(rows), 3),
        "stopped_after_median": float(np.median([n for n, _ in ends])),
        "stopped_regret_median": round(float(np.median([regret for _, regret in ends])), 4),
    } if ends else {}  # fmt: skip
    regret = [1 - r["speed"][min(12, len(r["speed"])) - 1] for r in rows]
    return {
        "searches": len(rows),
        "probes_to_95_median": float(np.median(reached)),
        "probes_to_95_median_interval": median_interval(reached),
        "probes_to_95_p90": float(np.percentile(reached, 90, method="higher")),
        "reached_95_frac": round(float(np.mean(np.array(reached) <= probes)), 4),
        # of the whole budget; then of the first 12 probes, and until the sampler's own rule (if it has one) ends it
        "oom_probes_median": float(np.median([r["ooms"] for r in rows])),
        "oom_probes_mean": round(float(np.mean([r["ooms"] for r in rows])), 2),
        "oom_probes_12_median": float(np.median([sum(r["oom_at"][:12]) for r in rows])),
        "oom_probes_to_stop_median": float(np.median([sum(r["oom_at"][: r["stopped"] or probes]) for r in rows])),
        "oom_probes_to_stop_mean": round(float(np.mean([sum(r["oom_at"][: r["stopped"] or probes]) for r in rows])), 2),
        "regret_12_median": round(max(0.0, float(np.median(regret))), 5),
        "regret_12_p90": round(float(np.percentile(regret, 90)), 5),
        **stops,
    }


def propose_ms(name: str, trials: int, *, repeats: int = 5) -> float:
    """Milliseconds to propose after the given number of trials: ask and ledger, on the largest grid."""
    case = max(_CASES.values(), key=lambda c: len(c.grid))
    used, step, rollout = law.truth(case.known, case.grid.codes, case.shape, case.card, misprediction=0.15, seed=0)
    sampler = make_sampler(name, case.grid, predictions=case.predictions, target_bytes=case.target_bytes)  # type: ignore[arg-type]
    ours = name == "autofit"

    def said(place: int) -> dict[str, Any]:
        return {"result": {"step_s": [float(step[place])], "rollout_s": [float(rollout[place])]}}

    study = optuna.create_study(directions=["minimize"] * (2 if ours else 1), sampler=sampler)
    fitting = np.flatnonzero(used <= case.target_bytes)[:: max(1, len(used) // (2 * trials))][:trials]
    for place in fitting:
        over = float(used[place] - case.target_bytes)
        values = [float(step[place]), float(used[place])] if ours else [float(step[place])]
        study.add_trial(optuna.trial.create_trial(
            params=case.grid.params(int(place)), distributions=sampler.distributions(), values=values,
            constraints={"bytes_over_target": over}, user_attrs=said(int(place)),
        ))  # fmt: skip
    seen = []
    for _ in range(repeats):
        began = time.perf_counter()
        trial = study.ask(sampler.distributions())
        seen.append(time.perf_counter() - began)
        place = case.grid.find(trial.params)
        assert place is not None
        trial.set_user_attr("result", said(place)["result"])
        trial.set_constraint("bytes_over_target", float(used[place] - case.target_bytes))
        study.tell(trial, [float(step[place]), float(used[place])] if ours else float(step[place]))
    return round(1000 * float(np.median(seen)), 1)


def tasks_of(options: argparse.Namespace) -> Iterable[tuple[str, str, float, int, str, int, bool]]:
    for name in options.samplers:
        seeds = options.seeds if name != "gp" else min(options.seeds, options.gp_seeds)
        for case in _CASES:
            for misprediction in MISPREDICTIONS:
                for seed in range(options.first_seed, options.first_seed + seeds):
                    yield name, case, misprediction, seed, options.truth, options.probes, options.stop_at_oom


def load_cases(recipes: str) -> None:
    wanted = _function(recipes)
    _CASES.update({c.name: c for r in wanted for card in law.CARDS.values() for c in [cases.case_of(r, card)]})  # type: ignore[attr-defined]


def main() -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samplers", nargs="+", choices=SAMPLERS, default=SAMPLERS)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--gp-seeds", type=int, default=2, help="Optuna's GP takes 0.2 s a proposal: fewer of them")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--probes", type=int, default=PROBES)
    parser.add_argument("--stop-at-oom", action="store_true")
    parser.add_argument("--truth", default="law:truth")
    parser.add_argument("--recipes", default="cases:RECIPES")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=_HERE)
    parser.add_argument("--no-plot", action="store_true")
    options = parser.parse_args()
    options.commit = _commit()  # a long run may end after the next commit
    load_cases(options.recipes)
    began = time.perf_counter()
    with multiprocessing.get_context("fork").Pool(options.workers) as pool:
        rows = list(pool.imap_unordered(search, list(tasks_of(options)), chunksize=4))
    report(rows, options, time.perf_counter() - began)


def report(rows: Sequence[dict[str, Any]], options: argparse.Namespace, wall_s: float) -> None:
    """Write the files; samplers that were not run again keep their old entries."""
    options.out.mkdir(parents=True, exist_ok=True)
    summary, details = (_read(options.out / name) for name in ("summary.json", "results.json"))
    for name in options.samplers:
        ours = [r for r in rows if r["sampler"] == name]
        listed = name in ("grid", "halving")  # a list to go through: nothing is proposed
        summary[name] = {**summary_of(ours, options.probes),
                         "propose_ms_at_200": 0.0 if listed else propose_ms(name, 200)}  # fmt: skip
        summary[name]["probes"] = options.probes  # the most a search had
        details[name] = {
            "date": date.today().isoformat(), "commit": options.commit,
            "device": f"cpu x {os.cpu_count()} ({platform.machine()})",
            "versions": {n: version(n) for n in ("optuna", "numpy", "scipy")}, "truth": options.truth,
            "recipes": options.recipes, "first_seed": options.first_seed,
            "stop_at_oom": options.stop_at_oom, "probes": options.probes,
            "wall_s_with_others": round(wall_s), "curve": curve([r["speed"] for r in ours], options.probes),
            "by_misprediction": {str(m): summary_of([r for r in ours if r["misprediction"] == m], options.probes)
                                 for m in MISPREDICTIONS},
            "by_case": {c: summary_of([r for r in ours if r["case"] == c], options.probes) for c in _CASES},
        }  # fmt: skip
        print(name, json.dumps(summary[name]), flush=True)
    (options.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    (options.out / "results.json").write_text(json.dumps(details, indent=1) + "\n")
    if not options.no_plot:
        plot({name: details[name]["curve"] for name in SAMPLERS if name in details}, options.out / "probes.png")


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=_HERE, check=True, capture_output=True, text=True).stdout.strip()


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def curve(speeds: Sequence[list[float] | None], probes: int) -> list[list[float]]:
    """Quartiles over the searches of the winner's speed as a share of the optimum, after each probe."""
    table = np.array([s + [s[-1]] * (probes - len(s)) for s in speeds if s])
    return [[round(float(v), 4) for v in row] for row in np.percentile(table, [25, 50, 75], axis=0)]


def plot(curves: dict[str, list[list[float]]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name, (low, middle, high) in curves.items():
        probes = range(1, len(middle) + 1)
        axes.plot(probes, middle, label=name)
        axes.fill_between(probes, low, high, alpha=0.12)
    axes.axhline(0.95, color="grey", linestyle="--", linewidth=1)
    axes.set(xlabel="probes", ylabel="speed of the winner / exhaustive optimum, quartiles", ylim=(0, 1.02))
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
