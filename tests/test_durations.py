"""The table of the tests' seconds, and the budget of what they start."""

import counted_work
import durations
import pytest


def test_each_row_of_the_table_is_a_test(pytestconfig: pytest.Config) -> None:
    """A row of another name leaves a test of seconds among the default ones, or keeps none from them."""
    if any("::" in each for each in pytestconfig.args):
        pytest.skip("of a file of which only some tests are asked for, the others are not known")
    files = {test.split("::")[0] for test in durations.collected}
    rows = [test for test in durations.read() if test.split("::")[0] in files]
    assert [test for test in rows if test not in durations.collected] == []


def test_a_count_above_its_budget_is_told() -> None:
    most = dict(counted_work.BUDGET)
    assert counted_work.above(most) == []
    (said,) = counted_work.above({**most, "calls": most["calls"] + 1})
    assert said.startswith(f"{most['calls'] + 1} calls where the default tests may have {most['calls']}")
    assert counted_work.total([{"calls": 1}, {"calls": 2, "processes": 3}]) == {
        "processes": 3, "calls": 3, "simulated cards": 0,
    }  # fmt: skip
