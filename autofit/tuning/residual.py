"""A Gaussian process for few data: how far probes are from what was expected of them, over the knobs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_solve, solve_triangular
from scipy.special import log_ndtr, ndtr

from autofit.tuning.grid import Floats, Grid, Mask

Places = NDArray[np.intp]
_OCTAVES = 2.0  # a doubling of a number changes a residual by little, eight times may change it wholly
_UNLIKE = 0.4  # how alike two candidates are, in the interactions, that differ in one knob without an order
_SWEEPS = 4  # of expectation propagation over the probes that ran out of memory
_GUESSES = 8  # draws of which axes matter, next to all of them alike
_MOST_GUESSES = 6  # of them are kept
_NEGLIGIBLE = 0.03  # and none with less evidence than this share of the best


class Similarity:
    """How alike candidates are: `additive` knob by knob, `joint` in all knobs at once. Both are 1 on the diagonal."""

    def __init__(self, grid: Grid, continuous: Sequence[Floats] = (), *, trends: bool = False) -> None:
        self._codes = grid.codes
        self._continuous = [np.asarray(values, dtype=np.float64) for values in (*grid.derived, *continuous)]
        self._tables: list[tuple[int, Floats, Floats]] = []
        for column, octaves in enumerate(grid.octaves):
            used = np.unique(grid.codes[:, column])
            if len(used) > 1:
                alone, joint = _alike(len(grid.choices[column]), octaves, trends=trends)
                self._tables.append((column, alone, joint))
        self._count = len(self._tables) + len(self._continuous)

    def between(self, rows: Places, columns: Places) -> tuple[Floats, Floats]:
        """Similarity of each of `rows` with each of `columns`: (in each axis, in all of them jointly)."""
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
        return np.array(axes).reshape(len(axes), -1), joint

    def weights(self, count: int) -> list[Floats]:
        """Guesses at how much of a residual each axis has: equal, and `count` in which few axes have most of it."""
        if not self._count:
            return [np.zeros(0)]
        drawn = np.random.default_rng(0).dirichlet(np.full(self._count, 0.4), size=count)
        return [np.full(self._count, 1 / self._count), *drawn]


def _alike(count: int, octaves: Floats | None, *, trends: bool) -> tuple[Floats, Floats]:
    if octaves is None:
        return np.eye(count), np.where(np.eye(count) > 0, 1.0, _UNLIKE)
    near = np.exp(-0.5 * ((octaves[:, None] - octaves[None, :]) / _OCTAVES) ** 2)
    if not trends:
        return near, near
    centred = (octaves - octaves.mean()) / max(1e-9, np.ptp(octaves))  # a straight line in the logarithm
    return 0.5 * near + 2.0 * centred[:, None] * centred[None, :], near


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One guess at how a residual behaves: its spread over the knobs, how much of it is knob by knob, its noise."""

    spread: float
    additive_frac: float
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """The guesses, which the data weigh; the spread of the offset that all candidates share; noise of a probe."""

    settings: tuple[Setting, ...]
    offset: float
    noise: float


def prior(spreads: dict[float, float], *, offset: float, noise: float) -> Prior:
    """`spreads` is {spread: its weight}; each is tried mostly knob by knob and mostly jointly."""
    settings = [
        Setting(spread=spread, additive_frac=additive, weight=weight)
        for spread, weight in spreads.items()
        for additive in (0.8, 0.35)
    ]
    return Prior(settings=tuple(settings), offset=offset, noise=noise)


class Residual:
    """The posterior after `values` (natural logarithms) at `places`; those marked `at_least` are lower bounds."""

    def __init__(self, similarity: Similarity, prior: Prior, places: Places, values: Floats, at_least: Mask) -> None:
        self._similarity, self._prior, self._places = similarity, prior, places
        self._parts: list[
            tuple[float, Setting, Floats, Floats, Floats]
        ] = []  # weight, setting, shares of the axes, Cholesky factor, alpha
        if not len(places):
            return
        axes, joint = similarity.between(places, places)
        guesses = [(s, w) for w in similarity.weights(_GUESSES) for s in prior.settings]
        covariances = np.array([self._covariance(s, shares, axes, joint) for s, shares in guesses])
        evidence = np.log([s.weight for s, _ in guesses])
        evidence = evidence + _evidence(covariances, values, at_least, prior.noise)
        weights = np.exp(evidence - evidence.max())
        weights /= weights.sum()
        least = max(_NEGLIGIBLE * weights.max(), np.sort(weights)[-_MOST_GUESSES:][0])
        for (setting, shares), covariance, weight in zip(guesses, covariances, weights, strict=True):
            if weight >= least:
                mean, variance = _sites(covariance, values, at_least, prior.noise)
                factor = np.linalg.cholesky(covariance + np.diag(variance)).astype(np.float64)
                alpha = cho_solve((factor, True), mean)
                self._parts.append((float(weight), setting, shares, factor, alpha))
        total = sum(part[0] for part in self._parts)
        self._parts = [(weight / total, *rest) for weight, *rest in self._parts]  # type: ignore[misc]

    @property
    def informed(self) -> bool:
        """Whether there are data at all."""
        return bool(self._parts)

    def _covariance(self, setting: Setting, shares: Floats, axes: Floats, joint: Floats) -> Floats:
        additive = (shares @ axes).reshape(joint.shape)
        alike = setting.additive_frac * additive + (1 - setting.additive_frac) * joint
        return self._prior.offset**2 + setting.spread**2 * alike

    def at(self, places: Places) -> tuple[Floats, Floats]:
        """(mean, standard deviation) of the residual at `places`, noise left out."""
        if not self._parts:
            weights = np.array([s.weight for s in self._prior.settings])
            spread = np.sqrt((weights * [s.spread**2 for s in self._prior.settings]).sum() / weights.sum())
            return np.zeros(len(places)), np.full(len(places), np.hypot(spread, self._prior.offset))
        axes, joint = self._similarity.between(places, self._places)
        mean, second = np.zeros(len(places)), np.zeros(len(places))
        for weight, setting, shares, factor, alpha in self._parts:
            cross = self._covariance(setting, shares, axes, joint)
            centre = cross @ alpha
            whole = self._prior.offset**2 + setting.spread**2
            known = (solve_triangular(factor, cross.T, lower=True, check_finite=False) ** 2).sum(axis=0)
            mean += weight * centre
            second += weight * (centre**2 + np.maximum(whole - known, 1e-10))
        return mean, np.sqrt(np.maximum(second - mean**2, 1e-10))

    def mean_at(self, places: Places) -> Floats:
        """The mean alone: cheap enough for 10^5 candidates."""
        mean = np.zeros(len(places))
        if self._parts:
            axes, joint = self._similarity.between(places, self._places)
            for weight, setting, shares, _, alpha in self._parts:
                mean += weight * (self._covariance(setting, shares, axes, joint) @ alpha)
        return mean


def _evidence(covariances: Floats, values: Floats, at_least: Mask, noise: float) -> Floats:
    """For each of `covariances`: log probability of the exact values, and of each lower bound given them."""
    exact = np.flatnonzero(~at_least)
    mean = np.zeros((len(covariances), len(values)))
    variance = np.diagonal(covariances, axis1=1, axis2=2).copy()
    log_probability = np.zeros(len(covariances))
    if len(exact):
        inner = covariances[:, exact[:, None], exact] + noise**2 * np.eye(len(exact))
        factor = np.linalg.cholesky(inner)
        whitened = np.linalg.solve(factor, np.broadcast_to(values[exact][:, None], (len(covariances), len(exact), 1)))
        log_probability = -0.5 * (whitened**2).sum(axis=(1, 2))
        log_probability -= np.log(np.diagonal(factor, axis1=1, axis2=2)).sum(axis=1)
        if at_least.any():
            cross = np.linalg.solve(factor, covariances[:, exact])
            mean = (cross * whitened).sum(axis=1)
            variance = variance - (cross**2).sum(axis=1)
    if at_least.any():
        spread = np.sqrt(np.maximum(variance[:, at_least], 1e-10) + noise**2)
        log_probability = log_probability + log_ndtr((mean[:, at_least] - values[at_least]) / spread).sum(axis=1)
    return np.asarray(log_probability, dtype=np.float64)


def _sites(covariance: Floats, values: Floats, at_least: Mask, noise: float) -> tuple[Floats, Floats]:
    """(value, variance) of a Gaussian that stands for each observation: expectation propagation of the lower bounds."""
    precision = np.where(at_least, 1e-8, noise**-2)
    shift = np.where(at_least, 0.0, values * noise**-2)
    for _ in range(_SWEEPS if at_least.any() else 0):
        inner = covariance + np.diag(1 / precision)
        posterior = covariance - covariance @ np.linalg.solve(inner, covariance)
        mean, variance = posterior @ shift, np.maximum(np.diag(posterior), 1e-12)
        for i in np.flatnonzero(at_least):
            left = 1 / max(1e-12, 1 / variance[i] - precision[i])
            centre = left * (mean[i] / variance[i] - shift[i])
            above, spread = _above(centre, left, values[i], noise)
            precision[i] = max(1e-8, 1 / spread - 1 / left)
            shift[i] = above / spread - centre / left
    return shift / precision, 1 / precision


def _above(mean: float, variance: float, bound: float, noise: float) -> tuple[float, float]:
    """(mean, variance) of a Gaussian after a noisy look told that it is above `bound`."""
    wide = np.sqrt(variance + noise**2)
    z = (mean - bound) / wide
    ratio = float(np.exp(-0.5 * z * z - 0.5 * np.log(2 * np.pi) - log_ndtr(z)))
    return mean + variance / wide * ratio, max(1e-12, variance - variance**2 / wide**2 * ratio * (z + ratio))


def expected_gain(best: Floats | float, mean: Floats, spread: Floats) -> Floats:
    """How far below `best` a Gaussian is expected to come, counting nothing where it stays above."""
    z = (best - mean) / spread
    return np.asarray((best - mean) * ndtr(z) + spread * np.exp(-0.5 * z * z) / np.sqrt(2 * np.pi), dtype=np.float64)


def probability_below(bound: float, mean: Floats, spread: Floats) -> Floats:
    return np.asarray(ndtr((bound - mean) / spread), dtype=np.float64)
