"""Jobs that are shared between a process and forks of it."""

import os
import signal
from functools import partial

import pytest

from autofit.probing.supervise import shared_out


def told(number: int) -> tuple[int, int]:
    return number, os.getpid()


@pytest.mark.parametrize("processes", [1, 2, 3, 9])
def test_results_are_in_order_and_of_as_many_processes(processes: int) -> None:
    found = shared_out([partial(told, number) for number in range(5)], processes)
    assert [number for number, _ in found] == [0, 1, 2, 3, 4]
    assert len({pid for _, pid in found}) == min(processes, 5)
    assert found[0][1] == os.getpid()


@pytest.mark.parametrize("place", [0, 1])
def test_an_error_of_a_job_is_raised_wherever_it_ran(place: int) -> None:
    def wrong(number: int) -> int:
        return int("x" if number == place else "1")

    with pytest.raises(ValueError, match="invalid literal"):
        shared_out([partial(wrong, number) for number in range(2)], 2)


def test_the_jobs_of_a_killed_fork_are_done_here() -> None:
    here = os.getpid()

    def only_here(number: int) -> tuple[int, int]:
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return told(number)

    assert shared_out([partial(only_here, number) for number in range(2)], 2) == [(0, here), (1, here)]
