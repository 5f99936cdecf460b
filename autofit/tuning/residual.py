"""A Gaussian process for few data: the residual of each probe against its prediction, over the knobs."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr, ndtr

from autofit.tuning.candidates import Floats, Grid, Mask

Places = NDArray[np.intp]
_OCTAVES = 2.0  # kernel length scale in octaves: a factor of 2 changes a residual little, a factor of 8 a lot
_UNLIKE = 0.4  # joint similarity of two candidates that differ in one unordered knob
_UNEVEN = 0.9  # prior spread of an axis' log weight: a few knobs cause most of a residual
_SLIGHT = 2.0  # prior log-weight penalty for knobs the prediction says have no effect
_PAIRS = 0.5  # prior strength of two-knob interactions, relative to the effects of single knobs
_JOINT = 0.3  # prior strength of the joint effect of all knobs, as a share of the spread
_DRAWS = 128  # hyperparameter settings drawn from the prior
_KEPT = 16  # settings resampled from the draws by their evidence
_PLENTY, _DRAWS_OF_PLENTY, _KEPT_OF_PLENTY = 24, 48, 5  # from 24 probes on the settings agree: use fewer
_MOVES = 6  # Metropolis steps of each kept setting, so that the settings fit the data better than prior draws
_STRIDE = 0.3  # standard deviation of a Metropolis step, in each logarithm
_DAMPING = 0.7  # damping of all expectation propagation sweeps but the first
_SWEEPS = 5  # sweeps of expectation propagation over the censored probes (OOM)


class Similarity:
    """Similarity of candidates along each axis, and along all axes jointly; 1 for a candidate with itself.

    `slight` are the grid's columns without predicted effect; `centres` is the prior mean of each axis' log weight
    relative to the others (axes,).
    """

    def __init__(
        self, grid: Grid, continuous: Sequence[Floats] = (), *, slight: Collection[int] = (), trends: bool = False
    ) -> None:
        self._codes = grid.codes
        self._continuous = [np.asarray(values, dtype=np.float64) for values in (*grid.derived, *continuous)]
        self._tables: list[tuple[int, Floats, Floats]] = []
        for column, octaves in enumerate(grid.octaves):
            used = np.unique(grid.codes[:, column])
            if len(used) > 1:
                alone, joint = _alike(len(grid.choices[column]), octaves, trends=trends)
                self._tables.append((column, alone, joint))
        columns = [-_SLIGHT if column in slight else 0.0 for column, _, _ in self._tables]
        self.centres = np.array([*columns, *[0.0] * len(self._continuous)])

    def between(self, rows: Places, columns: Places) -> tuple[Floats, Floats]:
        """(similarity along each axis (axes, R, C), joint similarity (R, C)) of `rows` with `columns`."""
        axes: list[Floats] = []
        joint = np.ones((len(rows), len(columns)))
        for column, alone, together in self._tables:
            places = self._codes[rows, column][:, None], self._codes[columns, column][None, :]
            axes.append(alone[places])
            joint *= together[places]
        for values in self._continuous:
            near = np.exp(-0.5 * ((values[rows][:, None] - values[columns][None, :]) / _OCTAVES) ** 2)
            axes.append(near)
            joint *= near
        return np.array(axes).reshape(len(self.centres), *joint.shape), joint


def _alike(count: int, octaves: Floats | None, *, trends: bool) -> tuple[Floats, Floats]:
    if octaves is None:
        return np.eye(count), np.where(np.eye(count) > 0, 1.0, _UNLIKE)
    near = np.exp(-0.5 * ((octaves[:, None] - octaves[None, :]) / _OCTAVES) ** 2)
    if not trends:  # half of a number's effect is smooth; the other half is the value's own (kernels, fragmentation)
        return 0.5 * near + 0.5 * np.eye(count), near
    centred = (octaves - octaves.mean()) / max(1e-9, np.ptp(octaves))  # a straight line in the logarithm
    return 0.5 * near + 2.0 * centred[:, None] * centred[None, :], near


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """Prior of a residual: `spread` over the knobs, itself uncertain by a factor of e^`doubt`.

    `offset` is the standard deviation of the error that all candidates share, `noise` that of one probe.
    """

    spread: float
    doubt: float
    offset: float
    noise: float

    def draw(self, centres: Floats, count: int) -> Floats:
        """(count, axes + 3): logs of the overall spread, each axis' weight, the pairs' weight and the joint weight."""
        drawn = np.random.default_rng(0).normal(size=(count, len(centres) + 3))
        return np.asarray(self._centre(centres) + drawn * self._scale(len(centres)), dtype=np.float64)

    def log_density(self, settings: Floats, centres: Floats) -> Floats:
        away = (settings - self._centre(centres)) / self._scale(len(centres))
        return np.asarray(-0.5 * (away**2).sum(axis=1))

    def _centre(self, centres: Floats) -> Floats:
        even = centres - 0.5 * np.log(max(1.0, np.exp(2 * centres).sum())) - _UNEVEN**2
        return np.array([np.log(self.spread), *even, np.log(_PAIRS), np.log(_JOINT)])

    def _scale(self, axes: int) -> Floats:
        return np.array([self.doubt, *[_UNEVEN] * axes, 0.5, 0.5])


class _Covariance:
    """Covariances under several hyperparameter settings at once."""

    def __init__(self, settings: Floats, offset: float) -> None:
        self._offset = offset
        overall = np.exp(settings[:, 0])
        self._own = (overall[:, None] * np.exp(settings[:, 1:-2])) ** 2
        self._pairs = np.exp(2 * settings[:, -2]) / (2 * self._own.sum(axis=1))
        self._joint = (overall * np.exp(settings[:, -1])) ** 2

    def between(self, axes: Floats, joint: Floats) -> Floats:
        flat = axes.reshape(len(axes), -1)
        alone = self._own @ flat
        whole = alone * alone  # in place from here on: a proposal spends most of its time here
        whole -= self._own**2 @ (flat * flat)
        whole *= self._pairs[:, None]
        whole += alone
        whole += self._joint[:, None] * joint.reshape(1, -1)
        whole += self._offset**2
        return np.asarray(whole.reshape(len(self._joint), *joint.shape), dtype=np.float64)

    @property
    def diagonal(self) -> Floats:
        alone = self._own.sum(axis=1)
        pairs = alone**2 - (self._own**2).sum(axis=1)
        return np.asarray(self._offset**2 + alone + self._pairs * pairs + self._joint, dtype=np.float64)


class Residual:
    """The posterior given `values` (natural logarithms) at `places`; values marked `at_least` are lower bounds."""

    def __init__(self, similarity: Similarity, prior: Prior, places: Places, values: Floats, at_least: Mask) -> None:
        self._similarity, self._prior, self._places = similarity, prior, places
        self._values, self._at_least = values, at_least
        self._last: tuple[bytes, tuple[Floats, Floats]] | None = None  # cache: the same pool is queried several times
        draws = prior.draw(similarity.centres, _DRAWS if len(places) < _PLENTY else _DRAWS_OF_PLENTY)
        if not len(places):
            self._spreads = np.sqrt(_Covariance(draws, prior.offset).diagonal)
            return
        self._axes, self._joint = similarity.between(places, places)
        settings = self._moved(draws)
        self._kernel = _Covariance(settings, prior.offset)
        covariances = self._kernel.between(self._axes, self._joint)
        fit = _fitted(covariances, values, at_least, prior.noise)
        self._inverse = np.linalg.inv(covariances + fit.variances[:, :, None] * np.eye(len(places)))
        self._alpha = (self._inverse @ fit.values[:, :, None])[:, :, 0]

    def _moved(self, draws: Floats) -> Floats:
        """Hyperparameter settings from their posterior: resampled by evidence, then moved, as in a particle filter."""
        chance = np.random.default_rng(len(self._places))
        evidence = self._evidence(draws)
        weights = np.exp(evidence - evidence.max()).cumsum()
        kept = _KEPT if len(self._places) < _PLENTY else _KEPT_OF_PLENTY
        chosen = np.searchsorted(weights, weights[-1] * (np.arange(kept) + 0.5) / kept)
        settings: Floats = draws[chosen]
        now = evidence[chosen] + self._prior.log_density(settings, self._similarity.centres)
        for _ in range(_MOVES):
            tried = settings + _STRIDE * chance.normal(size=settings.shape)
            then = self._evidence(tried) + self._prior.log_density(tried, self._similarity.centres)
            better = np.log(chance.random(len(now))) < then - now
            settings = np.where(better[:, None], tried, settings)
            now = np.where(better, then, now)
        return settings

    def _evidence(self, settings: Floats) -> Floats:
        covariances = _Covariance(settings, self._prior.offset).between(self._axes, self._joint)
        return _fitted(covariances, self._values, self._at_least, self._prior.noise).log_evidence

    @property
    def informed(self) -> bool:
        """True if there is at least one observation."""
        return len(self._places) > 0

    def each(self, places: Places) -> tuple[Floats, Floats]:
        """(mean, standard deviation) of the noise-free residual at `places`, each (settings, P)."""
        if not self.informed:
            spread = np.repeat(self._spreads[:, None], len(places), axis=1)
            return np.zeros_like(spread), spread
        key = places.tobytes()
        if self._last is None or self._last[0] != key:
            cross = self._kernel.between(*self._similarity.between(places, self._places))
            mean = (cross @ self._alpha[:, :, None])[:, :, 0]
            known = np.einsum("pij,pij->pi", cross @ self._inverse, cross)
            self._last = key, (mean, np.sqrt(np.maximum(self._kernel.diagonal[:, None] - known, 1e-10)))
        return self._last[1]

    def at(self, places: Places) -> tuple[Floats, Floats]:
        """(mean, standard deviation) of the noise-free residual at `places`, each (P,)."""
        return mixed(*self.each(places))

    def mean_at(self, places: Places) -> Floats:
        """The posterior mean of the residual at `places` (P,)."""
        return self.at(places)[0]


@dataclass(frozen=True, slots=True)
class _Fit:
    """For each covariance: the log evidence, and the Gaussian (value, variance) that replaces each observation."""

    log_evidence: Floats
    values: Floats
    variances: Floats


def _fitted(covariances: Floats, values: Floats, at_least: Mask, noise: float) -> _Fit:
    """Expectation propagation of the lower bounds, in parallel and damped; exact if there are no lower bounds.

    Rasmussen and Williams, Gaussian Processes for Machine Learning, section 3.6: (3.53) to (3.58), (3.65).
    """
    shape = covariances.shape[:2]
    precision = np.broadcast_to(np.where(at_least, 1e-6, noise**-2), shape).copy()
    shift = np.broadcast_to(np.where(at_least, 0.0, values * noise**-2), shape).copy()
    bound = np.flatnonzero(at_least)
    extra = np.zeros(shape[0])
    for sweep in range(_SWEEPS if len(bound) else 0):
        root = np.sqrt(precision)
        inner = np.eye(shape[1]) + root[:, :, None] * covariances * root[:, None, :]
        half = root[:, :, None] * covariances
        posterior = covariances - half.transpose(0, 2, 1) @ np.linalg.solve(inner, half)
        centre = (posterior @ shift[:, :, None])[:, bound, 0]
        spread = np.maximum(np.diagonal(posterior, axis1=1, axis2=2)[:, bound], 1e-12)
        left = 1 / np.maximum(1 / spread - precision[:, bound], 1e-6)
        outside = left * (centre / spread - shift[:, bound])
        wide = np.sqrt(left + noise**2)
        z = (outside - values[bound]) / wide
        log_tail = log_ndtr(z)
        ratio = np.exp(-0.5 * z * z - 0.5 * np.log(2 * np.pi) - log_tail)
        mean = outside + left / wide * ratio
        variance = np.maximum(left - left**2 / wide**2 * ratio * (z + ratio), 1e-12)
        step = 1.0 if sweep == 0 else _DAMPING
        new = np.maximum(1 / variance - 1 / left, 1e-6)
        precision[:, bound] += step * (new - precision[:, bound])
        shift[:, bound] += step * (mean / variance - outside / left - shift[:, bound])
        whole = left + 1 / precision[:, bound]
        away = outside - shift[:, bound] / precision[:, bound]
        extra = (log_tail + 0.5 * np.log(whole) + 0.5 * away**2 / whole).sum(axis=1)
    variances = 1 / precision
    stands = shift * variances
    factor, whitened = _factored(covariances + variances[:, :, None] * np.eye(shape[1]), stands, variances)
    log_evidence = extra - 0.5 * (whitened**2).sum(axis=1)
    log_evidence = log_evidence - np.log(np.diagonal(factor, axis1=1, axis2=2)).sum(axis=1)
    return _Fit(log_evidence, stands, variances)


def _factored(matrices: Floats, vectors: Floats, least: Floats) -> tuple[Floats, Floats]:
    """(Cholesky factors, their inverses times `vectors`), both from one factorization of the matrices plus one row.

    The corner entry keeps the extended matrix positive definite, as each matrix minus diag(`least`) is positive
    semidefinite.
    """
    count = vectors.shape[1]
    wider = np.empty((len(matrices), count + 1, count + 1))
    wider[:, :count, :count] = matrices
    wider[:, count, :count] = wider[:, :count, count] = vectors
    wider[:, count, count] = 1 + (vectors**2 / least).sum(axis=1)
    factor = np.linalg.cholesky(wider)
    return factor[:, :count, :count], factor[:, count, :count]


def mixed(mean: Floats, spread: Floats) -> tuple[Floats, Floats]:
    """(mean, standard deviation) of the mixture with equal weights over the first axis."""
    return mean.mean(axis=0), np.sqrt((spread**2).mean(axis=0) + mean.var(axis=0))


def expected_gain(best: Floats | float, mean: Floats, spread: Floats) -> Floats:
    """Expected improvement: E[max(best - x, 0)] of a Gaussian x with this mean and spread."""
    z = (best - mean) / spread
    return np.asarray((best - mean) * ndtr(z) + spread * np.exp(-0.5 * z * z) / np.sqrt(2 * np.pi), dtype=np.float64)


def probability_below(bound: float, mean: Floats, spread: Floats) -> Floats:
    return np.asarray(ndtr((bound - mean) / spread), dtype=np.float64)
