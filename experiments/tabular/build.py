"""The tables: predicted bytes and seconds of every candidate, by the forecast that `autofit search` begins with.

`python -m experiments.tabular.build` makes those that are not there yet; `--only NAME` makes one again.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from autofit.api.planning import Planned, Request, make_plan
from autofit.api.reading import fork_server
from autofit.forecast.forecast import Forecaster
from autofit.forecast.predictions import without_offload
from autofit.probing.prepare import worst_case_path
from autofit.recipe.keys import TIERS
from autofit.space.space import Space
from autofit.tuning.candidates import Grid
from experiments.kept import commit

HERE = Path(__file__).parent
TABLES = HERE / "tables"
PACKAGES = ("torch", "transformers", "trl")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.tabular.build", description=__doc__)
    parser.add_argument("--only", action="append", help="a recipe's name, anew")
    arguments = parser.parse_args()
    for name, told in yaml.safe_load((HERE / "recipes.yaml").read_text(encoding="utf-8")).items():
        path = TABLES / f"{name}.json"
        if name not in arguments.only if arguments.only else path.exists():
            continue
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            found = forecast(told, Path(folder))
        path.write_text(written(found), encoding="utf-8")
        print(
            f"{name}: {len(found['rows'])} candidates in {time.monotonic() - began:.0f} s",
            flush=True,
        )


@contextlib.contextmanager
def forecaster_of(told: dict[str, Any], folder: Path) -> Iterator[tuple[Planned, Space, Forecaster]]:
    """The plan of the recipe's search, its space, and what forecasts it."""
    server = fork_server(folder)
    try:
        planned = make_plan(asked(told, folder), server)
        space = without_offload(planned.plan.space)  # a simulated card does not say what an offload takes
        yield planned, space, Forecaster(
            device=planned.plan.device, worst_case=worst_case_path(planned.scratch), server=server,
            scratch=planned.scratch / "forecasts", kept=folder / "kept",
        )  # fmt: skip
    finally:
        server.close()


def forecast(told: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A table: knobs with their values, and for each candidate the indices of its values, MB, milliseconds, source."""
    with forecaster_of(told, folder) as (planned, space, forecaster):
        plan = planned.plan
        made = forecaster.forecast(space, limit_bytes=plan.limit_bytes)
    known, grid = made.predictions, Grid.of(space)
    assert plan.limit_bytes is not None  # the card's
    assert known.candidates == grid.candidates
    rows = [
        [*codes, int(tier), _or_none(used / 1e6), _or_none(step * 1e3), str(source or "unknown")[0]]
        for codes, tier, used, step, source in zip(
            grid.codes.tolist(), grid.tiers, known.device_used_bytes, known.step_s, made.sources, strict=True
        )
    ]
    return {
        **told, "limit_mb": plan.limit_bytes // 10**6, "tiers": list(TIERS),
        "knobs": dict(zip(grid.names, grid.choices, strict=True)),
        "columns": [*grid.names, "tier", "device_used_mb", "step_ms", "source"],
        "made": {"date": datetime.date.today().isoformat(), "autofit": commit(),
                 **{package: importlib.metadata.version(package) for package in PACKAGES}},
        "rows": rows,
    }  # fmt: skip


def _or_none(value: float) -> int | None:
    return None if np.isnan(value) else round(value)


def written(table: dict[str, Any]) -> str:
    """JSON with a line for each candidate."""
    head = json.dumps({key: value for key, value in table.items() if key != "rows"}, indent=1)
    rows = ",\n".join(json.dumps(row, separators=(",", ":")) for row in table["rows"])
    return f'{head[:-2]},\n "rows": [\n{rows}\n ]\n}}\n'


def asked(told: dict[str, Any], folder: Path) -> Request:
    """The search of the recipe, at its default settings."""
    return Request(
        recipe=told["recipe"], name="run", target_vram=None, headroom=None, device="auto", gpu=told["gpu"],
        trainer=told["trainer"], space=None, allow="neutral", changes=None, prompt_tokens=told["tokens"], trials=None,
        time_budget=None, plateau=None, min_gain=0.01, goal="speed", sampler="autofit", measured_steps=2,
        deadline="15m",
        parallel=None, seed=0, study=None, folder=folder,
    )  # fmt: skip


if __name__ == "__main__":
    main()
