"""flex_attention of transformers' models on a simulated card, for which torch has no rule of its own."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from autofit.fakegpu import FakeGpu, fake_gpu

BATCH, LENGTH, HEADS, DIM = 2, 512, 8, 32
KEY_HEADS, LAYERS = 2, 2
SMALL: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": HEADS * DIM, "intermediate_size": 512, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS,
}  # fmt: skip


def trained(gpu: FakeGpu, attention: str) -> tuple[int, int]:
    """Bytes held for backward, and the FLOPs of both passes."""
    config = AutoConfig.for_model("llama", **SMALL)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention).cuda()
    ids = torch.ones(BATCH, LENGTH, dtype=torch.long, device="cuda")
    before, flops = torch.cuda.memory_allocated(), gpu.clock.flops
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    held = torch.cuda.memory_allocated() - before
    loss.backward()
    return held, gpu.clock.flops - flops


def test_it_keeps_what_torchs_flash_attention_keeps_and_counts_the_same_flops() -> None:
    with fake_gpu("a100-40gb") as gpu:
        trained(gpu, "sdpa")  # allocates the workspaces
        flash, flex = (trained(gpu, name) for name in ("sdpa", "flex_attention"))
    seeds = LAYERS * 2 * 512  # of dropout, two numbers a layer that only flash attention keeps
    assert 0 <= flash[0] - flex[0] <= seeds
    assert flex[1] == flash[1]
    assert any("flex attention" in note for note in gpu.notes)
    assert not any("counted by the shapes" in note for note in gpu.notes)


def test_backward_needs_one_number_a_query_beside_gradients_of_few_key_heads() -> None:
    with fake_gpu("a100-40gb"):
        from transformers.integrations import flex_attention as module

        shapes = (HEADS, KEY_HEADS, KEY_HEADS)
        q, k, v = (
            torch.zeros(BATCH, heads, LENGTH, DIM, dtype=torch.bfloat16, device="cuda", requires_grad=True)
            for heads in shapes
        )
        out = module.compile_friendly_flex_attention(q, k, v, enable_gqa=True)
        grad = torch.ones_like(out)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out.backward(grad)
        peak = torch.cuda.max_memory_allocated() - before
    gradients = sum(2 * BATCH * heads * LENGTH * DIM for heads in shapes)
    assert peak == gradients + 4 * BATCH * HEADS * LENGTH
