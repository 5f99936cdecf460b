"""What is told beside an answer: faster changes, what lies outside a search's tier, and another card."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from recipes import grpo_recipe, trl_facts

from autofit.api.lower_tiers import Outside, outside, outside_lines, outside_of
from autofit.fakegpu.specs import gpu_spec
from autofit.forecast.change import Change, Trier, faster_changes, other_card
from autofit.forecast.estimate import Estimator
from autofit.forecast.levers import MICRO, Levers
from autofit.hardware.hardware import Device
from autofit.probing.fork_server import ForkServer
from autofit.probing.result import ProbeResult, ProbeStatus
from autofit.recipe.keys import Tier
from autofit.recipe.launch import Launch
from autofit.recipe.recipe import Recipe, merge
from autofit.space.knob import Knob
from autofit.space.space import Space
from autofit.space.traits import set_options
from autofit.tuning.frontier import Trial

Values = Mapping[str, object]
GB = 10**9


def run(values: Values) -> ProbeResult:
    """A law: bfloat16 halves bytes and seconds, a larger rollout is faster, vLLM crashes.

    Without checkpoints 10 GB a sample of the micro-batch are held, for a step that is 0.3 s shorter.
    """
    half = 2 if values.get("dtype") == "bfloat16" else 1
    chunk, micro = cast(int, values["steps_per_generation"]), cast(int, values["per_device_train_batch_size"])
    held = 0 if values.get("gradient_checkpointing", True) else 10 * micro * GB
    used = (16 // half + chunk * micro // 4) * GB + held
    step_s = 32.0 / half / chunk / micro + (1.0 if values.get("gradient_checkpointing", True) else 0.7)
    found = ProbeResult(
        status=ProbeStatus.FIT if used <= 40 * GB else ProbeStatus.OOM, device="sim:h100",
        device_used_bytes=used, least_capacity_bytes=used,
        step_s=(step_s,), rollout_s=(step_s - 1.0,),
        categories={
            "update": {"weights": 10 * GB // half, "activations": 6 * GB // half + held},
            "rollout": {"weights": 10 * GB // half, "KV cache": chunk * micro // 4 * GB},
        },
    )  # fmt: skip
    failed = replace(found, status=ProbeStatus.FAILED, reason="ImportError: no vllm (during load; see p.log)")
    return failed if values.get("use_vllm") else found


def faster(
    *, below: Tier | None = None, most: int = 9, weights_bytes: int | None = None, **changed: object
) -> tuple[tuple[Change, ...], tuple[Change, ...]]:
    own: dict[str, object] = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "steps_per_generation": 1, "dtype": None,
        "use_vllm": False, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3, "vllm_enable_sleep_mode": False,
        "gradient_checkpointing": True, "generation_batch_size": 4,
        **changed,
    }  # fmt: skip
    recipe = replace(grpo_recipe(**own), weights_bytes=weights_bytes)
    trier = Trier(recipe=recipe, device="sim:h100", capacity_bytes=40 * GB, probe=run, tell=lambda _: None)
    return faster_changes(
        Levers.of(recipe, "sim:h100"), trier, run(merge(recipe.values, {})), below=below, most=most, workers=1
    )


def test_a_config_that_fits_is_told_what_makes_it_faster_neutral_changes_first() -> None:
    """vLLM cannot be tried, so it is not called slow or too large; nor are weights of fewer bits beside it."""
    found, untried = faster()
    assert [change.tier for change in found] == ["neutral", "neutral", "approximate"]
    assert found[0].changes == {"steps_per_generation": 4}
    assert found[2].changes == {"dtype": "bfloat16"}
    assert [change.changes["use_vllm"] for change in untried] == [True]


def test_without_checkpoints_the_largest_micro_batch_that_leaves_room_is_told() -> None:
    """With the own one of 4 it would need 57 GB of 40; 3 does not divide the batch of 16."""
    change = next(change for change in faster()[0] if "gradient_checkpointing" in change.changes)
    assert change.changes["gradient_checkpointing"] is False
    assert change.changes["per_device_train_batch_size"] == 2
    assert change.device_used_bytes == 37 * GB


@pytest.mark.parametrize(("weights_gb", "share", "sleeps"), [(2, 0.3, False), (16, 0.5, False), (19, 0.6, True)])
def test_vllm_gets_a_share_for_all_completions_and_sleeps_where_the_update_leaves_no_room(
    weights_gb: int, share: float, *, sleeps: bool
) -> None:
    """The cache of all completions has 1 GB; a larger share only takes longer to wake up."""
    _, (untried,) = faster(weights_bytes=weights_gb * GB)
    assert untried.changes["use_vllm"]
    assert untried.changes.get("vllm_gpu_memory_utilization", 0.3) == share
    assert bool(untried.changes.get("vllm_enable_sleep_mode")) is sleeps


def test_beside_a_search_only_lower_tiers_are_told() -> None:
    found, _ = faster(below="neutral")
    assert [change.changes for change in found] == [{"dtype": "bfloat16"}]
    assert faster(below="approximate") == ((), ())


@pytest.mark.parametrize(("share", "is_tried"), [(0.004, False), (0.04, True), (None, True)])
def test_an_optimizer_is_tried_where_its_own_phase_takes_as_much_as_the_least_gain(
    share: float | None, *, is_tried: bool
) -> None:
    asked: list[Values] = []

    def probe(values: Values) -> ProbeResult:
        asked.append(values)
        return run(values)

    recipe = grpo_recipe(
        per_device_train_batch_size=4, gradient_accumulation_steps=4, steps_per_generation=1, optim="adamw_torch_fused"
    )
    base = run(merge(recipe.values, {}))
    assert base.median_step_s is not None
    if share is not None:  # else it is not known
        base = replace(base, phase_s={"update": base.median_step_s, "optimizer": share * base.median_step_s})
    trier = Trier(recipe=recipe, device="sim:h100", capacity_bytes=40 * GB, probe=probe, tell=lambda _: None)
    faster_changes(Levers.of(recipe, "sim:h100"), trier, base, most=9, workers=1)
    assert any(values.get("optim") == "adamw_8bit" for values in asked) is is_tried


def _estimator(recipe: Recipe, asked: list[Values], monkeypatch: pytest.MonkeyPatch) -> Estimator:
    """Its probes follow the law, and what they are asked for goes to `asked`."""

    def probe(_: Estimator, values: Values) -> ProbeResult:
        asked.append(values)
        return run(values)

    monkeypatch.setattr(Estimator, "probe", probe)
    return Estimator(
        recipe=recipe, device="sim:h100", capacity_bytes=40 * GB, folder=Path(), worst_case=Path(),
        server=cast(ForkServer, None), deadline_s=1.0,
    )  # fmt: skip


@pytest.mark.parametrize(("device", "loss", "base_probed"), [
    ("sim:h100", "grpo", False), ("cuda", "grpo", True), ("sim:h100", "dapo", True),
])  # fmt: skip
def test_the_winner_is_simulated_again_only_where_its_trial_does_not_say_what_is_asked(
    device: Device, loss: str, base_probed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dapo a larger rollout is of a lower tier, and whether it has room is told by the least capacity."""
    recipe = grpo_recipe(
        dtype=None, steps_per_generation=1, generation_batch_size=4, loss_type=loss, per_device_train_batch_size=4
    )
    asked: list[Values] = []

    estimator = _estimator(recipe, asked, monkeypatch)
    best = Trial(
        number=3, tier="neutral", params={}, changes={}, result=replace(run(recipe.values), device=device)
    )  # fmt: skip
    kept = outside(best, [best], estimator, "neutral")
    assert kept is not None
    assert (asked.count(recipe.values) == 1) is base_probed
    assert "bfloat16" in str(kept["changes"])


def test_a_winner_with_expandable_segments_is_offered_vllms_sleep_mode_without_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = grpo_recipe(
        dtype=None, steps_per_generation=1, generation_batch_size=4, per_device_train_batch_size=4,
        gradient_accumulation_steps=4, use_vllm=False, vllm_mode="colocate", vllm_gpu_memory_utilization=0.3,
        vllm_enable_sleep_mode=False, gradient_checkpointing=True,
    )  # fmt: skip
    recipe, asked = replace(recipe, weights_bytes=19 * GB), list[Values]()

    estimator = _estimator(recipe, asked, monkeypatch)
    grows = {"env": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}
    best = Trial(
        number=3, tier="neutral", params={}, changes=grows, result=replace(run(recipe.values), device="sim:h100")
    )  # fmt: skip
    outside(best, [best], estimator, "neutral")
    assert any(values.get("vllm_enable_sleep_mode") for values in asked)
    assert not any(values.get("env") for values in asked)


def test_what_lies_outside_is_a_line_each_with_its_option() -> None:
    change = Outside.of(faster(below="neutral")[0][0], step_s=9.0)
    _, line, tries = outside_lines([change], {"dtype": None}, "neutral", fits=True)
    assert "To try them all: --allow approximate with" in tries
    assert line == "  dtype None -> bfloat16 (approximate): 5.00 s a step, 9.00 GB, 1.80x   --set dtype=bfloat16"
    assert outside_lines([], {}, "neutral", fits=True) == []
    full = replace(faster(below="neutral")[0][0], device_used_bytes=10 * GB, shown_bytes=9 * GB)  # a cache fills it
    assert "9.00 GB" in full.outcome
    assert "9.00 GB" in Outside.of(full, step_s=9.0).line({"dtype": None})
    *_, tries = outside_lines([replace(change, own="pure_bf16: true")], {"dtype": None}, "neutral", fits=True)
    assert tries.startswith("To use one: write it into your file. ")  # no --set stands above it


def test_what_a_study_keeps_belongs_to_its_winner_and_tier() -> None:
    change = Outside.of(faster(below="neutral")[0][0], step_s=9.0)
    kept = {"trial": 3, "allow": "neutral", "changes": [{name: getattr(change, name) for name in Outside.__slots__}]}
    best = Trial(number=3, tier="neutral", params={}, changes={})
    assert outside_of(kept, best, "neutral") == (change,)
    assert outside_of(kept, best, "approximate") == ()
    assert outside_of(kept, None, "neutral") == ()


def test_the_smallest_card_with_room_is_named_only_after_it_was_simulated() -> None:
    asked: list[Device] = []

    def on(device: Device, capacity: int, used: int) -> ProbeResult:
        asked.append(device)
        status = ProbeStatus.FIT if used <= capacity else ProbeStatus.OOM
        return ProbeResult(status=status, device=device, device_used_bytes=used, least_capacity_bytes=used)

    base = on("sim:a100-80gb", 84 * GB, 20 * GB)
    asked.clear()
    card = other_card(base, 84 * GB, lambda device, capacity: on(device, capacity, 20 * GB), Launch())
    assert card is not None
    assert asked == [f"sim:{card.name}"]
    assert gpu_spec(card.name).capacity_bytes < 26 * GB
    assert card.options == f"--gpu {card.name}"
    for launch, count in ((Launch(ranks=7, server_ranks=1), "8x"), (Launch(ranks=16, machines=4), "4x4x")):
        several = other_card(base, 84 * GB, lambda device, capacity: on(device, capacity, 20 * GB), launch)
        assert several is not None
        assert several.options == f"--gpu {count}{card.name}"
    assert other_card(base, 84 * GB, lambda device, capacity: on(device, capacity, 60 * GB), Launch()) is None
    full = on("sim:a100-80gb", gpu_spec("a100-80gb").capacity_bytes, 70 * GB)
    capacity = gpu_spec("a100-80gb").capacity_bytes  # an H100 has 0.03 GB less, and is no smaller card
    assert other_card(full, capacity, lambda device, capacity: on(device, capacity, 70 * GB), Launch()) is None
    over = on("sim:a100-40gb", 42 * GB, 50 * GB)
    larger = other_card(over, 42 * GB, lambda device, capacity: on(device, capacity, 50 * GB), Launch())
    assert larger is not None
    assert larger.capacity_bytes > 53 * GB


def test_the_options_are_what_a_shell_and_yaml_read_back() -> None:
    import shlex

    from autofit.commands.common import settings

    changes = {"dtype": "bfloat16", "generation_batch_size": None, "gradient_checkpointing": True, "note": "a: b'c",
               "env": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}  # fmt: skip
    words = shlex.split(set_options(changes))
    assert words[::2] == ["--set"] * len(changes)
    assert settings(words[1::2]) == changes


def test_only_micro_batches_that_divide_the_batch_are_tried() -> None:
    """3 of a batch of 16 was taken for the candidate with 1: a step of many more micro-batches than are needed."""
    resolved: dict[str, object] = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
    facts = trl_facts("sft", resolved)
    recipe = Recipe(trainer="sft", values=dict(resolved), resolved=resolved, launch=Launch(ranks=1), model="m", **facts)
    levers = Levers.of(recipe, "sim:h100")
    assert levers.strengths[MICRO] == (2, 1)
    assert levers.candidate({MICRO: 3}) is None


def test_a_number_is_tried_one_step_towards_what_may_be_faster() -> None:
    """0.3 was tried in place of a share of 0.6, and one card an engine in place of eight."""
    knobs = (
        Knob(name="vllm_gpu_memory_utilization", tier="neutral", values=(0.3, 0.5, 0.7)),
        Knob(name="vllm_tensor_parallel_size", tier="neutral", values=(1, 2, 4, 8)),
        Knob(name="dtype", tier="approximate", values=("bfloat16",), memory_ascending=True),
    )
    own: dict[str, object] = {"vllm_gpu_memory_utilization": 0.5, "vllm_tensor_parallel_size": 8, "dtype": None}
    levers = Levers(Space.of(grpo_recipe(**own), knobs, allow="recipe", device="sim:h100"))
    assert [levers.quicker(knob.name) for knob in knobs] == [(0.7,), (4,), ("bfloat16",)]
    most = Levers(Space.of(grpo_recipe(vllm_gpu_memory_utilization=0.7), knobs[:1], device="sim:h100"))
    assert most.quicker("vllm_gpu_memory_utilization") == ()
