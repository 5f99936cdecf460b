"""A trial of a study in the keys of verl: of a verl config its changes, of a GRPO recipe all of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from autofit.api.arguments import named_as_arguments, studies_folder
from autofit.errors import ConfigError
from autofit.frontends.to_verl import exported
from autofit.frontends.tools import VERL
from autofit.frontends.writing import override, own_changes
from autofit.promotion.promotion import choose
from autofit.recipe.recipe import merge
from autofit.tuning.record import StudyRecord, record_of
from autofit.tuning.study import load_study, trials_of

_COMMAND = "python3 -m verl.trainer.main_ppo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A trial as verl's overrides: behind the user's own command where `whole` is False, else a command of its own."""

    trial: int
    whole: bool
    overrides: Mapping[str, object]
    changes: tuple[str, ...]  # what is another in verl, a sentence each

    def __str__(self) -> str:
        comments = [f"# {text}" for text in self.changes]
        words = [override(key, value) for key, value in self.overrides.items()]
        if not self.whole:
            return "\n".join([*comments, " ".join(words) or "# the trial changes nothing of the config"])
        return "\n".join([*comments, " \\\n  ".join([_COMMAND, *words])])

    def to_dict(self) -> dict[str, object]:
        return {"trial": self.trial, "overrides": dict(self.overrides), "changes": list(self.changes)}


def export_to_verl(trial: str, *, study: str | None, folder: Path) -> Export:
    """The trial (its number, or "best") of a study in verl's keys. Raises ConfigError."""
    with named_as_arguments():
        found = load_study(studies_folder(folder), study)
        record = record_of(found)
        chosen = choose(trials_of(found), trial, record.rule, fitting=False)
        return export_of(record, chosen.number, chosen.yaml_changes, found.study_name)


def export_of(record: StudyRecord, number: int, changes: Mapping[str, object], study: str) -> Export:
    """The same of a trial's `changes` of the study's recipe."""
    if record.trainer == VERL.name and record.foreign:
        overrides, others = own_changes(record.foreign, changes)
        return Export(trial=number, whole=False, overrides=overrides, changes=tuple(others))
    if record.trainer != "grpo":
        raise ConfigError(f"--to verl takes a study of a verl config or a grpo recipe; {study} is of {record.trainer}")
    made = exported(merge(record.resolved, changes), merge(record.values, changes))
    return Export(trial=number, whole=True, overrides=made.overrides, changes=made.changes)
