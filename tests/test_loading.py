"""A model with random weights is loaded as its checkpoint is: the same memory of the card, in the same order."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from trl.trainer.utils import create_model_from_path

from autofit.fakegpu import fake_gpu
from autofit.trainers.common import random_model
from autofit.trainers.random_checkpoint import random_checkpoint

SIZES = {
    "vocab_size": 60, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128,
}  # fmt: skip


def llama(*, tied: bool) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied))


def experts() -> Qwen3MoeForCausalLM:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32))


def loaded(source: Callable[..., Any], folder: Path, **options: Any) -> tuple[list[int], int]:
    """(bytes of each allocation and, negative, of each free, reserved bytes) of a card on which `source` loads."""
    with fake_gpu("a100-80gb") as gpu:
        model = source(str(folder), **options)
        assert model.device.type == "cuda"
        return list(gpu.memory.log.nbytes), gpu.peak_reserved_bytes


@pytest.mark.parametrize(
    ("made", "options"),
    [
        (lambda: llama(tied=True), {}),
        (lambda: llama(tied=False), {"dtype": torch.float32}),
        (experts, {}),
        (lambda: llama(tied=True), {"architecture": AutoModelForSequenceClassification, "num_labels": 1}),
        (lambda: llama(tied=True), {"quantization_config": BitsAndBytesConfig(load_in_4bit=True)}),
    ],
    ids=["tied", "another dtype", "experts", "reward", "4 bits"],
)
def test_random_weights_are_loaded_as_a_checkpoint(
    tmp_path: Path, made: Callable[[], Any], options: dict[str, Any]
) -> None:
    made().to(torch.bfloat16).save_pretrained(tmp_path)
    options = {"dtype": torch.bfloat16} | options
    assert loaded(random_model, tmp_path, **options) == loaded(create_model_from_path, tmp_path, **options)


def test_a_random_checkpoint_has_plain_biases_and_scales_and_its_experts_apart() -> None:
    made = experts()
    config = made.config
    config.attention_bias = True
    state = random_checkpoint(Qwen3MoeForCausalLM, config, device="cpu", dtype=torch.float32)
    attention, norm = "model.layers.0.self_attn.q_proj", "model.norm.weight"
    assert not state[f"{attention}.bias"][...].any()
    assert torch.equal(state[norm][...], torch.ones(64))
    assert float(state[f"{attention}.weight"][...].std()) == pytest.approx(config.initializer_range, rel=0.1)
    assert state["model.layers.0.mlp.experts.3.up_proj.weight"].get_shape() == [32, 64]
