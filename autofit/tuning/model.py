"""What a candidate's bytes and seconds will be: its prediction, corrected by what the probes said so far."""

import math
from collections.abc import Sequence

import numpy as np

from autofit.tuning.grid import Floats, Grid
from autofit.tuning.ledger import Observation
from autofit.tuning.predictions import Predictions
from autofit.tuning.residual import Places, Prior, Residual, Similarity, expected_gain, probability_below

Told = tuple[int, float, bool]  # a candidate, the logarithm of what was measured, whether that is a lower bound
_MOST_DATA = 32  # probes that the processes are given: the best and the latest; what an older, worse one says is known
# How wrong a prediction may be over the knobs (unknown by the factor e^doubt), and in what all candidates share.
_STEP = Prior(spread=0.24, doubt=0.8, offset=0.3, noise=0.02)
_USED = Prior(spread=0.19, doubt=0.8, offset=0.25, noise=0.01)
# Without a prediction the whole logarithm is a residual, about the mean of what was measured.
_STEP_ALONE = Prior(spread=0.7, doubt=0.8, offset=1.0, noise=0.02)
_USED_ALONE = Prior(spread=0.5, doubt=0.8, offset=1.0, noise=0.01)


class Model:
    """Log-normal beliefs about every candidate of `grid`. `learn` replaces what it was told before."""

    def __init__(self, grid: Grid, predictions: Predictions | None, *, target_bytes: int | None) -> None:
        self._target = math.log(target_bytes) if target_bytes is not None else math.inf
        self.predicted = predictions is not None
        self.log_step = self.log_used = np.zeros(len(grid))
        if predictions is not None:
            self.log_step = _filled(grid, np.log(predictions.step_s))
            self.log_used = _filled(grid, np.log(predictions.device_used_bytes))
        axes = [values / math.log(2) for values in (self.log_step, self.log_used) if np.ptp(values)]
        self._similarity = Similarity(grid, axes, trends=not self.predicted)
        self._step_prior, self._used_prior = (_STEP, _USED) if self.predicted else (_STEP_ALONE, _USED_ALONE)
        self.learn([], ())

    def learn(self, observations: Sequence[Observation], pending: Sequence[int]) -> None:
        """Condition on `observations`, and on `pending` probes as if they said what is expected of them."""
        kept = _informative(observations)
        timed = [(o.place, math.log(o.step_s), False) for o in kept if o.step_s is not None]
        held = [(o.place, math.log(o.device_used_bytes), o.at_least) for o in kept if o.device_used_bytes]
        if not self.predicted:
            self.log_step = np.full_like(self.log_step, np.mean([v for _, v, _ in timed]) if timed else 0.0)
            self.log_used = np.full_like(self.log_used, np.mean([v for _, v, _ in held]) if held else 0.0)
        self.step = self._posterior(self._step_prior, self.log_step, timed, pending)
        self.used = self._posterior(self._used_prior, self.log_used, held, pending)

    def _posterior(self, prior: Prior, expected: Floats, told: list[Told], pending: Sequence[int]) -> Residual:
        posterior = self._of(prior, expected, told)
        if not pending:
            return posterior
        places = np.array(pending, dtype=np.intp)
        imagined = posterior.mean_at(places) + expected[places]
        return self._of(
            prior, expected, [*told, *((p, float(v), False) for p, v in zip(places, imagined, strict=True))]
        )

    def _of(self, prior: Prior, expected: Floats, told: list[Told]) -> Residual:
        places = np.array([place for place, _, _ in told], dtype=np.intp)
        values = np.array([value for _, value, _ in told]) - expected[places]
        return Residual(self._similarity, prior, places, values, np.array([bound for _, _, bound in told], dtype=bool))

    def log_step_at(self, places: Places) -> tuple[Floats, Floats]:
        """(mean, standard deviation) of the logarithm of the step's seconds."""
        mean, spread = self.step.at(places)
        return mean + self.log_step[places], spread

    def log_used_at(self, places: Places) -> tuple[Floats, Floats]:
        """(mean, standard deviation) of the logarithm of the device-used bytes."""
        mean, spread = self.used.at(places)
        return mean + self.log_used[places], spread

    def fits_at(self, places: Places) -> Floats:
        """The probability that each of `places` fits the target."""
        if math.isinf(self._target) or (not self.predicted and not self.used.informed):
            return np.ones(len(places))
        mean, spread = self.used.each(places)
        return np.asarray(probability_below(self._target, mean + self.log_used[places], spread).mean(axis=0))

    def gain_at(self, places: Places, best: float, *, wider: float = 1.0) -> Floats:
        """How far each of `places` is expected to come below `best`, the logarithm of a step's seconds."""
        mean, spread = self.step.each(places)
        return np.asarray(expected_gain(best, mean + self.log_step[places], wider * spread).mean(axis=0))


def _filled(grid: Grid, logs: Floats) -> Floats:
    """`logs`, with what is nan guessed from the rest: a sum over the knobs' values."""
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
