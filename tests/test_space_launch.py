"""The space of a recipe on several ranks: launches that exist, at the effective batch of the recipe."""

import random
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from recipes import grpo_recipe

from autofit.errors import ConfigError
from autofit.forecast.levers import Levers
from autofit.forecast.predictions import Predictions, has_room, without_offload
from autofit.recipe.findings import clashes
from autofit.recipe.keys import LAUNCH, QUANT_STORAGE, SYNC_EACH_BATCH, Tier
from autofit.recipe.launch import Launch, Sharding
from autofit.recipe.recipe import Recipe, inner_value, merge, with_launch
from autofit.space import narrow
from autofit.space.knob import Knob, load_space
from autofit.space.space import Candidate, Space

SIM = "sim:a100-40gb"
NAMES = ("launch.sharding", "launch.reshard_after_forward", "launch.offload")


def recipe_on(launch: Launch, **changes: object) -> Recipe:
    return with_launch(grpo_recipe(world_size=launch.ranks, **changes), launch)


def space_of(recipe: Recipe, device: str = SIM) -> Space:
    knobs = tuple(k for k in load_space(None, trainer="grpo") if k.name.startswith(("launch.", "vllm_tensor")))
    batch = tuple(k for k in load_space(None, trainer="grpo") if k.solved)
    return Space.of(recipe, batch + knobs, device=device)


def launch_of(space: Space, candidate: Candidate) -> Launch:
    return Launch.of(merge(space.recipe.values, space.yaml_changes(candidate)))


@pytest.fixture(autouse=True)
def with_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow, "is_installed", lambda package: True)


def kinds(space: Space) -> set[tuple[object, ...]]:
    found = (launch_of(space, c) for c in space.allowed())
    return {(one.sharding, one.reshard_after_forward or one.sharding != "fsdp2", one.offload) for one in found}


ALL_KINDS = {
    ("ddp", True, "none"), ("zero2", True, "none"), ("zero2", True, "optimizer"), ("zero3", True, "none"),
    ("zero3", True, "optimizer"), ("zero3", True, "parameters"), ("fsdp2", True, "none"), ("fsdp2", False, "none"),
    ("fsdp2", True, "parameters"), ("fsdp2", False, "parameters"),
}  # fmt: skip


@pytest.mark.parametrize(
    "own", [{}, {"sharding": "fsdp2"}, {"sharding": "fsdp2", "offload": "parameters", "reshard_after_forward": False},
            {"sharding": "zero2", "offload": "optimizer"}, {"sharding": "zero3", "offload": "parameters"}],
)  # fmt: skip
def test_every_launch_that_exists_is_a_candidate_once_and_no_other(own: Mapping[str, object]) -> None:
    space = space_of(recipe_on(Launch.of({LAUNCH: {"ranks": 4, **own}})))
    assert kinds(space) == ALL_KINDS
    launches = [(launch_of(space, c).to_values(), space.changes(c)) for c in space.allowed()]
    assert len({repr(one) for one in launches}) == len(launches)
    for candidate in space.allowed():
        assert space.violated(candidate) is None
        assert space.settled(space.params(candidate)) == candidate
        assert space.tiers[candidate] == "neutral"


def test_a_launch_beyond_the_listed_ones_stays_with_the_recipe() -> None:
    space = space_of(recipe_on(Launch(ranks=4, sharding="fsdp1", offload="parameters")))
    assert ("fsdp1", True, "parameters") in kinds(space)
    assert kinds(space) >= ALL_KINDS


def test_one_rank_has_nothing_to_choose_and_nothing_to_say() -> None:
    knobs = load_space(None, trainer="grpo")
    space = Space.of(grpo_recipe(), knobs, device=SIM)
    assert not [k.name for k in space.knobs if k.name.startswith(("launch.", "vllm_tensor"))]
    assert not [name for name in (*space.left_out, *space.idle) if name.startswith("launch.")]


def test_the_cpu_has_ddp_and_fsdp2_alone() -> None:
    space = space_of(recipe_on(Launch(ranks=2)), device="cpu")
    assert kinds(space) == {("ddp", True, "none"), ("fsdp2", True, "none"), ("fsdp2", False, "none")}
    assert "launch.sharding" not in space.left_out


def test_without_deepspeed_zero_is_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow, "is_installed", lambda package: package != "deepspeed")
    for device in (SIM, "cuda"):
        space = space_of(recipe_on(Launch(ranks=2)), device=device)
        assert not [kind for kind in kinds(space) if str(kind[0]).startswith("zero")]
        assert "needs deepspeed, which is not installed" in space.left_out["launch.sharding"]


@pytest.mark.parametrize("given", [None, {"even_batches": False}, '{"even_batches": false}'])
def test_gradients_are_synced_in_every_micro_batch_where_they_are_sharded(given: object) -> None:
    own = {} if given is None else {"accelerator_config": given}
    knobs = tuple(k for k in load_space(None, trainer="grpo") if k.name in (*NAMES, SYNC_EACH_BATCH) or k.solved)
    resolved: dict[str, object] = {"accelerator_config": {"even_batches": True, "gradient_accumulation_kwargs": None}}
    recipe = recipe_on(Launch(ranks=4), **own)
    recipe = replace(recipe, resolved={**recipe.resolved, **resolved})
    space = Space.of(recipe, knobs, device=SIM)
    seen = set()
    for candidate in space.allowed():
        values = merge(recipe.values, space.yaml_changes(candidate))
        synced = inner_value(values, SYNC_EACH_BATCH)
        seen.add((Launch.of(values).sharding, synced))
        assert space.settled(space.params(candidate)) == candidate
        assert space.violated(candidate) is None
        if synced:
            assert space.split(candidate)[1] > 1  # with one micro-batch it would be the same training
            assert space.tiers[candidate] == "neutral"
            kept = {} if given is None else {"even_batches": False}
            assert values["accelerator_config"] == {**kept, "gradient_accumulation_kwargs": {"sync_each_batch": True}}
    assert {synced for sharding, synced in seen if sharding == "fsdp2"} == {False, True}
    assert {synced for sharding, synced in seen if sharding != "fsdp2"} == {None}


@pytest.mark.parametrize(("sharding", "fp16"), [("ddp", False), ("fsdp2", False), ("fsdp2", True)])
def test_4bit_weights_are_stored_as_a_float_where_fsdp2_shards_them_and_gathers_that_float(
    sharding: Sharding, fp16: bool
) -> None:
    recipe = recipe_on(Launch(ranks=4, sharding=sharding), load_in_4bit=True, fp16=fp16, bnb_4bit_quant_storage=None)
    levers = Levers.of(recipe, SIM)
    found = levers.strengths.get(QUANT_STORAGE, ())
    assert found == (() if fp16 else ("bfloat16",))
    if found:
        assert levers.tier_of(QUANT_STORAGE) == "neutral"
        at = levers.strongest([QUANT_STORAGE]) or {QUANT_STORAGE: "bfloat16", "launch.sharding": "fsdp2"}
        assert levers.changes(at)[QUANT_STORAGE] == "bfloat16"


def test_a_file_of_accelerator_settings_leaves_the_sync_as_it_is() -> None:
    knobs = tuple(k for k in load_space(None, trainer="grpo") if k.name in (*NAMES, SYNC_EACH_BATCH) or k.solved)
    recipe = recipe_on(Launch(ranks=4), accelerator_config="settings.json")
    space = Space.of(recipe, knobs, device=SIM)
    assert SYNC_EACH_BATCH not in [knob.name for knob in space.knobs]
    assert "accelerator_config must be a mapping" in space.left_out[SYNC_EACH_BATCH]


CLASHING = ("use_vllm", "use_transformers_continuous_batching", "optim", "quantization", "use_peft")


@pytest.mark.parametrize("own", [{}, {"sharding": "fsdp2"}, {"sharding": "zero3", "offload": "parameters"}])
@pytest.mark.parametrize("allow", ["neutral", "approximate"])
def test_settings_that_fail_together_are_never_a_candidate(own: Mapping[str, object], allow: Tier) -> None:
    recipe = recipe_on(
        Launch.of({LAUNCH: {"ranks": 4, **own}}), use_vllm=False, use_transformers_continuous_batching=False,
        optim="adamw_torch_fused", vllm_mode="colocate",
    )  # fmt: skip
    knobs = tuple(k for k in load_space(None, trainer="grpo") if k.name in NAMES + CLASHING or k.solved)
    space = Space.of(recipe, knobs, device=SIM, allow=allow)
    seen = set()
    for candidate in space.allowed():
        values = merge(recipe.values, space.yaml_changes(candidate))
        assert not list(clashes(recipe, values))
        assert space.settled(space.params(candidate)) == candidate
        launch = Launch.of(values)
        seen.add((launch.sharding, launch.offload, bool(values.get("use_vllm")), str(values.get("optim"))))
    offloaded = {use_vllm for sharding, offload, use_vllm, _ in seen if (sharding, offload) == ("fsdp2", "parameters")}
    assert offloaded == ({True} if allow == "approximate" else set())
    assert ("zero3", "parameters", False, "adamw_torch_fused") in seen  # the others stay
    assert "Expected all tensors to be on the same device" in str(space.left_out)
    if allow == "approximate":
        assert not [kind for kind in seen if kind[0] == "fsdp2" and kind[3].endswith("8bit")]
        assert [kind for kind in seen if kind[0] == "ddp" and kind[3] == "adamw_8bit"]
        assert "paged_adamw_8bit with launch.sharding fsdp2: optimizers of bitsandbytes" in space.left_out["optim"]


@pytest.mark.parametrize(
    ("dtype", "peft", "fails"), [("bfloat16", False, True), ("float16", False, True), ("float32", False, False),
                                 ("float16", True, False)],  # adapters are float32
)  # fmt: skip
def test_loss_scaling_needs_trained_weights_of_float32(dtype: str, peft: bool, fails: bool) -> None:
    recipe = recipe_on(Launch(), fp16=True, bf16=False, dtype=dtype, use_peft=peft)
    assert [clash.key for clash in clashes(recipe)] == ["fp16"] * fails


def test_a_recipe_whose_own_settings_fail_together_keeps_them() -> None:
    launch = Launch(ranks=4, sharding="fsdp2", offload="parameters")
    recipe = recipe_on(launch, use_vllm=False, use_transformers_continuous_batching=False)
    assert [clash.key for clash in clashes(recipe)] == ["launch.offload"]
    assert ("fsdp2", True, "parameters") in kinds(space_of(recipe))


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_reentrant_checkpointing_under_ddp_is_a_candidate_only_where_it_runs(*, own: bool, reentrant: bool) -> None:
    recipe = recipe_on(
        Launch(ranks=4), use_peft=True, ddp_find_unused_parameters=None, gradient_checkpointing=own,
        gradient_checkpointing_kwargs={"use_reentrant": reentrant},
    )  # fmt: skip
    assert bool(list(clashes(recipe))) == (own and reentrant)
    knobs = tuple(
        k for k in load_space(None, trainer="grpo") if k.name in (*NAMES, "gradient_checkpointing") or k.solved
    )
    space = Space.of(recipe, knobs, device=SIM)
    found = [merge(recipe.values, space.yaml_changes(candidate)) for candidate in space.allowed()]
    seen = {(Launch.of(values).sharding, bool(values["gradient_checkpointing"])) for values in found}
    assert {("ddp", False), ("fsdp2", True), ("fsdp2", False)} <= seen
    assert (("ddp", True) in seen) == (own or not reentrant)  # the recipe itself stays


@pytest.mark.parametrize(("optim", "use_peft", "fails"), [
    ("rmsprop_bnb_8bit", False, True), ("rmsprop_bnb_8bit", True, False), ("rmsprop", False, False),
])  # fmt: skip
def test_rmsprop_of_bitsandbytes_clashes_with_bfloat16_gradients(optim: str, *, use_peft: bool, fails: bool) -> None:
    recipe = recipe_on(Launch(ranks=2), optim=optim, dtype="bfloat16", use_peft=use_peft)
    assert [clash.key for clash in clashes(recipe)] == ["optim"] * fails


@pytest.mark.parametrize(("sharding", "fails"), [("fsdp2", True), ("fsdp1", False), ("ddp", False)])
def test_weights_in_8_bits_clash_with_fsdp2(sharding: Sharding, *, fails: bool) -> None:
    recipe = recipe_on(Launch(ranks=2, sharding=sharding), use_peft=True, load_in_8bit=True)
    assert [clash.key for clash in clashes(recipe)] == ["load_in_8bit"] * fails


def test_expandable_segments_are_no_candidate_beside_vllms_sleep_mode() -> None:
    grows = {"env": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}
    vllm = {"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": True}
    assert [clash.key for clash in clashes(recipe_on(Launch(), **vllm, **grows))] == ["env.PYTORCH_CUDA_ALLOC_CONF"]
    assert not list(clashes(recipe_on(Launch(), **vllm | {"vllm_enable_sleep_mode": False}, **grows)))
    recipe = recipe_on(Launch(), **vllm)
    names = ("env.PYTORCH_CUDA_ALLOC_CONF", "vllm_enable_sleep_mode")
    knobs = tuple(k for k in load_space(None, trainer="grpo") if k.name in names or k.solved)
    found = [merge(recipe.values, space.yaml_changes(c)) for space in [Space.of(recipe, knobs, device=SIM)]
             for c in space.allowed()]  # fmt: skip
    seen = {("env" in values and bool(values["env"]), values["vllm_enable_sleep_mode"]) for values in found}
    assert seen == {(False, True), (False, False), (True, False)}


@pytest.mark.parametrize(("changes", "fails"), [
    ({"load_in_4bit": True}, True), ({"load_in_8bit": True}, True), ({}, False),
    ({"load_in_4bit": True, "fp16": False, "bf16": True}, False),
])  # fmt: skip
def test_loss_scaling_clashes_with_adapters_of_a_quantised_model(changes: dict[str, object], *, fails: bool) -> None:
    recipe = recipe_on(Launch(), **{"use_peft": True, "fp16": True, "bf16": False, **changes})
    assert [clash.key for clash in clashes(recipe)] == ["fp16"] * fails


@pytest.mark.parametrize(
    ("model", "trainer", "use_peft", "fails"),
    [
        ("Qwen/Qwen3-8B", "sft", True, True),  # an LM head of its own
        ("Qwen/Qwen3-0.6B", "sft", True, False),  # the head is the input embeddings
        ("Qwen/Qwen3-8B", "sft", False, False),
        ("Qwen/Qwen3-8B", "reward", True, False),  # no LM head
        ("nobody/knows", "sft", True, False),
    ],
)
def test_an_lm_head_that_no_module_gathers_clashes_with_offload(
    model: str, trainer: str, *, use_peft: bool, fails: bool
) -> None:
    launch = Launch(ranks=4, sharding="fsdp2", offload="parameters")
    recipe = replace(recipe_on(launch, use_vllm=True, use_peft=use_peft), model=model, trainer=trainer)
    assert [clash.key for clash in clashes(recipe)] == ["launch.offload"] * fails


def test_a_candidate_names_the_package_of_its_value_alone() -> None:
    space = space_of(recipe_on(Launch(ranks=2)))
    for candidate in space.allowed():
        needed = launch_of(space, candidate).sharding.startswith("zero")
        assert ("deepspeed" in space.packages(candidate)) == needed


def test_a_sharding_knob_alone_never_makes_a_launch_that_cannot_be() -> None:
    knob = Knob(name="launch.sharding", tier="neutral", values=("ddp", "fsdp2", "zero3"))
    micro = Knob(name="per_device_train_batch_size", tier="neutral", solved=True)
    space = Space.of(recipe_on(Launch(ranks=2, sharding="fsdp2", offload="parameters")), (micro, knob), device=SIM)
    assert {launch_of(space, c).sharding for c in space.allowed()} == {"fsdp2", "zero3"}


def test_cards_move_between_training_and_server_at_the_same_effective_batch() -> None:
    draw = random.Random(1)
    several = 0
    for _ in range(50):
        server, ranks = draw.randint(1, 4), draw.randint(1, 7)
        micro, accumulation, groups = draw.choice([1, 2, 3, 4, 8]), draw.choice([1, 2, 6, 8]), draw.choice([2, 4, 8])
        recipe = recipe_on(
            Launch(ranks=ranks, server_ranks=server), per_device_train_batch_size=micro, use_vllm=True,
            gradient_accumulation_steps=accumulation, steps_per_generation=accumulation, num_generations=groups,
            vllm_mode="server",
        )  # fmt: skip
        try:
            space = space_of(recipe)
        except ConfigError:
            continue
        for candidate in space.allowed():
            values = merge(recipe.resolved, space.changes(candidate))
            launch = Launch.of(values)
            assert launch.cards == ranks + server
            size, accumulated, chunk = (
                int(str(values[key]))
                for key in ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation")
            )
            assert size * accumulated * launch.ranks == recipe.effective_batch_size
            assert (size * chunk * launch.ranks) % groups == 0
            several += launch.server_ranks != server
    assert several > 100


@pytest.mark.parametrize(("ranks", "sizes"), [(2, {1, 2}), (4, {1, 2, 4}), (8, {1, 2, 4, 8}), (3, {1})])
def test_tensor_parallel_divides_the_ranks_and_the_heads(ranks: int, sizes: set[int]) -> None:
    recipe = recipe_on(
        Launch(ranks=ranks), use_vllm=True, vllm_mode="colocate", vllm_tensor_parallel_size=1,
        model_name_or_path="Qwen/Qwen3-0.6B",
    )  # fmt: skip
    space = space_of(replace(recipe, model="Qwen/Qwen3-0.6B"))  # 16 heads
    found = {int(str(space.params(c).get("vllm_tensor_parallel_size", 1))) for c in space.allowed()}
    assert found == sizes


@pytest.mark.parametrize("own", ["none", "parameters"])
def test_a_space_without_offload_keeps_the_recipes_own(own: str) -> None:
    space = space_of(recipe_on(Launch.of({LAUNCH: {"ranks": 4, "sharding": "fsdp2", "offload": own}})))
    assert {launch_of(space, c).offload for c in without_offload(space).allowed()} == {"none", own}
    plain = Space.of(grpo_recipe(), load_space(None, trainer="grpo"), device=SIM)
    assert without_offload(plain) is plain


def test_room_is_what_is_known_to_fit() -> None:
    space = space_of(recipe_on(Launch(ranks=2)))
    count = len(space.allowed())
    used = np.where(np.arange(count) == 0, 9e9, np.nan)
    known = Predictions(candidates=tuple(space.allowed()), floor_bytes=np.zeros(count), device_used_bytes=used,
                        step_s=np.ones(count))  # fmt: skip
    assert has_room(known, 10**10)
    assert has_room(known, None)
    assert not has_room(known, 8 * 10**9)
