"""flash_attention_2 without its package: the kernels of flash-attn on a simulated card."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from autofit.fakegpu import FakeGpu, fake_gpu

pytestmark = pytest.mark.skipif(find_spec("flash_attn") is not None, reason="flash-attn is installed")
BATCH, LENGTH, HEADS, DIM = 2, 512, 8, 32
SMALL: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": HEADS * DIM, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": HEADS, "num_key_value_heads": HEADS // 4,
}  # fmt: skip


def build(attention: str) -> Any:
    config = AutoConfig.for_model("llama", **SMALL)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention).cuda()


def trained(gpu: FakeGpu, attention: str, *, mask: torch.Tensor | None = None, **inputs: Any) -> tuple[int, int, int]:
    """Bytes held for backward, the peak of both passes, and their FLOPs."""
    model = build(attention)
    ids = torch.ones(inputs.pop("shape", (BATCH, LENGTH)), dtype=torch.long, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before, flops = torch.cuda.memory_allocated(), gpu.clock.flops
    loss = model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False, **inputs).loss
    held = torch.cuda.memory_allocated() - before
    loss.backward()
    return held, torch.cuda.max_memory_allocated() - before, gpu.clock.flops - flops


def test_without_padding_it_is_the_kernel_that_torch_takes() -> None:
    with fake_gpu("a100-40gb") as gpu:
        trained(gpu, "sdpa")  # allocates the workspaces
        flash, torchs = (trained(gpu, name) for name in ("flash_attention_2", "sdpa"))
    assert gpu.attention_kernels == {"flash": 4}  # torch's, in two layers of two models
    assert flash[0] == torchs[0]
    assert flash[1] == pytest.approx(torchs[1], rel=0.01)
    assert flash[2] == torchs[2]
    assert any("flash-attn is not installed" in note for note in gpu.notes)


def test_padding_is_taken_out_before_attention_and_counts_for_nothing_in_it() -> None:
    with fake_gpu("a100-40gb") as gpu:
        whole = trained(gpu, "flash_attention_2")
        mask = torch.ones(BATCH, LENGTH, dtype=torch.long, device="cuda")
        mask[0, LENGTH // 2 :] = 0
        padded = trained(gpu, "flash_attention_2", mask=mask)
    scores = 2 * LENGTH**2 * HEADS * DIM  # FLOPs of one product, of one sequence, in one layer
    assert whole[2] - padded[2] == 2 * 7 * scores * 3 // 4  # 2 layers, 2 products forward and 5 backward


def test_sequences_one_after_the_other_attend_to_themselves_only() -> None:
    with fake_gpu("a100-40gb") as gpu:
        trained(gpu, "sdpa")
        apart = trained(gpu, "flash_attention_2")
        places = torch.arange(LENGTH, device="cuda").repeat(BATCH)[None]
        joined = trained(gpu, "flash_attention_2", shape=(1, BATCH * LENGTH), position_ids=places)
    assert joined[2] == apart[2]
    assert joined[0] == pytest.approx(apart[0], rel=0.02)


def test_a_rollout_decodes_with_it() -> None:
    with fake_gpu("a100-40gb"), torch.no_grad():
        prompt = torch.ones(2, 16, dtype=torch.long, device="cuda")
        out = build("flash_attention_2").generate(input_ids=prompt, attention_mask=prompt, max_new_tokens=8)
    assert out.shape == (2, 24)


def test_a_card_before_ampere_and_a_program_after_the_block_have_no_flash_attention_2() -> None:
    with fake_gpu("t4"), pytest.raises(ImportError):
        build("flash_attention_2")
    with fake_gpu("a100-40gb"):
        build("flash_attention_2")
    with pytest.raises(ImportError):
        AutoModelForCausalLM.from_config(
            AutoConfig.for_model("llama", **SMALL), dtype=torch.bfloat16, attn_implementation="flash_attention_2"
        )
