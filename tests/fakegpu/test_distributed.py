"""One rank of several: DDP's buckets, FSDP2's shards, and a loop that shrinks its batch until it fits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from autofit.fakegpu import fake_gpu

MIB = 1 << 20
WORKSPACES_MIB = 2 * 8320 / 1024


@pytest.fixture
def eight_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    dist.destroy_process_group()


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
    assert gpu.memory.allocator.oom_count > 0
