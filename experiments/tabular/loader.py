"""A loader of the tables that needs nothing but Python: bytes, seconds and fit of every candidate, or of one."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class Table:
    """A recipe's candidates. Candidate 0 is the recipe as it is written."""

    def __init__(self, path: str | Path) -> None:
        told = json.loads(Path(path).read_text(encoding="utf-8"))
        self.recipe, self.knobs, self.limit_mb = told["recipe"], told["knobs"], told["limit_mb"]
        self.names = list(self.knobs)
        self.rows = [row for row in told["rows"] if row[-3] is not None]
        self._places = {tuple(row[: len(self.names)]): place for place, row in enumerate(self.rows)}

    def __len__(self) -> int:
        return len(self.rows)

    def params(self, place: int) -> dict[str, Any]:
        return {name: self.knobs[name][code] for name, code in zip(self.names, self.rows[place], strict=False)}

    def find(self, params: Mapping[str, Any]) -> int | None:
        """The place of the candidate with these values; None if they do not keep the effective batch."""
        return self._places.get(tuple(self.knobs[name].index(params[name]) for name in self.names))

    def query(self, place: int) -> tuple[bool, int, float]:
        """(fits, MB of device memory used, seconds of an optimizer step), as a probe would say."""
        used_mb, step_ms = self.rows[place][-3:-1]
        return used_mb <= self.limit_mb, used_mb, step_ms / 1000

    def best_s(self) -> float | None:
        """Seconds of the fastest candidate that fits."""
        fitting: Sequence[float] = [step for fits, _, step in map(self.query, range(len(self))) if fits]
        return min(fitting, default=None)
