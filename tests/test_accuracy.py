"""The measured rows of experiments/accuracy, and what was simulated of them."""

import csv
import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "experiments" / "accuracy"
SETS = sorted(path.stem for path in (FOLDER / "measured").glob("*.csv"))


def measured(name: str) -> dict[str, dict[str, str]]:
    with (FOLDER / "measured" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return {line["row"]: line for line in csv.DictReader(file)}


def simulated(name: str) -> dict[str, dict[str, object]]:
    return dict(json.loads((FOLDER / "results" / f"{name}.json").read_text(encoding="utf-8")))


@pytest.mark.parametrize("name", SETS)
def test_every_simulated_row_says_what_it_was_made_with_so_that_it_can_be_made_anew(name: str) -> None:
    rows = measured(name)
    for row, figures in simulated(name).items():
        assert figures["code"] == rows[row]["commit"]
        assert {"date", "autofit", "versions"} <= set(figures)


@pytest.mark.parametrize("name", SETS)
def test_allocated_peaks_of_committed_results_are_within_the_goal_of_each_set(name: str) -> None:
    rows = measured(name)
    column = "peak_allocated_bytes" if "peak_allocated_bytes" in next(iter(rows.values())) else "allocated_mean_bytes"
    errors = [
        abs(float(str(figures[column])) / float(rows[row][column]) - 1)
        for row, figures in simulated(name).items()
        if column in figures
    ]
    assert sum(errors) / len(errors) <= 0.003
    assert max(errors) <= 0.015


def test_every_named_cause_belongs_to_a_measured_row() -> None:
    known = {f"{name}/{row}" for name in SETS for row in measured(name)}
    causes = json.loads((FOLDER / "causes.json").read_text(encoding="utf-8"))
    assert set(causes) <= known
