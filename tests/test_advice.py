"""The cheapest changes that make a config fit, on cards whose bytes follow a law."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
from recipes import grpo_recipe

from autofit.errors import Cancelled
from autofit.fakegpu.specs import gpu_spec
from autofit.forecast.advice import Advice, cheapest_changes
from autofit.forecast.change import Change
from autofit.forecast.levers import Assignment, Bounds, Known
from autofit.probing.result import ProbeResult, ProbeStatus
from autofit.recipe.keys import SYNC_EACH_BATCH
from autofit.recipe.recipe import merge

Values = Mapping[str, object]
Law = Callable[[Values], dict[str, dict[str, int]]]
GB = 10**9
CONTEXT = gpu_spec("h100").context_bytes


def law(values: Values) -> dict[str, dict[str, int]]:
    """Bytes by phase and category: weights, activations of a micro-batch, and the cache of a rollout."""
    micro, chunk = cast(int, values["per_device_train_batch_size"]), cast(int, values["steps_per_generation"])
    weights = 2 if values.get("load_in_4bit") else 4 if values.get("load_in_8bit") else 8
    length = cast(int, values["max_completion_length"])
    activations = micro * length // 32 // (4 if values.get("gradient_checkpointing") else 1)
    cache = micro * chunk * length // 256
    return {
        "update": {"weights": weights * GB, "activations": activations * GB},
        "rollout": {"weights": weights * GB, "KV cache": cache * GB},
    }


LEAST_SHARE = 0.48
REFUSAL = f"OutOfMemoryError: vLLM's share of the card is 25 GB: raise the share to {LEAST_SHARE}"


def in_an_engine(values: Values) -> dict[str, dict[str, int]]:
    """The same beside a vLLM engine, which starts with `LEAST_SHARE` of a card of 72 GB."""
    share = round(cast(float, values["vllm_gpu_memory_utilization"]) * 72 * GB)
    held = law(values)
    return {"update": {**held["update"], "vLLM": share}, "rollout": {"weights": 8 * GB, "vLLM": share}}


def step_s(values: Values) -> float:
    return 1.0 + 8 / cast(int, values["per_device_train_batch_size"]) + 0.5 * bool(values.get("gradient_checkpointing"))


def advice(capacity_bytes: int, asked: list[Values] | None = None, law: Law = law, crash: str | None = None,
           gap_bytes: int = 0, growing_bytes: int | None = None, **changes: object) -> Advice:  # fmt: skip
    """What is advised where `crash` (a key) makes a probe fail by an error of its own, and `gap_bytes` lie between.

    With expandable segments the recipe as it is needs `growing_bytes`, where that is known.
    """
    own: dict[str, object] = {
        "per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "steps_per_generation": 4,
        "max_completion_length": 256, "gradient_checkpointing": False, "use_peft": True, "dtype": "bfloat16",
    }  # fmt: skip
    recipe = replace(grpo_recipe(**own | changes), weights_bytes=8 * GB, model_parameters=4 * GB)

    def probe(values: Values) -> ProbeResult:
        if asked is not None:
            asked.append(values)
        held = law(values)
        nbytes = CONTEXT + gap_bytes + max(sum(of_phase.values()) for of_phase in held.values())
        status = ProbeStatus.FIT if nbytes <= capacity_bytes else ProbeStatus.OOM
        result = ProbeResult(
            status=status, device="sim:h100", device_used_bytes=nbytes, least_capacity_bytes=nbytes,
            peak_allocated_bytes=nbytes, step_s=(step_s(values),), categories=held,
            oom_phase="update" if status is ProbeStatus.OOM else None,
        )  # fmt: skip
        if law is in_an_engine and cast(float, values["vllm_gpu_memory_utilization"]) < LEAST_SHARE:
            return ProbeResult(status=ProbeStatus.OOM, device="sim:h100", oom_phase="load", reason=REFUSAL)
        if crash is not None and values.get(crash):
            result = replace(result, status=ProbeStatus.FAILED, reason=f"AttributeError: {crash}")
        return result

    base = replace(probe(merge(recipe.values, {})), growing_capacity_bytes=growing_bytes)
    return cheapest_changes(recipe, "sim:h100", probe, capacity_bytes=capacity_bytes, base=base, workers=1)


def test_each_neutral_setting_that_suffices_by_itself_comes_first_and_the_fastest_of_them() -> None:
    """8 weights + 64 activations: 60 GB is missed by 12, and checkpointing or the micro-batch alone gives that."""
    found = advice(60 * GB).changes
    assert [change.tier for change in found] == ["neutral", "neutral", "recipe"]
    assert [change.settings for change in found] == [1, 1, 1]
    assert [set(change.changes) & {"gradient_checkpointing", "per_device_train_batch_size", "max_completion_length"}
            for change in found] == [{"gradient_checkpointing"}, {"per_device_train_batch_size"},
                                     {"max_completion_length"}]  # fmt: skip
    assert not any(change.tight for change in found)


def test_expandable_segments_are_advised_by_what_the_recipes_own_run_told_and_not_tried_again() -> None:
    asked: list[Values] = []
    found = advice(80 * GB, asked, gap_bytes=12 * GB, growing_bytes=74 * GB)
    assert found.changes[0].options.startswith('--set \'env={"PYTORCH_CUDA_ALLOC_CONF": ')
    assert (found.changes[0].outcome, found.changes[0].tier) == ("fits: 74.00 GB, 2.00 s a step", "neutral")
    advice(76 * GB, asked, gap_bytes=12 * GB, growing_bytes=77 * GB)
    assert not any(values.get("env") for values in asked)


def test_a_smaller_rollout_is_tried_first_where_the_rollout_fills_the_card() -> None:
    """With dapo's loss it is approximate, and what is known of the neutral settings leaves them open."""

    def cache(values: Values) -> dict[str, dict[str, int]]:
        held = law(values)
        return {**held, "rollout": {category: 4 * nbytes for category, nbytes in held["rollout"].items()}}

    asked: list[Values] = []
    advice(60 * GB, asked, cache, gap_bytes=30 * GB, loss_type="dapo")
    sizes = [(values["per_device_train_batch_size"], values["steps_per_generation"]) for values in asked]
    assert sizes[:2] == [(8, 4), (8, 1)]


def test_a_setting_is_changed_no_further_than_needed_and_the_options_say_how() -> None:
    (micro,) = [c for c in advice(60 * GB).changes if "per_device_train_batch_size" in c.changes]
    assert micro.changes == {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 8,
        "steps_per_generation": 8,
    }
    assert micro.options.startswith("--set per_device_train_batch_size=4 --set gradient_accumulation_steps=8")


def test_a_rollout_of_one_group_has_no_smaller_size_and_the_other_settings_are_still_tried() -> None:
    """TRL's defaults: 8 completions a micro-batch, 8 a group, and a rollout of one micro-batch."""
    found = advice(
        60 * GB, num_generations=8, gradient_accumulation_steps=1, steps_per_generation=1, generation_batch_size=8
    )
    assert {"gradient_checkpointing": True} in [change.changes for change in found.changes]


def test_an_engine_that_does_not_start_gets_the_smallest_share_that_does_and_what_else_it_needs() -> None:
    """With half of the card the step has room for 40 GB beside its engine; it needs 8 + 64."""
    asked: list[Values] = []
    engine: dict[str, Any] = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3}
    found = advice(72 * GB, asked, in_an_engine, **engine)
    assert found.changes
    assert all(change.changes["vllm_gpu_memory_utilization"] == 0.5 for change in found.changes)
    assert {"gradient_checkpointing", "vllm_gpu_memory_utilization"} in [set(c.changes) for c in found.changes]
    assert {values["vllm_gpu_memory_utilization"] for values in asked[1:] if values["use_vllm"]} == {0.5}
    alone = advice(72 * GB, law=in_an_engine, gradient_checkpointing=True, **engine).changes
    assert [change.changes for change in alone] == [{"vllm_gpu_memory_utilization": 0.5}]


def test_a_change_that_crashes_is_told_and_the_others_are_tried() -> None:
    found = advice(60 * GB, crash="gradient_checkpointing")
    assert [change.changes for change in found.untried] == [{"gradient_checkpointing": True}]
    assert found.untried[0].failure == "AttributeError: gradient_checkpointing"
    assert "per_device_train_batch_size" in found.changes[0].changes
    assert not any("gradient_checkpointing" in change.changes for change in found.changes)


def test_what_is_trained_changes_only_where_nothing_else_is_enough() -> None:
    """The weights must shrink to 2 GB, which only 4 bits give, and the activations and the cache with them."""
    found = advice(5_200_000_000).changes
    assert found
    assert all(change.tier == "recipe" and change.changes.get("load_in_4bit") for change in found)
    assert found[0].settings <= 5


def test_where_nothing_fits_the_closest_and_its_bytes_are_told() -> None:
    asked: list[Values] = []
    found = advice(1 * GB, asked)
    assert found.changes == ()
    assert found.closest is None or (found.closest.least_capacity_bytes or 0) > 1 * GB
    assert len(asked) <= 2


def test_a_change_that_needs_more_than_the_recipe_is_not_the_closest() -> None:
    def worse(values: Values) -> dict[str, dict[str, int]]:
        return {"update": {"weights": (8 if values["per_device_train_batch_size"] == 8 else 80) * GB}}

    assert advice(1 * GB, law=worse).closest is None


def test_an_answer_takes_few_probes() -> None:
    for capacity, most in ((60, 5), (30, 6), (20, 7), (12, 10), (7, 12), (5.2, 12)):
        asked: list[Values] = []
        assert advice(int(capacity * GB), asked).changes, capacity
        assert len(asked) <= most, (capacity, len(asked))


@pytest.mark.parametrize(("capacity", "settings"), [(26, 2), (15, 3)])
def test_the_fewest_settings_that_promise_room_are_tried_before_all_of_them(capacity: int, settings: int) -> None:
    """Of a trainer that makes all logits, whose gaps between blocks are gigabytes and shrink with the micro-batch."""
    own: dict[str, object] = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "num_generations": 2,
        "steps_per_generation": 4, "max_completion_length": 1024, "gradient_checkpointing": True, "use_peft": True,
        "dtype": "bfloat16",
    }  # fmt: skip
    recipe = replace(grpo_recipe(**own), weights_bytes=8 * GB, model_parameters=4 * GB)
    asked: list[Values] = []

    def probe(values: Values) -> ProbeResult:
        asked.append(values)
        micro, length = cast(int, values["per_device_train_batch_size"]), cast(int, values["max_completion_length"])
        held = {"weights": (2 if values.get("load_in_4bit") else 8) * GB, "logits": micro * length * GB // 64}
        nbytes = CONTEXT + sum(held.values()) + held["logits"] * 2 // 5
        return ProbeResult(
            status=ProbeStatus.FIT if nbytes <= capacity * GB else ProbeStatus.OOM, device="sim:h100",
            device_used_bytes=nbytes, least_capacity_bytes=nbytes, peak_allocated_bytes=nbytes, step_s=(1.0,),
            categories={"update": held},
        )  # fmt: skip

    base = probe(recipe.values)
    found = cheapest_changes(
        recipe, "sim:h100", probe, capacity_bytes=capacity * GB, base=base, workers=1, wanted=1
    )  # fmt: skip
    assert [change.settings for change in found.changes] == [settings]
    assert len(asked) == 2  # the recipe as it is, and what is advised


def test_where_something_else_must_be_trained_the_user_has_the_choice_of_what_was_found() -> None:
    """Shorter samples or 4 bits: both are tried at once, and neither is milder than the other."""
    own: dict[str, object] = {
        "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "num_generations": 2,
        "steps_per_generation": 4, "max_completion_length": 1024, "gradient_checkpointing": True, "use_peft": True,
        "dtype": "bfloat16",
    }  # fmt: skip
    recipe = replace(grpo_recipe(**own), weights_bytes=12 * GB, model_parameters=6 * GB)

    def probe(values: Values) -> ProbeResult:
        length = cast(int, values["max_completion_length"])
        held = {"weights": (3 if values.get("load_in_4bit") else 12) * GB, "logits": length * GB // 128}
        nbytes = CONTEXT + sum(held.values())
        return ProbeResult(
            status=ProbeStatus.FIT if nbytes <= 18 * GB else ProbeStatus.OOM, device="sim:h100",
            device_used_bytes=nbytes, least_capacity_bytes=nbytes, peak_allocated_bytes=nbytes, step_s=(1.0,),
            categories={"update": held},
        )  # fmt: skip

    found = cheapest_changes(
        recipe, "sim:h100", probe, capacity_bytes=18 * GB, base=probe(recipe.values), workers=2, wanted=1
    )
    assert {change.tier for change in found.changes} == {"recipe"}
    assert {key for change in found.changes for key in change.changes} >= {"max_completion_length", "load_in_4bit"}


def test_a_recipe_that_fits_with_little_to_spare_is_given_room() -> None:
    capacity = CONTEXT + 73 * GB  # 72 are needed
    found = advice(capacity).changes
    assert "gradient_checkpointing" in found[0].changes
    assert not any(change.tight for change in found)


def test_a_recipe_that_trains_all_weights_is_offered_lora() -> None:
    def full(values: Values) -> dict[str, dict[str, int]]:
        held = law(values)
        held["update"]["gradients"] = 0 if values.get("use_peft") else 100 * GB
        return held

    (only,) = advice(80 * GB, law=full, use_peft=False).changes
    assert only.changes == {"use_peft": True, "lora_r": 16, "lora_alpha": 32}
    assert only.tier == "recipe"


def test_weights_that_only_fit_quantised_are_given_an_adapter() -> None:
    def full(values: Values) -> dict[str, dict[str, int]]:
        held = law(values)
        held["update"]["gradients"] = 0 if values.get("use_peft") else 100 * GB
        return held

    found = advice(8 * GB, law=full, use_peft=False, gradient_checkpointing=True, max_completion_length=64).changes
    assert found[0].changes["use_peft"]
    assert found[0].changes.get("load_in_4bit") or found[0].changes.get("load_in_8bit")


def test_float32_under_lora_is_approximate_and_its_dtype_is_advised() -> None:
    def float32(values: Values) -> dict[str, dict[str, int]]:
        held = law(values)
        weights = 16 if values.get("dtype") == "bfloat16" else 32
        return {phase: {**parts, "weights": weights * GB} for phase, parts in held.items()}

    found = advice(30 * GB, law=float32, dtype=None, gradient_checkpointing=True, max_completion_length=64).changes
    assert found[0].changes == {"dtype": "bfloat16"}
    assert found[0].tier == "approximate"


def test_weights_of_16_bits_are_offered_beside_a_neutral_change_that_suffices() -> None:
    def float32(values: Values) -> dict[str, dict[str, int]]:
        held = law(values)
        weights = 16 if values.get("dtype") == "bfloat16" else 32
        return {phase: {**parts, "weights": weights * GB} for phase, parts in held.items()}

    found = advice(95 * GB, law=float32, dtype=None).changes
    assert found[0].changes == {"gradient_checkpointing": True}
    assert {"dtype": "bfloat16"} in [change.changes for change in found]
    tighter = advice(60 * GB, law=float32, dtype=None).changes
    assert {"gradient_checkpointing": True, "dtype": "bfloat16"} in [change.changes for change in tighter]


def test_a_change_that_leaves_too_little_to_spare_is_not_advised_and_told_as_the_closest() -> None:
    """8.5 GB of weights that nothing changes, on 9 GB."""

    def whole(values: Values) -> dict[str, dict[str, int]]:
        return {phase: {**parts, "weights": 17 * GB // 2} for phase, parts in law(values).items()}

    capacity = CONTEXT + 9 * GB
    found = advice(capacity, law=whole, max_completion_length=32)
    assert not any(change.tight for change in found.changes)
    assert found.changes == ()
    assert found.closest is not None
    assert (found.closest.fits, found.closest.tight) == (True, True)


def _cancelled(count: Iterator[int], after: int, values: Values) -> dict[str, dict[str, int]]:
    if next(count) > after:
        raise Cancelled
    return law(values)


def test_a_cancelled_probe_ends_it_with_what_was_found() -> None:
    asked: list[Values] = []
    full = advice(60 * GB, asked)
    for after in range(len(asked)):
        found = advice(60 * GB, law=partial(_cancelled, iter(range(100)), after))
        assert len(found.changes) <= len(full.changes)
        assert set(map(str, found.changes)) <= set(map(str, full.changes))


def test_what_ranks_share_may_leave_nothing_on_a_card_so_that_it_is_tried() -> None:
    known = Known(
        at={}, parts={"update": {"weights": 10**10, "optimizer": 10**11}}, outside_bytes=10**9, context_bytes=5
    )
    own: Assignment = {"launch.sharding": "ddp", "launch.offload": "none", SYNC_EACH_BATCH: False}
    bounds = Bounds(grpo_recipe(world_size=8), own)
    settings: Assignment = {"launch.sharding": "fsdp2", "launch.offload": "parameters", SYNC_EACH_BATCH: True}
    assert [bounds.least_bytes(known, {name: value}) for name, value in settings.items()] == [5, 5, 5]


def test_what_ranks_would_hold_whole_again_is_not_tried_where_that_has_no_room() -> None:
    held = {"weights": 7 * GB, "optimizer": 15 * GB, "gradients": 30 * GB}
    known = Known(at={}, parts={"update": held}, outside_bytes=GB, context_bytes=5)
    own: Assignment = {"launch.sharding": "fsdp2"}
    recipe = grpo_recipe(world_size=4)
    bounds = Bounds(replace(recipe, launch=replace(recipe.launch, ranks=4)), own)
    sizes = {value: bounds.least_bytes(known, {"launch.sharding": value}) for value in ("ddp", "zero2", "zero3")}
    assert sizes == {"ddp": 4 * 22 * GB + 5, "zero2": 28 * GB + 5, "zero3": 5}


@pytest.mark.parametrize(
    ("given", "words"),
    [({"launch.offload": "parameters"}, ", over 3.00 s a step"), ({"launch.offload": "none"}, ", 3.00 s a step"),
     ({"per_device_train_batch_size": 1}, ", 3.00 s a step")],
)  # fmt: skip
def test_a_change_that_offloads_says_that_its_seconds_are_a_lower_bound(given: dict[str, object], words: str) -> None:
    result = ProbeResult(status=ProbeStatus.FIT, device="sim:a100-80gb", device_used_bytes=1, step_s=(3.0,))
    change = Change.of(result, changes=given, given=given, tier="neutral", settings=1, capacity_bytes=1 << 36)
    assert change.step_words == words


def test_a_change_that_could_not_be_tried_says_why() -> None:
    """A search told it without: the reason was in an estimate's advice alone."""
    result = ProbeResult(
        status=ProbeStatus.FAILED, device="sim:a100-80gb", reason="optim: no shards (during load; log)"
    )
    change = Change.of(result, changes={}, given={}, tier="neutral", settings=1, capacity_bytes=1 << 36)
    assert change.outcome == "could not be tried: optim: no shards"


def test_a_change_whose_cache_fills_the_card_is_shown_with_what_it_needs_as_the_verdict_of_it_is() -> None:
    capacity = CONTEXT + 80 * GB
    result = ProbeResult(status=ProbeStatus.FIT, device="sim:a100-80gb", device_used_bytes=capacity - GB // 100,
                         least_capacity_bytes=51 * GB, step_s=(3.0,))  # fmt: skip
    change = Change.of(result, changes={}, given={}, tier="neutral", settings=1, capacity_bytes=capacity)
    assert change.outcome == "fits: 51.00 GB, 3.00 s a step"
    assert change.to_json()["device_used_bytes"] == capacity - GB // 100


def test_settings_of_the_phase_that_is_too_large_are_tried_first() -> None:
    """A rollout of 60 GB beside an update of 40: no checkpoint and no smaller micro-batch mends that."""

    def rollouts(values: Values) -> dict[str, dict[str, int]]:
        completions = cast(int, values["per_device_train_batch_size"]) * cast(int, values["steps_per_generation"])
        return {"update": {"weights": 8 * GB, "activations": 32 * GB},
                "rollout": {"weights": 8 * GB, "KV cache": completions * 52 * GB // 32}}  # fmt: skip

    asked: list[Values] = []
    found = advice(70 * GB, asked, law=rollouts, gap_bytes=15 * GB)
    assert "steps_per_generation" in found.changes[0].changes
    assert cast(int, asked[1]["steps_per_generation"]) < 4


def test_a_recipe_that_never_loads_is_offered_what_changes_the_load_and_nothing_of_the_batch_is_tried() -> None:
    """An engine that finds no room for one sequence, and with a shorter one none beside the trainer's weights."""
    asked: list[Values] = []
    recipe = replace(
        grpo_recipe(
            use_peft=True, dtype="bfloat16", use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=0.7,
            vllm_enable_sleep_mode=False, vllm_max_model_length=None, vllm_tensor_parallel_size=1,
            use_transformers_continuous_batching=False,
        ),
        weights_bytes=8 * GB,
    )  # fmt: skip

    def probe(values: Values) -> ProbeResult:
        asked.append(values)
        held = {"load": {"weights": 8 * GB, "vLLM": 20 * GB}} if values.get("vllm_max_model_length") else {}
        if not values.get("use_vllm"):
            held = {"update": {"weights": 8 * GB, "activations": GB}}
        nbytes = CONTEXT + sum(sum(part.values()) for part in held.values()) if held else None
        fits = nbytes is not None and nbytes <= 15 * GB
        return ProbeResult(
            status=ProbeStatus.FIT if fits else ProbeStatus.OOM, device="sim:h100", oom_phase=None if fits else "load",
            device_used_bytes=nbytes, least_capacity_bytes=nbytes, step_s=(1.0,) if fits else (), categories=held,
        )  # fmt: skip

    base = probe(recipe.values)
    found = cheapest_changes(recipe, "sim:h100", probe, capacity_bytes=15 * GB, base=base, workers=1)
    assert found.changes[0].changes["use_vllm"] is False
    changed = [{key for key in values if recipe.values.get(key) != values[key]} for values in asked[1:]]
    of_load = {"use_vllm", "vllm_gpu_memory_utilization", "vllm_max_model_length", "load_in_4bit"}
    assert all(keys & of_load for keys in changed)
    assert len(asked) <= 7


def test_where_one_change_alone_suffices_two_others_together_are_offered_beside_it() -> None:
    """Weights are 8 and activations 64 of 48 GB: checkpointing alone suffices, and what else is there only in pairs."""

    def stubborn(values: Values) -> dict[str, dict[str, int]]:
        held = law(values)
        micro = cast(int, values["per_device_train_batch_size"])
        length = cast(int, values["max_completion_length"])
        few = {8: 64, 4: 56, 2: 50, 1: 44}[micro] * (256 + length) // 512
        held["update"]["activations"] = (12 if values.get("gradient_checkpointing") else few) * GB
        return held

    found = advice(48 * GB, law=stubborn).changes
    assert found[0].changes == {"gradient_checkpointing": True}
    assert len(found) > 1
    assert {change.settings for change in found} == {1, 2}
