"""Whoever proposes a trial and however it ends: what is probed keeps the recipe's effective batch and its groups."""

import random
from dataclasses import dataclass, replace
from pathlib import Path

import optuna
import pytest
from matrix import one_at_a_time
from optuna.trial import TrialState
from recipes import trl_facts

from autofit.probing.launch import Launcher
from autofit.probing.result import ProbeRequest, ProbeResult, ProbeStatus
from autofit.recipe.keys import TIERS, Tier
from autofit.recipe.launch import Launch
from autofit.recipe.recipe import Recipe, TrainerName
from autofit.space.knob import load_space
from autofit.space.space import Space
from autofit.tuning.candidates import Grid
from autofit.tuning.sampler import SAMPLERS, SamplerName, make_sampler
from autofit.tuning.search import Plan, Search

ACCUMULATION = "gradient_accumulation_steps"
_OWN: dict[TrainerName, dict[str, object]] = {
    "grpo": {"num_generations": 4, "max_completion_length": 64, "loss_type": "dapo", "num_iterations": 1},
    "sft": {"max_length": 100},
    "dpo": {"max_length": 100, "loss_type": ["sigmoid"], "precompute_ref_log_probs": False},
    "reward": {"max_length": 100},
}


def recipe_of(trainer: TrainerName, micro: int, accumulation: int, *, world: int = 1, **own: object) -> Recipe:
    """A recipe as given, and as TRL resolves it: rollouts of a whole step where nothing else is said."""
    values = {
        "per_device_train_batch_size": micro, ACCUMULATION: accumulation, "use_peft": True,
        "lora_r": 16, "lora_alpha": 32, "gradient_checkpointing": True, "optim": "adamw_torch", **_OWN[trainer], **own,
    }  # fmt: skip
    resolved = {"attn_implementation": None, "load_in_4bit": False, "load_in_8bit": False, **values}
    if trainer == "grpo":
        resolved["steps_per_generation"] = rollout(values, world) // (micro * world)
        resolved["generation_batch_size"] = rollout(values, world)
    facts = trl_facts(trainer, resolved)
    return Recipe(trainer=trainer, values=values, resolved=resolved, launch=Launch(ranks=world), **facts)


def number(values: dict[str, object], key: str) -> int:
    value = values[key]
    assert isinstance(value, int), (key, value)
    return value


def effective(values: dict[str, object], world: int) -> int:
    return number(values, "per_device_train_batch_size") * number(values, ACCUMULATION) * world


def rollout(values: dict[str, object], world: int) -> int:
    """Completions generated at once, as GRPOConfig works them out."""
    assert not {"generation_batch_size", "steps_per_generation"} <= set(values), "TRL refuses both"
    if "generation_batch_size" in values:
        return number(values, "generation_batch_size")
    key = "steps_per_generation" if "steps_per_generation" in values else ACCUMULATION
    return effective({**values, ACCUMULATION: values[key]}, world)


RECIPES = (
    recipe_of("grpo", 3, 5, num_generations=5, loss_type="grpo"),
    recipe_of("grpo", 6, 7, num_generations=3, steps_per_generation=7),
    recipe_of("grpo", 4, 9, num_generations=6, steps_per_generation=3, world=2),
    recipe_of("grpo", 2, 6, num_generations=4, generation_batch_size=36, loss_type="bnpo"),
    recipe_of("grpo", 10, 3, num_generations=15, num_iterations=2, scale_rewards="batch"),
    recipe_of("sft", 5, 9),
    recipe_of("dpo", 7, 6, world=3),
    recipe_of("reward", 1, 11),
)


@dataclass
class ByChance(Launcher):
    """Answers at once: fits, runs out of memory, fails or is killed. Keeps what it was asked to probe."""

    chance: random.Random

    def __post_init__(self) -> None:
        self.asked: dict[int, list[dict[str, object]]] = {}
        self._answers: dict[Path, ProbeResult] = {}

    def submit(self, request: ProbeRequest) -> None:
        trial = int(request.folder.name.split("-")[1])
        self.asked.setdefault(trial, []).append(dict(request.values))
        status = self.chance.choices(list(ProbeStatus), [6, 2, 1, 2])[0] if trial else ProbeStatus.FIT
        held = self.chance.randrange(50, 100) + (100 if status is ProbeStatus.OOM else 0)
        result = ProbeResult(status=status, device="cpu", device_used_bytes=held, step_s=(self.chance.random(),))
        self._answers[request.folder] = result if status is not ProbeStatus.OOM else replace(result, step_s=())

    def result(self, folder: Path) -> ProbeResult | None:
        return self._answers[folder]


@pytest.mark.parametrize(("recipe", "name"), one_at_a_time(RECIPES, SAMPLERS))
def test_every_trial_ever_told_keeps_the_effective_batch_and_the_groups(
    recipe: Recipe, name: SamplerName, tmp_path: Path
) -> None:
    statuses = set[str]()
    for seed, allow in enumerate(TIERS):
        study, asked = told(recipe, allow, name, seed, tmp_path / allow)
        assert set(asked) == {t.number for t in study.trials}
        assert len({tuple(t.params.items()) for t in study.trials}) == len(study.trials)
        for trial in study.trials:
            statuses.add(trial.user_attrs["status"])
            for values in asked[trial.number]:
                assert_kept(recipe, values, trial.user_attrs["tier"])
                steps = rollout(values, recipe.world_size) // effective({**values, ACCUMULATION: 1}, recipe.world_size)
                assert steps == trial.params.get("steps_per_generation", steps), "not what was asked for"
    assert len(statuses) >= 3 or name == "gp", statuses


def told(
    recipe: Recipe, allow: Tier, name: SamplerName, seed: int, folder: Path
) -> tuple[optuna.Study, dict[int, list[dict[str, object]]]]:
    """A search in memory, the last of whose trials lost its driver half-way and is asked for again."""
    space = Space.of(recipe, load_space(None, trainer=recipe.trainer), allow=allow, device="cuda")
    trials = min(4 if name == "gp" else 9, len(space.allowed()) // 3)
    plan = Plan(recipe=recipe, space=space, folder=folder, device="cpu", target_bytes=100, max_trials=trials)
    sampler = make_sampler(name, Grid.of(space), target_bytes=100, seed=seed)
    study = optuna.create_study(directions=["minimize", "minimize"], sampler=sampler)
    launcher = ByChance(random.Random(seed))
    Search(plan, study, server_socket=None, launcher=launcher).run()
    half = study.ask()
    first = next(iter(sampler.distributions().items()))
    half._suggest(*first)
    Search(plan, study, server_socket=None, launcher=launcher).run()
    assert all(t.state in (TrialState.COMPLETE, TrialState.FAIL) for t in study.trials)
    return study, launcher.asked


def assert_kept(recipe: Recipe, values: dict[str, object], tier: Tier) -> None:
    world = recipe.world_size
    assert effective(values, world) == recipe.effective_batch_size, values
    if recipe.trainer != "grpo":
        return
    group, generated = number(values, "num_generations"), rollout(values, world)
    assert group == recipe.num_generations or tier == "recipe", values
    assert generated % group == 0, values
    assert recipe.effective_batch_size % group == 0, values
    assert generated % (number(values, "per_device_train_batch_size") * world) == 0, values
    if recipe.generation_batch_size > recipe.effective_batch_size or recipe.resolved["num_iterations"] != 1:
        assert generated == recipe.generation_batch_size, values
    else:
        assert recipe.effective_batch_size % generated == 0, values
