"""Events of a call: trials that ended, things that happened, how far a search is, a word from a long silence."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from autofit.probing.result import ProbeStatus
from autofit.recipe.keys import Tier
from autofit.tuning.frontier import Trial
from autofit.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TrialResult:
    """One candidate and the result of its probe; None is "not measured". Figures are those of the longest probe."""

    number: int
    tier: Tier
    status: ProbeStatus | None  # fit, oom, failed or lost; None while it waits or is probed
    changes: Mapping[str, object]  # {key of the recipe: value}; empty for the recipe as it is
    device_used_bytes: int | None
    step_s: float | None  # of one optimizer step
    completions_per_s: float | None  # samples, for a trainer that does not generate
    speedup: float | None  # its completions per second over the baseline's; in turns with it if it was a finalist
    confirmed: bool | None  # True if it held in the longer probe; None if it had none
    at_least: bool = False  # its bytes are those held when memory ran out
    reason: str = ""  # of an oom, a failure or a loss
    needs: tuple[str, ...] = ()  # packages without which it does not run; a simulated probe does without them
    margin_bytes: int | None = None  # free bytes under the limit (target less headroom); None unless it fits
    first_step_s: float | None = None  # of its first probe, if that was doubted and repeated

    @classmethod
    def of(cls, trial: Trial, base: Trial | None, *, limit_bytes: int | None = None) -> "TrialResult":
        """The row of `trial`, with its speed-up over `base` and its margin."""
        used = trial.device_used_bytes if trial.fits else None
        return cls(
            number=trial.number, tier=trial.tier, status=trial.status, changes=trial.changes,
            device_used_bytes=trial.device_used_bytes, step_s=trial.step_s,
            completions_per_s=trial.completions_per_s, speedup=trial.speedup(base),
            confirmed=None if trial.confirmed is None else not trial.fell, at_least=trial.stopped_at_oom,
            reason="" if trial.figures is None else trial.figures.reason,
            margin_bytes=None if used is None or limit_bytes is None else limit_bytes - used,
            first_step_s=None if trial.first is None else trial.first.median_step_s,
            needs=trial.needs,
        )  # fmt: skip

    @property
    def fits(self) -> bool:
        """True if it fitted in each of its probes."""
        return self.status is ProbeStatus.FIT and self.confirmed is not False

    @property
    def stopped_at_oom(self) -> bool:
        """True if its bytes are a lower bound, as memory ran out."""
        return self.at_least

    def __str__(self) -> str:
        changes = ", ".join(f"{key}={value}" for key, value in self.changes.items()) or "the recipe as it is"
        figures = [str(self.status or "not probed yet")]
        if self.device_used_bytes is not None:
            figures.append(f"{'at least ' if self.at_least else ''}{format_bytes(self.device_used_bytes)}")
        if self.margin_bytes is not None:
            figures[-1] += f" ({format_bytes(self.margin_bytes)} free)"
        figures += [] if self.step_s is None else [f"{format_seconds(self.step_s)} a step"]
        figures += [] if self.speedup is None else [f"{self.speedup:.2f}x"]
        figures += [self.reason] if self.reason else []
        return f"trial {self.number} [{self.tier}] {changes}: {', '.join(figures)}"

    __repr__ = __str__  # the text at a Python prompt

    def to_dict(self) -> dict[str, object]:
        """The trial as `--json` has it; unmeasured figures are None."""
        return {
            "trial": self.number,
            "tier": self.tier,
            "status": None if self.status is None else str(self.status),
            "changes": dict(self.changes),
            "device_used_bytes": self.device_used_bytes,
            "step_s": self.step_s,
            "completions_per_s": self.completions_per_s,
            "speedup": self.speedup,
            "margin_bytes": self.margin_bytes,
            "first_step_s": self.first_step_s,
            "confirmed": self.confirmed,
            "needs": list(self.needs),
        }


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
    read: bool = False  # the recipe has been read: messages on it follow
    trying: bool = False  # a tried change, or its outcome: the result repeats the useful ones
    verdict: bool = False  # the promise against the whole run, which the result says as well

    def __str__(self) -> str:
        return f"{self.label:>16}: {self.text}" if self.label else self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """State of a search; `str` of it is a line of text."""

    done: int  # trials that have ended
    probing: tuple[str, ...]  # the trials at work and their changes
    best: TrialResult | None
    elapsed_s: float
    left_s: float | None  # None if the search is unbounded

    def without(self, number: int) -> "Progress":
        """The same where the trial `number` has just ended."""
        others = tuple(one for one in self.probing if one.partition(":")[0] != f"trial {number}")
        return replace(self, done=self.done + len(self.probing) - len(others), probing=others)

    def later(self, seconds: float) -> "Progress":
        """The same state, `seconds` later; the time left is unknown once it has passed."""
        left_s = None if self.left_s is None or self.left_s < seconds else self.left_s - seconds
        return replace(self, elapsed_s=self.elapsed_s + seconds, left_s=left_s)

    def __str__(self) -> str:
        best = "none yet"
        if self.best is not None and self.best.step_s is not None:
            best = f"trial {self.best.number} [{self.best.tier}] at {format_seconds(self.best.step_s)} a step"
            best += "" if self.best.speedup is None else f", {self.best.speedup:.2f}x"
            best += "" if self.best.margin_bytes is None else f", {format_bytes(self.best.margin_bytes)} free"
        left = "" if self.left_s is None else f", about {format_seconds(self.left_s)} left"
        now = ", ".join(one.partition(":")[0] for one in self.probing) or "..."  # their changes are shown when they end
        return f"{self.done} done, probing {now} | best {best} | {format_seconds(self.elapsed_s)}{left}"


STOPPING = Event(text="stopping the simulations at work", interrupted=True)
OnEvent = Callable[[Event], None]
OnAdvice = Callable[[float | None], None]  # hears the most seconds that advice may take, None without a limit


def silent(_: Event) -> None:
    """Ignores the event."""


def keeping(notes: list[str]) -> OnEvent:
    """A callback that adds a result's notes to `notes` and shows nothing, for callers that pass no callback."""

    def keep(event: Event) -> None:
        if event.label == "note":
            notes.append(event.text)

    return keep
