"""Which device a command takes when none is named: by the size of its target."""

import pytest

from autofit.errors import ConfigError
from autofit.fakegpu.specs import GPU_SPECS
from autofit.hardware import hardware
from autofit.hardware.hardware import card_of_size, choose_device_and_target
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
        ("100GB", "h200", 100 * GB),
        ("3GB", "t4", 3 * GB),
    ],
)
def test_a_target_names_the_card_of_its_size(no_card: None, size: str, card: str, target: int) -> None:
    assert choose_device_and_target("auto", None, parse_bytes(size)) == (f"sim:{card}", target)


def test_every_card_is_taken_by_some_target_of_its_size_or_has_a_usual_sister() -> None:
    for spec in GPU_SPECS.values():
        sizes = hardware._box_sizes(spec)
        assert sizes, spec.name
        taken = card_of_size(sizes[0] * GB)
        assert hardware._box_sizes(taken) == sizes
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


@pytest.mark.parametrize(
    ("asked", "gpu", "size", "message"),
    [
        ("auto", None, None, "lists no CUDA card.* give --target-vram SIZE .* or --gpu NAME"),
        ("sim", None, None, "^choose the simulated card: give --target-vram"),
        ("auto", None, 900 * GB, "largest known card, b200"),
        ("auto", "a1000", None, "unknown GPU 'a1000'"),
        ("cpu", "t4", None, "--device must be auto or sim; got cpu"),
        ("cuda", None, GB, "needs a CUDA card"),
        ("cpu", None, None, "needs a target"),
    ],
)
def test_what_names_no_card_says_what_would(
    no_card: None, asked: str, gpu: str | None, size: int | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_device_and_target(asked, gpu, size)
