"""The receiver of a full run's report: what its watchers say is kept, and none of them can end the training."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from autofit.plugin.protocol import Run
from autofit.promotion.reports import RunRecorder
from autofit.watching.contract import StepFacts, Watched, Watcher
from autofit.watching.events import EventKind, RunEvent, events_of, read_progress
from autofit.watching.progress import trend


class Counting(Watcher):
    """Says how many steps it saw, and adds the number to each line."""

    def __init__(self) -> None:
        self.seen = 0

    def step_ends(self, step: StepFacts) -> Iterable[RunEvent]:
        self.seen += 1
        return ()

    def adds(self, line: Mapping[str, object]) -> Mapping[str, object]:
        return {"seen": self.seen}


class Failing(Watcher):
    """Fails at its second step, or in what it adds at the third line."""

    def __init__(self, where: str) -> None:
        self.where, self.asked = where, 0

    def step_ends(self, step: StepFacts) -> Iterable[RunEvent]:
        self.asked += 1
        if self.where == "step_ends" and step.number == 2:
            raise ValueError("no such step")
        return ()

    def adds(self, line: Mapping[str, object]) -> Mapping[str, object]:
        if self.where == "adds" and line["step"] == 3:
            raise KeyError("reward")
        return {}


def recorder(folder: Path, *watchers: Watcher) -> RunRecorder:
    run = cast("Run", SimpleNamespace(last_step=5, samples_per_step=4, steps_between_saves=1))
    watched = Watched(
        folder=folder, trainer="sft", values={}, device="cpu", generates=False, samples_per_step=4, first_step=0,
        last_step=5,
    )  # fmt: skip
    return RunRecorder(run, watched, watchers)


def train(kept: RunRecorder) -> None:
    kept.train_begins()
    for step in range(5):
        kept.step_begins(step)
        kept.step_ends(step + 1)
        kept.logs(step + 1, 5, {"loss": 1.0})
    kept.ends()


def test_a_watcher_that_fails_is_asked_no_more_and_the_training_goes_on(tmp_path: Path) -> None:
    for where, text in (("step_ends", "ValueError: no such step"), ("adds", "KeyError: 'reward'")):
        folder = tmp_path / where
        folder.mkdir()
        failing, counting = Failing(where), Counting()
        train(recorder(folder, failing, counting))
        told = [event.text for event in events_of(folder) if event.kind is EventKind.FAULT]
        assert told == [f"Failing failed ({text}); the run goes on without it"]
        assert failing.asked == (2 if where == "step_ends" else 3)
        assert [line["seen"] for line in read_progress(folder)] == [1, 2, 3, 4, 5]


def test_the_same_step_logged_again_and_again_has_no_trend() -> None:
    assert trend([(3.0, float(n)) for n in range(20)]) is None
