"""Knobs inside mappings, knobs that depend on others, and knobs that are left out: each with its reason."""

import time
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from recipes import grpo_recipe

import autofit.space.narrow
from autofit.api.planning import _check_target
from autofit.errors import ConfigError
from autofit.recipe.launch import Launch
from autofit.recipe.recipe import Recipe, merge, tuned_yaml
from autofit.space.knob import Knob, load_space, read_space
from autofit.space.space import Space
from autofit.space.traits import SHARED_FILE, describe_changes, describe_left_out

OPTIONS, CARD = "activation_checkpointing_kwargs", "sim:a100-40gb"
DEFAULTS: dict[str, object] = {  # TRL's, of the keys that the default space of GRPO varies
    "dtype": "float32", "optim": "adamw_torch_fused", "use_vllm": False, "vllm_mode": "colocate",
    "vllm_gpu_memory_utilization": 0.3, "vllm_enable_sleep_mode": False, "vllm_max_model_length": None,
    "use_transformers_continuous_batching": False, "transformers_continuous_batching_config": None,
    "torch_compile": False, "torch_empty_cache_steps": None, "cast_lm_head_to_fp32": False, "model_init_kwargs": None,
    OPTIONS: None,
}  # fmt: skip


def recipe(**changes: object) -> Recipe:
    """GRPO's recipe with TRL's defaults, on prompts of at most 100 tokens."""
    made = grpo_recipe(**{**DEFAULTS, **changes})
    return Recipe(**{**{n: getattr(made, n) for n in Recipe.__dataclass_fields__}, "longest_prompt_tokens": 100})


def full(given: Recipe, **more: str) -> Space:
    return Space.of(given, load_space(None, trainer="grpo"), **{"allow": "recipe", "device": CARD, **more})  # type: ignore[arg-type]


# -- keys inside a mapping --------------------------------------------------------------------------------------------


def test_a_change_of_an_inner_key_leaves_the_rest_of_its_mapping_as_it_is() -> None:
    given = {"a": 1, OPTIONS: {"use_reentrant": False}, "model_init_kwargs": '{"use_cache": false}'}
    changes = {f"{OPTIONS}.offload": True, "model_init_kwargs.use_kernels": True, "other.deep.key": 3}
    found = merge(given, changes)
    assert found[OPTIONS] == {"use_reentrant": False, "offload": True}
    assert found["model_init_kwargs"] == {"use_cache": False, "use_kernels": True}  # TRL takes JSON text too
    assert found["other"] == {"deep": {"key": 3}}
    assert given[OPTIONS] == {"use_reentrant": False}
    assert merge({OPTIONS: {"offload": True}}, {f"{OPTIONS}.offload": None}) == {}
    assert merge({"a": 1, "max_length": 512}, {"a": None, "max_length": None}) == {"max_length": None}  # TRL: no limit
    with pytest.raises(ConfigError, match=r"a must be a mapping, or a\.b cannot be set; got 1"):
        merge(given, {"a.b": 2})


def test_an_inner_key_is_a_knob_from_the_space_to_the_tuned_yaml() -> None:
    knobs = read_space(
        {f"{OPTIONS}.offload": {"tier": "neutral", "values": [True, False], "unset": False}}, trainer=None
    )
    space = Space.of(recipe(), knobs)
    assert [c.values for c in space.candidates()] == [(True,), (False,)]  # False is what it means where it is not given
    changes = space.yaml_changes(space.candidate({f"{OPTIONS}.offload": True}))
    assert describe_changes(changes, space.recipe.resolved) == f"{OPTIONS}.offload True"
    given = {"x": 1, OPTIONS: {"use_reentrant": False}}
    assert yaml.safe_load(tuned_yaml(given, changes, comment="")) == {
        "x": 1, OPTIONS: {"use_reentrant": False, "offload": True},
    }  # fmt: skip
    stated = Space.of(recipe(**{OPTIONS: {"offload": True}}), knobs)
    assert stated.baseline.values == (True,)


# -- conditions -------------------------------------------------------------------------------------------------------


def test_no_training_is_listed_twice_and_what_has_no_effect_keeps_its_value() -> None:
    space = full(recipe(use_peft=False), allow="approximate")
    found = list(space.candidates())
    texts = {str(merge({}, space.changes(c))) for c in found}
    assert len(found) == len(set(found)) == len(texts)
    for candidate in found:
        params = space.params(candidate)
        assert space.violated(candidate) is None
        assert params["use_vllm"] or params["vllm_gpu_memory_utilization"] == 0.3
        assert not (params["use_vllm"] and params["use_transformers_continuous_batching"])


def test_what_gains_an_effect_is_written_out_even_at_its_default() -> None:
    space = full(recipe())
    base = space.params(space.baseline)
    with_vllm = space.settled({**base, "use_vllm": True})
    assert space.changes(with_vllm) == {
        "use_vllm": True, "vllm_gpu_memory_utilization": 0.3, "vllm_enable_sleep_mode": False,
        "vllm_max_model_length": 164,  # the longest prompt and completion: vLLM need not hold the model's whole context
    }  # fmt: skip
    assert space.packages(with_vllm) == ("vllm",)
    unsettled = space.candidate({**base, "vllm_enable_sleep_mode": True})
    assert "only where it has an effect (where use_vllm is True" in str(space.violated(unsettled))
    assert space.settled(space.params(unsettled)) == space.baseline
    eight_bit = space.settled({**base, "quantization": "8bit", "use_vllm": True})
    assert space.params(eight_bit)["use_vllm"] is False  # TRL refuses the two together


def test_a_recipe_with_vllm_keeps_what_it_chose_among_the_values() -> None:
    given = recipe(use_vllm=True, vllm_gpu_memory_utilization=0.42)
    space = full(given, allow="neutral")
    shares = {space.params(c)["vllm_gpu_memory_utilization"] for c in space.candidates()}
    assert shares == {0.3, 0.4, 0.42, 0.45, 0.5, 0.6, 0.7, 0.8, 0.9}
    lengths = {space.params(c)["vllm_max_model_length"] for c in space.candidates()}
    assert lengths == {None, 164}
    assert space.changes(space.baseline) == {}


def test_lora_in_place_of_full_fine_tuning_says_its_rank_and_alpha_and_may_be_quantised() -> None:
    space = full(recipe(use_peft=False))
    base = space.params(space.baseline)
    lora = space.settled({**base, "use_peft": True})
    assert space.changes(lora) == {"use_peft": True, "lora_r": 16, "lora_alpha": 32}
    assert describe_changes(space.changes(lora), space.recipe.resolved) == (
        "use_peft False -> True, lora_r 16, lora_alpha 32"
    )
    assert space.tier(lora) == "recipe"
    qlora = space.settled({**base, "use_peft": True, "quantization": "4bit", "lora_r": 8})
    assert space.changes(qlora) == {"use_peft": True, "load_in_4bit": True, "lora_r": 8, "lora_alpha": 16}
    assert space.packages(qlora) == ("bitsandbytes",)
    assert space.params(space.settled({**base, "quantization": "4bit"})) == base  # a quantised weight is not trained


def test_a_reward_models_adapter_gets_the_task_that_scores() -> None:
    knob = next(k for k in load_space(None, trainer="reward") if k.name == "use_peft")
    space = Space.of(recipe(use_peft=False, lora_task_type="CAUSAL_LM"), (knob,), allow="recipe")
    assert space.changes(space.candidate({"use_peft": True})) == {"use_peft": True, "lora_task_type": "SEQ_CLS"}
    assert space.changes(space.baseline) == {}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"when": ["use_vllm"]}, "when must be a mapping"),
        ({"when": {"use_vllm": {"a": 1}}}, "values of when must be plain"),
        ({"sets": {"a": [1]}}, "values of sets must be plain"),
        ({"traced": "no"}, "traced must be true or false"),
        (
            {"when": {"use_vlm": True}},
            "must name a knob above it or a key of the recipe.*nearest valid one is 'use_vllm'",
        ),
        ({"when": {"num_generations": 4}}, "neither may batch its samples"),
    ],
)
def test_a_wrong_condition_gets_one_clear_error(entry: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Space.of(recipe(), read_space({"lora_r": {"tier": "neutral", "values": [8], **entry}}, trainer=None))


def test_a_condition_on_a_knob_below_is_refused() -> None:
    knobs = load_space(None, trainer="grpo")
    turned = (*(k for k in knobs if k.name != "use_vllm"), next(k for k in knobs if k.name == "use_vllm"))
    with pytest.raises(ConfigError, match=r"vllm_gpu_memory_utilization must name a knob above it"):
        Space.of(recipe(), turned)


# -- left out, with the reason ----------------------------------------------------------------------------------------


def test_on_a_card_what_is_not_installed_is_left_out_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autofit.space.narrow, "is_installed", lambda name: False)
    real, simulated = (full(recipe(), device=device) for device in ("cuda", CARD))
    assert real.left_out["use_vllm"] == "needs vllm, which is not installed (pip install vllm)"
    assert real.left_out["quantization"] == "needs bitsandbytes, which is not installed (pip install bitsandbytes)"
    assert "vllm_enable_sleep_mode" in real.idle  # it would have no effect
    assert set(simulated.left_out) == {
        "torch_compile", "model_init_kwargs.use_kernels",  # not simulated
        "vllm_enable_sleep_mode",  # beside expandable segments
    }  # fmt: skip
    names = {knob.name for knob in simulated.knobs}
    assert {"use_vllm", "quantization", "optim"} <= names  # predicted without their packages
    assert describe_left_out(real.left_out).startswith(
        "quantization, optim: needs bitsandbytes, which is not installed (pip install bitsandbytes); use_vllm: needs"
    )


@pytest.mark.parametrize(
    ("knob", "device", "changes", "reason"),
    [
        ("dtype", "sim:t4", {}, "t4 has no arithmetic in bfloat16"),
        ("dtype", "cpu", {}, "it needs a GPU, and probes run on the CPU"),
        ("model_init_kwargs.use_kernels", CARD, {}, "only a real card shows the effect"),
    ],
)
def test_a_knob_is_never_left_out_without_a_word(
    knob: str, device: str, changes: dict[str, object], reason: str
) -> None:
    assert reason in full(recipe(**changes), device=device).left_out[knob]


def test_a_key_that_the_installed_version_lacks_is_left_out_of_our_spaces_and_wrong_in_a_users() -> None:
    older = recipe()
    resolved = {k: v for k, v in older.resolved.items() if k != "cast_lm_head_to_fp32"}
    older = Recipe(**{**{n: getattr(older, n) for n in Recipe.__dataclass_fields__}, "resolved": resolved,
                      "version": "TRL 1.14.0", "left_out": {"optim": "the trainer says no"}})  # fmt: skip
    space = full(older)
    assert space.left_out["cast_lm_head_to_fp32"] == "TRL 1.14.0 has no such key"
    assert space.left_out["optim"] == "the trainer says no"
    with pytest.raises(ConfigError, match="must be a key of the trainer"):
        Space.of(older, (Knob(name="cast_lm_head_to_fp32", tier="neutral", values=(True,)),))


def test_what_only_costs_is_only_switched_off() -> None:
    assert not {"cast_lm_head_to_fp32", "torch_empty_cache_steps"} & {k.name for k in full(recipe()).knobs}
    space = full(recipe(cast_lm_head_to_fp32=True, torch_empty_cache_steps=2), allow="approximate")
    params = {**space.params(space.baseline), "cast_lm_head_to_fp32": False, "torch_empty_cache_steps": None}
    changes = space.yaml_changes(space.candidate(params))
    assert changes == {"torch_empty_cache_steps": None, "cast_lm_head_to_fp32": False}  # None removes the key


@pytest.mark.parametrize(
    ("changes", "dtype", "batching"),
    [
        ({"use_peft": True, "bf16": True}, "approximate", "recipe"),  # float32 adapters stay in bfloat16 for good
        ({"use_peft": False, "bf16": True}, "recipe", "recipe"),
        ({"use_peft": False, "bf16": True, "dtype": "bfloat16"}, "recipe", "approximate"),
        ({"use_peft": True, "load_in_4bit": True, "bf16": True}, "approximate", "approximate"),
        ({"use_peft": True, "bf16": False}, "approximate", "approximate"),
    ],
)
def test_the_tier_of_a_precision_is_that_of_the_weights_it_changes(
    changes: dict[str, object], dtype: str, batching: str
) -> None:
    space = full(recipe(**changes))
    base = space.params(space.baseline)
    other = "float16" if changes.get("dtype") else "bfloat16"
    if "dtype" in base:
        assert space.tier(space.candidate({**base, "dtype": other})) == dtype
    batched = space.settled({**base, "use_transformers_continuous_batching": True})
    assert space.tier(batched) == batching


def test_the_whole_approximate_space_of_grpo_is_listed_at_once() -> None:
    began = time.process_time()
    space = full(recipe(), allow="approximate")
    count = len(space.allowed())
    assert time.process_time() - began < 1  # 0.02 s where this was written
    assert 1000 < count < 20_000


def test_every_default_space_is_valid_yaml_with_known_entries() -> None:
    for path in sorted((Path(__file__).parents[1] / "search_spaces").glob("*.yaml")):
        if path.name == SHARED_FILE:
            continue
        knobs = load_space(str(path), trainer=path.stem)
        assert all(knob.optional for knob in knobs)
        keys = {"vllm_mode", "fp16", "use_dynamic_bsz", "objective", "cut_cross_entropy", "lora_rank"}  # no knobs
        known = {*(knob.name for knob in knobs), *keys}
        assert {key for knob in knobs for key, _ in knob.when} <= known


def test_a_target_may_be_below_the_weights_where_a_candidate_has_fewer_bits() -> None:
    for lora, allow, least in ((True, "neutral", 4000), (True, "approximate", 2000), (True, "recipe", 530),
                               (False, "approximate", 4000), (False, "recipe", 530)):  # fmt: skip
        made = recipe(use_peft=lora)
        facts = {n: getattr(made, n) for n in Recipe.__dataclass_fields__}
        space = full(Recipe(**{**facts, "model_parameters": 1000, "weights_bytes": 4000}), allow=allow)
        _check_target(space, least)
        with pytest.raises(ConfigError, match="must hold at least the model's weights") as told:
            _check_target(space, least - 1)
        assert ("or load them in 4 bits (--allow recipe)" in str(told.value)) == (lora and least > 530)


def test_a_target_holds_a_cards_share_of_sharded_weights() -> None:
    """A search of verl's 32B script on 16 H100 was refused: it counted 131 GB of weights for each card."""
    made = recipe()
    facts = {n: getattr(made, n) for n in Recipe.__dataclass_fields__}
    for sharding, offload, least in (("fsdp1", "none", 1000), ("zero3", "parameters", 0), ("ddp", "none", 4000)):
        launch = Launch(ranks=4, sharding=cast(Any, sharding), offload=cast(Any, offload))
        space = full(
            Recipe(**{**facts, "model_parameters": 1000, "weights_bytes": 4000, "launch": launch}), allow="neutral"
        )
        _check_target(space, least)
        if least:
            with pytest.raises(ConfigError, match="a card's share, of 4" if least == 1000 else "the model's weights"):
                _check_target(space, least - 1)


@pytest.mark.parametrize(
    ("changes", "offered"),
    [
        ({"objective": "sft", "cut_cross_entropy": False}, True),
        ({"objective": "dpo", "cut_cross_entropy": False}, False),  # its loss needs the logits
        ({"objective": "sft", "cut_cross_entropy": True}, False),  # none are made already
    ],
)
def test_ligers_loss_of_a_plain_trainer_is_simulated_where_it_has_an_effect(
    changes: dict[str, object], offered: bool
) -> None:
    known = {"use_liger_kernel": False, **changes}
    own = recipe()
    own = Recipe(**{**{n: getattr(own, n) for n in Recipe.__dataclass_fields__}, "resolved": {**own.resolved, **known}})
    knobs = tuple(knob for knob in load_space(None, trainer="hf") if knob.name == "use_liger_kernel")
    space = Space.of(own, knobs, device=CARD, allow="approximate")
    assert not space.left_out
    assert offered is any(knob.name == "use_liger_kernel" for knob in space.knobs)
    assert knobs[0].traits.less == (True,)  # advice tries it for memory
