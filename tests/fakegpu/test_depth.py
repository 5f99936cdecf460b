"""A deep model predicted from two shallow traces, against its own trace."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from autofit.fakegpu import FakeGpu, FakeGpuError, fake_gpu
from autofit.fakegpu.depth import predict_depth

from .tiny_trainers import config


def _train(layers: int, *, lora: bool, checkpointing: bool) -> FakeGpu:
    with fake_gpu("a100-40gb") as gpu:
        shape = config(num_hidden_layers=layers, hidden_size=512, intermediate_size=1536)
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).cuda()
        if lora:
            model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        for _ in range(2):
            ids = torch.randint(0, 4000, (4, 256), device="cuda")
            with gpu.phase("forward"):
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            with gpu.phase("backward"):
                loss.backward()
            with gpu.phase("step"):
                optimizer.step()
                optimizer.zero_grad()
    return gpu


@pytest.mark.parametrize(("lora", "checkpointing"), [(False, False), (True, True), (False, True)])
def test_two_shallow_traces_predict_a_deep_model(lora: bool, checkpointing: bool) -> None:
    traced = {n: _train(n, lora=lora, checkpointing=checkpointing) for n in (2, 3)}
    predicted, deep = predict_depth(traced, 12), _train(12, lora=lora, checkpointing=checkpointing)
    mine = {phase.name: phase.peak_allocated_bytes for phase in predicted.phases}
    true = {phase.name: phase.peak_allocated_bytes for phase in deep.timeline.phases}
    for name in ("forward", "backward", "step"):
        assert mine[name] == pytest.approx(true[name], rel=1e-4)
    assert predicted.peak_allocated_bytes == pytest.approx(deep.peak_allocated_bytes, rel=0.04)
    assert predicted.peak_reserved_bytes == pytest.approx(
        deep.peak_reserved_bytes, rel=0.2
    )  # whole 20 MiB segments, on a tiny model
    assert predicted.elapsed_s == pytest.approx(deep.elapsed_s, rel=0.02)


def test_one_depth_is_not_enough() -> None:
    with pytest.raises(FakeGpuError, match="two traced depths"):
        predict_depth({}, 12)
