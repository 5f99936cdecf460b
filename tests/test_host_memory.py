"""Host memory of the ranks of a machine: who loads the model, who keeps what, who saves."""

import numpy as np
import pytest
import torch

import autofit
from autofit.fakegpu import fake_gpu
from autofit.fakegpu.memory import HostTensors, held_bytes
from autofit.fakegpu.rates.collectives import fake_ranks
from autofit.probing.host_memory import host_memory, shortage
from autofit.probing.simulated import saved_bytes
from autofit.recipe.launch import Launch

GIB = 1 << 30


@pytest.mark.parametrize(
    ("launch", "loading", "saves"),
    [
        (Launch(ranks=8), 8, False),
        (Launch(ranks=8, sharding="zero2"), 8, False),
        (Launch(ranks=8, sharding="zero3"), 1, True),
        (Launch(ranks=8, sharding="zero3", config={"deepspeed_config": {"zero3_init_flag": False}}), 8, True),
        (Launch(ranks=8, sharding="fsdp2"), 1, True),
        (Launch(ranks=8, sharding="fsdp2", config={"fsdp_config": {"fsdp_cpu_ram_efficient_loading": False}}), 8,
         False),
        (Launch(ranks=8, sharding="fsdp1", config={"fsdp_config": {"fsdp_cpu_ram_efficient_loading": False}}), 8, True),
        (Launch(ranks=8, sharding="fsdp2", config={"fsdp_config": {"fsdp_state_dict_type": "FULL_STATE_DICT"}}), 1,
         True),
        (Launch(ranks=8, sharding="fsdp2", config={"fsdp_config": {"fsdp_state_dict_type": "SHARDED_STATE_DICT"}}), 1,
         False),
    ],
)  # fmt: skip
def test_who_loads_and_who_saves(launch: Launch, loading: int, saves: bool) -> None:
    found = host_memory(launch, 16 * GIB, kept_bytes=0)
    assert found.loading_ranks == loading
    assert found.machine_bytes == 16 * GIB * loading
    assert found.save_bytes == (16 * GIB if saves else 0)


def test_the_ranks_of_two_machines_are_counted_for_one() -> None:
    found = host_memory(Launch(ranks=16, machines=2), GIB, kept_bytes=3 * GIB)
    assert (found.rank_bytes, found.machine_bytes) == (3 * GIB, 24 * GIB)


def test_a_machine_too_small_to_load_the_model_in_every_rank_is_told_so() -> None:
    assert shortage(Launch(ranks=8), 16 * GIB, 128 * GIB) == ()
    (note,) = shortage(Launch(ranks=8), 16 * GIB, 127 * GIB)
    assert "137.44 GB on the machine" in note
    assert "cpu_ram_efficient_loading" in note
    assert shortage(Launch(ranks=8, sharding="zero3"), 16 * GIB, 127 * GIB) == ()
    assert shortage(Launch(), 16 * GIB, GIB) == ()


def live_bytes(host: HostTensors) -> tuple[int, int]:
    """(bytes alive, pinned ones among them)."""
    log = list(zip(host.log.ids, host.log.nbytes, strict=True))
    return sum(nbytes for _, nbytes in log), sum(nbytes for number, nbytes in log if host.pinned[number])


def test_tensors_on_the_host_are_followed_to_their_end() -> None:
    with fake_gpu("a100-80gb") as gpu:
        host = gpu.follow_host()
        kept = torch.empty(1 << 20, pin_memory=True)
        copied = torch.ones(1 << 20, device="cuda").cpu()
        assert live_bytes(host) == (8 << 20, 4 << 20)
        del copied
        view = kept[:10]
        del kept
        assert live_bytes(host) == (4 << 20, 4 << 20)
        assert view.is_pinned()
        del view
        assert live_bytes(host) == (0, 0)


def test_memory_is_pinned_where_it_was_asked_for_or_nobody_waits_for_the_copy() -> None:
    with fake_gpu("a100-80gb"):
        on_card, on_host = torch.ones(1 << 20, device="cuda"), torch.ones(1 << 20)
        assert not on_host.is_pinned()
        assert on_host.pin_memory().is_pinned()
        assert not on_card.to("cpu").is_pinned()
        assert on_card.to("cpu", non_blocking=True).is_pinned()  # as torch's _to_copy does


def test_pinned_blocks_are_powers_of_two_and_kept_for_others_of_their_size() -> None:
    events = [(5, 1), (6, 1), (-5, 1), (100, 0), (-6, 1), (3, 1), (7, 1)]
    nbytes, pinned = np.array([n for n, _ in events]), np.array([p for _, p in events])
    held, kept = held_bytes(nbytes, pinned)
    assert kept.tolist() == [8, 16, 16, 16, 16, 20, 20]
    assert held.tolist() == [8, 16, 16, 116, 116, 120, 120]


def test_values_that_are_known_stay_known_in_pinned_memory() -> None:
    """A loader pins its batches; a mask that is not known any more would count as one with padding."""
    with fake_gpu("a100-80gb") as gpu:
        gpu.follow_host()
        mask = torch.ones(4, 1024, dtype=torch.long).pin_memory().to("cuda", non_blocking=True)
        assert bool((mask == 1).all())


def test_copies_from_pinned_memory_take_the_time_of_the_link_and_others_are_not_simulated() -> None:
    with fake_gpu("a100-80gb") as gpu:
        link_s = (400 << 20) / gpu.spec.host_link_bytes_per_s
        pinned = torch.ones(100 << 20).pin_memory()
        before = gpu.elapsed_s
        pinned.view(10, -1).to("cuda", non_blocking=True)
        assert gpu.elapsed_s - before == pytest.approx(link_s, rel=0.05)


def test_a_save_gathers_the_larger_of_the_model_and_the_optimizer() -> None:
    """accelerate saves one after the other: the moments of AdamW are two more models in the trained dtype."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    launch = Launch(ranks=4, sharding="fsdp2")
    with fake_ranks(4), fake_gpu("a100-80gb"):
        model = torch.nn.Sequential(torch.nn.Linear(1024, 512), torch.nn.Linear(512, 10)).cuda()
        model[1].requires_grad_(requires_grad=False)
        fully_shard(model, mesh=init_device_mesh("cuda", (4,)))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.zeros(1, 1024, device="cuda")).sum().backward()
        optimizer.step()
        both, alone = (saved_bytes(model, optimizer, launch, with_optimizer=asked) for asked in (True, False))
    trained, frozen = 4 * (1024 * 512 + 512), 4 * (512 * 10 + 10)
    assert alone == trained + frozen
    assert both == 2 * (trained + 4)  # each of the two parameters counts its steps in 4 bytes


@pytest.mark.parametrize(("ranks", "machine"), [(1, 90), (2, 90), (8, 90)])
def test_the_others_hold_their_share_twice_while_rank_0_loads(ranks: int, machine: int) -> None:
    """A model of 30 GiB on the host: rank 0 has it whole, and each rank its share and the pinned copy of it."""
    launch = Launch(ranks=ranks, sharding="fsdp2", offload="parameters")
    share = 30 * GIB // ranks
    found = host_memory(launch, 30 * GIB, kept_bytes=share, load_bytes=30 * GIB + 2 * share, share_bytes=share)
    assert found.machine_bytes == machine * GIB


def test_what_is_loaded_saved_and_kept_is_told_by_the_largest() -> None:
    fsdp2 = Launch(ranks=8, sharding="fsdp2")
    found = host_memory(fsdp2, 16 * GIB, kept_bytes=0, load_bytes=33 * GIB, whole_bytes=64 * GIB)
    assert (found.load_bytes, found.save_bytes, found.machine_bytes) == (33 * GIB, 64 * GIB, 64 * GIB)
    assert "rank 0 gathers 68.72 GB to save" in found.told
    assert "8 of its 8 ranks load 17.18 GB" in host_memory(Launch(ranks=8), 16 * GIB, kept_bytes=0).told
    offloaded = host_memory(Launch(ranks=8, sharding="fsdp2", offload="parameters"), 16 * GIB)
    assert "more than 17.18 GB per rank" in offloaded.told
    zero3 = host_memory(Launch(ranks=8, sharding="zero3"), 16 * GIB, kept_bytes=0, whole_bytes=64 * GIB)
    assert zero3.save_bytes == 16 * GIB  # each rank writes its own shard of the optimizer's state


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({}, True),
        ({"loads_on_card": True}, False),
        ({"loads_on_card": True, "launch": {"sharding": "fsdp2"}}, True),
    ],
)
def test_ranks_that_load_onto_their_own_card_take_no_host_memory(more: dict[str, object], told: bool) -> None:
    recipe = {"model_name_or_path": "Qwen/Qwen2.5-0.5B", "objective": "sft", "max_length": 64, "dtype": "bfloat16"}
    found = autofit.estimate(
        {**recipe, "bf16": True, "use_peft": True, **more}, gpu="2xa100-40gb", trainer="hf", prompt_tokens=64,
        num_processes=2, advice=False, lengths="off",
    )  # fmt: skip
    assert any(note.startswith("host memory") for note in found.result.notes) is told
