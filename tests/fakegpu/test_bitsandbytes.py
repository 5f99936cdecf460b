"""bitsandbytes on the simulated card: bytes of quantised weights and optimizer states, and a QLoRA training run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from autofit.fakegpu import FakeGpuError, fake_gpu
from autofit.fakegpu.patches.cuda_api import active_gpu

from .quantised import quantize_model
from .tiny_trainers import Case, config, train

bnb = pytest.importorskip("bitsandbytes")
MIB = 1 << 20


def test_a_4bit_layer_holds_half_a_byte_a_weight_and_its_scales() -> None:
    with fake_gpu("a100-40gb") as gpu:
        layer = bnb.nn.Linear4bit(1024, 4096, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4").cuda()
        assert isinstance(layer.weight, bnb.nn.Params4bit)
        weights, scales, nested_scales = 2 * MIB, 64 * 1024, 1024
        assert 0 <= torch.cuda.memory_allocated() - weights - scales - nested_scales < 4096
        x = torch.randn(4, 256, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        layer(x).sum().backward()
        assert x.grad is not None
    held, output, scratch = weights + scales, 8 * MIB, 2 * 8320 * 1024 // 2  # the scratch is cuBLAS's
    assert gpu.peak_allocated_bytes - held - output - scratch > 8 * MIB  # the dequantised weight


@pytest.mark.parametrize(
    ("layer", "options", "name"),
    [("Linear4bit", {"quant_type": "nf4"}, "Params4bit"), ("Linear8bitLt", {"has_fp16_weights": False}, "Int8Params")],
)
def test_a_layer_can_be_cast_before_and_moved_after_it_is_quantised(
    layer: str, options: dict[str, object], name: str
) -> None:
    with fake_gpu("a100-40gb"):
        made = getattr(bnb.nn, layer)(1024, 4096, bias=False, **options).to(torch.bfloat16).cuda()
        assert type(made.weight).__name__ == name  # by which accelerate, PEFT and TRL know it
        held = torch.cuda.memory_allocated()
        made.cpu()
        assert torch.cuda.memory_allocated() < 4096
        made.cuda()
        assert torch.cuda.memory_allocated() == held


@pytest.mark.parametrize(("name", "mebibytes"), [("AdamW8bit", 32.5), ("PagedAdamW8bit", 0.5), ("AdamW", 128)])
def test_optimizer_states_have_their_size(name: str, mebibytes: float) -> None:
    with fake_gpu("a100-40gb"):
        weight = torch.nn.Parameter(torch.randn(4096, 4096, device="cuda"))
        optimizer = getattr(bnb.optim, name)([weight])
        weight.grad = torch.zeros_like(weight)
        before = torch.cuda.memory_allocated()
        optimizer.step()
        assert (torch.cuda.memory_allocated() - before) / MIB == pytest.approx(mebibytes, abs=0.05)


def test_paged_states_take_their_way_to_the_card_and_back_at_each_step() -> None:
    seconds = {}
    with fake_gpu("a100-40gb") as gpu:
        for name in ("AdamW8bit", "PagedAdamW8bit"):
            weight = torch.nn.Parameter(torch.randn(4096, 4096, device="cuda"))
            optimizer = getattr(bnb.optim, name)([weight])
            weight.grad = torch.zeros_like(weight)
            optimizer.step()
            before = gpu.elapsed_s
            optimizer.step()
            seconds[name] = gpu.elapsed_s - before
    states = 2 * 4096 * 4096  # a byte for each element of two moments
    link_s = 2 * states / gpu.spec.host_link_bytes_per_s
    assert seconds["PagedAdamW8bit"] - seconds["AdamW8bit"] == pytest.approx(link_s, rel=0.1)
    assert any("paged optimizer states" in note for note in gpu.notes)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_model_trains_with_lora(bits: int, tmp_path: Path) -> None:
    case = Case(kind="sft", lora_rank=8, checkpointing=True, bf16=True, dtype=torch.bfloat16, use_cpu=False)
    how = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"} if bits == 4 else {"load_in_8bit": True}

    def build() -> torch.nn.Module:
        model = AutoModelForCausalLM.from_config(config(), dtype=torch.bfloat16)
        quantised: torch.nn.Module = quantize_model(model, BitsAndBytesConfig(**how))
        built.append(quantised)
        return quantised

    built: list[torch.nn.Module] = []
    with fake_gpu("l4") as gpu:
        train(case, tmp_path, model=build)
        layers = [m for m in built[0].modules() if isinstance(m, bnb.nn.Linear4bit | bnb.nn.Linear8bitLt)]
    assert len(layers) == 2 * 7
    adapter = 2 * sum(case.lora_rank * (layer.in_features + layer.out_features) for layer in layers)
    at_peak = gpu.timeline.at_peak
    assert at_peak["gradients"] == adapter  # bf16, and none of the quantised weights
    assert 2 * adapter <= at_peak["optimizer"] < 2.2 * adapter


@pytest.mark.parametrize("bits", ["load_in_4bit", "load_in_8bit"])
def test_loading_a_model_without_linear_layers_quantised_is_refused_too(bits: str, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(config(num_hidden_layers=0)).save_pretrained(tmp_path)
    how = BitsAndBytesConfig(**{bits: True})
    with fake_gpu("l4"), pytest.raises(FakeGpuError, match=r"no linear layer to quantise .* drop load_in_4bit"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=how, dtype=torch.bfloat16)


def test_real_quantisation_works_after_the_block() -> None:
    with fake_gpu("l4"):
        bnb.nn.Linear4bit(256, 256).cuda()
    packed, _ = bnb.functional.quantize_4bit(torch.randn(64, 64))
    assert type(packed) is torch.Tensor


def measured(layer: torch.nn.Module, rows: int, inner: int) -> tuple[int, int, int]:
    """FLOPs, bytes moved and temporary bytes of one forward pass without gradients."""
    with torch.no_grad():
        torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")  # allocates the workspace, once
        x = torch.zeros(rows, inner, device="cuda", dtype=torch.bfloat16)
        gpu = active_gpu()
        assert gpu is not None
        clock = gpu.clock
        flops, moved = clock.flops, clock.bytes_moved
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = layer(x)
        held = torch.cuda.memory_allocated() - before
    assert 0 <= held - rows * out.shape[1] * 2 < 1024
    return clock.flops - flops, clock.bytes_moved - moved, torch.cuda.max_memory_allocated() - before - held


def test_many_rows_dequantise_the_weight_and_then_multiply_so_that_qlora_is_not_faster_than_lora() -> None:
    rows, inner, outer = 2048, 4096, 4096
    weight = inner * outer
    with fake_gpu("l40s"):
        plain = torch.nn.Linear(inner, outer, bias=False, dtype=torch.bfloat16).cuda()
        packed = bnb.nn.Linear4bit(inner, outer, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4").cuda()
        as_plain, as_packed = measured(plain, rows, inner), measured(packed, rows, inner)
    assert as_packed[0] == as_plain[0] == 2 * rows * weight
    assert as_plain[2] == 0
    assert 2 * weight <= as_packed[2] < 2.15 * weight  # the weight in bfloat16, and its scales
    more = as_packed[1] - as_plain[1]  # the packed weight is read and the plain one written
    assert 2.5 * weight <= more < 2.8 * weight


@pytest.mark.parametrize(
    ("card", "rows", "fused"), [("l40s", 64, True), ("h100-80gb", 64, False), ("l40s", 600, False)]
)
def test_few_rows_read_the_packed_weight_where_the_installed_version_has_a_fused_kernel(
    card: str, rows: int, *, fused: bool
) -> None:
    inner = outer = 8192
    with fake_gpu(card):
        layer = bnb.nn.Linear4bit(inner, outer, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4").cuda()
        flops, moved, temporary = measured(layer, rows, inner)
    assert flops == 2 * rows * inner * outer
    assert (moved < 0.6 * inner * outer, temporary == 0) == (fused, fused)


def test_an_8bit_layer_makes_the_int32_product_and_the_mask_of_outliers_as_on_a_card() -> None:
    rows, inner, outer = 1024, 2048, 4096
    with fake_gpu("a100-40gb"):
        layer = bnb.nn.Linear8bitLt(inner, outer, bias=False, has_fp16_weights=False, threshold=6.0).cuda()
        flops, _, temporary = measured(layer, rows, inner)
    product, quantised = 4 * rows * outer, rows * inner
    rescaled = 2 * rows * outer  # float16 before it is cast to the input's bfloat16
    assert flops >= 2 * rows * inner * outer
    assert temporary == pytest.approx(product + rescaled + quantised, rel=0.02)
