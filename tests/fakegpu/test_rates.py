"""Measured kernel times: what the tables say, how they are asked, and that the clock asks them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from autofit.fakegpu import GPU_SPECS, HostCosts, fake_gpu, gpu_spec
from autofit.fakegpu.kernels import flops
from autofit.fakegpu.rates.collectives import log_error
from autofit.fakegpu.rates.kernels import (
    MEASURED,
    KernelSeconds,
    RateGrid,
    Work,
    card_rates,
    rates_name,
    stand_in,
)

# Seconds of single shapes in the tables of aiconfigurator-core 0.12.0 (bfloat16; framework as in the card's file).
SHAPES = [
    ("l40s", (4096, 4096, 4096), 624.9e-6), ("l40s", (2048, 8192, 3072), 413.0e-6), ("l40s", (1, 4096, 4096), 50.3e-6),
    ("a100-80gb", (4096, 4096, 4096), 548.9e-6), ("a100-80gb", (512, 4096, 4096), 97.5e-6),
    ("a100-80gb", (1, 8192, 3072), 40.2e-6),
]  # fmt: skip


def product(card: str, m: int, n: int, k: int, *, costs: HostCosts | None = None) -> float:
    spec = gpu_spec(card)
    work = Work("mm", ((m, k), (k, n)), spec.half_flops_per_s, 2, False, 2 * m * n * k, 2 * (m * k + k * n + m * n))
    return KernelSeconds(spec, costs or HostCosts()).seconds(work)[0]


@pytest.mark.parametrize(("card", "shape", "measured_s"), SHAPES)
def test_a_measured_product_takes_the_time_that_was_measured(
    card: str, shape: tuple[int, int, int], measured_s: float
) -> None:
    assert product(card, *shape) == pytest.approx(
        measured_s, rel=0.15
    )  # its neighbours' noise is averaged with its own


def test_a_further_wave_of_tiles_makes_a_step_and_not_a_slope() -> None:
    before, after, later = (product("l40s", m, 4096, 4096) for m in (1024, 1025, 1152))
    assert after > 1.25 * before  # measured: 132.6 and 231.2 us
    assert later < 1.1 * after


@pytest.mark.parametrize("card", GPU_SPECS)
def test_every_card_has_rates_and_says_when_they_are_another_cards(card: str) -> None:
    spec = GPU_SPECS[card]
    assert 1e-6 < product(card, 1, 64, 64) < 1e-5
    large = 2 * 4096**3 / product(card, 4096, 4096, 4096) / spec.half_flops_per_s
    assert 0.3 < large < 1.0
    assert (stand_in(spec) is None) == (card in MEASURED)


def test_a_run_on_a_card_that_was_not_measured_says_so() -> None:
    for card, said in (("l40s", False), ("rtx4090", True)):
        with fake_gpu(card) as gpu:
            assert any("were not measured" in note for note in gpu.notes) == said


def test_the_data_sheet_of_a_table_is_that_of_its_card_so_that_its_own_times_come_back() -> None:
    for card in ("a100-80gb", "l40s", "h100", "h200", "b200"):
        spec, machine = gpu_spec(card), card_rates(rates_name(gpu_spec(card))).machine
        assert (spec.half_flops_per_s, spec.bandwidth_bytes_per_s, spec.sm_count) == pytest.approx(
            (machine.flops_per_s, machine.bandwidth_bytes_per_s, machine.sm_count)
        )


def test_products_of_another_dtype_take_the_ratio_of_their_rates() -> None:
    spec = gpu_spec("a100-80gb")
    half, single = (
        KernelSeconds(spec, HostCosts()).seconds(Work("mm", ((4096, 4096), (4096, 4096)), rate, size, False, 1, 1))[0]
        for rate, size in ((spec.half_flops_per_s, 2), (spec.fp32_flops_per_s, 4))
    )
    assert single / half == pytest.approx(312 / 19.5, rel=0.1)


def test_a_backward_of_attention_takes_its_published_multiple_and_causal_half() -> None:
    spec = gpu_spec("l40s")
    shapes = (4, 32, 2048, 128), (4, 32, 2048, 128), (4, 8, 2048, 128), (4, 8, 2048, 128)
    rate = spec.half_flops_per_s

    def seconds(name: str, *, causal: bool = True) -> float:
        which = shapes if name.endswith("backward") else shapes[1:]
        work = Work(f"_scaled_dot_product_{name}", which, rate, 2, causal, 1, 1)
        return KernelSeconds(spec, HostCosts()).seconds(work)[0]

    forward = seconds("flash_attention")
    assert forward == pytest.approx(2 * 4 * 32 * 2048**2 * 128 / 0.45 / rate, rel=0.2)  # 45 % of the peak, as measured
    assert seconds("flash_attention_backward") == pytest.approx(2.5 * 0.73 / 0.63 * forward)
    assert seconds("efficient_attention") == pytest.approx(2 * forward)
    assert seconds("flash_attention", causal=False) == pytest.approx(2 * forward, rel=0.05)


def test_operands_of_a_product_come_from_memory_and_of_other_kernels_in_part_from_the_cache() -> None:
    spec, kernels = gpu_spec("l40s"), KernelSeconds(gpu_spec("l40s"), HostCosts())
    cold = 8e6 / kernels.bandwidth_bytes_per_s
    assert product("l40s", 1, 2048, 2048) >= 8e6 / kernels.bandwidth_bytes_per_s
    assert cold / 2.8 < kernels.others(0, 8_000_000, spec.fp32_flops_per_s) < cold
    assert kernels.others(0, 10**10, 1e12) == pytest.approx(1e10 / kernels.bandwidth_bytes_per_s, rel=1e-3)


def test_a_slower_card_is_slower_in_every_kernel() -> None:
    assert product("h100", 100, 512, 512, costs=replace(HostCosts(), gpu_slowdown=1.5)) == pytest.approx(
        1.5 * product("h100", 100, 512, 512)
    )


def test_autograd_launches_at_a_cost_of_its_own_but_a_recomputed_layer_is_pythons() -> None:
    costs = HostCosts(launch_s=1e-9, recorded_launch_s=1e-3, backward_launch_s=1e-5, view_s=1e-9)

    def twice(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(torch.sin(x))

    def host_s(*, recompute: bool) -> float:
        with fake_gpu("a100-40gb", host_costs=costs) as gpu:
            x = torch.zeros(8, device="cuda", requires_grad=True)
            out = (checkpoint(twice, x, use_reentrant=False) if recompute else twice(x)).sum()
            before = gpu.clock.host_s
            out.backward()
            return gpu.clock.host_s - before

    assert host_s(recompute=False) < 1.5e-3 < 1.9e-3 < host_s(recompute=True)  # the first gradient is Python's


def test_an_interval_is_as_wide_as_the_parts_that_a_step_has() -> None:
    spec = gpu_spec("l40s")
    assert log_error(spec, {"products": 1.0}) == pytest.approx(math.hypot(0.15, 0.1))
    assert log_error(spec, {"products": 0.5, "host": 0.5}) == pytest.approx(math.hypot(0.15, 0.05, 0.35))
    assert log_error(spec, {"products": 1.0}, 8) == pytest.approx(
        math.hypot(0.15, 0.1, 0.0917), rel=1e-3
    )  # the slowest
    assert log_error(gpu_spec("rtx4090"), {"products": 1.0}) > log_error(spec, {"products": 1.0})


def test_a_grid_gives_its_own_values_back_and_stays_at_its_edges() -> None:
    axes = np.log([1.0, 2.0, 4.0]), np.log([1.0, 10.0])
    grid = RateGrid(axes, np.arange(6.0).reshape(3, 2))
    assert grid.at(np.array([2.0, 100.0]), np.array([10.0, 0.1])).tolist() == [3.0, 4.0]
    assert grid.at(np.array([2**0.5]), np.array([1.0])) == pytest.approx([1.0])


def test_skipped_decode_steps_have_the_parts_of_the_last_traced_one() -> None:
    with fake_gpu("a100-40gb") as gpu:
        gpu.clock.advance(8.0, like={"products": 1.0, "attention": 0.0, "others": 1.0, "host": 2.0})
        parts = gpu.clock.traced_s
    assert (parts["products"], parts["others"], parts["host"]) == pytest.approx((2.0, 2.0, 4.0))


class Bytes:
    """A listener of the clock that adds up the bytes of each operator."""

    aside = of_step = False

    def __init__(self) -> None:
        self.moved: dict[str, int] = {}
        self.patterns: dict[str, str] = {}

    def view(self) -> None: ...

    def host_work(self, launches: float, *, alone: bool) -> None: ...

    def kernel(self, func: object, args: object, out: object, *, work: Work, **_: object) -> None:
        self.moved[work.name] = self.moved.get(work.name, 0) + work.nbytes
        self.patterns[work.name] = work.pattern


def test_a_kernel_moves_the_bytes_of_all_its_passes_and_an_expanded_gradient_none() -> None:
    rows, long, short = 64, 65536, 1024
    with fake_gpu("a100-80gb") as gpu:
        x = torch.zeros(rows, long, device="cuda", requires_grad=True)
        y = torch.zeros(rows, short, device="cuda")
        target = torch.zeros(rows, dtype=torch.long, device="cuda")
        gpu.clock.log = log = Bytes()  # type: ignore[assignment]
        torch.nn.functional.cross_entropy(x, target).backward()
        torch.softmax(y, -1)
        y.add_(y.clone())
        torch.cat([y, y])
        gpu.clock.log = None
    of_long, of_short = rows * long * 4, rows * short * 4
    assert log.moved["_log_softmax"] == 4 * of_long  # maximum, sum, result: each reads the row again
    assert log.moved["_log_softmax_backward_data"] == 4 * of_long
    assert log.moved["nll_loss_forward"] < of_short  # one element a target, not the whole input
    assert of_long <= log.moved["nll_loss_backward"] < 1.01 * of_long
    assert log.moved["_softmax"] == 2 * of_short
    assert log.moved["add_"] == 3 * of_short


@pytest.mark.parametrize(("card", "slower"), [("a100-80gb", 2.3), ("h100", 1.6), ("l40s", 1.0)])
def test_kernels_that_work_out_addresses_are_bound_by_the_multiprocessors(card: str, slower: float) -> None:
    kernels = KernelSeconds(gpu_spec(card), HostCosts())
    ratio = kernels.others(0, 10**9, 1e12, "strided") / kernels.others(0, 10**9, 1e12)
    assert ratio == pytest.approx(slower, rel=0.05)


def test_joined_slices_copied_halves_and_lists_of_tensors_have_rates_of_their_own() -> None:
    with fake_gpu("h100") as gpu:
        x = torch.zeros(64, 256, device="cuda", dtype=torch.bfloat16)
        wide = torch.zeros(64, 256, device="cuda")
        gpu.clock.log = log = Bytes()  # type: ignore[assignment]
        torch.cat((x, x))
        assert log.patterns["cat"] == "cat_whole"
        torch.cat((x[:, :128], x[:, 128:]), 1)
        assert log.patterns["cat"] == "cat_halves"
        torch.cat((wide[:, :128], wide[:, 128:]), 1)
        assert log.patterns["cat"] == "cat"
        x * x[:1]  # the row stays in the cache
        assert log.patterns["mul"] == "strided_halves"
        x[:, :128] * x[:, 128:]
        assert log.patterns["mul"] == "strided"  # three large tensors: bytes more than addresses
        wide * wide[:1]
        assert log.patterns["mul"] == "strided"
        torch._foreach_norm([x, wide])
        assert log.patterns["_foreach_norm"] == "tensors"
    kernels = KernelSeconds(gpu_spec("h100"), HostCosts())
    assert kernels.bandwidth("tensors") < 0.75 * kernels.bandwidth("streaming")
    assert kernels.bandwidth("cat_halves") < 0.5 * kernels.bandwidth("cat_whole")


def test_an_optimizer_that_is_fused_reads_four_tensors_and_writes_three() -> None:
    size = 1 << 22
    with fake_gpu("h100") as gpu:
        weight = torch.nn.Parameter(torch.zeros(size, device="cuda"))
        optimizer = torch.optim.AdamW([weight], fused=True)
        for _ in range(2):
            weight.grad = torch.zeros_like(weight)
            gpu.clock.log = log = Bytes()  # type: ignore[assignment]
            optimizer.step()
            gpu.clock.log = None
    assert log.moved["_fused_adamw_"] == pytest.approx(7 * size * 4, rel=0.01)


def _busy_s(run: Callable[[], object]) -> float:
    with fake_gpu("h100") as gpu:
        run()
    return sum(gpu.clock.busy_s.values())


def test_a_product_that_is_added_up_in_32_bits_takes_as_long_as_one_in_16() -> None:
    def added_up(**sum_dtype: torch.dtype) -> object:
        a, b = (torch.empty(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        out = torch.empty(4096, 4096, device="cuda", dtype=sum_dtype.get("out_dtype", torch.bfloat16))
        return torch.addmm(out, a, b, out=out, **sum_dtype)  # type: ignore[call-overload]

    assert _busy_s(lambda: added_up(out_dtype=torch.float32)) < 1.2 * _busy_s(added_up)


@pytest.mark.parametrize("key_heads", [16, 4])
def test_attention_of_grouped_heads_is_counted(key_heads: int) -> None:
    """torch's own counter of FLOPs refuses them in some versions: a kernel without FLOPs had the rate of 32 bits."""
    q = torch.empty(2, 16, 512, 64, dtype=torch.bfloat16, device="meta")
    k = torch.empty(2, key_heads, 512, 64, dtype=torch.bfloat16, device="meta")
    attention = torch.ops.aten._scaled_dot_product_flash_attention.default
    assert flops(attention, (q, k, k, 0.0, True), {}, q) == 4 * 2 * 16 * 512 * 512 * 64


# Milliseconds of torch's kernels, forward and backward, on an H100 80GB HBM3 (experiments/gpu/h100/kernel_times.json).
HOPPER = [
    ("flash", (8, 32, 1024, 128), 0.279, 1.115), ("flash", (4, 16, 2048, 128), 0.301, 0.908),
    ("flash", (1, 32, 8192, 128), 1.730, 4.955), ("flash", (4, 14, 2048, 64), 0.148, 0.467),
    ("cudnn", (8, 32, 1024, 128), 0.246, 0.595), ("cudnn", (4, 16, 2048, 128), 0.152, 0.491),
    ("cudnn", (1, 32, 8192, 128), 0.937, 2.912), ("cudnn", (2, 8, 2048, 256), 0.103, 0.476),
    ("efficient", (1, 32, 8192, 128), 3.355, 10.486), ("efficient", (2, 8, 2048, 256), 0.353, 4.185),
]  # fmt: skip


def _hopper_s(kind: str, shape: tuple[int, int, int, int], *, backward: bool = False) -> float:
    batch, heads, length, dim = shape
    sizes = [np.array([float(size)]) for size in (batch, heads, heads, length, length, dim)]
    rates = card_rates("h100_sxm")
    return float(rates.attention.seconds(rates.machine, *sizes, causal=True, backward=backward, of_torch=kind)[0])


@pytest.mark.parametrize(("kind", "shape", "forward_ms", "backward_ms"), HOPPER)
def test_torchs_attention_on_hopper_takes_what_was_measured(
    kind: str, shape: tuple[int, int, int, int], forward_ms: float, backward_ms: float
) -> None:
    assert _hopper_s(kind, shape) == pytest.approx(forward_ms / 1e3, rel=0.02)
    assert _hopper_s(kind, shape, backward=True) == pytest.approx(backward_ms / 1e3, rel=0.02)


@pytest.mark.parametrize("length", [16384, 65536, 262144])
def test_attention_of_long_sequences_keeps_a_share_of_the_peak_that_kernels_reach(length: int) -> None:
    """The fastest kernels published for an H100 have 0.75 of its peak (FlashAttention-3, arXiv 2407.08608)."""
    flops_of = 2.0 * 32 * length**2 * 128
    assert 0.6 < flops_of / _hopper_s("cudnn", (1, 32, length, 128)) / 989e12 < 0.75
    assert 0.3 < flops_of / _hopper_s("flash", (1, 32, length, 128)) / 989e12 < 0.45


def test_a_kernel_takes_a_short_ones_time_beside_its_bytes() -> None:
    kernels = KernelSeconds(gpu_spec("h100"), HostCosts())
    moved = 600_000_000
    assert kernels.others(0, moved, 1e12) == pytest.approx(moved / kernels.bandwidth_bytes_per_s + kernels.shortest_s)


@pytest.mark.parametrize(("read", "written", "slow"), [("bfloat16", "float32", True), ("float32", "bfloat16", False)])
def test_only_a_cast_to_more_bits_is_slow(read: str, written: str, slow: bool) -> None:
    def cast() -> object:
        return torch.empty(1 << 26, device="cuda", dtype=getattr(torch, read)).to(getattr(torch, written))

    streamed_s = KernelSeconds(gpu_spec("h100"), HostCosts()).others(0, 6 << 26, 1e12)
    assert (_busy_s(cast) > 1.2 * streamed_s) is slow
