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
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.mistral.configuration_mistral import MistralConfig
from transformers.models.mixtral.configuration_mixtral import MixtralConfig

from autofit.fakegpu import fake_gpu
from autofit.probing.rank import simulated_rank
from autofit.recipe.launch import Launch
from experiments.two_cards.rows import Row, rows

TOKENS = 4096
THEIRS = transformers.__version__.startswith("4.")  # their_versions.py
FSDP = {  # scripts/benchmarks/accelerate.yaml
    "distributed_type": "FSDP", "num_processes": 2, "mixed_precision": "no",
    "fsdp_config": {
        "fsdp_version": 1, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_backward_prefetch": "BACKWARD_PRE",
        "fsdp_forward_prefetch": False, "fsdp_offload_params": False, "fsdp_sharding_strategy": 1,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT", "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_sync_module_states": True, "fsdp_use_orig_params": False,
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


class Packed(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Samples of TOKENS tokens."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.ones(TOKENS, dtype=torch.long)
        return {"input_ids": ids, "labels": ids}


class Measured(Trainer):  # type: ignore[misc]
    """Their figures are those of transformers' memory metrics, which begin with the training."""

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        torch.cuda.reset_peak_memory_stats()
        return super()._inner_training_loop(*args, **kwargs)


def loss_of_their_version(outputs: Any, labels: torch.Tensor, num_items_in_batch: object = None) -> torch.Tensor:
    """The loss as transformers 4.48.1 computes it, with a shifted copy of the float32 logits; ours pads the labels."""
    logits = outputs.logits.float()
    shifted = logits[..., :-1, :].contiguous()
    return torch.nn.functional.cross_entropy(shifted.view(-1, logits.shape[-1]), labels[..., 1:].reshape(-1))


def model_of(row: Row) -> Any:
    config = CONFIGS[row.model]()
    config.use_cache = False
    precision = {"torch_dtype" if THEIRS else "dtype": torch.bfloat16}
    model = AutoModelForCausalLM.from_config(config, attn_implementation="flash_attention_2", **precision)
    if THEIRS:  # checkpoints are reentrant there, and TRL 0.13 does this for them
        model.enable_input_require_grads()
    if row.method == "qlora":
        model = in_4_bit(model)
    if row.method == "full":
        return model
    from peft import LoraConfig, get_peft_model

    names = ["q_proj", "k_proj", "v_proj", "o_proj"]
    lora = LoraConfig(r=16, lora_alpha=16, lora_dropout=0.1, target_modules=names, task_type="CAUSAL_LM")
    if row.method == "qlora":  # their copy of PEFT's preparation does not cast the other weights to float32
        model.requires_grad_(False)
        model.enable_input_require_grads()
    return get_peft_model(model, lora, autocast_adapter_dtype=row.method == "lora")


def in_4_bit(model: Any) -> Any:
    """The model with linear layers of bitsandbytes, stored as bfloat16 so that FSDP can shard them."""
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear

    settings = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_use_double_quant=True, bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16, bnb_4bit_quant_storage=torch.bfloat16,
    )  # fmt: skip
    return replace_with_bnb_linear(model, modules_to_not_convert=["lm_head"], quantization_config=settings)


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
        )  # fmt: skip
        trainer = Measured(model=model_of(row), args=arguments, train_dataset=Packed(),
                           compute_loss_func=None if THEIRS else loss_of_their_version)  # fmt: skip
        trainer.train()
        peak, held = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    took = round(time.perf_counter() - started, 1)
    return {"row": row.name, "peak_allocated_bytes": peak, "allocated_bytes": held, "simulation_s": took,
            "notes": list(gpu.notes)}  # fmt: skip


if __name__ == "__main__":
    chosen = next(row for row in rows() if row.name == sys.argv[1])
    Path(sys.argv[2]).write_text(json.dumps(run(chosen), indent=1), encoding="utf-8")
