"""A phase that takes long says so."""

import time

import pytest

from autofit.api import events
from autofit.api.events import still_at


def test_a_long_phase_says_that_it_goes_on_and_a_short_one_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "EVERY_S", 0.02)
    said: list[str] = []
    with still_at("reading the recipe", said.append):
        deadline = time.monotonic() + 5
        while not said and time.monotonic() < deadline:
            time.sleep(0.01)
    assert said[0].startswith("still reading the recipe, for ")
    count = len(said)
    with still_at("x", said.append):
        pass
    time.sleep(0.05)
    assert len(said) == count
