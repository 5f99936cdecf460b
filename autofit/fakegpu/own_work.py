"""Blocks in which Python that goes over modules is the simulation's own, and takes the simulated host no time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_open = [0]  # how many of them


@contextmanager
def own_work() -> Iterator[None]:
    """Such a block."""
    _open[0] += 1
    try:
        yield
    finally:
        _open[0] -= 1


def is_own_work() -> bool:
    """Whether one is open."""
    return bool(_open[0])
