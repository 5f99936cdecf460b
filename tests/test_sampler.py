"""The sampler against laws that are not its predictions: what it may never do, whatever the law."""

import dataclasses

import numpy as np
import optuna
import pytest
from optuna.trial import TrialState, create_trial
from recipes import grpo_recipe

from autofit.errors import ConfigError
from autofit.forecast.predictions import Predictions
from autofit.recipe.keys import TIERS, Tier
from autofit.space.knob import load_space
from autofit.space.space import Knob, Space
from autofit.tuning.candidates import Grid
from autofit.tuning.frontier import Goal, band_bytes
from autofit.tuning.record import Stop, StopKind
from autofit.tuning.sampler import SAMPLERS, CandidateSampler, PriorSampler, SamplerName, _percent, make_sampler

GB = 10**9


class Law:
    """A space, what is predicted of it and what is true: another cost for each value, drawn by `seed`."""

    def __init__(self, *, seed: int, allow: Tier = "neutral", off: float = 0.3, loss: str = "grpo") -> None:
        recipe = grpo_recipe(
            per_device_train_batch_size=4, gradient_accumulation_steps=8, steps_per_generation=8, loss_type=loss
        )
        self.space = Space.of(recipe, load_space(None, trainer="grpo"), allow=allow)
        self.grid = grid = Grid.of(self.space)
        chance = np.random.default_rng(seed)
        split = np.array([self.space.split(c) for c in grid.candidates], dtype=float)
        params = [self.space.params(c) for c in grid.candidates]
        kept = np.array([4.0 if p["gradient_checkpointing"] else 10.0 for p in params])
        used = (2 + kept * split[:, 0] / 4) * GB
        step = (0.5 + 4 / split[:, 0]) * np.where(kept > 5, 1.0, 1.3)
        truths = [sum(chance.normal(0, off / 2, 40)[codes] for codes in grid.codes.T) for _ in range(2)]
        self.used, self.step = used * np.exp(truths[0]), step * np.exp(truths[1])
        self.target_bytes = int(np.quantile(self.used, 0.6))
        self.predictions = Predictions(
            candidates=grid.candidates, floor_bytes=np.minimum(0.5 * used, 0.99 * self.used),
            device_used_bytes=used, step_s=step,
        )  # fmt: skip

    def sampler(self, name: SamplerName = "autofit", *, predicted: bool = True, seed: int = 0) -> CandidateSampler:
        return make_sampler(
            name, self.grid, predictions=self.predictions if predicted else None, target_bytes=self.target_bytes,
            seed=seed,
        )  # fmt: skip

    def study(self, sampler: CandidateSampler) -> optuna.Study:
        return optuna.create_study(directions=["minimize", "minimize"], sampler=sampler)

    def place(self, trial: optuna.trial.Trial) -> int:
        place = self.grid.find(trial.params)
        assert place is not None, f"not a candidate: {trial.params}"
        return place

    def tell(self, study: optuna.Study, trial: optuna.trial.Trial) -> bool:
        place = self.place(trial)
        trial.set_constraint("bytes_over_target", float(self.used[place] - self.target_bytes))
        study.tell(trial, [float(self.step[place]), float(self.used[place])])
        return bool(self.used[place] <= self.target_bytes)

    def best_place(self) -> int:
        fits = self.used <= self.target_bytes
        tier = self.grid.tiers[fits].min()
        return int(np.argmin(np.where(fits & (self.grid.tiers == tier), self.step, np.inf)))


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("predicted", [True, False])
def test_no_candidate_is_proposed_twice_or_after_an_oom_that_rules_it_out_or_without_the_effective_batch(
    name: SamplerName, predicted: bool
) -> None:
    for seed in range(2):
        law = Law(seed=seed, allow="approximate", loss="dapo")
        study = law.study(law.sampler(name, predicted=predicted, seed=seed))
        seen: list[int] = []
        ooms: list[int] = []
        for _ in range(7 if name == "gp" else 14):
            trial = study.ask(law.sampler().distributions())
            place = law.place(trial)
            candidate = law.grid.candidates[place]
            assert place not in seen
            assert not any(law.space.needs_no_less(candidate, law.grid.candidates[oom]) for oom in ooms)
            assert law.space.violated(candidate) is None
            micro, accumulation, chunk, groups = law.space.split(candidate)
            assert micro * accumulation == 32
            assert (micro * chunk) % groups == 0
            seen.append(place)
            if not law.tell(study, trial):
                ooms.append(place)
        assert seen[0] == 0


def test_an_error_of_30_percent_in_memory_and_time_costs_a_few_probes() -> None:
    needed = []
    for seed in range(12):
        law = Law(seed=seed)
        study = law.study(law.sampler())
        best = law.step[law.best_place()]
        for count in range(1, 13):  # noqa: B007
            trial = study.ask(law.sampler().distributions())
            if law.tell(study, trial) and law.step[law.place(trial)] <= best / 0.95:
                break
        needed.append(count)
    assert np.median(needed) <= 6, needed


def test_probes_at_work_are_left_alone_and_spread_out() -> None:
    law = Law(seed=1)
    study = law.study(law.sampler())
    law.tell(study, study.ask(law.sampler().distributions()))
    asked = [law.place(study.ask(law.sampler().distributions())) for _ in range(6)]
    assert len(set(asked)) == 6


def test_plain_optimize_works_and_ends_when_nothing_is_left() -> None:
    law = Law(seed=2)
    sampler = law.sampler()
    assert isinstance(sampler, PriorSampler)

    def objective(trial: optuna.Trial) -> tuple[float, float]:
        for name, distribution in sampler.distributions().items():
            assert isinstance(distribution, optuna.distributions.CategoricalDistribution)
            trial.suggest_categorical(name, distribution.choices)
        place = law.place(trial)
        trial.set_constraint("bytes_over_target", float(law.used[place] - law.target_bytes))
        return float(law.step[place]), float(law.used[place])

    study = law.study(sampler)
    study.optimize(objective, n_trials=1000)
    assert len(study.trials) + sampler.read(study).screened == len(law.grid)
    best = min((t for t in study.trials if t.constraints["bytes_over_target"] <= 0), key=lambda t: t.values[0])
    assert law.grid.find(best.params) == law.best_place()


def test_a_study_of_one_objective_and_pruned_trials_is_understood() -> None:
    law = Law(seed=3)
    sampler = law.sampler()
    study = optuna.create_study(direction="minimize", sampler=sampler)
    for _ in range(8):
        trial = study.ask(sampler.distributions())
        place = law.place(trial)
        if law.used[place] > law.target_bytes:
            study.tell(trial, state=TrialState.PRUNED)
        else:
            study.tell(trial, float(law.step[place]))
    observed = sampler.read(study).observations
    assert len(observed) == 8
    assert all(o.at_least == (not o.fits) for o in observed)


def test_an_oom_of_a_probe_that_ran_to_its_end_says_bytes_and_seconds() -> None:
    law = Law(seed=3)
    sampler = law.sampler()
    study = law.study(sampler)
    results: tuple[dict[str, object], ...] = (
        {"status": "oom", "step_s": [3.0, 3.2, 9.0], "rollout_s": [1.0, 1.2, 1.6], "least_capacity_bytes": 31 * GB},
        {"status": "oom", "step_s": [], "rollout_s": [], "least_capacity_bytes": None},
    )
    for result in results:
        trial = study.ask(sampler.distributions())
        trial.set_user_attr("result", result)
        trial.set_constraint("bytes_over_target", 1.0 * GB)
        study.tell(trial, [7.0, float(law.target_bytes + GB)])
    whole, stopped = sampler.read(study).observations
    assert (whole.step_s, whole.device_used_bytes, whole.at_least, whole.fits) == (3.2, 31 * GB, False, False)
    assert whole.rollout_s == pytest.approx(3.2 * 3.8 / 15.2)
    assert (stopped.step_s, stopped.device_used_bytes, stopped.at_least) == (None, law.target_bytes + GB, True)
    assert stopped.rollout_s is None


def test_a_baseline_whose_floor_is_over_the_target_costs_no_probe() -> None:
    law = Law(seed=4)
    floor = law.predictions.floor_bytes.copy()
    floor[0] = law.target_bytes + 1
    law.predictions = dataclasses.replace(law.predictions, floor_bytes=floor)
    sampler = law.sampler()
    study = law.study(sampler)
    assert law.place(study.ask(sampler.distributions())) != 0
    assert not sampler.read(study).free[0]


def probed(law: Law, trials: int, *, predicted: bool, goal: Goal = "speed") -> tuple[list[int], list[int], Stop | None]:
    """(tier of each probe, those that fit, why the search ended or None) of a search with at most `trials` probes."""
    sampler = make_sampler("autofit", law.grid, predictions=law.predictions if predicted else None,
                           target_bytes=law.target_bytes, goal=goal)  # fmt: skip
    study, places = law.study(sampler), list[int]()
    while len(places) < trials and (stop := sampler.worth_another(study, min_gain_frac=0.01)) is None:
        trial = study.ask(sampler.distributions())
        places.append(law.place(trial))
        law.tell(study, trial)
    return [int(law.grid.tiers[p]) for p in places], [p for p in places if law.used[p] <= law.target_bytes], stop


@pytest.mark.parametrize("predicted", [True, False])
def test_while_a_higher_tier_may_fit_no_lower_one_is_probed(predicted: bool) -> None:
    law = Law(seed=0, allow="recipe", off=0.0)
    shorter = np.array([law.space.params(c)["max_completion_length"] for c in law.grid.candidates], dtype=float)
    law.used *= 1.3 * np.sqrt(shorter / shorter.max())  # a third more than predicted; what is shorter needs less
    law.predictions = dataclasses.replace(law.predictions, floor_bytes=np.zeros(len(law.grid)))
    neutral = law.grid.tiers == 0
    law.target_bytes = int(np.unique(law.used[neutral])[1]) - 1  # only the leanest neutral candidates fit
    tiers, fits, stop = probed(law, 20, predicted=predicted)
    assert set(tiers) == {0}
    assert fits
    assert stop is not None
    law.target_bytes = int(law.used[neutral].min()) - 1  # no neutral candidate does
    tiers, fits, _ = probed(law, 12, predicted=predicted)
    assert tiers == sorted(tiers)
    assert tiers.index(2) <= 5, tiers
    assert fits


def test_at_any_tier_the_fastest_is_found_whatever_it_changes() -> None:
    law = Law(seed=3, allow="recipe")
    slow = law.grid.tiers == 0
    law.step[slow] *= 2
    law.predictions = dataclasses.replace(law.predictions, step_s=np.where(slow, 2.0, 1.0) * law.predictions.step_s)
    best_s = law.step[law.used <= law.target_bytes].min()
    _, fits, _ = probed(law, 12, predicted=True, goal="speed-at-any-tier")
    assert min(law.step[p] for p in fits) <= best_s / 0.75
    assert min(law.step[p] for p in fits) < law.step[slow & (law.used <= law.target_bytes)].min() / 1.5
    _, fits, _ = probed(law, 12, predicted=True)
    assert min(law.step[p] for p in fits) > best_s / 0.95


def test_the_band_is_found_at_the_highest_tier_that_has_it() -> None:
    for seed in range(4):
        law = Law(seed=seed, allow="recipe", off=0.05 if seed else 0.0)  # without an error many candidates are alike
        law.used *= 1.1
        for highest in (0, 2):  # of the tiers with a candidate in the band
            allowed = law.grid.tiers >= highest
            law.target_bytes = int(1.25 * np.median(law.used[allowed]))
            low, high = band_bytes(law.target_bytes)
            outside = (law.used > low) & (law.used < high) & ~allowed
            law.used[outside] *= 0.6
            law.predictions.device_used_bytes[outside] *= 0.6
            law.predictions = dataclasses.replace(law.predictions, floor_bytes=np.zeros(len(law.grid)))
            assert ((law.used > low) & (law.used < high) & allowed).any()
            tiers, fits, _ = probed(law, 12, predicted=True, goal="utilisation")
            inside = [p for p in fits if low <= law.used[p] <= high]
            assert min(law.grid.tiers[p] for p in inside) == highest, (seed, highest, tiers)


@pytest.mark.parametrize(
    ("slower_s", "used_gb", "leaner"), [(0.004, 5.6, True), (0.004, 7.8, False), (0.03, 5.6, False), (0.03, 9.0, True)]
)
def test_an_equally_fast_candidate_with_clearly_less_memory_is_probed_before_the_end(
    slower_s: float, used_gb: float, leaner: bool
) -> None:
    from autofit.space.space import Candidate

    grid = Grid(["kind"], [("a", "b", "c")], [Candidate((kind,)) for kind in "abc"])
    most = 8.0 if used_gb < 8 else 9.8  # at the edge of 10 GB a little slower is slow enough
    step, used = np.array([2.0, 1.0, 1.0 + slower_s]), np.array([3.0, most, used_gb]) * GB
    predictions = Predictions(candidates=grid.candidates, floor_bytes=used, device_used_bytes=used, step_s=step)
    sampler = PriorSampler(grid, predictions=predictions, target_bytes=10 * GB, min_gain_frac=0.5)
    study = optuna.create_study(directions=["minimize", "minimize"], sampler=sampler)
    for place in (0, 1):
        study.add_trial(create_trial(
            params=grid.params(place), distributions=sampler.distributions(), constraints={"over": -1.0},
            values=[float(step[place]), float(used[place])],
        ))  # fmt: skip
    assert (sampler.worth_another(study, min_gain_frac=0.5) is None) is leaner
    proposal = sampler.proposal()
    assert proposal is not None
    assert proposal.leaner is leaner


@pytest.mark.parametrize(("gain_s", "leaner_gb", "first"), [(0.004, 0.1, 1), (0.05, 0.1, 2), (0.004, 2.0, 2)])
def test_a_further_change_of_the_training_is_probed_only_where_it_gains_something(
    gain_s: float, leaner_gb: float, first: int
) -> None:
    from autofit.space.space import Candidate

    pairs = [(4, 16), (2, 16), (2, 4)]
    grid = Grid(["length", "rank"], [(4, 2), (16, 4)], [Candidate(pair) for pair in pairs],
                tiers=["neutral", "recipe", "recipe"])  # fmt: skip
    step, used = np.array([2.0, 1.0, 1.0 - gain_s]), np.array([20.0, 8.0, 8.0 - leaner_gb]) * GB
    predictions = Predictions(candidates=grid.candidates, floor_bytes=used, device_used_bytes=used, step_s=step)
    sampler = PriorSampler(grid, predictions=predictions, target_bytes=10 * GB)
    study = optuna.create_study(directions=["minimize", "minimize"], sampler=sampler)
    assert grid.find(study.ask(sampler.distributions()).params) == first


def test_the_search_ends_when_little_is_left_to_gain_and_says_how_little() -> None:
    law = Law(seed=5, off=0.05)
    sampler = law.sampler()
    study = law.study(sampler)
    while (stop := sampler.worth_another(study, min_gain_frac=0.01)) is None:
        law.tell(study, study.ask(sampler.distributions()))
        assert len(study.trials) < 30
    assert stop.kind is StopKind.GAIN
    assert "below 1 %" in stop.words
    assert sampler.worth_another(study, min_gain_frac=None) is None
    assert [_percent(share) for share in (0.0017, 4.1e-19)] == ["0.17 %", "less than 0.01 %"]


def test_an_oom_teaches_that_like_candidates_need_more_than_was_predicted() -> None:
    law = Law(seed=6)
    sampler = law.sampler()
    assert isinstance(sampler, PriorSampler)
    places = np.arange(len(law.grid))
    before = sampler._model.fits_at(places)
    place = int(np.argmax(before))
    distributions = sampler.distributions()
    study = law.study(sampler)
    study.add_trial(create_trial(
        params=law.grid.params(place), distributions=distributions, values=[9.0, law.target_bytes + 1.0],
        constraints={"bytes_over_target": 1.0},
    ))  # fmt: skip
    sampler.read(study)
    sampler.proposal()
    after = sampler._model.fits_at(places)
    # what was predicted to fit is less likely to; what was not may be a little likelier: predictions are further off
    assert (after[before >= 0.3] < before[before >= 0.3]).all()
    assert after.mean() < 0.6 * before.mean()
    assert after[place] < 0.6 * before[place]


def test_unknown_predictions_are_guessed_from_the_rest() -> None:
    law = Law(seed=7)
    step = law.predictions.step_s.copy()
    step[::3] = np.nan
    law.predictions = dataclasses.replace(law.predictions, step_s=step)
    sampler = law.sampler()
    assert isinstance(sampler, PriorSampler)
    expected = np.exp(sampler._model.log_step)
    assert np.isfinite(expected).all()
    assert np.corrcoef(np.log(expected), np.log(law.step))[0, 1] > 0.5
    with pytest.raises(ConfigError, match="one step_s per candidate"):
        dataclasses.replace(law.predictions, step_s=step[1:])


def test_memory_order_in_the_grid_is_that_of_the_space() -> None:
    for loss, allow in (("grpo", "neutral"), ("dapo", "recipe")):
        law = Law(seed=8, allow=allow, loss=loss)  # type: ignore[arg-type]
        chance = np.random.default_rng(0)
        for place in chance.integers(0, len(law.grid), 12):
            mask = law.grid.needs_no_less(int(place))
            for other in chance.integers(0, len(law.grid), 60):
                one, two = law.grid.candidates[other], law.grid.candidates[place]
                assert mask[other] == law.space.needs_no_less(one, two)


def test_a_grid_needs_no_space() -> None:
    from autofit.space.space import Candidate

    candidates = [Candidate((a, b)) for a in (1, 2, 4, 8) for b in ("x", "y")]
    grid = Grid(["size", "kind"], [(1, 2, 4, 8), ("x", "y")], candidates, ascending=["size"])
    sampler = PriorSampler(grid, target_bytes=5)
    study = optuna.create_study(directions=["minimize", "minimize"], sampler=sampler)
    for _ in range(6):
        trial = study.ask(sampler.distributions())
        size = trial.params["size"]
        trial.set_constraint("over", size - 5.0)
        study.tell(trial, [8 / size if size < 5 else 8.0, size])
        if sampler.worth_another(study, min_gain_frac=None) is not None:
            break
    assert min(t.values[0] for t in study.trials if t.constraints["over"] <= 0) == 2
    assert len({str(t.params) for t in study.trials}) == len(study.trials)


def test_tiers_of_the_grid_are_those_of_the_space() -> None:
    law = Law(seed=9, allow="recipe", loss="dapo")
    assert [TIERS[t] for t in law.grid.tiers] == [law.space.tier(c) for c in law.grid.candidates]


def test_a_hundred_thousand_candidates_are_listed_and_searched() -> None:
    recipe = grpo_recipe(
        per_device_train_batch_size=8, gradient_accumulation_steps=8, steps_per_generation=8, kind="a", seed=1, x=1
    )
    more = tuple(Knob(name=n, tier="neutral", values=v) for n, v in
                 [("kind", ("a", "b", "c")), ("seed", (1, 2, 3, 4)), ("x", (1, 2, 3, 5))])  # fmt: skip
    space = Space.of(recipe, (*load_space(None, trainer="grpo"), *more), allow="recipe")
    grid = Grid.of(space)
    assert len(grid) > 100_000
    chance = np.random.default_rng(0)
    used, step = chance.uniform(1, 9, len(grid)) * GB, chance.uniform(1, 9, len(grid))
    predictions = Predictions(candidates=grid.candidates, floor_bytes=0.5 * used, device_used_bytes=used, step_s=step)
    sampler = PriorSampler(grid, predictions=predictions, target_bytes=5 * GB)
    study = optuna.create_study(directions=["minimize", "minimize"], sampler=sampler)
    for _ in range(4):
        trial = study.ask(sampler.distributions())
        place = grid.find(trial.params)
        assert place is not None
        trial.set_constraint("over", float(used[place] - 5 * GB))
        study.tell(trial, [float(step[place]), float(used[place])])
    assert min(t.values[0] for t in study.trials[1:]) < 1.1


@pytest.mark.parametrize("told", [True, False])
def test_a_rollout_that_is_told_is_corrected_by_itself(told: bool) -> None:
    from autofit.space.space import Candidate

    sizes, kinds = (1, 2, 4, 8), ("x", "y", "z")
    grid = Grid(["size", "kind"], [sizes, kinds], [Candidate((a, b)) for a in sizes for b in kinds])
    rollout = np.repeat([8.0, 4.0, 2.0, 1.0], 3)  # the update is expected to depend on the kind alone
    update = np.tile([1.0, 2.0, 4.0], 4)
    true_rollout, true_update = 1.5 * rollout, 0.6 * update
    predictions = Predictions(
        candidates=grid.candidates, floor_bytes=np.zeros(12), device_used_bytes=np.full(12, 1.0 * GB),
        step_s=rollout + update, rollout_s=rollout,
    )  # fmt: skip
    sampler = PriorSampler(grid, predictions=predictions, target_bytes=2 * GB)
    study = optuna.create_study(directions=["minimize", "minimize"], sampler=sampler)
    for place in (0, 7):
        step_s = float(true_rollout[place] + true_update[place])
        measured = {"result": {"step_s": [step_s, step_s], "rollout_s": [0.0, 2 * float(true_rollout[place])]}}
        study.add_trial(create_trial(
            params=grid.params(place), distributions=sampler.distributions(), values=[step_s, float(GB)],
            constraints={"bytes_over_target": -1.0}, user_attrs=measured if told else {},
        ))  # fmt: skip
    sampler.read(study)
    sampler.proposal()
    mean, _ = sampler._model.log_step_at(np.arange(12))
    off = np.abs(mean - np.log(true_rollout + true_update))
    assert bool(off.max() < 0.1) is told, off
