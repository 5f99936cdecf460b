"""4-bit weights on one rank of several: FSDP's own code flattens, shards and gathers what bitsandbytes has packed."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.utils.other import fsdp_auto_wrap_policy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._traversal_utils import _get_fsdp_handles
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from autofit.fakegpu import fake_gpu
from autofit.fakegpu.rates.collectives import fake_ranks

from .quantised import quantize_model
from .tiny_trainers import config

bnb = pytest.importorskip("bitsandbytes")
RANKS, LAYERS, HIDDEN, RANK = 2, 3, 512, 8
SIZES = {"hidden_size": HIDDEN, "intermediate_size": 1024, "num_hidden_layers": LAYERS, "head_dim": 128}
LINEAR = 2 * HIDDEN * 512 + 2 * HIDDEN * 256 + 3 * HIDDEN * 1024  # elements of a layer's matrices: q, o; k, v; MLP
NORMS = 2 * HIDDEN + 2 * 128  # elements of a layer's norms
PACKED = LINEAR // 2 + 2 * NORMS  # bytes of a frozen layer
SCALES = LINEAR // 64 + 7 * (3 * 512 + 1024)  # of a layer, in 8 bit; of each matrix their scales, offset and codes


def in_4_bit() -> Any:
    """A model with 4-bit weights, stored as bfloat16 so that FSDP can shard them, and LoRA."""
    how = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16, bnb_4bit_quant_storage=torch.bfloat16,
    )  # fmt: skip
    model = quantize_model(AutoModelForCausalLM.from_config(config(**SIZES), dtype=torch.bfloat16), how)
    model.config.use_cache = False
    return get_peft_model(model, LoraConfig(r=RANK, target_modules="all-linear"), autocast_adapter_dtype=False)


def fsdp1(model: Any) -> Any:
    half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    return FullyShardedDataParallel(
        model, auto_wrap_policy=fsdp_auto_wrap_policy(model), mixed_precision=half, device_id=0
    )


def fsdp2(model: Any) -> Any:
    shard = functools.partial(
        fully_shard, mesh=init_device_mesh("cuda", (RANKS,)), mp_policy=MixedPrecisionPolicy(torch.bfloat16)
    )
    for layer in model.base_model.model.model.layers:
        shard(layer)
    return shard(model)


def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    ids = torch.full((1, 64), 5, device="cuda")
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def trained(model: Any) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def holds_no_more_after_a_second_step(model: Any) -> bool:
    optimizer = torch.optim.AdamW(trained(model))
    step(model, optimizer)
    held = torch.cuda.memory_allocated()
    step(model, optimizer)
    return torch.cuda.memory_allocated() == held


def test_fsdp1_flattens_packed_weights_and_leaves_their_scales_whole_on_each_rank() -> None:
    with fake_ranks(RANKS), fake_gpu("a100-80gb") as gpu:
        model = fsdp1(in_4_bit())
        frozen = [handle.flat_param for handle in _get_fsdp_handles(model) if not handle.flat_param.requires_grad]
        assert sorted(nbytes([shard]) for shard in frozen)[:LAYERS] == [PACKED // RANKS] * LAYERS
        rest = torch.cuda.memory_allocated() - nbytes(frozen) - nbytes(trained(model))
        assert rest == pytest.approx(LAYERS * SCALES, abs=4096)  # and what is computed of the positions
        assert holds_no_more_after_a_second_step(model)
        layers = [module for module in model.modules() if isinstance(module, bnb.nn.Linear4bit)]
        assert len(layers) == 7 * LAYERS
        assert all(layer.quant_state is not None for layer in layers)
    assert gpu.timeline.at_peak["weights"] >= nbytes(frozen)


def test_fsdp2_shards_packed_weights_too() -> None:
    with fake_ranks(RANKS), fake_gpu("a100-80gb") as gpu:
        model = fsdp2(in_4_bit())
        layers = model.base_model.model.model.layers
        frozen = [p.to_local() for p in layers.parameters() if not p.requires_grad]
        assert nbytes(frozen) == LAYERS * PACKED // RANKS
        assert holds_no_more_after_a_second_step(model)
    assert gpu.timeline.at_peak["weights"] >= nbytes(frozen)
