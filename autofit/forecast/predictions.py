"""What is expected of every candidate before the first probe: plain arrays, whoever made them."""

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from autofit.errors import ConfigError
from autofit.space.space import Candidate

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Predictions:
    """One entry a candidate, in the same order.

    `floor_bytes` is a lower bound of device-used (live tensors and context): below it the candidate certainly does not
    fit, so it is never probed. `device_used_bytes` and `step_s` are what a probe is expected to say; `step_s` is per
    optimizer step at the recipe's effective batch, so that candidates compare. They may be wrong: the search learns by
    how much. They may be nan where nothing is known of a candidate, and the floor is then 0. `rollout_s` is what of
    `step_s` passes before the update; with it, a probe that says both corrects each by itself.
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
                raise ConfigError(f"predictions need one {field.name} a candidate ({count}); got shape {values.shape}")
            if not field.name.startswith("floor") and not (values[~np.isnan(values)] > 0).all():
                raise ConfigError(f"predicted {field.name} must be above zero, or nan where nothing is known")

    def of(self, candidates: tuple[Candidate, ...]) -> "Predictions":
        """The same predictions for `candidates`, in their order; nan for those of which nothing is known."""
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
