"""Which device a command takes when none is named: by the size of its target."""

import pytest

from autofit.errors import ConfigError
from autofit.fakegpu.specs import GPU_SPECS
from autofit.hardware import hardware
from autofit.hardware.hardware import (
    CardNeeds,
    about_choice,
    card_needs,
    card_of_size,
    choose_device_and_target,
    host_memory_bytes,
)
from autofit.hardware.nvml import Gpu
from autofit.units import parse_bytes

GB, GIB = 10**9, 2**30
T4, A100 = GPU_SPECS["t4"].capacity_bytes, GPU_SPECS["a100-40gb"].capacity_bytes


@pytest.fixture
def no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "gpus", lambda: ())


@pytest.mark.parametrize(
    ("size", "card", "target"),
    [
        ("40GB", "a100-40gb", 40 * GB),  # the driver reports more: the target stays what was asked for
        ("40GiB", "a100-40gb", A100),  # and less than its box says: then it is the whole card
        ("16GB", "t4", T4),
        ("24GB", "rtx4090", 24 * GB),
        ("80GB", "a100-80gb", 80 * GB),
        ("141GB", "h200", 141 * GB),
        ("192GB", "b200", GPU_SPECS["b200"].capacity_bytes),
        ("60GB", "a100-80gb", 60 * GB),  # in between: the smallest size that has it
        ("100GB", "rtxpro6000", 100 * GB),
        ("120GB", "h200", 120 * GB),
        ("3GB", "rtx4060ti", 3 * GB),
    ],
)
def test_a_target_names_the_card_of_its_size(no_card: None, size: str, card: str, target: int) -> None:
    assert choose_device_and_target("auto", None, parse_bytes(size)) == (f"sim:{card}", target)


@pytest.mark.parametrize(
    ("size", "recipe", "card"),
    [
        ("16GB", {"dtype": "float16"}, "t4"),
        ("16GB", {"dtype": "bfloat16"}, "rtx4080"),  # a T4 has no bfloat16
        ("16GB", {"model_init_kwargs": {"torch_dtype": "bfloat16"}}, "rtx4080"),
        ("15GB", {"bf16": True}, "rtx4080"),
        ("16GB", {"attn_implementation": "flash_attention_2"}, "rtx4080"),
        ("40GB", {"attn_implementation": "kernels-community/vllm-flash-attn3"}, "h100"),
        ("16GB", {"load_in_8bit": True, "bf16": False}, "t4"),
        ("24GB", {"dtype": "bfloat16", "tf32": True}, "rtx4090"),
    ],
)
def test_the_card_of_a_size_has_what_the_recipe_needs(
    no_card: None, size: str, recipe: dict[str, object], card: str
) -> None:
    assert choose_device_and_target("auto", None, parse_bytes(size), card_needs(recipe))[0] == f"sim:{card}"


def test_a_card_without_the_kernels_that_a_recipe_names_is_refused_before_its_simulation() -> None:
    needs = card_needs({"attn_implementation": "flash_attention_2", "fp8": True})
    with pytest.raises(ConfigError, match=r"t4 has no flash attention 2 .* set another attention"):
        needs.check_kernels("sim:t4")
    needs.check_kernels("sim:rtx3090")


def test_the_choice_of_a_card_is_said_with_how_to_change_it() -> None:
    needs = card_needs({"dtype": "bfloat16", "bf16": True})
    assert about_choice("sim:rtx4080", None, 16 * GB, needs) == (
        "simulated on rtx4080, the usual card of 16 GB with bfloat16; --gpu NAME picks another (a4000, rtx4070tisuper, "
        "rtx4060ti-16gb, ...)"
    )
    assert about_choice("sim:a100-80gb", None, 60 * GB, CardNeeds()).startswith(
        "simulated on a100-80gb, the smallest card that has as much: 80 GB; --gpu NAME picks another (a100-pcie-80gb, "
        "a800, h100, ...)"
    )
    assert about_choice("sim:t4", "t4", None, needs) == (
        "t4 was named, and has no bfloat16 (dtype: bfloat16), bfloat16 (bf16: true) of its own"
    )
    assert about_choice("sim:a100-40gb", "a100", None, needs) == about_choice("cuda", None, 16 * GB, needs) == ""


def test_every_card_is_taken_by_some_target_of_its_size_or_has_a_usual_sister() -> None:
    for spec in GPU_SPECS.values():
        sizes = hardware._box_sizes(spec)
        assert sizes, spec.name
        taken = card_of_size(sizes[0] * GB)
        assert hardware._box_sizes(taken) == sizes or spec.name == "h20"  # the only one of its size
        assert taken.name in hardware._USUAL_CARDS


def test_a_named_card_may_be_asked_for_whole_by_the_size_on_its_box() -> None:
    assert choose_device_and_target("auto", "t4", 16 * GB) == ("sim:t4", T4)
    with pytest.raises(ConfigError, match="at most the card's memory"):
        choose_device_and_target("auto", "t4", 17 * GB)


def test_a_card_that_is_there_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "gpus", lambda: (Gpu(name="card", uuid="GPU-0", capacity_bytes=50 * GB),))
    assert choose_device_and_target("auto", None, 40 * GB) == ("cuda", 40 * GB)
    assert choose_device_and_target("auto", None, None) == ("cuda", 50 * GB)
    assert choose_device_and_target("sim", None, 40 * GB) == ("sim:a100-40gb", 40 * GB)
    assert choose_device_and_target("cpu", None, GB) == ("cpu", GB)


def test_a_search_on_the_cpu_may_use_all_memory_unless_a_target_says_less(no_card: None) -> None:
    assert choose_device_and_target("cpu", None, None) == ("cpu", host_memory_bytes())
    assert choose_device_and_target("cpu", None, GB) == ("cpu", GB)


@pytest.mark.parametrize(
    ("asked", "gpu", "size", "message"),
    [
        ("auto", None, None, "no CUDA card is visible .*lists none.* give --target-vram SIZE .* or --gpu NAME"),
        ("sim", None, None, "^choose the simulated card: give --target-vram"),
        ("auto", None, 900 * GB, "largest known card, b200"),
        ("auto", "a1000", None, "unknown GPU 'a1000'"),
        ("cpu", "t4", None, "--device must be auto or sim; got cpu"),
        ("cuda", None, GB, "needs a CUDA card"),
    ],
)
def test_what_names_no_card_says_what_would(
    no_card: None, asked: str, gpu: str | None, size: int | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_device_and_target(asked, gpu, size)
