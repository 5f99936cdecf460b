"""The adapter for `transformers.Trainer` and what derives from it: a run that reports its steps and phases."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from autofit.plugin.protocol import Report

_CHECKPOINT_FILES = ("trainer_state.json", "optimizer.pt", "scheduler.pt")


class TransformersRun:
    """A `transformers.Trainer` as a run.

    `phases` has the methods of the trainer (dotted paths) during which a phase of its own is at work; all else in an
    optimizer step is `update` or `optimizer`.
    """

    def __init__(
        self, trainer: Any, *, phases: Mapping[str, str], samples_per_step: int, tokens_per_step: int | None = None
    ) -> None:
        self.trainer = trainer
        self.samples_per_step = samples_per_step
        self.tokens_per_step = tokens_per_step
        self._phases = phases

    @property
    def model(self) -> torch.nn.Module:
        model = self.trainer.model
        assert isinstance(model, torch.nn.Module)
        return model

    @property
    def scoring_share(self) -> float:
        return 0.0

    @property
    def rollout_share(self) -> float:
        return 1.0

    @property
    def steps_between_saves(self) -> int:
        return 1

    @property
    def last_step(self) -> int:
        return int(self.trainer.state.max_steps)

    def train(self, report: Report, *, resume_from: Path | None = None) -> None:
        for path, phase in self._phases.items():
            _report_phase(self.trainer, path, phase, report)
        self.trainer.add_callback(_Reporter(report))
        if resume_from is not None:
            self.before_resuming(resume_from)
        self.trainer.train(resume_from_checkpoint=None if resume_from is None else str(resume_from))

    def before_resuming(self, checkpoint: Path) -> None:
        """Put right what the trainer does not continue exactly by itself; nothing here."""

    def checkpoint_is_whole(self, checkpoint: Path) -> bool:
        """Whether every file is there that the trainer continues from; a kill while saving leaves some out."""
        whole = all((checkpoint / name).exists() for name in _CHECKPOINT_FILES)
        if not whole or not list(checkpoint.glob("rng_state*.pth")):
            return False
        try:
            json.loads((checkpoint / "trainer_state.json").read_text())
        except (OSError, ValueError):
            return False
        return True

    def save_model(self, folder: Path) -> None:
        self.trainer.save_model(str(folder))


def _report_phase(trainer: Any, path: str, phase: str, report: Report) -> None:
    """Make the method at the dotted `path` from the trainer run within `phase`; nothing where the trainer lacks it."""
    *parts, method = path.split(".")
    owner = trainer
    for part in parts:
        owner = getattr(owner, part, None)
    original = getattr(owner, method, None)
    if original is None:
        return

    def within(*args: Any, **kwargs: Any) -> Any:
        with report.phase(phase):
            return original(*args, **kwargs)

    setattr(owner, method, within)


class _Reporter(TrainerCallback):  # type: ignore[misc]
    """Passes on what transformers says, and says back what the receiver wants."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def on_train_begin(self, *_: object, **__: object) -> None:
        self._report.train_begins()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: object) -> None:
        self._report.step_begins(state.global_step)

    def on_substep_end(self, *_: object, **__: object) -> None:
        self._report.micro_step_ends()

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any, **_: object
    ) -> None:
        self._report.gradient_is_whole(model, optimizer)

    def on_optimizer_step(self, *_: object, **__: object) -> None:
        self._report.optimizer_ends()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: object) -> None:
        wanted = self._report.step_ends(state.global_step)
        control.should_save = control.should_save or wanted.save
        control.should_training_stop = control.should_training_stop or wanted.stop

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: object) -> None:
        if logs and "loss" in logs:
            self._report.logs(state.global_step, state.max_steps, logs)
