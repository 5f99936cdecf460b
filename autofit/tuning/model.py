"""Posterior of each candidate's bytes and seconds: its prediction, corrected by the probes so far."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autofit.forecast.predictions import Predictions
from autofit.tuning.candidates import Floats, Grid, Observation
from autofit.tuning.comparison import PROBE_NOISE
from autofit.tuning.residual import Places, Prior, Residual, Similarity, expected_gain, mixed, probability_below

Told = tuple[int, float, bool]  # (candidate, log of the measured value, whether the value is a lower bound)
_LEAST_SHARE = 1e-3  # share of a step's seconds: a shorter phase gets no posterior of its own
_NO_EFFECT = 0.01  # a knob has no predicted effect if the means of its values differ by less (log difference)
_MOST_DATA = 24  # probes given to the Gaussian processes: the best and the latest; older, worse ones add little
# Prior of the prediction error: spread over the knobs (itself uncertain by the factor e^doubt), and shared offset.
_STEP = Prior(spread=0.24, doubt=0.8, offset=0.3, noise=PROBE_NOISE)
_USED = Prior(spread=0.19, doubt=0.8, offset=0.25, noise=0.01)
# Without a prediction the whole logarithm is a residual, about the mean of the measured values.
_STEP_ALONE = Prior(spread=0.7, doubt=0.8, offset=1.0, noise=PROBE_NOISE)
_USED_ALONE = Prior(spread=0.5, doubt=0.8, offset=1.0, noise=0.01)


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """One measured quantity: its prior mean per candidate (logarithms), and the similarity of candidates (kernel)."""

    expected: Floats
    similarity: Similarity

    def about_mean_of(self, told: list[Told]) -> "_Part":
        """The part with the mean of `told` as the prior mean of every candidate, for use without predictions."""
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
        self.learn([], ())

    def _part(self, expected: Floats, *axes: Floats, slight: Collection[int] = ()) -> _Part:
        octaves = [logs / math.log(2) for logs in (expected, *axes) if np.ptp(logs)]
        return _Part(expected, Similarity(self._grid, octaves, slight=slight, trends=not self.predicted))

    @property
    def log_step(self) -> Floats:
        """Prior mean of the logarithm of the step's seconds (N,), without correction by probes."""
        return self._step.expected

    @property
    def log_used(self) -> Floats:
        """Prior mean of the logarithm of the device-used bytes (N,), without correction by probes."""
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
        mean, spread = self.used.each(places)
        return np.asarray(probability_below(self._target, mean + self.log_used[places], spread).mean(axis=0))

    def gain_at(self, places: Places, best: float, *, wider: float = 1.0) -> Floats:
        """Expected improvement (P,), in log seconds, of each of `places` below `best`, the log of a step's seconds."""
        mean, spread = self._log_step_under_each(places)
        return np.asarray(expected_gain(best, mean, wider * spread).mean(axis=0))


def _is_split(rollout_s: Floats, step_s: Floats) -> bool:
    """Whether both phases take a noticeable share of the step in every candidate with a known split."""
    share = (rollout_s / step_s)[~np.isnan(rollout_s)]
    return bool(len(share) and share.min() > _LEAST_SHARE and share.max() < 1 - _LEAST_SHARE)


def _without_effect(grid: Grid, logs: Floats) -> set[int]:
    """The knobs (columns of the grid) without effect on `logs`."""
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
