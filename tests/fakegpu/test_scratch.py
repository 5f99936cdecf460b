"""Buffers of kernels, by the sizes that the CUDA build of torch 2.13 asks for without a card (experiments/oracle)."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

from autofit.fakegpu import FakeGpu, fake_gpu
from autofit.fakegpu.reductions import (
    scan_bytes,
    select_bytes,
    sort_pairs_bytes,
    split_buffers,
)

H100, A100 = {"processors": 132, "threads": 2048}, {"processors": 108, "threads": 2048}
Make = Callable[..., torch.Tensor]


def bf16_rows(rows: int, columns: int, *, card: dict[str, int] = H100, offset: int = 0) -> tuple[int, ...]:
    """Buffers of the sum over the rows."""
    return split_buffers((rows, columns), (columns, 1), (0,), itemsize=2, offset=offset, partial_bytes=4, **card)


@pytest.mark.parametrize(
    ("rows", "columns", "held"),
    [(5677, 253, (744832, 32)), (8192, 1483, (2277888, 188)), (4 * 1249, 660, (26695680, 24)),
     (4 * 1508, 896, (43581440, 28)), (1000, 896, ()), (300, 64, ())],
)  # fmt: skip
def test_a_sum_over_many_rows_is_split_between_blocks(rows: int, columns: int, held: tuple[int, ...]) -> None:
    assert bf16_rows(rows, columns) == held


def test_how_a_sum_is_split_depends_on_the_card_and_on_how_the_address_is_aligned() -> None:
    assert bf16_rows(6032, 896, offset=1, card=A100)[0] < bf16_rows(6032, 896, offset=1)[0]
    assert bf16_rows(6032, 896, offset=1) != bf16_rows(6032, 896)


def test_a_sum_of_more_than_two_gigabytes_is_split_as_its_halves_are() -> None:
    whole = split_buffers((1 << 31,), (1,), (0,), itemsize=2, offset=0, partial_bytes=4, **H100)
    half = split_buffers((1 << 30,), (1,), (0,), itemsize=1, offset=0, partial_bytes=4, **H100)
    assert whole == half != ()


@pytest.mark.parametrize(
    ("taken", "nbytes"),
    [(sort_pairs_bytes(2304, key_bytes=8), 1), (sort_pairs_bytes(4097, key_bytes=8), 83967),
     (sort_pairs_bytes(100_000, key_bytes=4), 1228287), (sort_pairs_bytes(1_000_000, key_bytes=2), 10187007),
     (sort_pairs_bytes(1_000_000, key_bytes=1), 299519), (sort_pairs_bytes(20_000, key_bytes=8, key_bits=17), 331775),
     (scan_bytes(1_000_000, sum_bytes=4), 5119),
     (scan_bytes(1_000_000, sum_bytes=8), 18943), (scan_bytes(1_000_000, sum_bytes=2), 3327),
     (select_bytes(1_000_000), 2815)],
)  # fmt: skip
def test_buffers_of_cub_are_those_that_it_asks_for(taken: int, nbytes: int) -> None:
    assert taken == nbytes


def peak_and_kept(gpu: FakeGpu, run: Callable[[], object]) -> tuple[int, int]:
    """Bytes at the peak of `run`, and those of its result, beside its arguments."""
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = run()
    found = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
    del out
    return found


def floats(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="cuda")


def longs(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.long, device="cuda")


def halves(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda")


def mask(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bool, device="cuda")


K = 512
CALLS: dict[str, tuple[Callable[[], Callable[[], object]], tuple[int, int]]] = {
    "sum of a mask": (lambda: (lambda x: lambda: x.sum())(mask(4, 1880)), (60928, K)),
    "cumsum of a mask": (lambda: (lambda x: lambda: x.cumsum(-1))(mask(1, 1961)), (33280, 15872)),
    "sort": (lambda: (lambda x: lambda: x.sort())(longs(15370)), (637440, 246784)),
    "short sort": (lambda: (lambda x: lambda: x.sort())(longs(178)), (4608, 3072)),
    "the largest of few long rows": (lambda: (lambda x: lambda: x.topk(8))(floats(81, 6000)), (348672, 8704)),
    "the largest of short rows": (lambda: (lambda x: lambda: x.topk(8))(floats(80, 6000)), (7680, 7680)),
    "norms of gradients": (
        lambda: (lambda x: lambda: torch._foreach_norm(x, 2))([floats(1000), floats(70000), floats(200000)]),
        (4 * K, 3 * K),
    ),
    "masked rows": (lambda: (lambda x, m: lambda: x[m])(longs(4, 4040), mask(4, 4040)), (388096, 129536)),
    "draws": (lambda: (lambda x: lambda: x.multinomial(1))(floats(8, 151936)), (4867584, K)),
    "few queries": (
        lambda: (lambda q, k: lambda: torch.ops.aten._scaled_dot_product_flash_attention(q, k, k))(
            halves(8, 14, 1, 64), halves(8, 2, 503, 64)
        ),
        (74240, 15872),
    ),
    "heads wider than a tile": (
        lambda: (lambda q, v: lambda: torch.ops.aten._scaled_dot_product_efficient_attention(q, q, v, None, True))(
            halves(2, 300, 8, 192).transpose(1, 2), halves(2, 300, 8, 128).transpose(1, 2)
        ),
        (3706880, 1249280),
    ),
    "an embedding's gradient": (
        lambda: (lambda g, i: lambda: torch.ops.aten.embedding_dense_backward(g, i, 151936, -1, False))(
            halves(4, 2110, 896), longs(4, 2110)
        ),
        (306597888, 272629760),
    ),
    "a loss that keeps the losses": (
        lambda: (lambda a, b: lambda: torch.nn.functional.mse_loss(a, b))(floats(1188, 320), floats(1188, 320)),
        (3042304, 1520640),
    ),
    "many systems of equations": (
        lambda: (lambda a, b: lambda: torch.linalg.solve_triangular(a, b, upper=False))(
            floats(2, 32, 5, 64, 64), floats(2, 32, 5, 64, 32)
        ),
        (2626560, 2621440),
    ),
    "groups of experts": (
        lambda: (lambda a, b, o: lambda: torch.ops.aten._grouped_mm(a, b, o))(
            halves(8192, 1024), halves(32, 622, 1024).transpose(1, 2), torch.empty(32, dtype=torch.int32, device="cuda")
        ),
        (10293248, 10223616),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_operator_takes_the_bytes_that_the_cuda_build_does(name: str) -> None:
    make, expected = CALLS[name]
    with fake_gpu("h100", enforce_capacity=False) as gpu, torch.no_grad():
        assert peak_and_kept(gpu, make()) == expected


def test_attention_without_dropout_keeps_no_random_numbers() -> None:
    with fake_gpu("h100") as gpu, torch.no_grad():
        q = halves(2, 300, 14, 64).transpose(1, 2)
        call = torch.ops.aten._scaled_dot_product_efficient_attention
        assert peak_and_kept(gpu, lambda: call(q, q, q, None, True))[1] == 1075200 + 35840


def test_an_output_with_the_strides_of_its_queries_is_copied_for_its_backward() -> None:
    with fake_gpu("h100") as gpu, torch.no_grad():
        q, grad = halves(2, 8, 300, 64), halves(2, 300, 8, 64).transpose(1, 2)
        out, *saved = torch.ops.aten._scaled_dot_product_flash_attention(q, q, q, 0.0, True)
        sums, starts, starts_k, most, most_k, seed, offset, _ = saved
        call = torch.ops.aten._scaled_dot_product_flash_attention_backward
        rest = (grad, q, q, q, out, sums, starts, starts_k, most, most_k, 0.0, True, seed, offset)
        assert peak_and_kept(gpu, lambda: call(*rest)) == (4055040, 1843200)


@pytest.mark.parametrize("multiply", [
    lambda a, b: a @ b, lambda a, b: torch.addmm(a[0, 0], a, b), lambda a, b: a[None] @ b[None],
    lambda a, b: torch.nn.functional.linear(a, b.T),
])  # fmt: skip
def test_a_product_of_two_dtypes_fails_as_it_does_on_a_card(multiply: Make) -> None:
    with fake_gpu("h100"), pytest.raises(RuntimeError, match=r"same dtype, but got|expected scalar type"):
        multiply(floats(4, 8), halves(8, 4))


def test_copies_of_inputs_are_made_before_the_results() -> None:
    with fake_gpu("h100") as gpu, torch.no_grad():
        x, weight = halves(2, 22, 87).transpose(1, 2), halves(87, 1, 4)
        made = len(gpu.memory.allocations)
        torch.nn.functional.conv1d(x, weight, groups=87, padding=3)
        copy, result = gpu.memory.allocations[made:]
    assert (copy.nbytes, result.nbytes) == (2 * 2 * 87 * 22, 2 * 2 * 87 * 25)
    assert copy.died is not None
    assert copy.died > result.born


@pytest.mark.parametrize(("dtype", "products"), [(torch.float32, 1), (torch.bfloat16, 0)])
def test_efficient_attention_multiplies_float32_outside_of_its_kernel(dtype: torch.dtype, products: int) -> None:
    with fake_gpu("a100-40gb") as gpu, torch.no_grad():
        q, grad = (torch.empty(2, 300, 8, 64, dtype=dtype, device="cuda").transpose(1, 2) for _ in range(2))
        out, *sums = torch.ops.aten._scaled_dot_product_efficient_attention(q, q, q, None, True)
        made = len(gpu.memory.allocations)
        call = torch.ops.aten._scaled_dot_product_efficient_attention_backward
        call(grad, q, q, q, None, out, *sums, 0.0, [True, True, True, False])
        scratch = [each.shape for each in gpu.memory.allocations[made:]]
    assert scratch.count((4 * q.numel(),)) == products


def test_gradients_accumulated_at_indices_are_sorted_first() -> None:
    with fake_gpu("h100") as gpu, torch.no_grad():
        x, rows, values = floats(1000, 1000), longs(2305), floats(2305, 1000)
        peak, kept = peak_and_kept(gpu, lambda: x.index_put_((rows,), values, accumulate=True))
    assert (peak, kept) == (4 * 18944 + 43008, 0)  # linear, sorted, original and new numbers; CUB's buffers


def test_rows_that_a_mask_takes_are_as_many_as_their_values() -> None:
    with fake_gpu("h100") as gpu, torch.no_grad():
        x, mask, values = floats(2, 3000, 100), torch.ones(2, 3000, device="cuda") > 0, floats(5990, 100)
        known = peak_and_kept(gpu, lambda: x.index_put_((mask,), values, accumulate=True))
        rows = [longs(5990), longs(5990)]
        given = peak_and_kept(gpu, lambda: x.index_put_(tuple(rows), values, accumulate=True))
    assert known == given


def test_a_convolution_asks_no_driver_for_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver(*_: object, **__: object) -> object:
        raise RuntimeError("CUDA driver version is insufficient")

    monkeypatch.setattr(torch._C, "_select_conv_backend", no_driver)
    with fake_gpu("h100") as gpu, torch.no_grad():
        x, weight = halves(2, 22, 87).transpose(1, 2), halves(87, 1, 4)
        out = peak_and_kept(gpu, lambda: torch.nn.functional.conv1d(x, weight, padding=3, groups=87))
    assert out == (16384, 8704)  # the input is made contiguous


def test_a_product_of_int8_is_one_of_float32_where_the_inner_size_is_no_multiple_of_four() -> None:
    pytest.importorskip("bitsandbytes")
    with fake_gpu("h100") as gpu, torch.no_grad():
        a, b = (torch.empty(512, n, dtype=torch.int8, device="cuda") for n in (1024, 1022))
        product = torch.ops.bitsandbytes.int8_linear_matmul.default
        even, odd = (peak_and_kept(gpu, lambda x=x: product(x, x)) for x in (a, b))  # type: ignore[misc]
    assert even == (1 << 20, 1 << 20)
    assert odd[0] > 4 << 20  # both matrices and the result in float32


def test_a_formula_leaves_out_what_changes_in_leaps() -> None:
    with fake_gpu("h100") as gpu, torch.no_grad():
        halves(8192, 1483).sum(0)
        floats(8, 151936).topk(50)
    assert {a.op for a in gpu.memory.allocations if a.is_stepwise} == {"sum", "topk"}


def test_what_a_known_mask_selects_is_counted_by_its_true_elements() -> None:
    with fake_gpu("h100") as gpu, torch.no_grad():
        chosen = torch.tensor([[True, False]] * 4096).cuda()
        x = longs(4096, 2)
        assert peak_and_kept(gpu, lambda: x.masked_select(chosen))[1] == 4096 * 8
        assert x.masked_select(chosen[:, :1]).shape == (8192,)  # of each row, both: the worst case


def test_a_loss_by_elements_is_one_tensor_however_it_is_asked_for() -> None:
    with fake_gpu("h100") as gpu, torch.no_grad():
        a, b = floats(512, 512), floats(512, 512)
        mse = torch.ops.aten.mse_loss.default
        assert peak_and_kept(gpu, lambda: mse(a, b, reduction=0)) == peak_and_kept(gpu, lambda: mse(a, b, 0)) == (
            1 << 20, 1 << 20
        )  # fmt: skip
