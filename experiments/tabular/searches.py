"""Samplers on the tables: `python -m experiments.tabular.searches` writes results.json and table.md.

`autofit` begins without predictions here, as the others do; `autofit, predicted` with the table's own figures, each
knob's values mistaken by 15 % of a step and 5 % of the bytes. Every search has PROBES probes, and an OOM is told as
in `autofit search`.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import statistics
import warnings
from pathlib import Path
from typing import Any, cast

import numpy as np
import optuna

from autofit.forecast.predictions import Floats, Predictions
from autofit.recipe.keys import TIERS
from autofit.space.space import Candidate
from autofit.tuning.candidates import Grid
from autofit.tuning.sampler import SamplerName, make_sampler
from experiments.kept import commit
from experiments.tabular.build import HERE, TABLES
from experiments.tabular.loader import Table

PROBES, SEEDS = 20, 5
SAMPLERS = ("autofit, predicted", "autofit", "tpe", "random", "grid")
STEP_OFF, BYTES_OFF = 0.15, 0.05


def grid_of(table: Table) -> Grid:
    candidates = [Candidate(tuple(table.params(place).values())) for place in range(len(table))]
    tiers = [TIERS[row[len(table.names)]] for row in table.rows]
    return Grid(table.names, [table.knobs[name] for name in table.names], candidates, tiers=tiers)


def mistaken(table: Table, grid: Grid, seed: int) -> Predictions:
    """The table's figures, off by an effect of each value of each knob."""
    chance = np.random.default_rng([seed, 11])
    told = np.array([table.query(place)[1:] for place in range(len(table))], dtype=np.float64)

    def off(size: float) -> Floats:
        effects = [chance.normal(0, 1, int(codes.max()) + 1)[codes] for codes in grid.codes.T]
        total = np.sum(effects, axis=0)
        return np.asarray(np.exp(size * total / max(1e-9, float(total.std()))), dtype=np.float64)

    used, step = told[:, 0] * 1e6 * off(BYTES_OFF), told[:, 1] * off(STEP_OFF)
    return Predictions(
        candidates=grid.candidates, floor_bytes=np.zeros(len(table)), device_used_bytes=used, step_s=step
    )


def search(name: str, table: Table, seed: int) -> dict[str, int]:
    """Probes until 95 % of the best speed, PROBES + 1 if never, and how many of all probes ran out of memory."""
    grid, best_s = grid_of(table), table.best_s()
    assert best_s is not None
    ours = name.startswith("autofit")
    limit = table.limit_mb * 10**6
    prior = mistaken(table, grid, seed) if name == "autofit, predicted" else None
    sampler = make_sampler(
        cast(SamplerName, "autofit" if ours else name), grid, target_bytes=limit, seed=seed, predictions=prior
    )
    study = optuna.create_study(directions=["minimize"] * (2 if ours else 1), sampler=sampler)
    reached, ooms, slowest = PROBES + 1, 0, 0.0
    for number in range(1, min(PROBES, len(table)) + 1):
        if sampler.worth_another(study, min_gain_frac=None) is not None:
            break
        trial = study.ask(sampler.distributions())
        place = grid.find(trial.params)
        assert place is not None
        fits, used_mb, step_s = table.query(place)
        slowest, ooms = max(slowest, step_s), ooms + (not fits)
        more: dict[str, Any] = {} if fits else {"least_capacity_bytes": used_mb * 10**6}
        trial.set_user_attr("result", {"step_s": [step_s], "rollout_s": [], **more})
        trial.set_constraint("bytes_over_target", float(used_mb * 10**6 - limit))
        values = [step_s if fits else slowest, used_mb * 1e6]
        study.tell(trial, values if ours else values[0])
        if fits and step_s <= best_s / 0.95:
            reached = min(reached, number)
    return {"reached": reached, "ooms": ooms}


def main() -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    for path in sorted(TABLES.glob("*.json")):
        table = Table(path)
        fitting = sum(table.query(place)[0] for place in range(len(table)))
        row: dict[str, Any] = {
            "candidates": len(table),
            "fitting": fitting,
            "best_s": table.best_s(),
            "first_s": table.query(0)[2],
        }
        if fitting:
            for name in SAMPLERS:
                runs = [search(name, table, seed) for seed in range(SEEDS)]
                row[name] = {key: statistics.median(run[key] for run in runs) for key in ("reached", "ooms")}
        found[path.stem] = row
        print(path.stem, row, flush=True)
    made = {
        "date": datetime.date.today().isoformat(),
        "autofit": commit(),
        "optuna": importlib.metadata.version("optuna"),
    }
    Path(HERE / "results.json").write_text(
        json.dumps({"made": made, "tables": found}, indent=1) + "\n", encoding="utf-8"
    )
    Path(HERE / "table.md").write_text(written(made, found), encoding="utf-8")


def written(made: dict[str, str], found: dict[str, Any]) -> str:
    lines = [
        "# Samplers on the tables", "",
        f"Made on {made['date']} by autofit at {made['autofit']}, Optuna {made['optuna']}: "
        f"median over {SEEDS} seeds of the probes until 95 % of the "
        f"best speed (of {PROBES}; `-`: not within them), and in brackets of the probes out of memory.", "",
        "| recipe | candidates | that fit | best over the recipe as written | " + " | ".join(SAMPLERS) + " |",
        "|---" * (len(SAMPLERS) + 4) + "|",
    ]  # fmt: skip
    for name, row in found.items():
        gain = "nothing fits" if row["best_s"] is None else f"{row['first_s'] / row['best_s']:.2f}x"
        cells = [_cell(row.get(sampler)) for sampler in SAMPLERS]
        lines.append(f"| {name} | {row['candidates']} | {row['fitting']} | {gain} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(run: dict[str, float] | None) -> str:
    if run is None:
        return ""
    return f"{run['reached']:g} ({run['ooms']:g})" if run["reached"] <= PROBES else f"- ({run['ooms']:g})"


if __name__ == "__main__":
    main()
