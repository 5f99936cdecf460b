from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from recipes import grpo_recipe

from autofit.errors import ConfigError
from autofit.recipe.keys import TIERS, Tier
from autofit.space.knob import load_space
from autofit.space.space import Knob, Space

KNOBS = load_space(None, trainer="grpo")


@settings(max_examples=250, deadline=None)
@given(
    micro=st.integers(1, 24), accumulation=st.integers(1, 24), generations=st.integers(2, 12),
    chunk=st.integers(1, 24), world=st.sampled_from([1, 2, 3, 4, 8]), iterations=st.sampled_from([1, 1, 2]),
    allow=st.sampled_from(TIERS), loss=st.sampled_from(["grpo", "dapo", "bnpo"]),
    extra=st.lists(st.sampled_from(["x0.25", "x0.5", "x2", "x3", 2, 3, 4, 6]), max_size=4, unique=True),
    solved=st.booleans(),
)  # fmt: skip
def test_every_candidate_holds_the_effective_batch_and_whole_groups_exactly(
    micro: int, accumulation: int, generations: int, chunk: int, world: int, iterations: int, allow: Tier,
    loss: str, extra: list[int | str], solved: bool,
) -> None:  # fmt: skip
    recipe = grpo_recipe(
        per_device_train_batch_size=micro, gradient_accumulation_steps=accumulation, steps_per_generation=chunk,
        num_generations=generations, world_size=world, num_iterations=iterations, loss_type=loss,
    )  # fmt: skip
    knobs = tuple(
        Knob(name=k.name, tier=k.tier, values=tuple(extra) or (2,), needs=k.needs)
        if k.name == "num_generations" or (k.name == "steps_per_generation" and not solved)
        else k
        for k in KNOBS
    )
    try:
        space = Space.of(recipe, knobs, allow=allow, device="cuda")
    except ConfigError:
        assume((micro * chunk * world) % generations == 0 and recipe.effective_batch_size % generations == 0)
        whole, part = sorted([recipe.effective_batch_size, recipe.generation_batch_size], reverse=True)
        assert whole % part != 0  # the only reason to refuse a recipe whose groups are whole
        return
    seen = set()
    for count, candidate in enumerate(space.candidates()):
        if count >= 300:
            break
        assert candidate not in seen
        seen.add(candidate)
        keys = {**recipe.resolved, **space.changes(candidate)}
        m, a = keys["per_device_train_batch_size"], keys["gradient_accumulation_steps"]
        k, c = keys["num_generations"], keys["steps_per_generation"]
        assert isinstance(m, int)
        assert isinstance(a, int)
        assert isinstance(k, int)
        assert isinstance(c, int)
        assert m * a * world == recipe.effective_batch_size
        assert (m * c * world) % k == 0
        assert recipe.effective_batch_size % k == 0
        assert a % c == 0 or c % a == 0
        assert TIERS.index(space.tier(candidate)) <= TIERS.index(allow) or loss != "grpo"
    if recipe.num_prompts is None and (micro * chunk * world) % generations == 0:
        assert space.changes(space.baseline) == {}
        assert space.tier(space.baseline) == "neutral"


def test_lora_alpha_keeps_its_ratio_to_r() -> None:
    space = Space.of(grpo_recipe(), KNOBS, allow="recipe")
    halved = next(c for c in space.candidates() if space.params(c) == {**space.params(space.baseline), "lora_r": 8})
    assert space.changes(halved) == {"lora_r": 8, "lora_alpha": 16}
    assert space.tier(halved) == "recipe"


@pytest.mark.parametrize(
    ("loss", "split", "chunk"),
    [("grpo", "neutral", "neutral"), ("dapo", "neutral", "approximate"), ("bnpo", "approximate", "approximate"),
     ("dr_grpo", "neutral", "neutral"), ("cispo", "neutral", "approximate")],
)  # fmt: skip
def test_what_is_neutral_depends_on_the_loss(loss: str, split: str, chunk: str) -> None:
    space = Space.of(grpo_recipe(loss_type=loss), KNOBS, allow="recipe")
    base = space.params(space.baseline)
    halves = space.candidate({**base, "per_device_train_batch_size": 2, "steps_per_generation": 8})
    chunked = space.candidate({**base, "steps_per_generation": 2})
    assert (space.tier(halves), space.tier(chunked)) == (split, chunk)


def test_batch_scaled_rewards_make_smaller_rollouts_approximate() -> None:
    space = Space.of(grpo_recipe(scale_rewards="batch"), KNOBS, allow="recipe")
    assert space.tier(space.candidate({**space.params(space.baseline), "steps_per_generation": 2})) == "approximate"


def test_rollouts_used_for_several_steps_keep_their_size() -> None:
    recipe = grpo_recipe(steps_per_generation=8)
    space = Space.of(recipe, KNOBS, allow="recipe")
    assert {m * c for m, _, c, _ in map(space.split, space.candidates())} == {recipe.generation_batch_size}


def test_an_empty_space_says_which_constraint_excludes_what() -> None:
    with pytest.raises(ConfigError, match=r"no valid candidate: of \d+ combinations, \d+ by .*dataset has \(1\)"):
        Space.of(
            grpo_recipe(
                num_prompts=1, num_generations=2, per_device_train_batch_size=16, gradient_accumulation_steps=1,
                steps_per_generation=1, num_iterations=2,
            ),
            KNOBS,
        )  # fmt: skip


def test_a_split_group_is_refused_with_the_keys_to_change() -> None:
    with pytest.raises(ConfigError, match=r"effective batch 6 .*num_generations=4.*change"):
        Space.of(grpo_recipe(per_device_train_batch_size=3, gradient_accumulation_steps=2), KNOBS)


def test_memory_order_rules_out_only_what_is_at_least_as_large_in_every_knob() -> None:
    space = Space.of(grpo_recipe(), KNOBS)
    base = space.params(space.baseline)
    larger = space.candidate({**base, "per_device_train_batch_size": 8, "steps_per_generation": 2})
    without = space.candidate({**base, "gradient_checkpointing": False})
    eager = space.candidate({**base, "attn_implementation": "eager"})
    assert space.needs_no_less(larger, space.baseline)
    assert space.needs_no_less(without, space.baseline)
    assert not space.needs_no_less(space.baseline, larger)
    assert not space.needs_no_less(larger, without)
    assert not space.needs_no_less(eager, space.baseline)  # no order is claimed for attention kernels


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trainer: sft\nknobs: {a: {tier: neutral, values: [1]}}", "is for trainer 'sft'"),
        ("trainer: grpo\nknobs: []", "must have a mapping `knobs`"),
        ("trainer: grpo\nknobs: {lora_r: {tier: free, values: [1]}}", "tier must be one of"),
        ("trainer: grpo\nknobs: {lora_r: {tier: recipe, values: []}}", "values must be a list"),
        ("trainer: grpo\nknobs: {lora_r: {tier: recipe, vlaues: [1]}}", "nearest valid one is 'values'"),
        ("trainer: grpo\nknobs: {lora_r: {tier: recipe, values: [[1]]}}", "must be plain"),
        ("trainer: grpo\nextra: 1\nknobs: {}", "may only have the keys"),
    ],
)
def test_a_broken_space_file_gets_one_clear_error(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "space.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_space(str(path), trainer="grpo")


def test_an_unknown_knob_names_the_nearest_key() -> None:
    with pytest.raises(ConfigError, match="nearest valid one is 'lora_r'"):
        Space.of(grpo_recipe(), (Knob(name="lora_rank", tier="recipe", values=(1,)),), allow="recipe")


def test_a_knob_without_what_it_needs_stays_as_the_recipe_has_it_and_says_why() -> None:
    rank = Knob(name="lora_r", tier="recipe", values=(8,), needs=("lora",))
    space = Space.of(grpo_recipe(use_peft=False), (*KNOBS[:5], rank), allow="recipe", device="cpu")
    assert not {k.name for k in space.knobs} & {"lora_r", "env.PYTORCH_CUDA_ALLOC_CONF"}
    assert space.left_out == {
        "env.PYTORCH_CUDA_ALLOC_CONF": "it needs a GPU, and probes run on the CPU",
        "lora_r": "the recipe trains without LoRA (use_peft)",
    }


def test_only_the_keys_that_batch_samples_can_be_solved() -> None:
    with pytest.raises(ConfigError, match="only per_device_train_batch_size and steps_per_generation can be solved"):
        Space.of(grpo_recipe(), (Knob(name="lora_r", tier="recipe", solved=True),), allow="recipe")
