"""`autofit.studies`: the studies of a folder, each with its winner and its promoted runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath

import optuna
from rich.markup import escape
from rich.table import Table

from autofit.api.arguments import FOLDER, named_as_arguments, studies_folder
from autofit.api.events import TrialResult
from autofit.api.promoted import PromotedRun, promoted_runs
from autofit.api.tables import Shown
from autofit.folding import Folding
from autofit.probing.result import ProbeStatus
from autofit.recipe.recipe import own_names
from autofit.space.traits import describe_changes
from autofit.tuning.frontier import baseline, winner
from autofit.tuning.record import record_of
from autofit.tuning.storage import database_of, use_storage
from autofit.tuning.study import own_studies, trials_of
from autofit.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StudySummary:
    """One study. None is "unknown", or "there is none"."""

    name: str
    model: str
    trainer: str
    device: str  # cpu, cuda, or sim: and a card
    target_bytes: int | None
    used: str  # when a search last worked on it, in ISO 8601, UTC
    trials: int  # asked for
    finished: int
    fits: int
    winner: TrialResult | None
    changes: str  # of the winner, in words
    promoted: tuple[PromotedRun, ...] = ()
    original: Mapping[str, object] = field(default_factory=dict)  # the recipe as its trainer resolved it

    def to_dict(self) -> dict[str, object]:
        """Plain values only."""
        runs = [
            {"trial": run.trial, "state": run.state, "step": run.step, "last_step": run.last_step, "kept": run.kept}
            for run in self.promoted
        ]
        return {
            "study": self.name, "model": self.model, "trainer": self.trainer, "device": self.device,
            "target_bytes": self.target_bytes, "used": self.used, "trials": self.trials, "finished": self.finished,
            "fits": self.fits, "winner": None if self.winner is None else self.winner.to_dict(),
            "changes": self.changes, "promoted": runs,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Studies(Shown):
    """The studies of a folder, the one used last at the end."""

    folder: Path
    home: str  # the folder, or the database that several folders share
    studies: tuple[StudySummary, ...]

    def to_dict(self) -> dict[str, object]:
        """The object that `autofit studies --json` prints: plain values only."""
        return {"studies": [study.to_dict() for study in self.studies]}

    def parts(self) -> list[Table | str]:
        """A table with a study a row."""
        if not self.studies:
            return [f"there are no studies in {self.home}"]
        title = f"Studies in {escape(self.home)}, the one used last at the end"
        table = Folding(title=title)
        for name in ("study", "model", "trainer", "device", "target", "trials", "winner", "promoted", "used (UTC)"):
            table.add_column(name, overflow="fold", no_wrap=name == "study")
        for study in self.studies:
            table.add_row(*map(escape, _row(study)))
        found = [f"{s.name}: trial {s.winner.number} wins with {s.changes}" for s in self.studies if s.winner]
        return [table, *found]


def studies(folder: str | Path = FOLDER, *, storage: str | None = None) -> Studies:
    """The studies that autofit keeps in `folder`, or in the database `storage`, the one used last at the end.

    Those of other programs are left out.

    Raises ConfigError for a folder that has no database of studies, and EnvironmentFault for one that cannot be read.
    """
    with named_as_arguments():
        folder = studies_folder(folder)
        use_storage(folder, storage)
        found = own_studies(folder)
        home = database_of(folder).home
        return Studies(folder=folder, home=home, studies=tuple(_summary(folder, study) for study in found))


def _summary(folder: Path, study: optuna.Study) -> StudySummary:
    record, trials = record_of(study), trials_of(study)
    best = winner(trials, **record.rule)
    row = None if best is None else TrialResult.of(best, baseline(trials), limit_bytes=record.limit_bytes)
    return StudySummary(
        name=study.study_name, model=PurePath(str(record.resolved.get("model_name_or_path") or "")).name,
        trainer=record.trainer, device=record.device, target_bytes=record.target_bytes, used=record.used,
        trials=len(trials), finished=sum(t.status is not None for t in trials),
        fits=sum(t.status is ProbeStatus.FIT for t in trials), winner=row,
        changes="" if row is None else describe_changes(row.changes, record.resolved, own_names(record.foreign)),
        promoted=promoted_runs(folder, study.study_name), original=record.resolved,
    )  # fmt: skip


def _row(study: StudySummary) -> tuple[str, ...]:
    waiting = study.trials - study.finished
    trials = f"{study.finished}, {study.fits} fit" + (f", {waiting} waiting" if waiting else "")
    target = "-" if study.target_bytes is None else format_bytes(study.target_bytes)
    return (
        study.name, study.model, study.trainer, study.device, target, trials, _winner(study),
        "\n".join(map(_run, study.promoted)) or "-", study.used[:16].replace("T", " "),
    )  # fmt: skip


def _winner(study: StudySummary) -> str:
    best = study.winner
    if best is None:
        return "nothing fits" if study.finished else "-"
    faster = "" if best.speedup is None or not best.changes else f", {best.speedup:.2f}x"
    used = "" if best.device_used_bytes is None else f", {format_bytes(best.device_used_bytes)}"
    return f"trial {best.number}{faster}{used}"


def _run(run: PromotedRun) -> str:
    of = "" if run.last_step is None else f" of {run.last_step}"
    promise = {True: ", promise kept", False: ", promise broken", None: ""}[run.kept]
    return f"trial {run.trial}: {run.state}, step {run.step}{of}{promise}"
