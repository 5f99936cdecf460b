"""What `autofit.run` found: the stages of a pipeline, and how each went."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rich.table import Table

from autofit.api.tables import Shown
from autofit.folding import Folding
from autofit.promotion.promotion import model_path

Status = Literal["done", "kept", "interrupted", "nothing fits", "not reached", "left alone", "planned"]
_GOOD = ("done", "kept", "left alone")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """How one stage went. `kept`: it was done before, and nothing that it depends on has changed."""

    name: str
    trainer: str
    status: Status
    what: str  # what happened, or what a run would do
    study: str | None = None
    trial: int | None = None
    final: Mapping[str, object] | None = None  # of its training: steps, losses, rewards, output_dir

    @property
    def model_path(self) -> str | None:
        """Where its trained model (or adapter) lies; None before it is done."""
        return None if self.final is None else model_path(self.final)

    def to_dict(self) -> dict[str, object]:
        """Plain values only."""
        return {
            "stage": self.name, "trainer": self.trainer, "status": self.status, "what": self.what, "study": self.study,
            "trial": self.trial, "model": self.model_path, "final": None if self.final is None else dict(self.final),
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PipelineResult(Shown):
    """The stages of a pipeline, in the order of their training. `str` of it is a table."""

    name: str
    stages: tuple[StageResult, ...]

    @property
    def status(self) -> Status:
        """done, planned, interrupted or nothing fits: of the first stage that is not done."""
        return next((stage.status for stage in self.stages if stage.status not in _GOOD), "done")

    @property
    def model_path(self) -> str | None:
        """Where the last stage's trained model lies; None unless every stage is done."""
        return self.stages[-1].model_path if self.status == "done" else None

    def to_dict(self) -> dict[str, object]:
        """The object that `autofit run --json` prints: plain values only."""
        return {"pipeline": self.name, "status": self.status, "stages": [stage.to_dict() for stage in self.stages]}

    def parts(self) -> list[Table | str]:
        """A row a stage: what happened to it, and where its model is."""
        table = Folding(title=f"pipeline {self.name}")
        for column in ("stage", "trainer", "status", "what", "model"):
            table.add_column(column, overflow="fold")
        for stage in self.stages:
            table.add_row(stage.name, stage.trainer, stage.status, stage.what, stage.model_path or "-")
        return [table]
