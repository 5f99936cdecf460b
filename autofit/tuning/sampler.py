"""Optuna samplers, our own and wrapped ones, that propose only valid candidates that are still untried and allowed."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler, GPSampler, NSGAIISampler, RandomSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState
from threadpoolctl import ThreadpoolController

from autofit.forecast.predictions import Cloud, Predictions
from autofit.recipe.keys import TIERS
from autofit.tuning.acquisition import Model, Proposal, places_ahead, propose
from autofit.tuning.candidates import Grid, Ledger, Mask, Observation
from autofit.tuning.frontier import Goal, band_bytes, less_disturbed
from autofit.tuning.record import Stop, StopKind, repeats
from autofit.tuning.study import to_trial

SamplerName = Literal["autofit", "tpe", "gp", "nsga2", "random", "grid"]
SAMPLERS: tuple[SamplerName, ...] = get_args(SamplerName)
_NOT_LIKELY = 0.05  # a baseline with a lower fit probability is not probed first
_HOPELESS = 0.01  # if nothing fits and every candidate left has a lower fit probability, the search ends
_FITS_TO_STOP = 3  # without predictions: fits needed before the expected gain may end the search
_OOMS_TO_DOUBT = 2  # without predictions: OOMs without a fit, from which on the leanest candidate is probed
_DRAWS = 24  # proposals of a plain sampler examined per trial; the first valid one is taken
_GP_DRAWS = 1  # Optuna's GP takes 0.2 s and more a proposal, and a second one is nearly the same
_BLAS = ThreadpoolController()  # BLAS threads wait for cores that probes use: 5 times slower for such small matrices
_SAMPLE = 200  # candidates among which `halving` looks for the one that rules out the most


class CandidateSampler(BaseSampler):
    """Base of all samplers here: baseline first, whole candidates only, each once, less those that an OOM rules out.

    A lower tier is proposed only where no candidate of a higher one is left, or none may fit; unless the goal is the
    fastest at any tier.

    Works in any Optuna study whose first objective is the step's seconds, minimised (the second may be device-used
    bytes), and whose trials carry a constraint: bytes over the target, above zero for an OOM. The objective function
    must ask for every knob: `{n: trial.suggest_categorical(n, d.choices) for n, d in sampler.distributions().items()}`.
    """

    def __init__(
        self, grid: Grid, *, predictions: Predictions | None = None, target_bytes: int | None = None, seed: int = 0,
        goal: Goal = "speed",
    ) -> None:  # fmt: skip
        self.grid, self.goal = grid, goal
        self.predictions = None if predictions is None else predictions.of(grid.candidates)
        if self.predictions is not None and np.isnan(self.predictions.step_s).all():
            self.predictions = None
        cannot_fit = None
        if self.predictions is not None and target_bytes is not None:
            cannot_fit = self.predictions.floor_bytes > target_bytes
        self.target_bytes = target_bytes
        self._cannot_fit = cannot_fit
        self._random = np.random.default_rng(seed)
        self._study: str | None = None
        self.wanted: int | None = None  # the candidate to propose next, before all others
        self._judged: tuple[int, object, object] = (0, None, None)  # number of observations, ledger, repeats
        self._settled: set[int] = set()  # tiers of those that settle theirs
        self._begin()

    def _begin(self) -> None:
        self.ledger = Ledger(self.grid, target_bytes=self.target_bytes, cannot_fit=self._cannot_fit)

    def read(self, study: Study, *, but: int | None = None) -> Ledger:
        """The ledger after reading all trials of `study`, except number `but`."""
        if self._study != study.study_name:  # one sampler may serve one study after another
            self._study = study.study_name
            self._begin()
        trials = study.get_trials(deepcopy=False)
        self.ledger.read(trials, but=but)
        for number, again in repeats(study).items():
            first = to_trial(trials[number]).result
            if first is not None:
                self.ledger.repeat(number, less_disturbed(first, again))
        return self.ledger

    def distributions(self) -> dict[str, BaseDistribution]:
        """{knob: categorical distribution}, for `study.ask`."""
        return {n: CategoricalDistribution(c) for n, c in zip(self.grid.names, self.grid.choices, strict=True)}

    def worth_another(self, study: Study, *, min_gain_frac: float | None) -> Stop | None:
        """The reason to stop, unless a candidate is still worth a probe."""
        free = self.read(study).free
        if not free.any():
            return Stop(StopKind.EXHAUSTED, "every candidate is tried or ruled out")
        tier = self._settled_tier()
        if min_gain_frac is not None and tier is not None and tier < self.tiers[free].min():
            kept, does = TIERS[tier], "is in the band" if self.goal == "utilisation" else "fits"
            words = f"every candidate of the {kept} tier is tried or ruled out, and one of them {does}"
            return Stop(StopKind.EXHAUSTED, words)
        return None

    def ahead(self, study: Study) -> list[tuple[int, float, float]]:
        """(index, seconds, bytes) of the untried candidates that belong on the front of `study`, as predicted.

        Of no lower tier than the trials that fit. Empty without predictions, and before the first fit.
        """
        ledger = self.read(study)
        fits = [int(self.tiers[o.place]) for o in ledger.observations if o.fits]
        if self.predictions is None or not fits:
            return []
        model = Model(self.grid, self.predictions, target_bytes=self.target_bytes)
        allowed = ledger.free & (self.tiers <= max(fits))
        with _BLAS.limit(limits=1):
            return places_ahead(model, ledger.observations, ledger.pending, allowed)

    def cloud(self, study: Study) -> Cloud | None:
        """The predictions of all candidates as points of a picture, corrected by the probes of `study`."""
        ledger = self.read(study)
        if self.predictions is None or not ledger.observations:
            return Cloud.of(self.predictions)
        model = Model(self.grid, self.predictions, target_bytes=self.target_bytes)
        with _BLAS.limit(limits=1):
            model.learn(ledger.observations, ())
            return Cloud.of(self.predictions, model.expected)

    @property
    def tiers(self) -> NDArray[np.int64]:
        """The tier of each candidate as the goal orders them (N,): all alike where any tier may win."""
        return np.zeros_like(self.grid.tiers) if self.goal == "speed-at-any-tier" else self.grid.tiers

    def _settled_tier(self) -> int | None:
        """The highest tier with a candidate that fits (goal utilisation: in the band); it beats all lower ones."""
        told = self.ledger.observations
        if self._judged[1:] != (self.ledger, self.ledger.repeated):
            self._judged = 0, self.ledger, self.ledger.repeated
            self._settled = set()
        tiers = self.tiers
        self._settled |= {int(tiers[o.place]) for o in told[self._judged[0] :] if self._settles(o)}
        self._judged = len(told), self.ledger, self.ledger.repeated
        return min(self._settled, default=None)

    def _settles(self, told: Observation) -> bool:
        if self.goal != "utilisation" or self.target_bytes is None or not told.fits:
            return told.fits
        low, high = band_bytes(self.target_bytes)
        return low <= (told.device_used_bytes or 0) <= high

    def choose(self, study: Study, trial: FrozenTrial, free: NDArray[np.intp]) -> int:
        """The index of the candidate to probe next, one of `free`."""
        raise NotImplementedError

    @property
    def baseline_first(self) -> bool:
        """True if the first probe is the unchanged recipe. False if it is predicted to exceed the memory."""
        return self._cannot_fit is None or not self._cannot_fit[0]

    # -- Optuna's interface ---------------------------------------------------------------------------------------

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self.distributions()

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The values of all knobs. A trial whose driver was killed half-way keeps the values that it already has."""
        fixed = trial.params
        if set(fixed) >= set(search_space):
            return dict(fixed)
        ledger = self.read(study, but=trial.number)
        free = ledger.free
        if fixed:
            return self.grid.params(self._completed(fixed, free, ledger.untried))
        if not free.any():
            study.tell(trial.number, state=TrialState.FAIL)
            raise RuntimeError("no candidate is left to propose: every one is tried or ruled out")
        if self.wanted is not None:
            place, self.wanted = self.wanted, None
            return dict(self.grid.params(place))
        first = not ledger.observations and not ledger.pending and free[0]
        if first and self.baseline_first:
            return dict(self.grid.params(0))
        return dict(self.grid.params(self.choose(study, trial, np.flatnonzero(free))))

    def highest(self, free: NDArray[np.intp]) -> NDArray[np.intp]:
        """The subset of `free` in the highest tier that is left."""
        tiers = self.tiers[free]
        return np.asarray(free[tiers == tiers.min()])

    def _completed(self, fixed: Mapping[str, object], free: Mask, untried: Mask) -> int:
        """The index of a candidate with the values in `fixed`, untried if possible."""
        agreeing = self.grid.agrees(fixed)
        pool = next(mask for mask in (agreeing & free, agreeing & untried, agreeing, free, untried) if mask.any())
        return int(np.flatnonzero(pool)[0])

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        raise ValueError(
            f"{param_name!r} is not a knob of this sampler's grid; its knobs are {', '.join(self.grid.names)}"
        )

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        """End `study.optimize` when all candidates are used up."""
        if not getattr(study._thread_local, "in_optimize_loop", False):
            return
        ledger = self.read(study, but=trial.number)
        free = ledger.free
        if (place := self.grid.find(trial.params)) is not None:
            free[place] = False
        if not free.any():
            study.stop()

    def reseed_rng(self) -> None:
        self._random = np.random.default_rng()


class PriorSampler(CandidateSampler):
    """Predictions as the prior, probes as the evidence: constrained expected improvement per second of probing.

    Gaussian processes over the knobs model the residual of each probe against its prediction, in bytes and in seconds
    (rollout and update separately if both are reported). An OOM that stopped a probe is censored: a lower bound. A
    pending probe counts as if it returned its expectation (kriging believer). The tiers are searched in the order of
    the winner rule. Without predictions the processes model the logarithms themselves, after a phase of `halving`.
    """

    def __init__(
        self, grid: Grid, *, predictions: Predictions | None = None, target_bytes: int | None = None, seed: int = 0,
        goal: Goal = "speed", min_gain_frac: float = 0.01,
    ) -> None:  # fmt: skip
        super().__init__(grid, predictions=predictions, target_bytes=target_bytes, seed=seed, goal=goal)
        self._min_gain_frac = min_gain_frac
        self._model = Model(grid, self.predictions, target_bytes=target_bytes)
        self._known: tuple[object, ...] | None = None
        self._proposal: Proposal | None = None

    @property
    def baseline_first(self) -> bool:
        """True if the first probe is the baseline. False if its predicted fit probability is below 5 %."""
        if not super().baseline_first:
            return False
        if self.predictions is None or self.target_bytes is None:
            return True
        unlearnt = Model(self.grid, self.predictions, target_bytes=self.target_bytes)
        return bool(unlearnt.fits_at(np.zeros(1, dtype=np.intp))[0] >= _NOT_LIKELY)

    def proposal(self) -> Proposal | None:
        """The next candidate and its expected gain, given the ledger; cached until the ledger changes."""
        ledger = self.ledger
        known = (self._study, len(ledger.observations), ledger.pending, int(ledger.free.sum()), ledger.repeated)
        if known != self._known:
            with _BLAS.limit(limits=1):
                self._model.learn(ledger.observations, ledger.pending)
                self._proposal = propose(
                    self._model, self.grid, ledger.observations, ledger.pending, ledger.free, goal=self.goal,
                    target_bytes=self.target_bytes, min_gain_frac=self._min_gain_frac,
                )  # fmt: skip
            self._known = known
        return self._proposal

    def worth_another(self, study: Study, *, min_gain_frac: float | None) -> Stop | None:
        stop = super().worth_another(study, min_gain_frac=min_gain_frac)
        fits = sum(o.fits for o in self.ledger.observations)
        enough = 1 if self.predictions is not None else _FITS_TO_STOP
        if stop is not None or min_gain_frac is None or not self.ledger.observations:
            return stop
        found = self.proposal()
        assert found is not None
        if not fits and self.predictions is not None and found.fits < _HOPELESS:
            words = f"nothing fits so far, and the likeliest candidate left fits with a probability of {found.fits:.1%}"
            return Stop(StopKind.HOPELESS, words)
        if fits >= enough and found.gain_frac < min_gain_frac and not found.leaner:
            expected, wanted = _percent(found.gain_frac), f"{100 * min_gain_frac:.2g} %"
            return Stop(StopKind.GAIN, f"the best candidate left is expected to gain {expected}, below {wanted}")
        return None

    def choose(self, study: Study, trial: FrozenTrial, free: NDArray[np.intp]) -> int:
        if self.predictions is None and (pool := self._without_predictions(self.highest(free))).size:
            return halving(self.grid, pool, self._random)
        found = self.proposal()
        assert found is not None
        return found.place

    def _without_predictions(self, free: NDArray[np.intp]) -> NDArray[np.intp]:
        """The most informative candidates of `free` to probe while predictions are missing; empty once the model knows.

        Before the first fit all; after a second OOM the leanest, of which an OOM ends the tier. After a fit the next
        number of each knob without memory order, then those that need more memory than the fastest: it buys speed.
        """
        told = self.ledger.observations
        fits = [o for o in told if o.fits and o.step_s is not None]
        if fits:
            fastest = min(fits, key=lambda o: (self.tiers[o.place], o.step_s))
            step = self.grid.stepped(fastest.place, [o.place for o in fits], self.ledger.pending, free)
            if step is not None:
                return np.array([step])
            return free[self.grid.needs_no_less(fastest.place, free)]
        if len(told) < _OOMS_TO_DOUBT:
            return free
        above = np.array([int(self.grid.needs_no_less(int(place), free).sum()) for place in free])
        return np.asarray(free[above == above.max()])


def halving(grid: Grid, pool: NDArray[np.intp], random: np.random.Generator) -> int:
    """The index of the candidate whose OOM or fit decides most others: many above and many below it in memory order."""
    sample = random.permutation(pool)[:_SAMPLE]
    order = np.array([grid.needs_no_less(int(place), sample) for place in sample])  # [i, j]: j needs no less than i
    above, below = order.sum(axis=1), order.sum(axis=0)
    return int(sample[np.lexsort((below, np.minimum(above, below)))[-1]])


class PlainSampler(CandidateSampler):
    """One of Optuna's samplers, or grid order: the first draw that is free, else the free candidate nearest to it."""

    def __init__(
        self, grid: Grid, *, inner: BaseSampler | None, predictions: Predictions | None = None,
        target_bytes: int | None = None, seed: int = 0, goal: Goal = "speed",
    ) -> None:  # fmt: skip
        super().__init__(grid, predictions=predictions, target_bytes=target_bytes, seed=seed, goal=goal)
        self._inner = inner

    def choose(self, study: Study, trial: FrozenTrial, free: NDArray[np.intp]) -> int:
        free = self.highest(free)
        if self._inner is None:
            return int(free[0])
        drawn: dict[str, Any] = {}
        allowed = set(free.tolist())
        distributions = self.distributions()
        for _ in range(_GP_DRAWS if isinstance(self._inner, GPSampler) else _DRAWS):
            drawn = dict(self._inner.sample_relative(study, trial, distributions))
            drawn |= {  # a sampler leaves out knobs that it would draw independently of the others
                name: self._inner.sample_independent(study, trial, name, distribution)
                for name, distribution in distributions.items()
                if name not in drawn
            }
            place = self.grid.find(drawn)
            if place is not None and place in allowed:
                return place
        differing = sum(
            (self.grid.codes[free, k] != self.grid.choices[k].index(drawn[name])).astype(int)
            for k, name in enumerate(self.grid.names)
        )
        nearest = free[differing == np.min(differing)]
        return int(self._random.choice(nearest))

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        if self._inner is not None:
            self._inner.before_trial(study, trial)

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        if self._inner is not None:
            self._inner.after_trial(study, trial, state, values)
        super().after_trial(study, trial, state, values)

    def reseed_rng(self) -> None:
        super().reseed_rng()
        if self._inner is not None:
            self._inner.reseed_rng()


def make_sampler(
    name: SamplerName, grid: Grid, *, predictions: Predictions | None = None, target_bytes: int | None = None,
    seed: int = 0, goal: Goal = "speed", min_gain_frac: float = 0.01,
) -> CandidateSampler:  # fmt: skip
    """The sampler of that name over `grid`. All but `autofit` use predictions only to exclude candidates."""
    if name == "autofit":
        return PriorSampler(
            grid, predictions=predictions, target_bytes=target_bytes, seed=seed, goal=goal, min_gain_frac=min_gain_frac
        )
    inner: dict[str, BaseSampler | None] = {
        "tpe": TPESampler(multivariate=True, constant_liar=True, n_startup_trials=5, seed=seed),
        "nsga2": NSGAIISampler(population_size=12, seed=seed), "random": RandomSampler(seed=seed), "grid": None,
    }  # fmt: skip
    chosen = GPSampler(n_startup_trials=5, seed=seed) if name == "gp" else inner[name]
    return PlainSampler(grid, inner=chosen, predictions=predictions, target_bytes=target_bytes, seed=seed, goal=goal)


def _percent(share: float) -> str:
    """`0.17 %`; a tiny share in words."""
    return f"{100 * share:.2g} %" if share >= 1e-4 else "less than 0.01 %"
