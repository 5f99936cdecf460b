"""The receivers of a full run's report: they log its steps, ask its watchers, save checkpoints, and stop on request.

Of several ranks, rank 0 records the run and decides, and the others do as it does. Imports torch.
"""

import shutil
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from autofit.errors import printable
from autofit.plugin.protocol import LOAD, UPDATE, Control, Report, Run
from autofit.promotion.checkpoints import prove, rotate, unwritten, what_is_torn
from autofit.promotion.run_folder import Place, asked_to_end
from autofit.watching.contract import StepFacts, Watched, Watcher
from autofit.watching.events import EventKind, RunEvent, keep_event, keep_progress, sync_progress
from autofit.watching.memory import retries, since_beginning

# Time between checkpoints: a kill loses at most about a minute, or more where saving would take more than this share.
_SAVE_EVERY_S = 60.0
_MOST_SAVING_FRAC = 0.05
_RSS_EVERY_S = 0.5  # between two readings of the process' memory


class RunRecorder(Report):
    """Writes each logged step to progress.jsonl and the watchers' events to events.jsonl; saves about once a minute."""

    ranks = 1

    def __init__(self, run: Run, watched: Watched, watchers: Sequence[Watcher]) -> None:
        assert watched.folder is not None
        self._folder: Path = watched.folder
        self._run, self._watched, self._watchers = run, watched, list(watchers)
        self._samples_word = "completions" if watched.generates else "samples"
        self._saved = self._began = self._save_began = self._training_began = time.monotonic()
        self._save_s = 0.0
        self._asked_to_stop = False
        self.began = False
        self._process, self._rss_bytes, self._rss_at = psutil.Process(), 0, -_RSS_EVERY_S
        self.steps = watched.first_step
        self.stopped = False

    def train_begins(self) -> None:
        self._training_began = time.monotonic()
        self._watched = replace(self._watched, last_step=self._run.last_step)
        self._ask(lambda watcher: watcher.begins(self._watched))

    def step_begins(self, step: int) -> None:
        super().step_begins(step)
        self._began = time.monotonic()
        self.began = True

    def step_ends(self, step: int) -> Control:
        self.steps = step
        facts = StepFacts(number=step, step_s=time.monotonic() - self._began, **self._peaks())
        self._ask(lambda watcher: watcher.step_ends(facts))
        if step % self._run.steps_between_saves:
            return Control()
        asked = self._asked_to_stop or asked_to_end(self._folder)
        save = asked or time.monotonic() - self._saved > max(_SAVE_EVERY_S, self._save_s / _MOST_SAVING_FRAC)
        self.stopped = asked and step < self._run.last_step
        return Control(save=save, stop=self.stopped)

    def save_begins(self) -> None:
        self._save_began = time.monotonic()

    def saved(self, checkpoint: Path) -> None:
        try:
            sync_progress(self._folder)
            prove(checkpoint)
        except OSError as error:
            self._went_without(checkpoint, error)
            return
        rotate(checkpoint)
        self._saved = time.monotonic()
        self._save_s = self._saved - self._save_began

    def save_failed(self, checkpoint: Path, error: Exception) -> bool:
        """True after an error of the disk: the run goes on, and saves again at the next interval."""
        return self._went_without(checkpoint, error)

    def _went_without(self, checkpoint: Path, error: Exception) -> bool:
        failure = unwritten(checkpoint, error)
        if failure is None:
            return False
        if what_is_torn(checkpoint, self._run.checkpoint_is_whole) is not None:
            shutil.rmtree(checkpoint, ignore_errors=True)
        self._saved = time.monotonic()
        self._tell([RunEvent(step=self.steps, kind=EventKind.CHECKPOINT, text=failure)])
        return True

    def logs(self, step: int, last_step: int, values: Mapping[str, Any]) -> None:
        step_s = time.monotonic() - self._began
        line: dict[str, object] = {"step": step, "max_steps": last_step, "time": time.time(), **_numbers(values)}
        line |= {"step_s": step_s, f"{self._samples_word}_per_s": self._run.samples_per_step * self.ranks / step_s}
        line |= {"host_rss_bytes": self._rss(), **self._peaks(), **retries()}
        line["run_s"] = time.monotonic() - self._training_began  # of this start: its steps are timed by it

        def add(watcher: Watcher) -> Iterable[RunEvent]:
            line.update(watcher.adds(line))
            return ()

        self._ask(add)
        keep_progress(self._folder, line)
        self._ask(lambda watcher: watcher.logs(line))

    def _peaks(self) -> dict[str, int]:
        """The peaks of the card's memory since the run began; empty on a machine that lacks one."""
        return since_beginning()

    def _rss(self) -> int:
        """Resident bytes of the process, as of half a second ago at most."""
        now = time.monotonic()
        if now - self._rss_at >= _RSS_EVERY_S:
            self._rss_bytes, self._rss_at = int(self._process.memory_info().rss), now
        return self._rss_bytes

    def ends(self) -> None:
        """The training is finished."""
        self._ask(lambda watcher: watcher.ends())

    def _ask(self, question: Callable[[Watcher], Iterable[RunEvent]]) -> None:
        """Ask every watcher. One that fails is dropped: hours of training must go on."""
        for watcher in tuple(self._watchers):
            try:
                events = list(question(watcher))
            except Exception as error:
                traceback.print_exception(error)  # into the log of the run
                self._watchers.remove(watcher)
                reason = printable(f"{type(error).__name__}: {error}", 200)
                text = f"{type(watcher).__name__} failed ({reason}); the run goes on without it"
                events = [RunEvent(step=self.steps, kind=EventKind.FAULT, text=text)]
            if events:
                self._tell(events)

    def _tell(self, events: Iterable[RunEvent]) -> None:
        for event in events:
            keep_event(self._folder, event)
            self._asked_to_stop |= event.stop


def _numbers(logs: Mapping[str, Any]) -> dict[str, float]:
    return {k: float(v) for k, v in logs.items() if isinstance(v, int | float) and not isinstance(v, bool)}


class Where(Report):
    """A report that knows in which phase of which step the run is."""

    rank = 0
    at_work = LOAD  # the phase
    in_step = False
    steps = 0  # that are finished

    def moved(self) -> None:
        """The run went on to `at_work`."""

    def enter(self, phase: str) -> str:
        left, self.at_work = self.at_work, phase
        self.moved()
        return left

    def train_begins(self) -> None:
        super().train_begins()
        self.enter(UPDATE)

    def step_begins(self, step: int) -> None:
        self.in_step = True
        super().step_begins(step)

    def step_ends(self, step: int) -> Control:
        self.in_step = False
        return super().step_ends(step)


class Locating(Where, RunRecorder):
    """A recorder that knows in which phase of which step the run is."""


_PATIENCE = timedelta(days=2)  # the job ends all ranks once one is gone; a long evaluation or save is no fault


class Together:
    """The ranks of this run, over a gloo group of their own: cards go on meanwhile, and NCCL's time-out is unaffected.

    Every rank calls the same methods in the same order.
    """

    def __init__(self) -> None:
        """After the trainer has begun the ranks' process group."""
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=_PATIENCE)

    def decided(self, decide: Callable[[], Any]) -> Any:
        """The result of `decide` on rank 0, for every rank; only rank 0 calls it."""
        found = [decide() if self.rank == 0 else None]
        dist.broadcast_object_list(found, src=0, group=self._group)
        return found[0]

    def control(self, own: Control | None = None) -> Control:
        """The `Control` of rank 0, on every rank."""
        flags = torch.zeros(2, dtype=torch.uint8)
        if own is not None:
            flags[0], flags[1] = own.save, own.stop
        dist.broadcast(flags, src=0, group=self._group)
        return Control(save=bool(flags[0]), stop=bool(flags[1]))

    def most(self, figures: Mapping[str, int]) -> dict[str, int]:
        """The largest of each figure over all ranks, each of which has the same names."""
        if not figures:
            return {}
        values = torch.tensor(list(figures.values()), dtype=torch.int64)
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._group)
        return dict(zip(figures, values.tolist(), strict=True))

    def wait(self) -> None:
        """Return once every rank has called it."""
        dist.barrier(group=self._group)


class _Rank(Where):
    """Common part of every rank: keeps its place in a file, and saves and stops when all do."""

    together: Together
    place: Place
    began = stopped = False

    def joins(self, together: Together, place: Place) -> None:
        """Called before the training."""
        self.together, self.place, self.rank = together, place, together.rank

    def moved(self) -> None:
        self.place.keep(self.steps, self.at_work)

    def save_failed(self, checkpoint: Path, error: Exception) -> bool:
        """False: the other ranks are in the midst of saving, so this one must stop too."""
        return False


class Leading(_Rank, Locating):
    """The recorder of a run of several ranks, on rank 0. The peaks it tells are the largest of all ranks."""

    _largest: dict[str, int]

    def joins(self, together: Together, place: Place) -> None:
        super().joins(together, place)
        self.ranks, self._largest = together.ranks, {}

    def step_ends(self, step: int) -> Control:
        self._largest = self.together.most(since_beginning())
        return self.together.control(super().step_ends(step))

    def _peaks(self) -> dict[str, int]:
        return self._largest

    def saved(self, checkpoint: Path) -> None:
        self.together.wait()  # until every rank has written its files
        super().saved(checkpoint)


class Following(_Rank):
    """The report of every other rank."""

    def __init__(self, first_step: int) -> None:
        self.steps = first_step

    def step_begins(self, step: int) -> None:
        self.began = True
        super().step_begins(step)

    def step_ends(self, step: int) -> Control:
        super().step_ends(step)
        self.steps = step
        self.together.most(since_beginning())
        control = self.together.control()
        self.stopped = control.stop
        return control

    def saved(self, checkpoint: Path) -> None:
        self.together.wait()
