"""Predicted bytes and seconds of every candidate before the first probe, as plain arrays from any source."""

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from autofit.errors import ConfigError
from autofit.space.space import Candidate

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Predictions:
    """One entry per candidate, in the order of `candidates`.

    `floor_bytes` is a lower bound of device-used (live tensors and context): under a smaller target the candidate
    certainly does not fit, so it is never probed. `device_used_bytes` and `step_s` are the expected results of a probe;
    `step_s` is per optimizer step at the recipe's effective batch, so that candidates compare. They may be wrong: the
    search learns the error. They are NaN for a candidate without a prediction, and its floor is 0. `rollout_s` is the
    part of `step_s` before the update; with it, a probe that reports both parts corrects each part separately.
    """

    candidates: tuple[Candidate, ...]
    floor_bytes: Floats
    device_used_bytes: Floats
    step_s: Floats
    rollout_s: Floats | None = None

    def __post_init__(self) -> None:
        count = len(self.candidates)
        for field in fields(self)[1:]:
            values = getattr(self, field.name)
            if values is None:
                continue
            if values.shape != (count,):
                raise ConfigError(
                    f"predictions must have one {field.name} per candidate, shape ({count},); got shape {values.shape}"
                )
            if not field.name.startswith("floor") and not (values[~np.isnan(values)] > 0).all():
                raise ConfigError(f"predicted {field.name} must be above zero, or NaN if unknown")

    def of(self, candidates: tuple[Candidate, ...]) -> "Predictions":
        """The predictions for `candidates`, in their order; NaN for a candidate without one."""
        if candidates == self.candidates:
            return self
        known = {candidate: place for place, candidate in enumerate(self.candidates)}
        places = np.array([known.get(c, -1) for c in candidates])

        def aligned(values: Floats, unknown: float) -> Floats:
            return np.where(places >= 0, values[places], unknown)

        return Predictions(
            candidates=candidates,
            floor_bytes=aligned(self.floor_bytes, 0.0),
            device_used_bytes=aligned(self.device_used_bytes, np.nan),
            step_s=aligned(self.step_s, np.nan),
            rollout_s=None if self.rollout_s is None else aligned(self.rollout_s, np.nan),
        )
