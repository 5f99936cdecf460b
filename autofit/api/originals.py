"""What a running probe changes of its study's recipe, in words."""

from collections.abc import Mapping
from pathlib import Path

from autofit.errors import AutofitError
from autofit.space.describe import describe_changes


class Originals:
    """The recipes of the studies in `folder`, each read once; Optuna is loaded with the first."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, tuple[Mapping[str, object], Mapping[str, object]] | None] = {}

    def changes(self, study: str, values: Mapping[str, object]) -> str:
        """How `values` differ from the recipe of `study`; "" where the study cannot be read."""
        if study not in self._known:
            self._known[study] = self._recipe(study)
        known = self._known[study]
        if known is None:
            return ""
        given, resolved = known
        keys = [key for key in {**given, **values} if given.get(key) != values.get(key)]
        return describe_changes({key: values.get(key) for key in keys}, resolved)

    def _recipe(self, study: str) -> tuple[Mapping[str, object], Mapping[str, object]] | None:
        from autofit.tuning.record import record_of
        from autofit.tuning.study import load_study

        try:
            record = record_of(load_study(self._folder, study))
        except AutofitError:
            return None
        return record.values, record.resolved
