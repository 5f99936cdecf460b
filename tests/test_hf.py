"""The plain transformers.Trainer: its bytes against the CPU allocator's, its batches, and its rules."""

import gc
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from fakegpu.tiny_trainers import Case as Model
from fakegpu.tiny_trainers import build_model, profiler_peak_bytes, tokenizer

from autofit.errors import ConfigError
from autofit.fakegpu import fake_gpu
from autofit.plugin.registry import trainer_for
from autofit.trainers import hf_training
from autofit.trainers.common import random_weights
from autofit.trainers.trl_config import TrlConfig, parse

LENGTH = 128
LORA: dict[str, object] = {"use_peft": True, "lora_r": 8, "lora_target_modules": "all-linear"}
PACKED: dict[str, object] = {"packing": True, "block_diagonal": True}


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 of two layers and 4,003 words, so that the logits are what decides."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    build_model(Model(kind="sft")).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def parsed(model: Path, folder: Path, **changes: object) -> TrlConfig:
    values: dict[str, object] = {
        "model_name_or_path": str(model), "output_dir": str(folder), "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2, "max_steps": 2, "max_length": LENGTH, "report_to": "none",
        "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "use_cpu": True, "seed": 1, **changes,
    }  # fmt: skip
    return parse("hf", values, overrides={})


def rows(config: TrlConfig, count: int = 8) -> Dataset:
    """Rows of `LENGTH` tokens; packed ones of two samples."""
    tokens = {"ids": [5] * LENGTH, "labels": [5] * LENGTH}
    if config.training.objective == "sft":
        row: dict[str, object] = {"input_ids": tokens["ids"], "labels": tokens["labels"]}
        if config.training.packing:
            row["seq_lengths"] = [LENGTH // 2, LENGTH // 2]
    else:
        row = {f"{side}_{name}": found for side in ("chosen", "rejected") for name, found in tokens.items()}
    return Dataset.from_list([row] * count)


def trained(model: Path, folder: Path, **changes: object) -> object:
    config = parsed(model, folder, **changes)
    with random_weights(hf_training):  # as in a probe
        trainer = hf_training.made(config, rows(config))
    trainer.train()
    return trainer


CASES: dict[str, dict[str, object]] = {
    "full, float32 master with autocast": {"bf16": True},
    "full, pure bfloat16": {"dtype": "bfloat16"},
    "LoRA, adapters in float32": {**LORA, "dtype": "bfloat16", "adapter_dtype": "float32", "bf16": True},
    "LoRA, adapters in bfloat16": {**LORA, "dtype": "bfloat16", "adapter_dtype": "bfloat16"},
    "DPO, float32 logits": {"objective": "dpo", "dtype": "bfloat16", "float32_logits": True},
    "DPO, LoRA": {"objective": "dpo", **LORA, "float32_logits": True},
    "reward": {"objective": "reward"},
    "packed": {"packing": True},
    "packed, block diagonal": PACKED,
    "last layer": {"trainable_layers": 1},
}


@pytest.mark.parametrize("name", CASES)
def test_a_whole_training_peaks_at_the_real_allocators_bytes(name: str, small_model: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    with fake_gpu("h100", mode="cpu", enforce_capacity=False) as gpu:
        trained(small_model, tmp_path / "fake", **CASES[name])
    gc.collect()
    real = profiler_peak_bytes(lambda: trained(small_model, tmp_path / "real", **CASES[name]))
    error = gpu.peak_requested_bytes / real - 1
    print(f"{name}: real {real / 2**20:.3f} MiB, error {error:+.4%}")
    assert abs(error) <= 2e-4


def test_an_objective_in_a_recipe_means_this_trainer() -> None:
    assert trainer_for({"objective": "dpo", "max_length": 8}, None) == "hf"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": "ppo"}, "objective must be one of sft, dpo, reward; got 'ppo'"),
        ({"packing": True, "objective": "dpo"}, "packing fills rows for objective: sft; got objective: dpo"),
        ({"block_diagonal": True}, "block_diagonal keeps packed samples apart; it needs packing: true"),
        ({"trainable_layers": 0}, "the hf config: trainable_layers must be 1 or more; got 0"),
        ({"assistant_only_loss": True}, "every key must be one that the trainer hf takes"),
    ],
)
def test_a_wrong_recipe_is_one_line(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        parsed(tmp_path, tmp_path, **changes)
    assert "\n" not in str(raised.value)
