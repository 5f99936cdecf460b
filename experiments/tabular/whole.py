"""Forecasts beside whole simulations of drawn candidates: `python -m experiments.tabular.whole [--only NAME]`.

A forecast says the bytes and seconds of every candidate from few traces. Here each recipe is forecast anew, and the
candidates whose names have the lowest CRC-32 are simulated whole, as a search probes them: all layers, their own
settings together. whole.json and whole.md hold both.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import statistics
import tempfile
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from autofit.forecast.estimate import Estimator
from autofit.forecast.forecast import Forecast
from autofit.probing.prepare import worst_case_path
from autofit.recipe.recipe import merge
from experiments.kept import commit
from experiments.tabular.build import HERE, forecaster_of

OUT, PAGE = HERE / "whole.json", HERE / "whole.md"
COUNT = 4  # candidates of a recipe
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.tabular.whole", description=__doc__)
    parser.add_argument("--only", action="append", help="a recipe's name; the others' rows stay")
    parser.add_argument("--count", type=int, default=COUNT, help="candidates of a recipe")
    options = parser.parse_args()
    recipes: dict[str, Any] = {}
    for file in ("recipes.yaml", "further.yaml"):
        recipes |= yaml.safe_load((HERE / file).read_text(encoding="utf-8"))
    kept = json.loads(OUT.read_text(encoding="utf-8")) if OUT.exists() else {}
    for name in options.only or recipes:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            rows = compared(name, recipes[name], options.count, Path(folder))
        kept[name] = {"date": datetime.date.today().isoformat(), "autofit": commit(), "rows": rows}
        OUT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(page(kept), encoding="utf-8")
        print(f"{name}: {len(rows)} candidates in {time.monotonic() - began:.0f} s", flush=True)


def compared(name: str, told: dict[str, Any], count: int, folder: Path) -> list[Row]:
    """What was forecast of the drawn candidates of a recipe, and what their whole simulations say."""
    with forecaster_of(told, folder) as (planned, space, forecaster):
        plan = planned.plan
        assert plan.limit_bytes is not None
        made = forecaster.forecast(space, limit_bytes=plan.limit_bytes)
        if made.problems:
            print(f"{name}: {'; '.join(made.problems)}", flush=True)
        estimator = Estimator(
            recipe=space.recipe, device=plan.device, capacity_bytes=plan.limit_bytes, folder=folder / "probes",
            worst_case=worst_case_path(planned.scratch), server=forecaster.server, deadline_s=900, least_of_fits=False,
        )  # fmt: skip
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda place: _row(made, estimator, place), drawn(name, made, count)))


def drawn(name: str, made: Forecast, count: int) -> list[int]:
    """Places of `count` candidates that have a forecast, but the recipe as it is, which is what is traced."""
    changed = [
        place for place, candidate in enumerate(made.predictions.candidates)
        if made.space.yaml_changes(candidate) and math.isfinite(made.predictions.step_s[place])
    ]  # fmt: skip
    return sorted(changed, key=lambda place: zlib.crc32(f"{name}/{_changes(made, place)}".encode()))[:count]


def _changes(made: Forecast, place: int) -> str:
    return json.dumps(made.space.yaml_changes(made.predictions.candidates[place]), sort_keys=True)


def _row(made: Forecast, estimator: Estimator, place: int) -> Row:
    """One candidate: live bytes with the context, and seconds of a step, forecast and simulated whole."""
    predictions = made.predictions
    changes = made.space.yaml_changes(predictions.candidates[place])
    result = estimator.probe(merge(estimator.recipe.values, changes))
    row = {
        "changes": changes, "source": str(made.sources[place]) if made.sources else "visited",
        "forecast_bytes": round(float(predictions.device_used_bytes[place])),
        "forecast_s": round(float(predictions.step_s[place]), 4),
    }  # fmt: skip
    if result.peak_allocated_bytes is None or result.median_step_s is None:
        return row | {"failed": result.reason}
    peak = max(result.phases, key=lambda phase: phase.peak_allocated_bytes)
    context = peak.device_used_bytes - peak.peak_reserved_bytes
    return row | {"whole_bytes": peak.peak_allocated_bytes + context, "whole_s": round(result.median_step_s, 4)}


def errors(kept: dict[str, Any], key: str) -> list[float]:
    """How far the forecasts are above the whole simulations, as a share; `key` is "bytes" or "s"."""
    rows = [row for told in kept.values() for row in told["rows"] if f"whole_{key}" in row]
    return [row[f"forecast_{key}"] / row[f"whole_{key}"] - 1 for row in rows]


def spread(found: list[float]) -> str:
    """The median and the largest of the errors' sizes."""
    return f"{statistics.median(map(abs, found)):.2%}, {max(found, key=abs):+.2%}"


def page(kept: dict[str, Any]) -> str:
    """The table."""
    lines = [
        "# Forecasts beside whole simulations", "",
        f"Written by `python -m experiments.tabular.whole`. Live bytes with the context: median error, largest: "
        f"{spread(errors(kept, 'bytes'))}; seconds of a step: {spread(errors(kept, 's'))}.", "",
        "| recipe | changes | from | GB forecast | GB whole | | s forecast | s whole | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, told in sorted(kept.items()):
        for row in told["rows"]:
            changes = ", ".join(f"{key.split('.')[-1]} {value}" for key, value in _flat(row["changes"]).items())
            if "failed" in row:
                lines.append(f"| {name} | {changes} | {row['source']} | failed: {row['failed']} | | | | | |")
                continue
            cells = [f"{row['forecast_bytes'] / 1e9:.3f}", f"{row['whole_bytes'] / 1e9:.3f}",
                     f"{row['forecast_bytes'] / row['whole_bytes'] - 1:+.2%}", f"{row['forecast_s']:.3f}",
                     f"{row['whole_s']:.3f}", f"{row['forecast_s'] / row['whole_s'] - 1:+.2%}"]  # fmt: skip
            lines.append(f"| {name} | {changes} | {row['source']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _flat(changes: dict[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in changes.items():
        found |= _flat(value, f"{before}{key}.") if isinstance(value, dict) else {f"{before}{key}": value}
    return found


if __name__ == "__main__":
    main()
