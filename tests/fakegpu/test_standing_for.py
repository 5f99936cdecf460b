"""Parts of a run that stand for many, an empty cache at the begin of a phase, and shards that move to the host."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from autofit.fakegpu import fake_gpu
from autofit.fakegpu.depth.expand import Mark, run_of
from autofit.fakegpu.rates.collectives import fake_ranks
from autofit.fakegpu.replay import EventLog, Unlimited

MIB = 1 << 20


def product(times: int, *, at_once: bool) -> tuple[float, int]:
    """(seconds, peak allocated bytes) of `times` products on a simulated card, traced once or each."""
    with fake_gpu("a100-80gb") as gpu:
        a = torch.empty(4096, 4096, device="cuda", dtype=torch.bfloat16)
        for _ in range(1 if at_once else times):
            with gpu.standing_for(times if at_once else 1):
                _ = a @ a
                del _
        return gpu.elapsed_s, gpu.peak_allocated_bytes


def test_one_traced_pass_counts_the_seconds_of_all_that_it_stands_for() -> None:
    (each_s, each_bytes), (once_s, once_bytes) = product(50, at_once=False), product(50, at_once=True)
    assert once_s == pytest.approx(each_s, rel=0.02)
    assert once_bytes == each_bytes


def test_what_stands_for_many_inside_of_another_counts_in_each_of_its_times() -> None:
    def seconds(outer: int, inner: int, *, at_once: bool) -> float:
        with fake_gpu("a100-80gb", follow_layers=True) as gpu:
            a = torch.empty(4096, 4096, device="cuda", dtype=torch.bfloat16)
            for _ in range(1 if at_once else outer):
                with gpu.standing_for(outer if at_once else 1):
                    for _ in range(1 if at_once else inner):
                        with gpu.standing_for(inner if at_once else 1):
                            _ = a @ a
                            del _
            marks = [Mark(name="end", event=len(gpu.memory.log.ids), stretch=gpu.clock.cut())]  # type: ignore[attr-defined]
            return run_of(gpu, marks).seconds()[-1]

    for outer, inner in ((5, 7), (2, 3), (3, 2)):
        assert seconds(outer, inner, at_once=True) == pytest.approx(seconds(outer, inner, at_once=False), rel=0.02)


def test_a_replay_gives_back_the_cache_where_the_program_did() -> None:
    log = EventLog()
    for number, size in enumerate((100 * MIB, 300 * MIB)):
        log.add(number, size)
        log.add(number, -size)
    assert Unlimited(log).peaks == (300 * MIB, 400 * MIB)
    log.emptied.append(2)
    assert Unlimited(log, [0, 2]).peaks == (300 * MIB, 300 * MIB)


def test_shards_of_fsdp2_that_move_to_the_host_leave_the_card_with_their_optimizer_and_come_back() -> None:
    with fake_ranks(4), fake_gpu("h100") as gpu:
        model = torch.nn.Linear(4096, 4096, bias=False)
        fully_shard(model, mesh=init_device_mesh("cuda", (4,)))
        optimizer = torch.optim.AdamW(model.parameters())
        share = 4096 * 4096 * 4 // 4
        for _ in range(2):  # the second time the optimizer has stepped
            assert gpu.memory.allocator.allocated_bytes % share == 0
            before = gpu.memory.allocator.allocated_bytes
            model.to("cpu")
            assert before - gpu.memory.allocator.allocated_bytes == share
            assert optimizer.param_groups[0]["params"][0] is next(model.parameters())
            model.to("cuda")
            assert gpu.memory.allocator.allocated_bytes == before
            model(torch.empty(8, 4096, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
