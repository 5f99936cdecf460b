"""Optimizers and kernels of packages that are not installed: simulated by their bytes, or left out with a note."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, TrainingArguments
from transformers.integrations.liger import apply_liger_kernel
from transformers.trainer_optimizer import OptimizerContext, _get_torchao_optimizer
from transformers.utils.import_utils import enable_tf32

from autofit.fakegpu import fake_gpu
from autofit.fakegpu.patches.low_bit import AdamW8bit
from autofit.fakegpu.rates.collectives import fake_ranks

from .tiny_trainers import config

BLOCK, ROWS, COLUMNS = 256, 512, 1024


@pytest.mark.parametrize(("bits", "table"), [(8, 256), (4, 16)])
def test_torchaos_states_are_codes_with_a_scale_a_block_and_a_table(bits: int, table: int, tmp_path: Path) -> None:
    """Shapes as torchao 0.18's OptimState8bit and OptimState4bit have them."""
    with fake_gpu("a100-40gb") as gpu:
        large = torch.nn.Parameter(torch.zeros(ROWS, COLUMNS, device="cuda", dtype=torch.bfloat16))
        small = torch.nn.Parameter(torch.zeros(BLOCK, device="cuda", dtype=torch.bfloat16))
        args = TrainingArguments(output_dir=str(tmp_path), optim=f"adamw_torch_{bits}bit", report_to="none")
        context = OptimizerContext(args=args, model=None, optimizer_kwargs={"lr": 1e-3}, adam_kwargs={}, optim_args={})
        kind, options = _get_torchao_optimizer(context)
        optimizer = kind([large, small], **options)
        for parameter in (large, small):
            parameter.grad = torch.zeros_like(parameter)
        before = torch.cuda.memory_allocated()
        optimizer.step()
        held = torch.cuda.memory_allocated() - before
        first = gpu.elapsed_s
        optimizer.step()
    count = ROWS * COLUMNS
    table_bytes = max(512, 4 * table)  # the allocator's smallest block
    assert held == 2 * (count * bits // 8 + 4 * count // BLOCK + table_bytes) + 2 * 2 * BLOCK
    assert gpu.elapsed_s > first
    assert any("torchao" in note for note in gpu.notes)


def test_torchaos_states_of_a_sharded_parameter_are_of_its_shard() -> None:
    """torchao 0.18, optim/adam.py, _new_buffer: `p.to_local()` decides, and is what the state is like."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with fake_ranks(4), fake_gpu("a100-80gb"):
        layer = torch.nn.Linear(COLUMNS, ROWS, bias=False, device="cuda", dtype=torch.bfloat16)
        fully_shard(layer, mesh=init_device_mesh("cuda", (4,)))
        layer(torch.zeros(1, COLUMNS, device="cuda", dtype=torch.bfloat16)).sum().backward()
        optimizer = AdamW8bit(layer.parameters(), block_size=BLOCK)
        before = torch.cuda.memory_allocated()
        optimizer.step()
        held = torch.cuda.memory_allocated() - before
    count = ROWS * COLUMNS // 4
    assert held == 2 * (count + 4 * count // BLOCK + 4 * 256)


def test_kernels_for_whole_layers_are_left_out_with_a_note() -> None:
    with fake_gpu("a100-40gb") as gpu:
        model = AutoModelForCausalLM.from_config(config(), dtype=torch.bfloat16)
        apply_liger_kernel(model, None)
        model.set_use_kernels(True)
    assert len([note for note in gpu.notes if "were asked for and not simulated" in note]) == 2


def test_tf32_is_asked_of_the_simulated_card_and_makes_its_products_faster(tmp_path: Path) -> None:
    def seconds(tf32: bool) -> float:
        with fake_gpu("a100-80gb") as gpu:
            TrainingArguments(output_dir=str(tmp_path), tf32=tf32, bf16=False, report_to="none")
            factor = torch.empty(4096, 4096, device="cuda")
            before = gpu.clock.now_s
            factor @ factor
            torch.cuda.synchronize()
            return gpu.clock.now_s - before

    try:
        slow, fast = map(seconds, (False, True))
    finally:
        enable_tf32(False)
    assert fast < slow / 2
    with pytest.raises(ValueError, match="tf32 requires Ampere"), fake_gpu("t4"):
        TrainingArguments(output_dir=str(tmp_path), tf32=True, bf16=False, report_to="none")
