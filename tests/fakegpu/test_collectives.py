"""Seconds of collectives between cards: measured tables, formulas, overlap with kernels, and NCCL's bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoConfig, AutoModelForCausalLM

from autofit.fakegpu import FakeGpu, fake_gpu
from autofit.fakegpu.depth.delay import NEVER, NOTHING, Delay, LayerClock
from autofit.fakegpu.depth.expand import Mark, TracedRun, expanded
from autofit.fakegpu.depth.stack import shrink
from autofit.fakegpu.formula.kernel_log import KernelKinds, KernelLog
from autofit.fakegpu.formula.polynomials import COLLECTIVES, Symbols
from autofit.fakegpu.formula.seconds import KernelRows
from autofit.fakegpu.rates.collectives import (
    KINDS,
    NETWORK_SHARE,
    TABLES,
    Collective,
    CollectiveSeconds,
    fake_ranks,
    log_error,
    nccl_bytes,
)
from autofit.fakegpu.specs import GPU_SPECS, MIB, gpu_spec

GIB = 1 << 30


# ---------------------------------------------------------------------- tables and formulas
@pytest.mark.parametrize(
    ("card", "kind", "cards", "nbytes", "measured_us"),
    [
        ("a100-80gb", "all_gather", 2, 512 * MIB, 1789.8),
        ("a100-80gb", "all_reduce", 8, 32 * MIB, 367.0),
        ("h100", "reduce_scatter", 8, 512 * MIB, 1399.0),
        ("l40s", "all_reduce", 2, 512 * MIB, 26_700.0),
    ],
)
def test_a_measured_collective_takes_the_seconds_that_were_measured(
    card: str, kind: Collective, cards: int, nbytes: int, measured_us: float
) -> None:
    told = CollectiveSeconds(gpu_spec(card)).seconds(kind, nbytes, cards)
    assert told == pytest.approx(measured_us * 1e-6, rel=0.002)


@pytest.mark.parametrize("card", sorted(GPU_SPECS))
@pytest.mark.parametrize("kind", [*KINDS, "broadcast"])
def test_more_bytes_take_longer_on_every_card(card: str, kind: Collective) -> None:
    seconds = CollectiveSeconds(gpu_spec(card))
    for cards in (2, 3, 4, 8, 16):
        few, many, most = (seconds.seconds(kind, size, cards) for size in (1, 64 * MIB, 4 * GIB))
        assert 1e-6 < few < many < most
        assert most / many == pytest.approx(64, rel=0.5)
    assert seconds.seconds(kind, GIB, 1) == 0.0


def test_cards_without_a_table_and_many_machines_say_that_a_formula_is_used() -> None:
    for name, spec in GPU_SPECS.items():
        notes = CollectiveSeconds(spec).notes(4)
        assert ("measured with NCCL" in notes[0]) == (name in TABLES)
    assert "cross machines of 8" in CollectiveSeconds(gpu_spec("h100")).notes(16)[0]
    assert "cross machines of 4" in CollectiveSeconds(gpu_spec("h100"), per_machine=4).notes(8)[0]


def test_an_all_reduce_over_a_slow_network_is_bound_by_it() -> None:
    inside, across = CollectiveSeconds(gpu_spec("a100-80gb")), CollectiveSeconds(gpu_spec("a100-80gb"), per_machine=4)
    assert across.seconds("all_reduce", GIB, 8) > 2 * inside.seconds("all_reduce", GIB, 8)  # 75 GB/s of four adapters
    assert across.seconds("all_reduce", GIB, 4) == inside.seconds("all_reduce", GIB, 4)


@pytest.mark.parametrize("kind", [*KINDS, "broadcast"])
def test_a_network_that_is_given_takes_the_place_of_the_usual_one(kind: Collective) -> None:
    spec = gpu_spec("h100")  # 8 adapters of 400 Gbit/s
    usual, same, slow = (CollectiveSeconds(spec, network_gbit=gbit) for gbit in (0, 8 * 400, 100))
    assert same.seconds(kind, 64 * GIB, 16) == usual.seconds(kind, 64 * GIB, 16)
    assert slow.seconds(kind, 64 * GIB, 16) / usual.seconds(kind, 64 * GIB, 16) == pytest.approx(32, rel=0.02)
    assert slow.seconds(kind, GIB, 8) == usual.seconds(kind, GIB, 8)
    assert "as given" in slow.notes(16)[0]
    assert "launch.network_gbit" in usual.notes(16)[0]


@pytest.mark.parametrize(
    ("gbit", "adapters", "cards", "measured_gb_per_s"),
    [(100, 8, 16, 75), (200, 4, 16, 91), (200, 4, 16, 86), (400, 8, 256, 200)],
    ids=["nccl#495", "nccl-tests#100", "nccl-tests#175", "nccl#1218"],
)
def test_all_adapters_of_a_machine_carry_a_ring_between_machines(
    gbit: int, adapters: int, cards: int, measured_gb_per_s: float
) -> None:
    """One adapter was taken for the whole machine, 4 to 8 times too slow. busbw as nccl-tests defines it."""
    a_card = gbit / 8 * 1e9 * adapters / 8
    spec = replace(gpu_spec("h100"), network_bytes_per_s=a_card)
    seconds = CollectiveSeconds(spec).seconds("all_reduce", 8 * GIB, cards)
    busbw = 2 * (cards - 1) / cards * 8 * GIB / seconds
    assert 0.8 < busbw / (measured_gb_per_s * 1e9) < 1.51


def test_the_steps_of_an_all_reduce_between_machines_grow_with_their_logarithm_alone() -> None:
    """350 GB/s of busbw on 248 machines of H200 (github NVIDIA/nccl-tests#283) were told as 79, a ring's 494 steps."""
    seconds = CollectiveSeconds(gpu_spec("h200"))
    busbw = 2 * 512 * MIB / seconds.seconds("all_reduce", 512 * MIB, 1984)
    assert 0.75 * 350e9 < busbw < 350e9
    assert seconds.seconds("all_gather", 1, 1984) > 10 * seconds.seconds("all_reduce", 1, 1984)  # rings have no tree


def test_a_step_on_several_machines_is_less_certain_by_what_public_reports_of_networks_differ() -> None:
    spec, shares = gpu_spec("h100"), {"products": 0.6, "collectives": 0.4}
    assert log_error(spec, shares, 16, machines=2) > 1.3 * log_error(spec, shares, 16)
    alone = log_error(spec, {"products": 1.0}, 16)
    assert log_error(spec, {"products": 1.0}, 16, machines=2) == alone
    l40s = gpu_spec("l40s")  # PCIe alone is less certain than that
    assert log_error(l40s, shares, 16, machines=2) == log_error(l40s, shares, 16)


def test_an_all_to_all_between_machines_goes_through_each_card_s_own_adapter() -> None:
    spec = gpu_spec("h100")
    told = CollectiveSeconds(spec).seconds("alltoall", GIB, 16)
    assert told == pytest.approx(GIB / 2 / (NETWORK_SHARE * spec.network_bytes_per_s), rel=0.01)


# ---------------------------------------------------------------------- the algebra
def test_segments_of_all_lanes_join_as_their_times_do() -> None:
    first = Delay(
        host=(2.0, NEVER, NEVER, NEVER, NEVER),
        gpu=(1.0, 3.0, NEVER, 4.0, NEVER),
        gathers=(NEVER, 1.0, NEVER, 2.0, NEVER),
    )
    second = Delay(copies=(0.5, NEVER, 1.0, NEVER, NEVER), reductions=(NEVER, 2.0, NEVER, 1.0, 0.0))
    start = (1.0, 2.0, 3.0, 4.0, 5.0)
    assert first.then(second).after(start) == second.after(first.after(start))
    assert first.then(NOTHING) == NOTHING.then(first) == first
    assert first.repeated(3) == first.then(first).then(first)


# ---------------------------------------------------------------------- overlap
def _seconds(work: Callable[[FakeGpu], object], *, card: str = "a100-80gb", cards: int = 2) -> tuple[float, float]:
    """(seconds of `work` on a rank, seconds in which its kernels waited for collectives)."""
    with fake_ranks(cards), fake_gpu(card, enforce_capacity=False) as gpu:
        torch.zeros(1, device="cuda")
        start_s = gpu.elapsed_s
        work(gpu)
        return gpu.elapsed_s - start_s, gpu.clock.exposed_s


def test_an_asynchronous_collective_overlaps_until_it_is_waited_for() -> None:
    def work(gpu: FakeGpu, *, at_once: bool, products: int = 8) -> None:
        message, a = torch.empty(1 << 28, device="cuda"), torch.empty(8192, 8192, device="cuda", dtype=torch.bfloat16)
        handle = dist.all_reduce(message, async_op=not at_once)
        for _ in range(products):
            a = a @ a
        if handle is not None:
            handle.wait()

    collectives = CollectiveSeconds(gpu_spec("a100-80gb"))
    alone_s = collectives.seconds("all_reduce", 1 << 30, 2)
    blocking_s, exposed_s = _seconds(lambda gpu: work(gpu, at_once=True))
    overlapped_s, hidden_s = _seconds(lambda gpu: work(gpu, at_once=False))
    assert exposed_s == pytest.approx(alone_s, rel=1e-6)
    assert collectives.left_frac == pytest.approx(84 / 108)  # products beside it have what NCCL leaves
    assert blocking_s - overlapped_s == pytest.approx(alone_s * collectives.left_frac, rel=0.02)
    assert hidden_s == 0.0
    _, late_s = _seconds(lambda gpu: work(gpu, at_once=False, products=0))
    assert late_s == pytest.approx(alone_s, rel=0.02)


def test_a_gathered_tensor_is_there_once_while_it_is_waited_for() -> None:
    with fake_ranks(2), fake_gpu("a100-80gb") as gpu:
        mesh = init_device_mesh("cuda", (2,))
        share = DTensor.from_local(torch.zeros(1 << 18, device="cuda"), mesh, [Shard(0)])
        allocator = gpu.memory.allocator
        allocator.peak_requested_bytes = before = allocator.requested_bytes
        whole = share.full_tensor()
        assert whole.numel() == 1 << 19
        assert allocator.peak_requested_bytes - before == whole.numel() * 4


def _ddp(gpu: FakeGpu, *, synchronised: bool, as_view: bool = False, rows: int = 4096) -> None:
    layers = nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(8)]).to("cuda", torch.bfloat16)
    model = nn.parallel.DistributedDataParallel(layers, device_ids=[0], gradient_as_bucket_view=as_view)
    with contextlib.nullcontext() if synchronised else model.no_sync():
        model(torch.zeros(rows, 4096, device="cuda", dtype=torch.bfloat16)).sum().backward()


def test_ddp_reduces_its_gradients_during_backward_and_only_where_they_are_synchronised() -> None:
    plain_s, _ = _seconds(lambda gpu: _ddp(gpu, synchronised=False))
    fast_s, exposed_s = _seconds(lambda gpu: _ddp(gpu, synchronised=True))
    moved_s = 2 * 2 * 8 * 32 * MIB / gpu_spec("a100-80gb").bandwidth_bytes_per_s  # gradients to the buckets and back
    assert plain_s < fast_s < plain_s + exposed_s + 2 * moved_s
    assert exposed_s < 2e-3  # the broadcast of the model, and the last bucket
    _, exposed_s = _seconds(lambda gpu: _ddp(gpu, synchronised=True, rows=64), card="rtx4090", cards=4)
    reduced_s = 2 * 3 / 4 * 8 * 32 * MIB / gpu_spec("rtx4090").peer_bytes_per_s
    broadcast_s = reduced_s / 2 * 4 / 3
    assert exposed_s == pytest.approx(reduced_s + broadcast_s, rel=0.15)  # there is little to compute meanwhile


def test_gradients_that_are_views_of_the_buckets_are_not_copied() -> None:
    copied_s, _ = _seconds(lambda gpu: _ddp(gpu, synchronised=True))
    viewed_s, _ = _seconds(lambda gpu: _ddp(gpu, synchronised=True, as_view=True))
    assert viewed_s < copied_s


def _train(shape: AutoConfig, *, sharded: bool) -> Callable[[Callable[[str], None]], object]:
    def train(mark: Callable[[str], None]) -> object:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).cuda()
        wrapped = model
        if sharded:
            for module in (*model.model.layers, model):
                fully_shard(module, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16))
        else:
            wrapped = nn.parallel.DistributedDataParallel(model, device_ids=[0])
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        ids = torch.randint(0, 3000, (2, 512), device="cuda")
        for _ in range(2):
            mark("forward")
            loss = wrapped(input_ids=ids, labels=ids, use_cache=False).loss
            mark("backward")
            loss.backward()
            mark("optimizer")
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        mark("end")
        return loss

    return train


def _followed(train: Callable[[Callable[[str], None]], object]) -> TracedRun:
    marks: list[Mark] = []
    with fake_ranks(4), fake_gpu("rtx4090", enforce_capacity=False, follow_layers=True, record_places=False) as gpu:
        clock = gpu.clock
        assert isinstance(clock, LayerClock)
        kept = train(lambda name: marks.append(Mark(name=name, event=len(gpu.memory.log), stretch=clock.cut())))
    del kept
    return expanded(gpu, marks)


@pytest.mark.parametrize("sharded", [True, False], ids=["fsdp2", "ddp"])
def test_a_shallow_run_waits_for_collectives_as_the_deep_one_does(sharded: bool) -> None:
    def shape(*, shallow: bool) -> AutoConfig:
        config = AutoConfig.for_model(
            "llama", vocab_size=4096, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8,
            num_attention_heads=8, num_key_value_heads=2,
        )  # fmt: skip
        if shallow:
            shrink(config)
        return config

    deep, shallow = (_followed(_train(shape(shallow=few), sharded=sharded)).seconds() for few in (False, True))
    for start in (3, 4):  # forward and backward of the second step
        there = deep[start + 1] - deep[start]
        assert shallow[start + 1] - shallow[start] == pytest.approx(there, rel=0.02 if sharded else 0.05)


def test_a_forecast_has_the_seconds_of_collectives_beside_the_kernels_of_their_phase() -> None:
    log = KernelLog()
    with fake_ranks(4), fake_gpu("a100-80gb") as gpu:
        gpu.clock.log, log.on, log.phase = log, True, "update"
        dist.all_reduce(torch.zeros(64 * MIB, device="cuda"), async_op=True).wait()
        dist.all_reduce(torch.zeros(MIB, device="cuda"))
        kernels = gpu.clock.kernels
    told = log.kinds({"update": 1})
    found = {
        KernelKinds.segment(kind): kernels.seconds(info.work)[0]
        for kind, info in told.infos.items()
        if info.name == "all_reduce"
    }
    measured = CollectiveSeconds(gpu_spec("a100-80gb"))
    assert found == {
        "update" + COLLECTIVES: pytest.approx(measured.seconds("all_reduce", 256 * MIB, 4), rel=1e-6),
        "update": pytest.approx(measured.seconds("all_reduce", 4 * MIB, 4), rel=1e-6),
    }


def gathered(layers: int, rows: int) -> tuple[KernelKinds, float, FakeGpu]:
    """Kernels, seconds and card of a pass that gathers one layer ahead, as FSDP does, and reduces behind."""
    width, log = 8192, KernelLog()
    with fake_ranks(4), fake_gpu("rtx4090", enforce_capacity=False) as gpu:
        x, part = (torch.zeros(shape, device="cuda", dtype=torch.bfloat16) for shape in ((rows, width), (width, width)))
        ahead, behind = torch.cuda.Stream(), torch.cuda.Stream()
        gpu.clock.synchronize()
        began_s = gpu.clock.now_s
        gpu.clock.log, log.on, log.phase = log, True, "update"

        def gather() -> torch.cuda.Event:
            with torch.cuda.stream(ahead):
                dist.all_gather_into_tensor(part, part[: width // 4])
            there = torch.cuda.Event()
            there.record(ahead)
            return there

        there = gather()
        for layer in range(layers):
            torch.cuda.current_stream().wait_event(there)
            ahead.wait_stream(torch.cuda.current_stream())
            if layer + 1 < layers:
                there = gather()
            for _ in range(2):
                x @ part
            behind.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(behind):
                dist.reduce_scatter_tensor(part[: width // 4], part)
        torch.cuda.current_stream().wait_stream(behind)
    return log.kinds({"update": 1}), gpu.clock.now_s - began_s, gpu


def test_a_forecast_has_the_waits_of_kernels_and_collectives_for_each_other() -> None:
    """All collectives of a phase were taken to overlap with all of its kernels: an update of FSDP2 was 28 % short."""
    (low, low_s, gpu), (high, high_s, _), (wide, *_) = gathered(4, 8192), gathered(5, 8192), gathered(4, 12288)
    symbols = Symbols(("B", "T"), (8192.0, 0.0), rounds=False)
    symbols.start({**low.per_segment, **high.per_segment})
    symbols.vary("B", 12288.0, low.per_segment, wide.per_segment)
    rows = KernelRows.of(low, high, symbols, layers=(4, 5), kernels=gpu.clock.kernels)

    def told(layers: int, rows_: int) -> float:
        return float(rows.seconds(np.array([[float(rows_)]]), layers, np.zeros(1))["update"][0])

    assert [told(4, 8192), told(5, 8192)] == pytest.approx([low_s, high_s], rel=1e-9)
    assert told(4, 12288) == pytest.approx(gathered(4, 12288)[1], rel=1e-6)
    assert told(12, 24576) == pytest.approx(gathered(12, 24576)[1], rel=0.005)


def test_a_forecast_lets_the_gathers_of_a_decode_step_overlap_with_its_kernels() -> None:
    log = KernelLog()
    with fake_ranks(8), fake_gpu("a100-80gb") as gpu:
        gpu.clock.log, log.on, log.phase = log, True, "rollout"
        weights, row, gathered = (torch.zeros(shape, device="cuda") for shape in ((8192, 8192), (1, 8192), 64 * MIB))
        for step in range(3):
            log.decode_step(step)
            work = dist.all_gather_into_tensor(gathered, gathered[: 8 * MIB], async_op=True)
            for _ in range(4):
                row @ weights
            work.wait()
        log.decode_end()
    told = log.kinds({})
    symbols = Symbols(("B", "T"), (1.0, 2.0), rounds=False)
    symbols.start(told.per_segment)
    rows = KernelRows.of(told, told, symbols, layers=(1, 1), kernels=gpu.clock.kernels)
    found = rows.seconds(np.ones((1, 1)), 1, np.array([100.0]))
    gather_s = CollectiveSeconds(gpu_spec("a100-80gb")).seconds("all_gather", 256 * MIB, 8)
    assert set(found) == {"rollout", "decode"}
    assert found["decode"][0] == pytest.approx(100 * gather_s, rel=0.01)


def test_the_ranks_of_a_machine_are_those_that_the_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with fake_ranks(8), fake_gpu("a100-80gb") as gpu:
        dist.all_reduce(torch.zeros(MIB, device="cuda"))
    assert any("machines of 4" in note for note in gpu.notes)


# ---------------------------------------------------------------------- NCCL's bytes
def test_nccl_buffers_count_outside_the_allocator() -> None:
    with fake_gpu("a100-80gb") as alone:
        torch.zeros(MIB, device="cuda")
    with fake_ranks(8), fake_gpu("a100-80gb") as gpu:
        torch.zeros(MIB, device="cuda")
        dist.all_reduce(torch.zeros(MIB, device="cuda"))
        dist.all_reduce(torch.zeros(MIB, device="cuda"), group=dist.new_group([0, 1]))
    assert alone.communicator_bytes == 0
    assert gpu.communicator_bytes == (392 + 342) * MIB
    assert alone.allocatable_bytes - gpu.allocatable_bytes == 392 * MIB
    assert gpu.device_used_bytes == gpu.spec.context_bytes + gpu.communicator_bytes + gpu.peak_reserved_bytes
    assert any("NCCL" in note for note in gpu.notes)


def test_nvlink_sharp_counts_on_switched_cards_unless_it_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
    assert nccl_bytes(gpu_spec("h100"), 8) == 392 * MIB + 8 * 301_989_888
    assert nccl_bytes(gpu_spec("h100"), 2) == 342 * MIB
    assert nccl_bytes(gpu_spec("h100-pcie"), 8) == nccl_bytes(gpu_spec("a100-80gb"), 8) == 392 * MIB
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    assert nccl_bytes(gpu_spec("h100"), 8) == 392 * MIB
