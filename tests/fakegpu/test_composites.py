"""That fake CUDA tensors take the path of a CUDA build through torch's dispatcher: its kernels, and its composites."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import torchgen  # type: ignore[import-untyped]
import yaml

from autofit.fakegpu import fake_gpu
from autofit.fakegpu.patches.operators import IN_PARTS, OWN_KERNELS

_YAML = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
_COMPOSITES = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")

# Operators without a CUDA kernel that were looked at (torch 2.13): their composites on CUDA make no temporaries beside
# small ones, or they are views, factories and checks, or `IN_PARTS`, or (convolution) a note says what is not counted.
_LOOKED_AT = """
_assert_scalar _assert_tensor_metadata _batch_norm_no_update _conj _conj_physical _convolution _euclidean_dist
_functional_assert_scalar _functional_sym_constrain_range _functional_sym_constrain_range_for_size _fw_primal
_grid_sampler_2d_cpu_fallback _grid_sampler_2d_cpu_fallback_backward _has_same_storage_numel _is_all_true
_is_any_true _lazy_clone _make_dual _native_batch_norm_legit_no_training _neg_view _new_zeros_with_same_feature_meta
_nnpack_spatial_convolution _pack_padded_sequence _pin_memory _print _safe_softmax
_scaled_dot_product_fused_attention_overrideable _scaled_dot_product_fused_attention_overrideable_backward _stack
_trilinear _unsafe_index _unsafe_index_put _unsafe_masked_index _unsafe_masked_index_put_accumulate _unsafe_view abs
add addr affine_grid_generator alias allclose arange as_strided bartlett_window bernoulli
binary_cross_entropy_with_logits bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor
blackman_window block_diag ccol_indices celu cholesky_solve clone col_indices complex conj_physical constant_pad_nd
conv_tbc convolution convolution_backward_overrideable convolution_overrideable copy copysign count_nonzero
crow_indices cummax cummin deg2rad dense_dim detach diag_embed diagonal diagonal_backward dist div dot embedding
expand eye fft_fftfreq fft_rfftfreq fill floor_divide fmod frexp full hamming_window hann_window huber_loss_backward
index_fill index_put indices isinf kaiser_window kthvalue ldexp linear linspace log_softmax logcumsumexp logical_and
logical_not logical_or logical_xor logspace logsumexp masked_fill masked_scatter_backward mean median mode mul mv
mvlgamma nan_to_num nanmedian norm normal normal_functional ones permute pixel_shuffle pixel_unshuffle polar
polygamma put rad2deg range remainder repeat resize_as rot90 row_indices rrelu_with_noise_backward rsub
scalar_tensor select select_backward slice slice_backward slice_inverse smooth_l1_loss_backward soft_margin_loss
soft_margin_loss_backward softmax sort split split_with_sizes squeeze stack sub sum t transpose unbind unsafe_split
unsafe_split_with_sizes unsqueeze values vdot view xlogy zeros
"""
_OTHERS = re.compile(
    "(new_|_foreach_|rand|sym_|_test|_?mkldnn|_?sparse|_?nested|to_sparse|empty|is_|miopen|cudnn|_mps|lift|_?linalg|"
    "quantize|fbgemm|special_).*|.*(_copy|_like|_scatter)"
)  # copies, factories, other backends, and linear algebra and special functions, which training does not call


def _functions() -> Iterator[tuple[str, set[str]]]:
    """(name with overload, its dispatch keys) of each operator of torch."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    functions = {f["func"].split("(")[0]: f for f in yaml.load(_YAML.read_text(), Loader=loader)}
    for name, function in functions.items():
        own = function.get("dispatch") or {}
        structured = functions.get(function.get("structured_delegate", ""), {}).get("dispatch") or {}
        yield name, {key.strip() for keys in (*own, *structured) for key in keys.split(",")}


def _taken_apart(names: list[str]) -> set[str]:
    """The operators that autograd's CUDA key sends into their composite."""
    table = {name: torch._C._dispatch_dump_table(f"aten::{name}") for name in names}
    found = {name for name, rows in table.items() if re.search("^AutogradCUDA: .*CompositeImplicit", rows, re.M)}
    return {name.split(".")[0] for name in found}


def test_no_operator_with_a_cuda_kernel_is_taken_apart_on_the_card() -> None:
    with_kernel = [name for name, keys in _functions() if "CUDA" in keys]
    assert len(with_kernel) > 1000
    outside = _taken_apart(with_kernel)
    assert outside <= set(OWN_KERNELS)
    assert ("silu_backward" in outside) == (torch.version.cuda is None)  # a CUDA build takes none apart
    with fake_gpu("a100-40gb"):
        assert _taken_apart(with_kernel) == set()
    assert _taken_apart(with_kernel) == outside


def test_every_operator_whose_composite_a_card_runs_was_looked_at() -> None:
    names = {
        name.split(".")[0].rstrip("_")
        for name, keys in _functions()
        if "CUDA" not in keys and keys.intersection(_COMPOSITES)
    }
    assert {name for name in names - set(_LOOKED_AT.split()) if not _OTHERS.fullmatch(name)} == set()
    assert set(IN_PARTS) <= set(_LOOKED_AT.split())


def _temporaries(backward: bool, run: object) -> float:
    """Bytes beside inputs and outputs at the peak, in inputs of (1024, 1024) float32."""
    with fake_gpu("a100-40gb"):
        x = torch.randn(1024, 1024, device="cuda", requires_grad=backward)
        out = run(x)  # type: ignore[operator]
        gradient = torch.randn_like(out) if backward else None
        if not backward:
            del out
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        if backward:
            out.backward(gradient)
        else:
            kept = run(x)  # type: ignore[operator]
            before += kept.numel() * 4
        return (torch.cuda.max_memory_allocated() - before) / x.numel() / 4


@pytest.mark.parametrize(
    ("backward", "run", "inputs"),
    [
        (True, F.silu, 1.0),  # the gradient alone: the composite had 4 times as much
        (True, F.mish, 1.0),
        (False, lambda x: torch.logsumexp(x, -1), 1.0),  # exp(x - max), as in logsumexp_out_impl
        (False, lambda x: torch._safe_softmax(x, -1), 0.25),  # the mask of isneginf, as in attention.cpp
    ],
)
def test_temporaries_are_those_of_a_cuda_build(backward: bool, run: object, inputs: float) -> None:
    assert _temporaries(backward, run) == pytest.approx(inputs, abs=0.02)


def test_rms_norm_is_one_kernel_that_keeps_one_number_a_row() -> None:
    for inference in (False, True):
        seen = []
        with fake_gpu("a100-40gb") as gpu:
            gpu.tracer.after = lambda function, *_: seen.append(function.__name__)  # noqa: B023
            x = torch.randn(4, 1000, 256, device="cuda", requires_grad=not inference)
            weight = torch.ones(256, device="cuda", requires_grad=not inference)
            with torch.inference_mode(inference):
                before = torch.cuda.memory_allocated()
                out = F.rms_norm(x, (256,), weight)
            kept = torch.cuda.memory_allocated() - before - out.numel() * 4
            if not inference:
                out.sum().backward()
            gpu.tracer.after = None
        assert "_fused_rms_norm.default" in seen
        assert "rsqrt.default" not in seen
        assert 0 <= kept <= (0 if inference else 4 * 4 * 1000 + 512)
