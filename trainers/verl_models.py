"""The model that verl's engine shards: built from its config with random weights, with LoRA where that is trained.

Read in verl at commit 1dda039b: verl/workers/engine/fsdp/transformer_impl.py, _build_module and _build_lora_module.
"""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

from .verl_engine import DTYPES, fuse_head
from .verl_settings import Settings


def random_model(settings: Settings, folder: str, *, dtype: str, lora: bool) -> torch.nn.Module:
    """The model of the config in `folder` with random weights in host memory, before it is sharded."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=settings.trust_remote_code)
    model = AutoModelForCausalLM.from_config(
        config, dtype=DTYPES[dtype], attn_implementation=settings.attn_implementation
    )
    model.to(DTYPES[dtype])
    if settings.use_fused_kernels:
        fuse_head(model)
    if settings.enable_gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return _with_lora(model, settings) if lora else model


def value_model(settings: Settings, folder: str) -> torch.nn.Module:
    """The critic: the layers of the config in `folder` and a head of one number (utils/model.py, load_valuehead_model).

    verl sets its attention itself.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=settings.trust_remote_code, num_labels=1)
    config.classifier_dropout = 0.0
    dtype = DTYPES[settings.critic_model_dtype]
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": "flash_attention_2"}
    model: Any = AutoModelForTokenClassification.from_config(config, **options)
    model.to(dtype)
    if settings.critic_enable_gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    made: torch.nn.Module = model
    return made


def _with_lora(model: Any, settings: Settings) -> torch.nn.Module:
    """verl's adapters, cast to the dtype of the base (transformer_impl.py, _build_lora_module)."""
    from peft import LoraConfig, TaskType, get_peft_model

    model.enable_input_require_grads()
    adapters = LoraConfig(
        task_type=TaskType.CAUSAL_LM, r=settings.lora_rank, lora_alpha=settings.lora_alpha,
        target_modules=settings.target_modules, bias="none",
    )  # fmt: skip
    made: torch.nn.Module = get_peft_model(model, adapters)
    base = next(p.dtype for p in made.parameters() if not p.requires_grad)
    for parameter in made.parameters():
        if parameter.requires_grad and parameter.dtype != base:
            parameter.data = parameter.data.to(base)
    return made


def inner(model: Any) -> Any:
    """The transformers model, with adapters or without."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
