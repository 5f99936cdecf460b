"""An Optuna sampler that proposes only valid, untried candidates that no out-of-memory probe rules out."""

from collections.abc import Iterable, Mapping
from random import Random
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from autofit.space import Candidate, Space

_HALVING_TRIALS = 4  # proposals by halving before TPE has enough to go on
_DRAWS = 24  # TPE proposals looked at per trial; the first valid one is taken
_SAMPLE = 200  # candidates among which halving looks for the one that rules out the most


class CandidateSampler(BaseSampler):
    """Halves what is larger than the fastest fit by what an OOM would rule out; then TPE, among the valid candidates.

    An OOM rules out whatever can only need as much memory or more (`Space.needs_no_less`).
    """

    def __init__(self, space: Space, *, seed: int) -> None:
        self._space = space
        self._allowed = space.allowed()
        self._random = Random(seed)
        self._inner = TPESampler(multivariate=True, constant_liar=True, n_startup_trials=_HALVING_TRIALS, seed=seed)

    def distributions(self) -> dict[str, BaseDistribution]:
        """{knob: categorical distribution}, for `study.ask`."""
        choices = zip(self._space.knobs, self._space.choices, strict=True)
        return {knob.name: CategoricalDistribution(values) for knob, values in choices}

    def remaining(self, trials: Iterable[FrozenTrial]) -> list[Candidate]:
        """The allowed candidates that are neither tried nor ruled out by an OOM."""
        trials = list(trials)
        taken = {self._candidate(t) for t in trials}
        ruled_out = [self._candidate(t) for t in trials if t.user_attrs.get("status") == "oom"]
        known = [c for c in ruled_out if c is not None]
        return [
            c for c in self._allowed
            if c not in taken and not any(self._space.needs_no_less(c, oom) for oom in known)
        ]  # fmt: skip

    def screened(self, trials: Iterable[FrozenTrial]) -> int:
        """How many untried candidates an OOM has ruled out."""
        trials = list(trials)
        taken = {self._candidate(t) for t in trials}
        return sum(c not in taken for c in self._allowed) - len(self.remaining(trials))

    def _candidate(self, trial: FrozenTrial) -> Candidate | None:
        names = {knob.name for knob in self._space.knobs}
        return self._space.candidate(trial.params) if names <= set(trial.params) else None

    # -- Optuna's interface ---------------------------------------------------------------------------------------

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self.distributions()

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """All knobs at once. A trial that lost its driver half-way keeps the values it already has."""
        fixed = trial.params
        if set(fixed) >= set(search_space):
            return dict(fixed)
        others = [t for t in study.get_trials(deepcopy=False) if t.number != trial.number]
        pool = [c for c in self.remaining(others) if _agrees(self._space.params(c), fixed)]
        if trial.number == 0 or not pool:
            return dict(self._space.params(self._space.baseline))
        if larger := self._larger_than_the_fastest(pool, others):
            return dict(self._space.params(self._halving(larger)))
        if sum(t.state is TrialState.COMPLETE for t in others) > _HALVING_TRIALS:
            allowed = set(pool)
            for _ in range(_DRAWS):
                drawn = self._inner.sample_relative(study, trial, search_space)
                if drawn and (candidate := self._space.candidate(drawn)) in allowed:
                    return dict(self._space.params(candidate))
        return dict(self._space.params(self._halving(pool)))

    def _larger_than_the_fastest(self, pool: list[Candidate], others: list[FrozenTrial]) -> list[Candidate]:
        """The candidates that can only need more memory than the fastest fit so far: speed is bought with memory."""
        fits = [t for t in others if t.user_attrs.get("status") == "fit" and t.values]
        if not fits:
            return []
        fastest = self._candidate(min(fits, key=lambda t: t.values[0]))
        return [c for c in pool if fastest is not None and self._space.needs_no_less(c, fastest)]

    def _halving(self, pool: list[Candidate]) -> Candidate:
        """The candidate whose OOM, or whose fit, tells most about the others: as many above it as below."""
        sample = pool if len(pool) <= _SAMPLE else self._random.sample(pool, _SAMPLE)
        self._random.shuffle(sample := list(sample))

        def tells(candidate: Candidate) -> tuple[int, int]:
            above = sum(self._space.needs_no_less(other, candidate) for other in sample)
            below = sum(self._space.needs_no_less(candidate, other) for other in sample)
            return min(above, below), below

        return max(sample, key=tells)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        raise AssertionError("every knob is proposed by sample_relative")

    def reseed_rng(self) -> None:
        self._inner.reseed_rng()


def _agrees(params: Mapping[str, object], fixed: Mapping[str, object]) -> bool:
    return all(params[name] == value for name, value in fixed.items())
