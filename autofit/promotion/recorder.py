"""The receiver of a full run's report: logs its steps, asks its watchers, saves checkpoints, stops on request."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch

from autofit.plugin.protocol import Control, Report, Run
from autofit.promotion.progress import keep_progress
from autofit.watching.events import RunEvent, keep_event
from autofit.watching.watcher import StepFacts, Watched, Watcher

_SAVE_EVERY_S = 60.0  # time between checkpoints: a kill loses at most about a minute


class Recorder(Report):
    """Writes each logged step to progress.jsonl and what watchers say to events.jsonl; saves about once a minute."""

    def __init__(self, run: Run, watched: Watched, watchers: Sequence[Watcher]) -> None:
        assert watched.folder is not None
        self._folder: Path = watched.folder
        self._run, self._watched, self._watchers = run, watched, watchers
        self._samples_word = "completions" if watched.generates else "samples"
        self._saved = self._began = time.monotonic()
        self._asked_to_stop = False
        self.steps = watched.first_step
        self.stopped = False

    def train_begins(self) -> None:
        self._watched = replace(self._watched, last_step=self._run.last_step)
        self._tell(event for watcher in self._watchers for event in watcher.begins(self._watched))

    def step_begins(self, step: int) -> None:
        self._began = time.monotonic()

    def step_ends(self, step: int) -> Control:
        self.steps = step
        facts = StepFacts(number=step, step_s=time.monotonic() - self._began, **_peaks())
        self._tell(event for watcher in self._watchers for event in watcher.step_ends(facts))
        if step % self._run.steps_between_saves:
            return Control()
        asked = self._asked_to_stop or (self._folder / "stop").exists()
        save = asked or time.monotonic() - self._saved > _SAVE_EVERY_S
        if save:
            self._saved = time.monotonic()
        self.stopped = asked and step < self._run.last_step
        return Control(save=save, stop=self.stopped)

    def logs(self, step: int, last_step: int, values: Mapping[str, Any]) -> None:
        step_s = time.monotonic() - self._began
        line: dict[str, object] = {"step": step, "max_steps": last_step, "time": time.time(), **_numbers(values)}
        line |= {"step_s": step_s, f"{self._samples_word}_per_s": self._run.samples_per_step / step_s}
        line |= {"host_rss_bytes": int(psutil.Process().memory_info().rss), **_peaks()}
        keep_progress(self._folder, line)
        self._tell(event for watcher in self._watchers for event in watcher.logs(line))

    def ends(self) -> None:
        """The training is finished."""
        self._tell(event for watcher in self._watchers for event in watcher.ends())

    def _tell(self, events: Iterable[RunEvent]) -> None:
        for event in events:
            keep_event(self._folder, event)
            self._asked_to_stop |= event.stop


def _numbers(logs: Mapping[str, Any]) -> dict[str, float]:
    return {k: float(v) for k, v in logs.items() if isinstance(v, int | float) and not isinstance(v, bool)}


def _peaks() -> dict[str, int]:
    if not torch.cuda.is_available():
        return {}
    return {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
    }
