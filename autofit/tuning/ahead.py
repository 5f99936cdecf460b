"""Which candidates belong on the front although no probe has reached them.

A prediction is corrected by the probes of its study (`tuning.model`). It joins the front where it dominates a trial of
it, clearly in seconds or bytes, or where it needs clearly less memory than whatever is faster. Both shares are the
errors of two figures of one kind (`tuning.comparison`): a smaller difference is none that is known.
"""

import math
from collections.abc import Sequence

import numpy as np

from autofit.tuning.candidates import Mask, Observation
from autofit.tuning.comparison import EDGE_EQUAL_FRAC, LEANER_FRAC
from autofit.tuning.foreseen import Costs, undominated
from autofit.tuning.model import Model
from autofit.tuning.residual import Places

_MOST = 256  # candidates whose predictions are corrected: those on the first fronts of the predictions as they are
_LIKELY = 0.5  # the least probability to fit


def places_ahead(
    model: Model, observations: Sequence[Observation], pending: Sequence[int], free: Mask
) -> list[tuple[int, float, float]]:
    """(index, seconds, bytes) of the `free` candidates that belong on the front, fastest first.

    A `pending` probe counts as if it returned its expectation.
    """
    model.learn(observations, pending)
    pool = _first_fronts(model, np.flatnonzero(free))
    if not len(pool):
        return []
    pool = pool[model.fits_at(pool) >= _LIKELY]
    costs = [(o.step_s, o.device_used_bytes) for o in observations if o.fits and o.step_s and o.device_used_bytes]
    costs += _expected(model, np.array(pending, dtype=np.intp)) if pending else []
    probed = [costs[place] for place in undominated(costs)]
    expected = _expected(model, pool)
    return [(int(pool[place]), *expected[place]) for place in _joining(probed, expected)]


def _expected(model: Model, places: Places) -> list[tuple[float, float]]:
    if not len(places):
        return []
    steps, used = model.expected(places)
    return list(zip(steps.tolist(), used.tolist(), strict=True))


def _joining(probed: Costs, expected: Costs) -> list[int]:
    """The indices of those `expected` costs that join the front `probed`, fastest first."""
    found: list[int] = []
    least = math.inf
    for step_s, used, place in sorted([(*c, -1) for c in probed] + [(*c, i) for i, c in enumerate(expected)]):
        if used >= least:
            continue
        if place < 0 or _is_leaner(step_s, used, least, probed) or _is_ahead(step_s, used, least, probed):
            found += [place] if place >= 0 else []
            least = used
    return found


def _is_leaner(step_s: float, used: float, least: float, probed: Costs) -> bool:
    """Whether it needs clearly less than the `least` of all that is faster, and no trial of as much is as fast."""
    as_good = any(other <= used and other_s <= (1 + EDGE_EQUAL_FRAC) * step_s for other_s, other in probed)
    return least < math.inf and used <= (1 - LEANER_FRAC) * least and not as_good


def _is_ahead(step_s: float, used: float, least: float, probed: Costs) -> bool:
    """Whether it dominates a trial that nothing faster does, by more in one figure than the two may be off."""
    return any(
        step_s <= other_s and used <= other < least
        and (step_s <= other_s / (1 + EDGE_EQUAL_FRAC) or used <= (1 - LEANER_FRAC) * other)
        for other_s, other in probed
    )  # fmt: skip


def _first_fronts(model: Model, places: Places) -> Places:
    """Those of `places` on the front of the predictions as they are, on the next one once these are left out, ..."""
    left, kept = places, np.zeros(0, dtype=np.intp)
    while len(left) and len(kept) < _MOST:
        costs = list(zip(model.log_step[left].tolist(), model.log_used[left].tolist(), strict=True))
        front = left[undominated(costs)]
        kept, left = np.concatenate([kept, front]), left[~np.isin(left, front)]
    return kept[:_MOST]
