"""Cases of several axes: by default one axis varies at a time, `nox -s thorough` runs every combination."""

from collections.abc import Collection, Iterable, Sequence
from itertools import product

import pytest


def one_at_a_time(*axes: Sequence[object]) -> Iterable[object]:
    """Every combination of a value of each axis; those that differ from the first one in several axes are thorough."""
    for case in product(*axes):
        changed = sum(value is not axis[0] for value, axis in zip(case, axes, strict=True))
        yield pytest.param(*case, marks=pytest.mark.thorough if changed > 1 else ())


def marked(names: Iterable[str], *, default: Collection[str], thorough: Collection[str]) -> list[object]:
    """The cases with these names; those that are neither `default` nor `thorough` are slow."""
    marks = {name: pytest.mark.thorough if name in thorough else pytest.mark.slow for name in names}
    return [pytest.param(name, marks=() if name in default else mark) for name, mark in marks.items()]
