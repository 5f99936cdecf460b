"""The predictions of every candidate as points of a picture, few enough to be kept with a study."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from autofit.forecast.predictions import Floats, Predictions

_MOST_POINTS = 800
_CELL = 0.01  # width of a cell in log2, in which only one candidate is kept: 0.7 %; widened until few are left

Correct = Callable[[NDArray[np.intp]], tuple[Floats, Floats]]  # indices -> (seconds of a step, device-used bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cloud:
    """Predicted bytes and seconds of a study's candidates; of candidates that are nearly equal there is one."""

    candidates: int  # that have a prediction
    device_used_bytes: tuple[int, ...]
    step_s: tuple[float, ...]

    @classmethod
    def of(cls, predictions: Predictions | None, correct: Correct | None = None) -> "Cloud | None":
        """The points of `predictions`; None without any. `correct` maps indices to what probes make of the figures."""
        if predictions is None:
            return None
        used, step_s = predictions.device_used_bytes, predictions.step_s
        known = np.isfinite(used) & np.isfinite(step_s)
        if not known.any():
            return None
        points = np.column_stack([used[known], step_s[known]])
        kept = np.flatnonzero(known)[_thinned(points)]
        shown_s, shown = (step_s[kept], used[kept]) if correct is None else correct(kept)
        return cls(
            candidates=len(points), device_used_bytes=tuple(int(used) for used in shown),
            step_s=tuple(float(f"{seconds:.4g}") for seconds in shown_s),
        )  # fmt: skip

    def to_json(self) -> dict[str, object]:
        return {"candidates": self.candidates, "device_used_bytes": list(self.device_used_bytes),
                "step_s": list(self.step_s)}  # fmt: skip

    @classmethod
    def from_json(cls, content: Mapping[str, object] | None) -> "Cloud | None":
        """The cloud that a study keeps; None for a study without one."""
        if content is None:
            return None
        found = cast("Mapping[str, Any]", content)
        return cls(
            candidates=int(found["candidates"]), device_used_bytes=tuple(found["device_used_bytes"]),
            step_s=tuple(found["step_s"]),
        )  # fmt: skip


def _thinned(points: Floats) -> NDArray[np.intp]:
    """The index of one point of each cell of a logarithmic grid, with cells wide enough for at most _MOST_POINTS."""
    cell = _CELL
    while True:
        _, first = np.unique(np.floor(np.log2(points) / cell), axis=0, return_index=True)
        if len(first) <= _MOST_POINTS:
            return np.sort(first)
        cell *= 1.25
