"""A line on a terminal while a step takes long: a bar, what is being done, and about how long it takes yet.

How long a step takes is known from the last time: the seconds of each are kept (`autofit.files.cache_folder`). A step
that has a limit is said to end by then.
"""

import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autofit.errors import AutofitError
from autofit.files import cache_folder, read_json, write_json
from autofit.units import format_seconds

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

SCREEN = threading.RLock()  # held while a line is written: one that meets the bar's first drawing would join it
_CELLS = 20  # of a bar
_EVERY_S = 0.25
_KEPT = 200  # steps whose seconds are kept
_NOTED_S = 1.0  # a step that took less has no bar worth keeping


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step at work: its words, and how long it may take, or took the last time."""

    words: str
    began_s: float
    most_s: float | None = None
    last_s: float | None = None

    def line(self, now_s: float, *, width: int) -> str:
        """`[#####...............] simulating the recipe, 3 s, about 8 s left`; without the bar in a narrow terminal."""
        spent_s = max(0.0, now_s - self.began_s)
        whole_s = self.most_s or self.last_s
        left = ""
        if whole_s is not None and whole_s > spent_s:
            left = f", {'at most' if self.most_s else 'about'} {_round(whole_s - spent_s)} left"
        elif self.last_s is not None and self.most_s is None:
            left = f", more than the last {_round(self.last_s)}"
        text = f"{self.words}, {_round(spent_s)}{left}"
        bar = f"[{self._cells(spent_s, whole_s)}] "
        return bar + text if len(bar) + len(text) <= width else text

    @staticmethod
    def _cells(spent_s: float, whole_s: float | None) -> str:
        """The part that is done; where that is not known, a mark that moves."""
        if whole_s:
            done = min(_CELLS - 1, int(_CELLS * spent_s / whole_s))
            return "#" * done + "." * (_CELLS - done)
        at = int(spent_s / _EVERY_S) % _CELLS
        return "." * at + "#" + "." * (_CELLS - 1 - at)


class Bar:
    """The line of the steps of one command about `what`; nothing where stderr is no terminal."""

    def __init__(self, command: str, what: str, *, shown: bool = True) -> None:
        self._of = f"{command} {what}"
        self._shown = shown
        self._step: Step | None = None
        self._live: Live | None = None

    def begin(self, words: str, *, most_s: float | None = None) -> None:
        """The step at work from now on; the one before it has ended."""
        self.end()
        if not self._shown:
            return
        last_s = paces().get(f"{self._of} {words}")
        self._step = Step(words=words, began_s=time.monotonic(), most_s=most_s, last_s=last_s)
        self._start()

    def end(self) -> None:
        """The step has ended: its seconds are kept, and the line is gone."""
        self._stop()
        step, self._step = self._step, None
        spent_s = 0.0 if step is None else time.monotonic() - step.began_s
        if step is not None and step.most_s is None and spent_s >= _NOTED_S:
            keep_pace(f"{self._of} {step.words}", spent_s)

    def close(self) -> None:
        """The command ends, perhaps before its step: nothing is kept of that."""
        self._stop()
        self._step = None

    def _start(self) -> None:
        from rich.console import Console
        from rich.live import Live

        console = Console(stderr=True)
        if not console.is_terminal or console.is_dumb_terminal:
            return
        self._live = Live(
            get_renderable=lambda: self._now(console.width), console=console, refresh_per_second=1 / _EVERY_S,
            transient=True, redirect_stdout=False,
        )  # fmt: skip
        with SCREEN:
            self._live.start()

    def _stop(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            with SCREEN:
                live.stop()

    def _now(self, width: int) -> "Text":
        from rich.text import Text

        line = "" if self._step is None else self._step.line(time.monotonic(), width=width - 1)
        return Text(line, no_wrap=True, overflow="ellipsis")


def paces(path: Path | None = None) -> dict[str, float]:
    """{step: seconds that it took the last time}."""
    try:
        found = read_json(path or _path()) or {}
    except (AutofitError, OSError, ValueError):
        return {}
    return {name: float(value) for name, value in found.items() if isinstance(value, int | float)}


def keep_pace(name: str, spent_s: float, path: Path | None = None) -> None:
    """Keep the seconds of a step; a folder that cannot be written to keeps nothing."""
    known = paces(path)
    known.pop(name, None)
    kept = dict([*known.items(), (name, round(spent_s, 1))][-_KEPT:])
    with contextlib.suppress(AutofitError, OSError):
        write_json(path or _path(), kept)


def _path() -> Path:
    return cache_folder() / "paces.json"


def _round(seconds: float) -> str:
    """Whole seconds below a minute: tenths would flicker."""
    return f"{seconds:.0f} s" if seconds < 60 else format_seconds(seconds)


def words_of(what: Sequence[object]) -> str:
    """The name of what a command is about, by its recipe and card, as the steps are kept under it."""
    return " ".join(str(one) for one in what if one is not None)
