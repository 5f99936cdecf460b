"""One rank of several: DDP's buckets, FSDP2's shards, and a loop that shrinks its batch until it fits."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from autofit.fakegpu import fake_gpu
from autofit.fakegpu.depth.layers import DATA, Tag
from autofit.fakegpu.depth.stack import Stack
from autofit.fakegpu.rates.collectives import fake_ranks
from autofit.fakegpu.specs import HostCosts

MIB = 1 << 20
WORKSPACES_MIB = 2 * 8320 / 1024


@pytest.fixture
def eight_ranks() -> Iterator[None]:
    with fake_ranks(8):
        yield


def test_each_rank_of_one_process_makes_tensors_of_its_own_share() -> None:
    rows = []
    for rank in (0, 2):
        with fake_ranks(3, rank):
            whole = distribute_tensor(torch.zeros(64, 4), init_device_mesh("cpu", (3,)), [Shard(0)])
            made = whole.new_zeros(64, 4)
            assert isinstance(made, DTensor)
            rows.append([len(whole.to_local()), len(made.to_local())])
    assert rows == [[22, 22], [20, 20]]


@pytest.mark.usefixtures("eight_ranks")
@pytest.mark.parametrize("as_view", [False, True])
def test_ddp_holds_its_buckets_beside_the_gradients_unless_they_are_views(as_view: bool) -> None:
    with fake_gpu("a100-80gb"):
        inner = nn.Linear(2048, 8192, bias=False).cuda()
        model = nn.parallel.DistributedDataParallel(inner, device_ids=[0], gradient_as_bucket_view=as_view)
        model(torch.randn(4, 2048, device="cuda")).sum().backward()
        held = torch.cuda.memory_allocated() / MIB - WORKSPACES_MIB
        assert held == pytest.approx(64 * (2 if as_view else 3), abs=0.5)


@pytest.mark.usefixtures("eight_ranks")
@pytest.mark.parametrize("as_view", [False, True])
def test_buckets_of_ddp_count_as_gradients(as_view: bool) -> None:
    with fake_gpu("a100-80gb") as gpu:
        inner = nn.Linear(2048, 8192, bias=False).cuda()
        model = nn.parallel.DistributedDataParallel(inner, device_ids=[0], gradient_as_bucket_view=as_view)
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(2):  # the second forward pass makes the buckets anew
            model(torch.randn(4, 2048, device="cuda")).sum().backward()
            optimizer.step()
    held = {name: nbytes[-1] / MIB for name, nbytes in gpu.timeline.live_bytes.items()}
    assert (held["weights"], held["gradients"]) == (64, 64 if as_view else 128)
    assert held["activations"] + held["temporaries"] < 1


@pytest.mark.usefixtures("eight_ranks")
def test_fsdp2_holds_an_eighth_and_gathers_a_layer_at_a_time() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    with fake_gpu("a100-80gb"):
        mesh = init_device_mesh("cuda", (8,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(8)]).cuda()
        for layer in model:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        shards = 8 * 64 / 8
        assert torch.cuda.memory_allocated() / MIB == pytest.approx(shards, abs=0.1)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            model(torch.randn(4, 4096, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.cuda.memory_allocated() / MIB == pytest.approx(3 * shards + WORKSPACES_MIB, abs=0.5)
        assert torch.cuda.max_memory_allocated() / MIB < 3 * shards + WORKSPACES_MIB + 8 * 32


@pytest.mark.usefixtures("eight_ranks")
@pytest.mark.parametrize("version", [1, 2])
def test_each_sharded_module_takes_the_hosts_time_for_its_hooks(version: int) -> None:
    def host_s(units: int, *, trains: bool) -> float:
        with fake_gpu("h100") as gpu:
            layers = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(16)]).cuda()
            model = sharded(layers, list(layers)[:units], version)
            began = gpu.clock.host_s
            with torch.set_grad_enabled(trains):
                found = model(torch.randn(4, 8, device="cuda")).sum()
            if trains:
                found.backward()
            return gpu.clock.host_s - began

    launches = {1: {False: 26, True: 34 + 20 + 15}, 2: {False: 24, True: 41 + 22 + 16}}[version]
    for trains, each in launches.items():
        more_s = host_s(12, trains=trains) - host_s(4, trains=trains)
        of_units_s = 8 * each * HostCosts().launch_s  # less a little for the root, which has fewer weights
        assert 0.9 * of_units_s < more_s < 2 * of_units_s


def sharded(model: nn.Module, units: list[nn.Module], version: int) -> nn.Module:
    """The model under FSDP1 or FSDP2 with these modules as units of their own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    if version == 1:
        return FullyShardedDataParallel(
            model, auto_wrap_policy=lambda module, recurse, nonwrapped_numel: recurse or module in units,
            device_id=torch.cuda.current_device(),
        )  # fmt: skip
    mesh = init_device_mesh("cuda", (8,))
    for module in (*units, model):
        fully_shard(module, mesh=mesh)
    return model


def _train_sharded(world_size: int, *, offload: bool) -> tuple[float, float, list[str]]:
    """MiB held after two steps, the peak of the second, and the notes, of eight layers of 64 MiB in fp32."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    with fake_ranks(world_size), fake_gpu("a100-80gb") as gpu:
        mesh = init_device_mesh("cuda", (world_size,))
        mixed = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        model = nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(8)])
        if not offload:
            model.cuda()
        for module in (*model, model):
            fully_shard(
                module, mesh=mesh, mp_policy=mixed, offload_policy=CPUOffloadPolicy() if offload else OffloadPolicy()
            )
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            model(torch.randn(4, 4096, device="cuda")).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        held, peak = torch.cuda.memory_allocated() / MIB, torch.cuda.max_memory_allocated() / MIB
    return held, peak, gpu.notes


@pytest.mark.parametrize("world_size", [2, 8, 64])
def test_fsdp2_divides_what_is_held_by_the_world_size(world_size: int) -> None:
    held, peak, notes = _train_sharded(world_size, offload=False)
    shards = 8 * 64 / world_size
    assert held == pytest.approx(3 * shards + WORKSPACES_MIB, abs=0.5)  # parameters and two moments
    gathered, foreach = 4 * shards + 64 + 5 * 32, 5 * shards  # gradients with a few layers, or with AdamW's temporaries
    assert 3 * shards < peak - WORKSPACES_MIB < max(gathered, foreach) + 0.5
    assert any("collectives" in note for note in notes)


@pytest.mark.parametrize("world_size", [8, 64])
def test_fsdp2_with_offload_holds_only_the_gathered_layers_on_the_card(world_size: int) -> None:
    held, peak, _ = _train_sharded(world_size, offload=True)
    assert held == pytest.approx(WORKSPACES_MIB, abs=0.5)
    assert peak - WORKSPACES_MIB < 64 + 5 * 32 + 64 / world_size


@pytest.mark.parametrize("world_size", [2, 64])
def test_ddp_holds_the_same_at_any_world_size(world_size: int) -> None:
    with fake_ranks(world_size), fake_gpu("a100-80gb"):
        model = nn.parallel.DistributedDataParallel(nn.Linear(2048, 8192, bias=False).cuda(), device_ids=[0])
        with model.no_sync():
            model(torch.randn(4, 2048, device="cuda")).sum().backward()
        model(torch.randn(4, 2048, device="cuda")).sum().backward()
        held = torch.cuda.memory_allocated() / MIB
        metric = torch.ones(4, device="cuda")
        dist.all_reduce(metric)
        dist.barrier()
    assert held == pytest.approx(64 * 3 + WORKSPACES_MIB, abs=0.5)


@pytest.mark.parametrize("rows", [4096, 4099])
def test_a_save_of_fsdp2_gathers_one_parameter_at_a_time(rows: int) -> None:
    """The full state dicts that accelerate asks torch for: why a save is no phase of a simulated probe."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
    )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with fake_ranks(4), fake_gpu("a100-80gb"):
        mesh = init_device_mesh("cuda", (4,))
        model = nn.Sequential(nn.Linear(4096, rows, bias=False), *[nn.Linear(rows, rows, bias=False) for _ in range(2)])
        model.cuda()
        for module in (*model, model):
            fully_shard(module, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(4, 4096, device="cuda")).sum().backward()
        optimizer.step()
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True)
        for saved in (lambda: get_model_state_dict(model, options=whole),
                      lambda: get_optimizer_state_dict(model, optimizer, options=whole)):  # fmt: skip
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            saved()
            gathered = (torch.cuda.max_memory_allocated() - before) / MIB
            assert gathered == pytest.approx(4 * rows * rows / MIB, rel=0.002)
            assert torch.cuda.memory_allocated() == before


def test_a_loop_that_halves_its_batch_finds_one_that_fits() -> None:
    with fake_gpu("t4") as gpu:
        model = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(4)]).cuda()
        batch = 1 << 20
        while True:
            try:
                model(torch.randn(batch, 4096, device="cuda")).relu().sum().backward()
                break
            except torch.OutOfMemoryError:
                model.zero_grad()
                batch //= 2
    assert 1 << 14 < batch < 1 << 18
    assert gpu.memory.allocator.oom_count == 20 - math.log2(batch)  # one for each time that it was halved


@pytest.mark.usefixtures("eight_ranks")
def test_the_gradient_of_a_flat_parameter_lies_in_the_pool_of_the_stream_that_gathered_its_weights() -> None:
    """Autograd computes a node in the stream of its forward (experiments/oracle: hf-full-2-fsdp1)."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    with fake_gpu("a100-80gb") as gpu:
        layers = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(2))).cuda()
        for i in range(2):
            layers[i] = FullyShardedDataParallel(layers[i], use_orig_params=True, device_id=0)
        model = FullyShardedDataParallel(layers, use_orig_params=True, device_id=0)
        before = len(gpu.memory.allocations)
        with model.no_sync():  # the whole gradients stay
            model(torch.randn(4, 1024, device="cuda")).sum().backward()
        streams = {
            op: {gpu.memory.log.streams.get(i, 0) for i, made in enumerate(gpu.memory.allocations)
                 if i >= before and made.op == op and made.nbytes == 4 * MIB}
            for op in ("resize_", "cat", "mm over rows")
        }  # fmt: skip
    assert streams["cat"] == streams["resize_"] != {0}
    assert streams["mm over rows"] == {0}


def test_tensors_of_a_model_with_few_layers_stand_for_all_but_those_of_one_layer_for_themselves() -> None:
    """DDP sends the whole model, FSDP1 a layer at a time."""
    with fake_gpu("a100-80gb", follow_layers=True) as gpu:
        assert gpu.layers is not None
        gpu.layers.stacks.append(Stack(first=1, period=1, units=5, layers=7))
        tensors = [torch.empty(1) for _ in range(5)]  # outside of layers, then of each layer that was built
        for layer, tensor in enumerate(tensors[1:]):
            gpu.layers.lend(tensor, Tag(DATA, 0, layer).encode())
        assert gpu.layers.at_full_depth(tensors) == [0, 1, 2, 2, 2, 2, 3, 4]
        assert gpu.layers.at_full_depth(tensors[::-1]) == [0, 1, 2, 2, 2, 2, 3, 4]
        assert gpu.layers.at_full_depth(tensors[2:3]) == [0]
