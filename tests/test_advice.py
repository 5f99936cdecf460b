"""The cheapest changes that make a config fit, on cards whose bytes follow a law."""

from collections.abc import Callable, Mapping
from typing import cast

from recipes import grpo_recipe

from autofit.forecast.advice import Advice, cheapest_changes
from autofit.probing.result import ProbeResult, ProbeStatus

Values = Mapping[str, object]
GB = 10**9


def law(values: Values) -> tuple[int, float]:
    """(bytes, seconds): weights, a cache that grows with the rollout, activations with micro-batch and length."""
    micro, chunk = cast(int, values["per_device_train_batch_size"]), cast(int, values["steps_per_generation"])
    weights = 2 if values.get("load_in_4bit") else 4 if values.get("load_in_8bit") else 8
    length = cast(int, values["max_completion_length"])
    activations = micro * length // 64 // (4 if values.get("gradient_checkpointing") else 1)
    return (weights + micro * chunk * length // 256 + activations) * GB, (2.0 if weights < 8 else 1.0) + 8 / micro


def advice(capacity_bytes: int, asked: list[Values] | None = None, law: Callable[[Values], tuple[int, float]] = law,
           **changes: object) -> Advice:  # fmt: skip
    own: dict[str, object] = {
        "per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "steps_per_generation": 4,
        "max_completion_length": 256, "gradient_checkpointing": False, "use_peft": True, "dtype": "bfloat16",
    }  # fmt: skip
    recipe = grpo_recipe(**own | changes)

    def probe(values: Values) -> ProbeResult:
        if asked is not None:
            asked.append(values)
        nbytes, step_s = law(values)
        status = ProbeStatus.FIT if nbytes <= capacity_bytes else ProbeStatus.OOM
        return ProbeResult(status=status, device="sim:h100", device_used_bytes=nbytes, least_capacity_bytes=nbytes,
                           peak_allocated_bytes=nbytes, step_s=(step_s,))  # fmt: skip

    return cheapest_changes(recipe, "sim:h100", probe, workers=1)


def test_neutral_changes_of_one_setting_come_first_and_the_fastest_of_them() -> None:
    """8 weights + 32 rollout + 32 activations: 60 GB is missed by 12, which three settings can give by themselves."""
    found = advice(60 * GB).changes
    assert [change.tier for change in found] == ["neutral"] * 3
    assert [change.settings for change in found] == [1, 1, 1]
    assert {"gradient_checkpointing"} in [set(change.changes) for change in found]
    steps = [change.step_s for change in found]
    assert steps == sorted(steps, key=lambda s: cast(float, s))
    assert all(change.device_used_bytes <= 60 * GB for change in found)


def test_a_setting_is_changed_no_further_than_needed() -> None:
    micro = [c.changes for c in advice(60 * GB).changes if "per_device_train_batch_size" in c.changes]
    assert {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8, "steps_per_generation": 8} in micro


def test_what_is_trained_changes_only_where_nothing_else_is_enough() -> None:
    """Four settings are needed at once, none of which can be left out."""
    found = advice(7 * GB).changes
    assert [change.tier for change in found] == ["recipe"]
    assert [change.settings for change in found] == [4]
    assert all(change.changes.get("load_in_4bit") or change.changes.get("load_in_8bit") for change in found)


def test_where_nothing_fits_the_closest_and_its_bytes_are_told() -> None:
    asked: list[Values] = []
    found = advice(1 * GB, asked)
    assert found.changes == ()
    assert found.closest is not None
    assert found.closest.least_capacity_bytes > 1 * GB
    assert found.closest.changes["load_in_4bit"]
    assert len(asked) <= 4


def test_an_answer_takes_few_probes() -> None:
    for capacity in (60, 30, 20, 12, 7):
        asked: list[Values] = []
        assert advice(capacity * GB, asked).changes
        assert len(asked) <= 30, capacity


def test_a_recipe_that_trains_all_weights_is_offered_lora() -> None:
    def full(values: Values) -> tuple[int, float]:
        nbytes, step_s = law(values)
        return nbytes + (0 if values.get("use_peft") else 100 * GB), step_s

    (only,) = advice(80 * GB, law=full, use_peft=False).changes
    assert only.changes == {"use_peft": True, "lora_r": 16, "lora_alpha": 32}
    assert only.tier == "recipe"
