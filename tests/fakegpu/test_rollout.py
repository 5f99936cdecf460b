"""A rollout that is played from its first tokens, against the same one simulated token by token."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from autofit.fakegpu import AllocatorSettings, FakeGpu, fake_gpu
from autofit.fakegpu.patches import rollout

from .tiny_trainers import config


def _generate(*, expandable: bool, padded: bool, tokens: int = 36) -> FakeGpu:
    settings = AllocatorSettings(expandable_segments=expandable)
    with fake_gpu("a100-40gb", settings=settings) as gpu:
        model = AutoModelForCausalLM.from_config(
            config(hidden_size=512, num_attention_heads=8, head_dim=64, num_key_value_heads=8), dtype=torch.bfloat16
        ).cuda()
        mask = torch.ones(8, 200, dtype=torch.long)
        mask[0, :3] = 0 if padded else 1
        out = model.generate(
            input_ids=torch.full((8, 200), 5).cuda(),
            attention_mask=mask.cuda(),
            generation_config=GenerationConfig(
                max_new_tokens=tokens, do_sample=True, pad_token_id=4001, eos_token_id=4000
            ),
        )
        assert out.shape == (8, 200 + tokens)
        assert (out[:, 200:] == 4000).sum().item() == 0
    return gpu


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_a_played_rollout_peaks_where_a_simulated_one_does(
    expandable: bool, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = _generate(expandable=expandable, padded=padded)
    monkeypatch.setattr(rollout, "LAST_TRY", 0)
    simulated = _generate(expandable=expandable, padded=padded)
    assert played.tracer.operation_count < simulated.tracer.operation_count / 3
    assert played.peak_allocated_bytes == pytest.approx(simulated.peak_allocated_bytes, rel=2e-4)
    assert played.peak_reserved_bytes == pytest.approx(simulated.peak_reserved_bytes, rel=0.02)
    assert played.memory.allocator.allocated_bytes == simulated.memory.allocator.allocated_bytes
    assert played.elapsed_s == pytest.approx(simulated.elapsed_s, rel=0.05)
    assert played.timeline.at_peak["KV cache"] > 0


def test_a_long_rollout_played_in_strides_peaks_and_lasts_as_one_played_step_by_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = _generate(expandable=False, padded=False, tokens=400)
    monkeypatch.setattr(rollout, "MOST_PLAYED", 40)
    strides = _generate(expandable=False, padded=False, tokens=400)
    assert len(strides.memory.log) < len(whole.memory.log) / 2
    assert strides.peak_allocated_bytes == pytest.approx(whole.peak_allocated_bytes, rel=1e-3)
    assert strides.least_capacity_bytes == pytest.approx(whole.least_capacity_bytes, rel=0.02)
    assert strides.memory.allocator.allocated_bytes == whole.memory.allocator.allocated_bytes
    assert strides.elapsed_s == pytest.approx(whole.elapsed_s, rel=1e-6)
