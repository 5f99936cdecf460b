"""Work that ends early keeps what it has."""

import signal
import threading
from concurrent.futures import wait
from typing import Any

import pytest

from autofit.forecast import advice
from autofit.forecast.advice import Ending, within


def counted(stop: threading.Event, found: list[int]) -> list[int]:
    found.append(1)
    assert stop.wait(60)
    return found


def test_work_that_is_done_in_time_is_not_cancelled() -> None:
    def never(_: Ending) -> None:
        raise AssertionError

    assert within(60, lambda: 3, cancel=never) == (3, None)


def test_after_its_time_work_is_cancelled_and_what_it_has_comes_back() -> None:
    stop = threading.Event()
    assert within(0.01, lambda: counted(stop, []), cancel=lambda _: stop.set()) == ([1], Ending.TIME)


def test_ctrl_c_cancels_and_keeps_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    stop, told = threading.Event(), list[Ending]()

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return wait(*args, **kwargs)

    monkeypatch.setattr(advice, "wait", interrupted)

    def cancel(ending: Ending) -> None:
        told.append(ending)
        stop.set()

    assert within(60, lambda: counted(stop, []), cancel=cancel) == ([1], Ending.INTERRUPT)
    assert told == [Ending.INTERRUPT]
