"""A recipe that was edited after its search: the study's copy is what a promotion trains."""

from datetime import datetime
from pathlib import Path

from autofit.errors import ConfigError, quoted
from autofit.recipe.yaml_file import read_yaml_mapping
from autofit.tuning.record import StudyRecord

_MOST = 3  # settings that are named


def edit_note(record: StudyRecord, cwd: Path) -> str:
    """What the recipe's file says otherwise than the study, if it was edited after the last search; else ""."""
    path = cwd / f"{record.recipe_name}.yaml"
    if record.foreign or not record.used or not path.is_file():
        return ""
    if path.stat().st_mtime <= datetime.fromisoformat(record.used).timestamp():
        return ""
    try:
        now = read_yaml_mapping(path, what="recipe")
    except ConfigError:
        return ""  # the study's copy is whole
    other = [key for key in now if key != "env" and now[key] != record.values.get(key)]  # env is kept sealed
    if not other:
        return ""
    words = [f"{key} {quoted(now[key], 40)} (the study: {_said(record, key)})" for key in other[:_MOST]]
    more = f" and {len(other) - _MOST} more" if len(other) > _MOST else ""
    return (
        f"{path.name} was edited after the search and says {', '.join(words)}{more}; the study's copy is what is "
        "trained. To take the edit, run the search again"
    )


def _said(record: StudyRecord, key: str) -> str:
    return quoted(record.values[key], 40) if key in record.values else "not given"
