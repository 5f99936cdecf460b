"""One measured two-card row inside `fake_gpu`: a plain transformers Trainer with accelerate's FSDP, as rank 0 of 2.

Usage: python -m experiments.two_cards.program ROW OUT. The settings are those of their scripts (see README.md): packed
samples of 4,096 tokens, gradient checkpointing, FSDP1 with FULL_SHARD and BACKWARD_PRE, bfloat16 without autocast (with
it for 4 bit), AdamW; LoRA of rank 16 on the attention's projections.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch
import transformers
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainerCallback, TrainingArguments
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.mistral.configuration_mistral import MistralConfig
from transformers.models.mixtral.configuration_mixtral import MixtralConfig

from autofit.fakegpu import FakeGpu, fake_gpu
from autofit.plugin.ranks import simulated_rank
from autofit.recipe.launch import Launch
from experiments.kept import commit
from experiments.two_cards.rows import Row, rows

TOKENS = 4096
THEIRS = transformers.__version__.startswith("4.")  # their_versions.py
FSDP = {  # scripts/benchmarks/accelerate.yaml
    "distributed_type": "FSDP", "num_processes": 2, "mixed_precision": "no",
    "fsdp_config": {
        "fsdp_version": 1, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_backward_prefetch": "BACKWARD_PRE",
        "fsdp_forward_prefetch": False, "fsdp_offload_params": False, "fsdp_sharding_strategy": 1,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT", "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_sync_module_states": True, "fsdp_use_orig_params": True,
    },
}  # fmt: skip
# The padding token that they add makes the vocabulary the next multiple of 8 after 32,001.
CONFIGS = {
    "mistral-7b": lambda: MistralConfig(vocab_size=32008, head_dim=128, sliding_window=4096),
    "mixtral-8x7b": lambda: MixtralConfig(vocab_size=32008, head_dim=128, sliding_window=None),
    "llama-2-70b": lambda: LlamaConfig(
        vocab_size=32008, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8,
    ),
}  # fmt: skip
SETTINGS = {"attn_implementation": "flash_attention_2", "torch_dtype" if THEIRS else "dtype": torch.bfloat16}


def config_of(row: Row) -> Any:
    config = CONFIGS[row.model]()
    config.use_cache = False
    return config


class Packed(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Samples of TOKENS tokens, of three int64 tensors: by so much the measured held bytes grow with each sample."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.ones(TOKENS, dtype=torch.long)
        return {"input_ids": ids, "labels": ids, "attention_mask": ids}


class Steps(TrainerCallback):  # type: ignore[misc]
    """The simulated seconds at which each step ended."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu, self.ends_s = gpu, list[float]()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.ends_s.append(self.gpu.elapsed_s)


def loss_of_their_version(outputs: Any, labels: torch.Tensor, num_items_in_batch: object = None) -> torch.Tensor:
    """The loss as transformers 4.48.1 computes it, with a shifted copy of the float32 logits; ours pads the labels."""
    logits = outputs.logits.float()
    shifted = logits[..., :-1, :].contiguous()
    return torch.nn.functional.cross_entropy(shifted.view(-1, logits.shape[-1]), labels[..., 1:].reshape(-1))


def model_of(row: Row) -> Any:
    model = in_4_bit(row) if row.method == "qlora" else whole(row)
    if THEIRS:  # checkpoints are reentrant there, and TRL 0.13 does this for them
        model.enable_input_require_grads()
    if row.method == "full":
        return model
    from peft import LoraConfig, get_peft_model

    names = ["q_proj", "k_proj", "v_proj", "o_proj"]
    lora = LoraConfig(r=16, lora_alpha=16, lora_dropout=0.1, target_modules=names, task_type="CAUSAL_LM")
    # TRL 0.13 leaves an adapter of sharded 4-bit weights in their dtype
    return get_peft_model(model, lora, autocast_adapter_dtype=row.method == "lora")


def whole(row: Row) -> Any:
    return AutoModelForCausalLM.from_config(config_of(row), **SETTINGS)


def in_4_bit(row: Row) -> Any:
    """The model as transformers loads and quantises a checkpoint on this rank, stored as bfloat16 for FSDP."""
    settings = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_use_double_quant=True, bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16, bnb_4bit_quant_storage=torch.bfloat16,
    )  # fmt: skip
    config = config_of(row)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in whole(row).state_dict().items()}
    checkpoint = {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    architecture = AutoModelForCausalLM._model_mapping[type(config)]
    return architecture.from_pretrained(
        None, config=config, state_dict=checkpoint, quantization_config=settings, **SETTINGS,
        **({"low_cpu_mem_usage": True} if THEIRS else {}),
    )  # fmt: skip


def run(row: Row) -> dict[str, object]:
    started = time.perf_counter()
    launch = Launch.of_accelerate(FSDP, what="their accelerate.yaml")
    with (
        tempfile.TemporaryDirectory() as folder,
        simulated_rank(launch),
        fake_gpu("a100-80gb", enforce_capacity=False, record_places=False) as gpu,
    ):
        arguments = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=row.micro_batch, gradient_accumulation_steps=1, max_steps=2,
            gradient_checkpointing=True, save_strategy="no", weight_decay=0.01, warmup_steps=10, adam_epsilon=1e-4,
            learning_rate=2e-5, report_to=[], disable_tqdm=True, bf16=row.method == "qlora", optim="adamw_torch",
            skip_memory_metrics=False,
        )  # fmt: skip
        steps = Steps(gpu)
        trainer = Trainer(model=model_of(row), args=arguments, train_dataset=Packed(), callbacks=[steps],
                          compute_loss_func=None if THEIRS else loss_of_their_version)  # fmt: skip
        peak, held = peak_and_held(trainer.train().metrics)
    took = round(time.perf_counter() - started, 1)
    return {"row": row.name, "peak_allocated_bytes": peak, "allocated_bytes": held,
            "seconds_per_step": round(steps.ends_s[1] - steps.ends_s[0], 3), "simulation_s": took,
            "commit": commit(), "notes": list(gpu.notes)}  # fmt: skip


def peak_and_held(metrics: dict[str, int]) -> tuple[int, int]:
    """Bytes of their two columns, from transformers' memory metrics as their script adds them."""
    held = metrics["before_init_mem_gpu"] + metrics["init_mem_gpu_alloc_delta"] + metrics["train_mem_gpu_alloc_delta"]
    return held + metrics["train_mem_gpu_peaked_delta"], held


if __name__ == "__main__":
    chosen = next(row for row in rows() if row.name == sys.argv[1])
    Path(sys.argv[2]).write_text(json.dumps(run(chosen), indent=1), encoding="utf-8")
