"""What a call says while it runs: things that happened, how far a search is, a word from a long silence."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from autofit.api.trials import TrialResult
from autofit.units import format_bytes, format_seconds

EVERY_S = 20.0


@contextmanager
def still_at(what: str, say: Callable[[str], None]) -> Iterator[None]:
    """Context of a silent phase: says every 20 s that it is still at `what`, from a thread of its own."""
    ended, began = threading.Event(), time.monotonic()

    def wait() -> None:
        while not ended.wait(EVERY_S):
            say(f"still {what}, for {format_seconds(time.monotonic() - began)}")

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that happened; `str` of it is a line of text, so `on_event=print` shows how a call goes on."""

    text: str
    label: str = ""  # of the text: model, device, effective batch, predicted, ...
    trial: TrialResult | None = None  # a trial that has just ended
    interrupted: bool = False  # Ctrl-C came, and the probes at work are being stopped

    def __str__(self) -> str:
        return f"{self.label:>16}: {self.text}" if self.label else self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a search is; `str` of it is a line of text."""

    done: int  # trials that have ended
    probing: tuple[str, ...]  # the trials at work and their changes
    best: TrialResult | None
    elapsed_s: float
    left_s: float | None  # None where nothing bounds the search

    def __str__(self) -> str:
        best = "none yet"
        if self.best is not None and self.best.step_s is not None:
            best = f"trial {self.best.number} [{self.best.tier}] at {format_seconds(self.best.step_s)} a step"
            best += "" if self.best.speedup is None else f", {self.best.speedup:.2f}x"
            best += "" if self.best.margin_bytes is None else f", {format_bytes(self.best.margin_bytes)} free"
        left = "" if self.left_s is None else f", about {format_seconds(self.left_s)} left"
        now = ", ".join(one.partition(":")[0] for one in self.probing) or "..."  # their changes are said when they end
        return f"{self.done} done, probing {now} | best {best} | {format_seconds(self.elapsed_s)}{left}"


STOPPING = Event(text="stopping the simulations at work", interrupted=True)
OnEvent = Callable[[Event], None]


def silent(_: Event) -> None:
    """Shows nothing."""
