"""Which untried candidate is worth a probe: constrained expected improvement per second of probing.

The posterior of each candidate's bytes and seconds is its prediction, corrected by the probes so far.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autofit.forecast.predictions import Predictions
from autofit.recipe.keys import TIERS
from autofit.tuning.candidates import Floats, Grid, Mask, Observation
from autofit.tuning.comparison import EDGE_EQUAL_FRAC, EQUAL_FRAC, LEANER_FRAC, PROBE_NOISE, edge_bytes, is_as_good
from autofit.tuning.frontier import FASTEST, SLOWER_FRAC, Costs, Goal, band_bytes, undominated
from autofit.tuning.residual import Places, Prior, Residual, Similarity, expected_gain, mixed, probability_below

Told = tuple[int, float, bool]  # (candidate, log of the measured value, whether the value is a lower bound)
_LEAST_SHARE = 1e-3  # share of a step's seconds: a shorter phase gets no posterior of its own
_NO_EFFECT = 0.01  # a knob has no predicted effect if the means of its values differ by less (log difference)
_MOST_DATA = 24  # probes given to the Gaussian processes: the best and the latest; older, worse ones add little
# Prior of the prediction error: spread over the knobs (itself uncertain by the factor e^doubt), and shared offset.
_STEP = Prior(spread=0.24, doubt=0.8, offset=0.3, noise=PROBE_NOISE)
_USED = Prior(spread=0.19, doubt=0.8, offset=0.25, noise=0.01)
# Where the prediction is what a probe's own simulation says of each phase: sizes between two that were simulated are
# within 0.6 % in seconds, and an allocator needs 0.2 to 0.5 % more than the live tensors (experiments/LOG.md).
_SURE = 0.004
_STEP_SURE = Prior(spread=_SURE, doubt=0.1, offset=_SURE, noise=_SURE)
# Without a prediction the whole logarithm is a residual, about the mean of the measured values.
_STEP_ALONE = Prior(spread=0.7, doubt=0.8, offset=1.0, noise=PROBE_NOISE)
_USED_ALONE = Prior(spread=0.5, doubt=0.8, offset=1.0, noise=0.01)


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """One measured quantity: its prior mean per candidate (logarithms), and the similarity of candidates (kernel)."""

    expected: Floats
    similarity: Similarity

    def about_mean_of(self, told: list[Told]) -> "_Part":
        """The part with the mean of `told` as the prior mean of every candidate, if predictions are missing."""
        return replace(self, expected=np.full_like(self.expected, np.mean([v for _, v, _ in told]) if told else 0.0))

    def posterior(self, prior: Prior, told: list[Told], pending: Sequence[int]) -> Residual:
        """Posterior given `told`, treating each pending probe as if it returned its current expectation.

        This is the kriging believer.
        """
        found = self._after(prior, told)
        if not pending:
            return found
        places = np.array(pending, dtype=np.intp)
        imagined = found.mean_at(places) + self.expected[places]
        return self._after(prior, [*told, *((p, float(v), False) for p, v in zip(pending, imagined, strict=True))])

    def _after(self, prior: Prior, told: list[Told]) -> Residual:
        places = np.array([place for place, _, _ in told], dtype=np.intp)
        values = np.array([value for _, value, _ in told]) - self.expected[places]
        return Residual(self.similarity, prior, places, values, np.array([bound for _, _, bound in told], dtype=bool))


class Model:
    """Log-normal posterior of every candidate of `grid`. `learn` replaces all earlier observations.

    If the predictions and every probe separate the rollout's seconds from the update's, each gets a Gaussian process
    of its own: each depends on fewer knobs than their sum, and the sum alone loses half of the information of a probe.
    """

    def __init__(self, grid: Grid, predictions: Predictions | None, *, target_bytes: int | None) -> None:
        self._grid = grid
        self._target = math.log(target_bytes) if target_bytes is not None else math.inf
        self.predicted = predictions is not None
        self.sure = predictions is not None and predictions.sure
        log_step = log_used = np.zeros(len(grid))
        phases: tuple[Floats, ...] = ()
        if predictions is not None:
            log_step = _filled(grid, np.log(predictions.step_s))
            log_used = _filled(grid, np.log(predictions.device_used_bytes))
            if predictions.rollout_s is not None and _is_split(predictions.rollout_s, predictions.step_s):
                log_rollout = _filled(grid, np.log(predictions.rollout_s))
                rollout_s = np.exp(log_rollout)
                phases = log_rollout, np.log(np.maximum(np.exp(log_step) - rollout_s, _LEAST_SHARE * rollout_s))
        self._used, self._step = self._part(log_used), self._part(log_step, log_used)
        self._phases = tuple(self._part(logs, log_used, slight=_without_effect(grid, logs)) for logs in phases)
        self._step_prior, self._used_prior = (_STEP, _USED) if self.predicted else (_STEP_ALONE, _USED_ALONE)
        if self.sure:
            self._step_prior = _STEP_SURE
        self.learn([], ())

    def _part(self, expected: Floats, *axes: Floats, slight: Collection[int] = ()) -> _Part:
        octaves = [logs / math.log(2) for logs in (expected, *axes) if np.ptp(logs)]
        return _Part(expected, Similarity(self._grid, octaves, slight=slight, trends=not self.predicted))

    @property
    def log_step(self) -> Floats:
        """Prior mean of the logarithm of the step's seconds (N,), before correction by probes."""
        return self._step.expected

    @property
    def log_used(self) -> Floats:
        """Prior mean of the logarithm of the device-used bytes (N,), before correction by probes."""
        return self._used.expected

    def learn(self, observations: Sequence[Observation], pending: Sequence[int]) -> None:
        """Condition on `observations`, and on `pending` probes as if they returned their expectation."""
        kept = _informative(observations)
        timed = [(o, o.step_s) for o in kept if o.step_s is not None]
        held = [(o.place, math.log(o.device_used_bytes), o.at_least) for o in kept if o.device_used_bytes]
        steps = [(o.place, math.log(step_s), False) for o, step_s in timed]
        if not self.predicted:
            self._step, self._used = self._step.about_mean_of(steps), self._used.about_mean_of(held)
        self.used = self._used.posterior(self._used_prior, held, pending)
        told = {self._step: steps}
        if self._phases and all(o.rollout_s and o.rollout_s < step_s for o, step_s in timed):
            split = [(o.place, o.rollout_s or 0.0, step_s) for o, step_s in timed]
            rollouts = [(place, math.log(rollout_s), False) for place, rollout_s, _ in split]
            updates = [(place, math.log(step_s - rollout_s), False) for place, rollout_s, step_s in split]
            told = dict(zip(self._phases, (rollouts, updates), strict=True))
        self._seconds = [
            (part.expected, part.posterior(self._step_prior, each, pending)) for part, each in told.items()
        ]

    def _log_step_under_each(self, places: Places) -> tuple[Floats, Floats]:
        """(mean, standard deviation) of the log step time, each (settings, P), under each kept hyperparameter setting.

        The log of a sum of log-normals, to first order in the spreads.
        """
        beliefs = [(expected[places], *residual.each(places)) for expected, residual in self._seconds]
        means = np.array([expected + mean for expected, mean, _ in beliefs])
        spreads = np.array([spread for _, _, spread in beliefs])
        log_sum = np.logaddexp.reduce(means)
        shares = np.exp(means - log_sum)
        return log_sum, np.sqrt(((shares * spreads) ** 2).sum(axis=0))

    def log_step_at(self, places: Places) -> tuple[Floats, Floats]:
        """(mean, standard deviation) of the logarithm of the step's seconds."""
        return mixed(*self._log_step_under_each(places))

    def log_used_at(self, places: Places) -> tuple[Floats, Floats]:
        """(mean, standard deviation) of the logarithm of the device-used bytes."""
        mean, spread = self.used.at(places)
        return mean + self.log_used[places], spread

    def expected(self, places: Places) -> tuple[Floats, Floats]:
        """(seconds of a step, device-used bytes) of each of `places`: their medians."""
        return np.exp(self.log_step_at(places)[0]), np.exp(self.log_used_at(places)[0])

    def fits_at(self, places: Places) -> Floats:
        """The probability that each of `places` fits the target."""
        if math.isinf(self._target) or (not self.predicted and not self.used.informed):
            return np.ones(len(places))
        if self.sure:  # the used bytes of a probe include spare room
            return np.asarray(probability_below(self._target, self.log_used[places], np.full(len(places), _SURE)))
        mean, spread = self.used.each(places)
        return np.asarray(probability_below(self._target, mean + self.log_used[places], spread).mean(axis=0))

    def gain_at(self, places: Places, best: float, *, wider: float = 1.0) -> Floats:
        """Expected improvement (P,), in log seconds, of each of `places` below `best`, the log of a step's seconds."""
        mean, spread = self._log_step_under_each(places)
        return np.asarray(expected_gain(best, mean, wider * spread).mean(axis=0))


def _is_split(rollout_s: Floats, step_s: Floats) -> bool:
    """True if both phases take a noticeable share of the step in every candidate with a known split."""
    share = (rollout_s / step_s)[~np.isnan(rollout_s)]
    return bool(len(share) and share.min() > _LEAST_SHARE and share.max() < 1 - _LEAST_SHARE)


def _without_effect(grid: Grid, logs: Floats) -> set[int]:
    """The knobs (columns of the grid) that leave `logs` unchanged."""
    means = ([logs[codes == one].mean() for one in np.unique(codes)] for codes in grid.codes.T)
    return {column for column, of_values in enumerate(means) if np.ptp(of_values) < _NO_EFFECT}


def _filled(grid: Grid, logs: Floats) -> Floats:
    """`logs`, with each NaN filled by a least-squares additive fit over the knobs' values."""
    known = ~np.isnan(logs)
    if known.all():
        return logs
    if not known.any():
        return np.zeros(len(logs))
    columns = [np.ones((len(grid), 1))]
    columns += [grid.codes[:, [k]] == np.arange(1, len(values)) for k, values in enumerate(grid.choices)]
    table = np.hstack(columns).astype(np.float64)
    effects = np.linalg.lstsq(table[known], logs[known], rcond=None)[0]
    return np.where(known, logs, table @ effects)


def _informative(observations: Sequence[Observation]) -> list[Observation]:
    if len(observations) <= _MOST_DATA:
        return list(observations)
    best = sorted((o for o in observations if o.fits and o.step_s is not None), key=lambda o: o.step_s or 0.0)
    kept = {o.place: o for o in [*best[: _MOST_DATA // 2], *observations[-_MOST_DATA // 2 :]]}
    return list(kept.values())


_POOL = 512  # candidates with a full posterior; predictions rank the others lower
_NEAR = 128  # candidates added to the pool because they differ from the best so far in the fewest knobs
_IN_BAND = 128  # candidates added for goal utilisation: the fastest predicted in its band, narrower than `_GUESS`
_GUESS = 0.3  # assumed prediction error (standard deviation of the logarithm) while the pool is chosen
_STARTUP_S, _PROBE_STEPS = 15.0, 3.0  # of a probe: seconds before its first step, and steps
_OOM_COST = 0.01  # cost of an OOM, as a log difference: it may tell less than a fit, and may hang a card
_CURIOSITY = 2.0  # factor on the posterior spread for a proposal: small effects here hide large ones elsewhere
_DOUBT = 1.5  # factor on the posterior spread for the expected gain that may end the search
_FIRST_FIT = 1.0  # worth of the first fit, as a log difference
_HOPELESS = 0.1  # a tier without a fit is left for a lower one if no candidate of it is likelier to fit


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A candidate, and the expected gain of the best candidate of its pool, as a share of the step's seconds.

    `fits` is the largest probability to fit, `suits` the same for goal utilisation's band, and `settled` whether a
    trial did already. `leaner`: the candidate is expected to be as fast as the fastest so far, with less memory.
    """

    place: int
    gain_frac: float
    fits: float
    suits: float
    settled: bool
    leaner: bool = False


def propose(
    model: Model, grid: Grid, observations: Sequence[Observation], pending: Sequence[int], free: Mask, *,
    goal: Goal, target_bytes: int | None, min_gain_frac: float,
) -> Proposal | None:  # fmt: skip
    """The best candidate of the highest tier that has one which may fit; None if all candidates are taken.

    A tier with a fit is searched to its end before a lower one: no lower tier can win then. At any tier all compete.
    """
    tiers = np.zeros_like(grid.tiers) if goal == "speed-at-any-tier" else grid.tiers
    fallback: Proposal | None = None
    for tier in range(len(TIERS)):
        places = np.flatnonzero(free & (tiers == tier))
        if not len(places):
            continue
        rivals = [o for o in observations if o.fits and o.step_s is not None and tiers[o.place] <= tier]
        imagined = [p for p in pending if tiers[p] <= tier]
        stage = _Stage(model, grid, rivals, imagined, goal=goal, target_bytes=target_bytes)
        found = stage.best(places)
        if found.settled and found.gain_frac < min_gain_frac and goal in FASTEST:
            return stage.leaner(places, found)
        if found.settled or found.suits >= _HOPELESS:
            return found
        if fallback is None or _better(found, fallback, measured=bool(rivals), min_gain_frac=min_gain_frac):
            fallback = found
    return fallback


def _better(found: Proposal, other: Proposal, *, measured: bool, min_gain_frac: float) -> bool:
    """True if the proposal of a lower tier is better than `other`, when both tiers are unlikely to suit."""
    if not measured:
        return found.fits > other.fits
    return other.gain_frac < min_gain_frac and found.gain_frac > other.gain_frac


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
        self._band = (0.0, math.inf) if target_bytes is None else band_bytes(target_bytes)
        low, high = self._band
        self._in_band = [o for o in rivals if low <= (o.device_used_bytes or 0) <= high]

    @property
    def _for_band(self) -> bool:
        return self._goal == "utilisation" and self._target is not None

    def best(self, places: Places) -> Proposal:
        pool = self._pool(places)
        fits = self._model.fits_at(pool)
        step, spread = self._model.log_step_at(pool)
        gain = self._gain(pool, step, _CURIOSITY * spread, fits, wider=_CURIOSITY)
        seconds = _STARTUP_S + _PROBE_STEPS * np.exp(np.clip(step, -20, 20))
        worth = fits * gain - (1 - fits) * _OOM_COST
        chosen = int(np.argmax(np.where(worth > 0, worth / seconds, worth * seconds)))
        return Proposal(
            place=self._plainest(int(pool[chosen]), places),
            gain_frac=float(-np.expm1(-(fits * self._gain(pool, step, _DOUBT * spread, fits, wider=_DOUBT)).max())),
            fits=float(fits.max()),
            suits=float((self._within_band(pool) if self._for_band else fits).max()),
            settled=bool(self._in_band) if self._for_band else bool(len(self._points)),
        )

    def _plainest(self, chosen: int, places: Places) -> int:
        """That of `places` with the fewest of the changes of `chosen` that is expected to be as good (`is_as_good`)."""
        told = self._model.sure or (self._grid.tiers[chosen] and self._model.predicted)
        if self._goal not in FASTEST or not told:
            return chosen
        codes = self._grid.codes
        near = places[((codes[places] == codes[chosen]) | (codes[places] == codes[0])).all(axis=1)]
        steps, used = self._model.expected(near)
        fits, own = self._model.fits_at(near), int(np.flatnonzero(near == chosen)[0])
        cost = (float(steps[own]), float(used[own]))
        able = [i for i in range(len(near)) if fits[i] >= min(_LIKELY, fits[own])
                and is_as_good((float(steps[i]), float(used[i])), cost)]  # fmt: skip
        changes = (codes[near] != codes[0]).sum(axis=1)
        return int(near[min(able, key=lambda i: (int(changes[i]), float(steps[i])))])

    def leaner(self, places: Places, found: Proposal) -> Proposal:
        """`found`, or a candidate of `places` that would win against the fastest so far by the rule of `equals`."""
        if not self._model.predicted or not self._rivals or not len(places):
            return found
        best = min(self._rivals, key=lambda o: o.step_s or 0.0)
        most = edge_bytes(self._target)
        used_bytes, best_s = best.device_used_bytes or 0.0, best.step_s or 0.0
        at_edge = most is not None and used_bytes > most
        pool = self._pool(places)
        likely = pool[self._model.fits_at(pool) >= 0.5]
        step, used = self._model.log_step_at(likely)[0], self._model.log_used_at(likely)[0]
        aim = most if at_edge and most is not None else (1 - LEANER_FRAC) * used_bytes
        as_fast = math.log(best_s * (1 + (EDGE_EQUAL_FRAC if at_edge else EQUAL_FRAC)))
        known = [
            o for o in self._rivals if (o.device_used_bytes or 0.0) <= aim and math.log(o.step_s or 1.0) <= as_fast
        ]
        if self._model.sure and (known or not at_edge):  # spare bytes kept by a probe are not predicted
            return found
        if known:  # it wins already; another one would have to be leaner than the leanest
            aim = min(aim, (1 - LEANER_FRAC) * min(o.device_used_bytes or 0.0 for o in known))
        able = np.flatnonzero((step <= as_fast) & (used <= math.log(max(1.0, aim))))
        if not len(able):
            return found
        chosen = able[np.argmin(step[able] if at_edge and not known else used[able])]
        return replace(found, place=int(likely[chosen]), leaner=True)

    def _pool(self, places: Places) -> Places:
        """The most promising of `places`, ranked by prediction plus the bias that all candidates share."""
        if len(places) <= _POOL:
            return places
        model = self._model
        sample = places[:: max(1, len(places) // 64)]
        step = model.log_step[places] + float(np.median(model.log_step_at(sample)[0] - model.log_step[sample]))
        used, guess = model.log_used[places], _SURE if model.sure else _GUESS
        if not model.sure:
            used = used + float(np.median(model.used.mean_at(sample)))
        reference = self._points[:, 0].min() if len(self._points) else float(np.median(step))
        promise = expected_gain(reference, step, np.full(len(places), guess))
        if self._target is not None and model.predicted:
            most = math.log(self._band[1] if self._for_band else self._target)
            promise = promise * probability_below(most, used, np.full(len(places), guess))
            if self._for_band:
                low = math.log(self._band[0])
                promise = promise * (1 - probability_below(low, used, np.full(len(places), guess)))
        chosen = np.argpartition(-promise, _POOL)[:_POOL]
        if self._best_place is not None:
            codes = self._grid.codes
            differing = (codes[places] != codes[self._best_place]).sum(axis=1)
            chosen = np.union1d(chosen, np.argpartition(differing, _NEAR)[:_NEAR])
        if self._for_band:
            low, high = map(math.log, self._band)
            outside = np.maximum(0.0, np.maximum(low - used, used - high))
            chosen = np.union1d(chosen, np.lexsort((step, outside))[:_IN_BAND])
        return np.asarray(places[chosen], dtype=np.intp)

    def _gain(self, pool: Places, step: Floats, spread: Floats, fits: Floats, *, wider: float = 1.0) -> Floats:
        """Expected gain of each candidate of the pool if it fits, as a log difference (P,)."""
        if self._goal == "memory":
            return self._memory_gain(pool, step, spread, fits)
        if self._for_band:
            return self._band_gain(pool, step, spread)
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

    def _band_gain(self, pool: Places, step: Floats, spread: Floats) -> Floats:
        """Expected gain in log seconds, times the probability that the used share of the target is in the band.

        Before the first candidate in the band, and where none is likely to be: how much nearer to it from below.
        """
        within = self._within_band(pool)
        if self._in_band:
            best = min(math.log(o.step_s or 1.0) for o in self._in_band)
            return expected_gain(best, step, spread) * within
        if within.max() >= _HOPELESS:
            return expected_gain(_reference(step, within), step, spread) * within
        low, high = map(math.log, self._band)
        used, doubt = self._model.log_used_at(pool)
        below = [u for u in self._points[:, 1] if u < low]
        nearer = np.minimum(used, low) - max(below, default=float(used.min()) - _FIRST_FIT)
        return np.asarray(np.maximum(0.0, nearer) * probability_below(high, used, doubt))

    def _within_band(self, pool: Places) -> Floats:
        """The probability that each candidate of the pool uses 75 to 85 % of the target."""
        low, high = map(math.log, self._band)
        used, doubt = self._model.log_used_at(pool)
        return np.asarray(probability_below(high, used, doubt) - probability_below(low, used, doubt))


def _reference(expected: Floats, likely: Floats) -> float:
    """Reference value (log seconds or log bytes) before the first fit.

    Deliberately bad, so that any first fit counts as a large gain.
    """
    return float(expected[likely >= 0.5 * likely.max()].max()) + _FIRST_FIT


# ----------------------------------------------------------------------- places on the front that no probe has reached

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
    """True if it needs clearly less than the `least` of all faster ones, and beats every trial of at most its bytes."""
    as_good = any(other <= used and other_s <= (1 + EDGE_EQUAL_FRAC) * step_s for other_s, other in probed)
    return least < math.inf and used <= (1 - LEANER_FRAC) * least and not as_good


def _is_ahead(step_s: float, used: float, least: float, probed: Costs) -> bool:
    """True if it dominates a trial undominated by faster ones, by more in one figure than the two may be off."""
    return any(
        step_s <= other_s and used <= other < least
        and (step_s <= other_s / (1 + EDGE_EQUAL_FRAC) or used <= (1 - LEANER_FRAC) * other)
        for other_s, other in probed
    )  # fmt: skip


def _first_fronts(model: Model, places: Places) -> Places:
    """The subset of `places` on the front of the predictions as they are, on the next one once it is left out, ..."""
    left, kept = places, np.zeros(0, dtype=np.intp)
    while len(left) and len(kept) < _MOST:
        costs = list(zip(model.log_step[left].tolist(), model.log_used[left].tolist(), strict=True))
        front = left[undominated(costs)]
        kept, left = np.concatenate([kept, front]), left[~np.isin(left, front)]
    return kept[:_MOST]
