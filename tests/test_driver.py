"""The cards of a fake NVIDIA driver: which are seen, by which name, and with how much memory. No torch, no card."""

import re
from pathlib import Path

import pytest
from drivers import Card, Driver

from autofit.fakegpu.specs import UnknownGpuError, gpu_spec
from autofit.hardware import hardware
from autofit.hardware.hardware import card_of

ALIKE = [Card(uuid=f"GPU-{i}0000000-1111-2222-3333-444444444444") for i in range(4)]
SMALL = Card(name="Tesla T4", uuid="GPU-a0000000-1111-2222-3333-444444444444", total_mib=15360, capability=(7, 5))
FAST = ALIKE[0]
SLICED = Card(name="NVIDIA A100-SXM4-40GB", uuid="GPU-b0000000-1111-2222-3333-444444444444", kind="sliced")
SLICES = [
    Card(name="NVIDIA A100-SXM4-40GB MIG 1g.5gb", uuid=f"MIG-{i}c000000-1111-5222-3333-444444444444", kind="slice",
         total_mib=4864, used_mib=12, reserved_mib=0, capability=(8, 0)) for i in range(2)
]  # fmt: skip
BROKEN = {kind: Card(kind=kind, uuid=f"GPU-{kind}") for kind in ("lost", "forbidden", "dying")}
SEEN = "[gpu.uuid for gpu in hardware.gpus()]"


def test_without_a_driver_there_is_no_card(driver: Driver) -> None:
    driver.cards.unlink(missing_ok=True)
    assert driver.told(SEEN) == []


@pytest.mark.parametrize(
    ("kind", "words"),
    [("lost", "GPU is lost"), ("forbidden", "Insufficient Permissions"), ("dying", "GPU is lost")],
)
def test_a_card_that_its_driver_refuses_is_named_and_the_others_are_seen(driver: Driver, kind: str, words: str) -> None:
    driver.has(ALIKE[0], BROKEN[kind], ALIKE[2])
    uses, look = "[use.gpu.uuid for use in health.card_uses()]", "health.look_at_cards()"
    asked = f"[{SEEN}, nvml.driver_cards().refused, {uses}, [gpu.index for gpu in {look}.cards], {look}.refused]"
    two, refused = [ALIKE[0].uuid, ALIKE[2].uuid], [f"card 1 is left out, its driver says: {words}"]
    assert driver.told(asked) == [two, refused, two, [0, 2], refused]


def test_an_index_beside_a_lost_card_is_cudas_which_may_not_count_that_card(driver: Driver) -> None:
    driver.has(BROKEN["lost"], *ALIKE[1:3])
    assert driver.told(SEEN, CUDA_VISIBLE_DEVICES="0", FAKE_CUDA_ORDER="1") == [ALIKE[1].uuid]
    assert driver.told(SEEN, CUDA_VISIBLE_DEVICES=ALIKE[2].uuid) == [ALIKE[2].uuid]


@pytest.mark.parametrize(
    ("cards", "env", "why"),
    [
        ((), {}, "the driver lists none"),
        ((BROKEN["lost"],), {}, r"lists none that works \(card 0 is left out, its driver says: GPU is lost\)"),
        ((ALIKE[0],), {"CUDA_VISIBLE_DEVICES": "7"}, "CUDA_VISIBLE_DEVICES='7' names none"),
        ((ALIKE[0],), {"FAKE_START": "18"}, "its driver does not start .*version mismatch"),
        ((ALIKE[0],), {"FAKE_START": "4"}, "its driver does not start .*Insufficient Permissions"),
    ],
)
def test_why_there_is_no_card_is_told(driver: Driver, cards: tuple[Card, ...], env: dict[str, str], why: str) -> None:
    driver.has(*cards)
    refused = driver.fails("hardware.choose_device('cuda')", **env)
    assert re.search(why, refused), refused
    both = "[hardware.choose_device('auto', 'h100'), hardware.choose_device('auto')]"
    assert driver.told(both, **env) == ["sim:h100", "cpu"]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("2,0", [ALIKE[2], ALIKE[0]]),
        ("GPU-3,GPU-1", [ALIKE[3], ALIKE[1]]),  # the beginning of a UUID is enough
        (ALIKE[1].uuid, [ALIKE[1]]),
        ("1,7,2", [ALIKE[1]]),  # CUDA stops at the first card that is not there
        ("GPU-,1", []),  # the beginning of every UUID names none
        ("", []),
    ],
)
def test_alike_cards_are_seen_as_cuda_sees_them(driver: Driver, visible: str, expected: list[Card]) -> None:
    driver.has(*ALIKE)
    assert driver.told(SEEN, CUDA_VISIBLE_DEVICES=visible) == [card.uuid for card in expected]


def test_an_index_among_unlike_cards_is_cudas_and_not_the_drivers(driver: Driver, tmp_path: Path) -> None:
    driver.has(SMALL, FAST)
    env = {"CUDA_VISIBLE_DEVICES": "0", "FAKE_CUDA_LOG": str(tmp_path / "log")}
    assert driver.told(SEEN, FAKE_CUDA_ORDER="1", **env) == [FAST.uuid]  # CUDA counts from the fastest
    assert (tmp_path / "log").read_text().count("cuInit") == 1
    assert driver.told(SEEN, CUDA_DEVICE_ORDER="PCI_BUS_ID", **env) == [SMALL.uuid]
    assert (tmp_path / "log").read_text().count("cuInit") == 1  # not asked: the setting says it
    assert driver.told(SEEN) == [SMALL.uuid, FAST.uuid]


def test_an_index_that_cuda_cannot_tell_is_refused_with_what_to_give(driver: Driver) -> None:
    driver.has(SMALL, FAST)
    refused = r"CUDA_VISIBLE_DEVICES=0 names cards by CUDA's own order.* name them by UUID \(nvidia-smi -L\)"
    with pytest.raises(AssertionError, match=refused):
        driver.told(SEEN, CUDA_VISIBLE_DEVICES="0")


def test_a_sliced_card_is_seen_as_its_slices(driver: Driver) -> None:
    driver.has(SLICED, *SLICES)
    seen = [card.uuid for card in SLICES]
    assert driver.told(f"[{SEEN}, hardware.slot_names('cuda', 1)]") == [seen, [f"cuda-{uuid}" for uuid in seen]]
    told = driver.told("[(gpu.name, gpu.capacity_bytes) for gpu in hardware.gpus()]",
                       CUDA_VISIBLE_DEVICES=SLICES[1].uuid)  # fmt: skip
    assert told == [[SLICES[1].name, 4864 << 20]]
    assert driver.told("hardware.simulated_twin('cuda')", CUDA_VISIBLE_DEVICES=SLICES[0].uuid) is None


def test_a_job_that_sees_no_card_still_knows_the_card_of_its_slot(driver: Driver) -> None:
    driver.has(SMALL, FAST)
    of = "hardware.gpu_of_slot"
    asked = f"[{of}('cuda-{FAST.uuid}').capacity_bytes, {of}('cuda-0').capacity_bytes]"
    assert driver.told(asked, CUDA_VISIBLE_DEVICES="") == [card.total_mib << 20 for card in (FAST, SMALL)]
    assert driver.told(f"{of}('cpu-0')") is None


@pytest.mark.parametrize("how", ["bare", "whole", "a slice"])
def test_a_card_is_found_by_the_uuid_that_torch_gives(driver: Driver, how: str) -> None:
    driver.has(SLICED, *SLICES, *ALIKE)
    asked = {"bare": ALIKE[2].uuid.removeprefix("GPU-"), "whole": ALIKE[2].uuid,
             "a slice": SLICES[1].uuid.removeprefix("MIG-")}[how]  # fmt: skip
    expected = SLICES[1] if how == "a slice" else ALIKE[2]
    found = driver.told(
        f"(n := __import__('pynvml'), n.nvmlInit(), n.nvmlDeviceGetUUID(nvml.handle_of(n, '{asked}')))[1:]"
    )
    assert isinstance(found, list)
    assert found[-1] == expected.uuid


def test_a_drivers_reserve_counts_only_where_the_driver_cannot_tell_it_apart(driver: Driver) -> None:
    driver.has(FAST)
    asked = "(n := __import__('pynvml'), n.nvmlInit(), nvml.used_bytes(n, n.nvmlDeviceGetHandleByIndex(0)))[-1]"
    assert driver.told(asked) == 600 << 20
    assert driver.told(asked, FAKE_OLD_DRIVER="1") == (600 + 615) << 20


def test_a_cards_clock_is_told_and_a_slices_is_not(driver: Driver) -> None:
    driver.has(SLICED, *SLICES, *ALIKE)
    asked = "(n := __import__('pynvml'), n.nvmlInit(), nvml.card_state(n, nvml.handle_of(n, '{}')))[-1]"
    both = ", ".join(f"__import__('dataclasses').asdict({asked.format(card.uuid)})" for card in (ALIKE[0], SLICES[0]))
    told = driver.told(f"[{both}]")
    assert isinstance(told, list)
    whole, piece = told
    assert whole == {"sm_clock_mhz": 1980, "power_w": 412.345, "temperature_c": 51, "slowed_by": 4}
    assert piece == {"sm_clock_mhz": None, "power_w": None, "temperature_c": None, "slowed_by": 4}


@pytest.mark.parametrize(
    ("name", "card", "said"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40gb", ""),
        ("Tesla T4", "t4", ""),
        ("NVIDIA H100 PCIe", "h100-pcie", ""),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb", ""),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb", ""),
        ("Tesla V100-SXM2-16GB-N", "v100-16gb", "not published"),
        ("NVIDIA H100 NVL", "h100-nvl", ""),
        ("NVIDIA GeForce RTX 4090 D", None, "did you mean rtx4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None, "unknown GPU"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None, "a slice of a card"),
        ("GRID A100-40C", None, "a virtual card"),
        ("NVIDIA A40-48Q", None, "a virtual card"),
        ("NVIDIA RTX A6000", "a6000", ""),
    ],
)
def test_a_drivers_name_means_a_card_with_the_same_bytes_or_none_and_this_is_said(
    name: str, card: str | None, said: str
) -> None:
    spec, remark = card_of(name)
    assert (None if spec is None else spec.name) == card
    assert said in remark
    assert bool(remark) == bool(said)


def test_every_other_name_is_one_that_the_table_of_cards_does_not_take_itself() -> None:
    for name in hardware._SAME_CHIP:
        with pytest.raises(UnknownGpuError):
            gpu_spec(name)
