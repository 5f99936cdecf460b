"""Which untried candidate is worth a probe: constrained expected improvement per second of probing."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autofit.recipe.keys import TIERS
from autofit.tuning.frontier import BAND, SLOWER_FRAC, Goal
from autofit.tuning.grid import Floats, Grid, Mask
from autofit.tuning.ledger import Observation
from autofit.tuning.model import Model
from autofit.tuning.residual import Places, expected_gain, probability_below

_POOL = 512  # candidates with a full posterior; predictions rank the others lower
_NEAR = 128  # candidates added to the pool because they differ from the best so far in the fewest knobs
_GUESS = 0.3  # assumed prediction error (standard deviation of the logarithm) while the pool is chosen
_OOM_COST = 0.01  # cost of an OOM, as a log difference: it may tell less than a fit, and may hang a card
_CURIOSITY = 2.0  # factor on the posterior spread for a proposal: small effects here hide large ones elsewhere
_DOUBT = 1.5  # factor on the posterior spread for the expected gain that may end the search
_FIRST_FIT = 1.0  # worth of the first fit, as a log difference
_LIKELY = 0.5  # after OOMs and no fit: a tier with a lower best fit probability is skipped if another tier has more
_HOPELESS = 0.1  # the same threshold in all other cases, for a tier without a fit


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A candidate, and the expected gain of the best candidate of its pool, as a share of the step's seconds."""

    place: int
    gain_frac: float
    fits: float
    anything_fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeCost:
    """Seconds of a probe: its start plus `steps` times the seconds of a step."""

    startup_s: float = 15.0
    steps: float = 3.0


def propose(
    model: Model, grid: Grid, observations: Sequence[Observation], pending: Sequence[int], free: Mask, *,
    goal: Goal, target_bytes: int | None, cost: ProbeCost, min_gain_frac: float,
) -> Proposal | None:  # fmt: skip
    """The best candidate of the highest tier with a worthwhile gain; None if no candidate is free."""
    fallback: Proposal | None = None
    measured = any(o.fits for o in observations)
    unsure = not measured and any(not o.fits for o in observations)
    for tier in range(len(TIERS)):
        places = np.flatnonzero(free & (grid.tiers == tier))
        if not len(places):
            continue
        rivals = [o for o in observations if o.fits and o.step_s is not None and grid.tiers[o.place] <= tier]
        imagined = [p for p in pending if grid.tiers[p] <= tier]
        stage = _Stage(model, grid, rivals, imagined, goal=goal, target_bytes=target_bytes)
        found = stage.best(places, cost)
        enough = _LIKELY if unsure else _HOPELESS
        worthwhile = found.gain_frac >= min_gain_frac if found.anything_fits else found.fits >= enough
        if worthwhile:
            return found
        better = fallback is None or (found.fits > fallback.fits if unsure else found.gain_frac > fallback.gain_frac)
        fallback = found if better else fallback
    return fallback


class _Stage:
    """The choice within one tier, compared with the measured fits of this tier and of higher tiers."""

    def __init__(
        self, model: Model, grid: Grid, rivals: Sequence[Observation], imagined: Sequence[int], *, goal: Goal,
        target_bytes: int | None,
    ) -> None:  # fmt: skip
        self._model, self._grid, self._goal, self._target = model, grid, goal, target_bytes
        self._rivals = list(rivals)
        places = np.array(imagined, dtype=np.intp)
        likely = places[model.fits_at(places) >= 0.5] if len(places) else places
        steps, used = model.log_step_at(likely)[0], model.log_used_at(likely)[0]
        measured = [(math.log(o.step_s or 1.0), math.log(o.device_used_bytes or 1.0)) for o in rivals]
        self._points = np.array([*measured, *zip(steps, used, strict=True)]).reshape(-1, 2)
        self._best_place = min(rivals, key=lambda o: o.step_s or 0.0).place if rivals else None

    def best(self, places: Places, cost: ProbeCost) -> Proposal:
        pool = self._pool(places)
        fits = self._model.fits_at(pool)
        step, spread = self._model.log_step_at(pool)
        gain = self._gain(pool, step, _CURIOSITY * spread, fits, wider=_CURIOSITY)
        seconds = cost.startup_s + cost.steps * np.exp(np.clip(step, -20, 20))
        worth = fits * gain - (1 - fits) * _OOM_COST
        chosen = int(np.argmax(np.where(worth > 0, worth / seconds, worth * seconds)))
        return Proposal(
            place=int(pool[chosen]),
            gain_frac=float(-np.expm1(-(fits * self._gain(pool, step, _DOUBT * spread, fits, wider=_DOUBT)).max())),
            fits=float(fits.max()),
            anything_fits=bool(len(self._points)),
        )

    def _pool(self, places: Places) -> Places:
        """The most promising of `places`, ranked by prediction plus the bias that all candidates share."""
        if len(places) <= _POOL:
            return places
        model = self._model
        sample = places[:: max(1, len(places) // 64)]
        step = model.log_step[places] + float(np.median(model.log_step_at(sample)[0] - model.log_step[sample]))
        used = model.log_used[places] + float(np.median(model.used.mean_at(sample)))
        reference = self._points[:, 0].min() if len(self._points) else float(np.median(step))
        promise = expected_gain(reference, step, np.full(len(places), _GUESS))
        if self._target is not None and model.predicted:
            promise = promise * probability_below(math.log(self._target), used, np.full(len(places), _GUESS))
        chosen = np.argpartition(-promise, _POOL)[:_POOL]
        if self._best_place is not None:
            codes = self._grid.codes
            differing = (codes[places] != codes[self._best_place]).sum(axis=1)
            chosen = np.union1d(chosen, np.argpartition(differing, _NEAR)[:_NEAR])
        return np.asarray(places[chosen], dtype=np.intp)

    def _gain(self, pool: Places, step: Floats, spread: Floats, fits: Floats, *, wider: float = 1.0) -> Floats:
        """Expected gain of each candidate of the pool if it fits, as a log difference (P,)."""
        if self._goal == "memory":
            return self._memory_gain(pool, step, spread, fits)
        if self._goal == "utilisation" and self._target is not None:
            return self._band_gain(pool, step, spread, fits)
        best = self._points[:, 0].min() if len(self._points) else _reference(step, fits)
        return self._model.gain_at(pool, best, wider=wider)

    def _memory_gain(self, pool: Places, step: Floats, spread: Floats, fits: Floats) -> Floats:
        """Expected gain in log bytes, times the probability that the step is at most 10 % slower than the fastest."""
        slower = math.log1p(SLOWER_FRAC)
        reachable = step[fits >= 0.5]
        fastest = min([*self._points[:, 0], *(reachable.min(keepdims=True) if len(reachable) else [])], default=0.0)
        quick = self._points[self._points[:, 0] <= fastest + slower] if len(self._points) else self._points
        used, doubt = self._model.log_used_at(pool)
        best = quick[:, 1].min() if len(quick) else _reference(used, fits)
        return expected_gain(best, used, doubt) * probability_below(fastest + slower, step, spread)

    def _band_gain(self, pool: Places, step: Floats, spread: Floats, fits: Floats) -> Floats:
        """Expected gain in log seconds, times the probability that the used share of the target is in the band."""
        assert self._target is not None
        low, high = (math.log(share * self._target) for share in BAND)
        used, doubt = self._model.log_used_at(pool)
        within = probability_below(high, used, doubt) - probability_below(low, used, doubt)
        inside = self._points[(self._points[:, 1] >= low) & (self._points[:, 1] <= high)]
        best = inside[:, 0].min() if len(inside) else _reference(step, within)
        return expected_gain(best, step, spread) * within


def _reference(expected: Floats, likely: Floats) -> float:
    """Reference value (log seconds or log bytes) before the first fit.

    Deliberately bad, so that any first fit counts as a large gain.
    """
    return float(expected[likely >= 0.5 * likely.max()].max()) + _FIRST_FIT
