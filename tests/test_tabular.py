"""The tabular benchmark can be read with Python alone, and its candidates are those of the recipe."""

from pathlib import Path

import pytest

from experiments.tabular.loader import Table

TABLES = sorted((Path(__file__).parents[1] / "experiments" / "tabular" / "tables").glob("*.json"))


@pytest.fixture(params=TABLES, ids=lambda path: path.stem)
def table(request: pytest.FixtureRequest) -> Table:
    return Table(request.param)


def test_the_first_candidate_is_the_recipe_as_written(table: Table) -> None:
    first = table.params(0)
    own = {knob: value for knob, value in table.recipe.items() if knob in first}
    assert own
    assert {knob: first[knob] for knob in own} == own


def test_each_candidate_is_found_by_its_values(table: Table) -> None:
    assert [table.find(table.params(place)) for place in range(len(table))] == list(range(len(table)))


def test_the_best_is_the_fastest_that_fits(table: Table) -> None:
    best, every = table.best_s(), [table.query(place) for place in range(len(table))]
    assert all(not fits or (best is not None and step_s is not None and best <= step_s) for fits, _, step_s in every)


def test_all_tables_stay_small() -> None:
    assert sum(path.stat().st_size for path in TABLES) < 1_000_000
