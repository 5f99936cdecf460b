"""Settings whose seconds on a simulated card are a lower bound: the optimizer's step on the host is not timed."""

import numpy as np

from autofit.forecast.predictions import Predictions
from autofit.forecast.structures import without
from autofit.recipe.clashes import OFFLOAD
from autofit.space.space import Space

WHY = "candidates without it fit, and the seconds of the host's step are not known"


def without_offload(space: Space) -> Space:
    """`space` without offloads to the host that the recipe does not have; `space` itself if it has none.

    The host's step would count for nothing, so a slower candidate would win.
    """
    place = next((i for i, knob in enumerate(space.knobs) if knob.name == OFFLOAD), None)
    offers = () if place is None else tuple(v for v in space.choices[place] if v != "none")
    gone = [(OFFLOAD, v) for v in offers if place is not None and v != space.baseline.values[place]]
    return without(space, gone) if gone else space


def has_room(predictions: Predictions, limit_bytes: int | None) -> bool:
    """Whether a candidate is predicted to fit."""
    used = predictions.device_used_bytes
    return bool((np.isfinite(used) & (used <= (np.inf if limit_bytes is None else limit_bytes))).any())
