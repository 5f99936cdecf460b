"""LLaMA-Factory's YAMLs as `chance` draws them, its own reading of one, and autofit's in the same facts.

Its own reading is of `get_train_args`, and of `init_adapter` on a Qwen2 of 8 small layers (LLaMA-Factory ff6d4d12).
"""

import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import yaml

from autofit.frontends.draft import Foreign
from experiments.frontends.chance import NO, Drawn, Facts, Values, dtypes, group, in_order, on_a_card, tiny, zero

AXES: dict[str, tuple[object, ...]] = {
    "model_name_or_path": ("Qwen/Qwen2.5-0.5B",), "dataset": ("identity",), "template": ("qwen",),
    "output_dir": ("out",), "do_train": (True,), "learning_rate": ("1e-4", 2e-5, 1e-5),
    "stage": ("sft", "sft", "sft", "pt", "dpo", "dpo", "kto", "rm", NO),
    "finetuning_type": ("lora", "lora", "full", "freeze", NO),
    "per_device_train_batch_size": (1, 2, 3, 8, NO), "gradient_accumulation_steps": (1, 2, 5, 16, NO),
    "bf16": (True, True, False, NO), "lora_rank": (NO, 4, 16, 64), "lora_alpha": (NO, NO, 16, 32),
    "lora_dropout": (NO, 0.0, 0.1), "lora_target": (NO, "all", "q_proj,v_proj"),
    "cutoff_len": (NO, 1024, 2048, 1000), "packing": (NO, NO, True, False),
    "flash_attn": (NO, "auto", "fa2", "sdpa", "disabled"), "enable_liger_kernel": (NO, NO, True),
    "disable_gradient_checkpointing": (NO, NO, True, False), "gradient_checkpointing": (NO, NO, NO, True, False),
    "use_reentrant_gc": (NO, NO, False, True), "upcast_lmhead_output": (NO, NO, NO, True),
    "deepspeed": (NO, NO, NO, NO, zero(0), zero(2), zero(3), zero(2, ("offload_optimizer",)),
                  zero(3, ("offload_optimizer", "offload_param"))),
    "optim": (NO, NO, "adamw_torch", "adafactor", "paged_adamw_8bit", "sgd"),
    "max_steps": (NO, NO, 100, -1), "num_train_epochs": (NO, 3, 1.0), "val_size": (0.1, 0.1, 20, NO),
    "eval_strategy": (NO, NO, NO, "steps", "epoch", "no"), "do_eval": (NO, NO, NO, False),
    "eval_steps": (NO, 50), "per_device_eval_batch_size": (NO, 1, 4), "save_steps": (NO, 500),
    "freeze_trainable_layers": (NO, 1, 2, 4), "pref_loss": (NO, NO, "sigmoid", "orpo", "simpo", "ipo"),
    "pref_beta": (NO, 0.3), "simpo_gamma": (NO, NO, 1.2), "ddp_find_unused_parameters": (NO, NO, False, True),
}  # fmt: skip
RARE: tuple[Values, ...] = (
    {"pure_bf16": True}, {"pure_bf16": True, "finetuning_type": "full"}, {"pure_bf16": True, "bf16": False},
    {"fp16": True}, {"fp16": True, "bf16": False}, {"fp16": True, "bf16": NO}, {"bf16": False},
    {"quantization_bit": 4}, {"quantization_bit": 4, "finetuning_type": "lora", "bf16": NO},
    {"quantization_bit": 4, "finetuning_type": "lora", "double_quantization": False},
    {"quantization_bit": 4, "finetuning_type": "lora", "quantization_type": "fp4", "fp16": True, "bf16": NO},
    {"quantization_bit": 8, "finetuning_type": "lora"}, {"quantization_bit": 8, "finetuning_type": "oft"},
    {"quantization_bit": 4, "finetuning_type": "lora", "pure_bf16": True, "deepspeed": NO},
    {"quantization_bit": 4, "finetuning_type": "lora", "deepspeed": zero(3)}, {"quantization_method": "hqq"},
    {"quantization_type": "fp4"}, {"finetuning_type": "oft"}, {"finetuning_type": "oft", "oft_block_size": 16},
    {"finetuning_type": "oft", "oft_rank": 4, "oft_block_size": 0}, {"finetuning_type": "oft", "use_dora": True},
    {"finetuning_type": "oft", "lora_target": "q_proj,v_proj"}, {"finetuning_type": "oft", "oft_target": "q_proj"},
    {"use_rslora": True}, {"use_rslora": True, "finetuning_type": "lora"}, {"use_dora": True},
    {"use_dora": True, "finetuning_type": "lora"}, {"additional_target": "embed_tokens,lm_head"},
    {"additional_target": "embed_tokens", "finetuning_type": "lora"}, {"pissa_init": True, "finetuning_type": "lora"},
    {"pissa_init": True}, {"neat_packing": True}, {"neat_packing": True, "stage": "sft"},
    {"neat_packing": True, "packing": False, "stage": "sft"}, {"packing": True, "stage": "pt"}, {"stage": "pt"},
    {"packing": False, "stage": "pt"}, {"use_unsloth_gc": True}, {"upcast_layernorm": True},
    {"use_galore": True, "finetuning_type": "full", "deepspeed": NO}, {"use_galore": True},
    {"use_apollo": True, "finetuning_type": "full", "deepspeed": NO}, {"use_apollo": True},
    {"use_badam": True, "finetuning_type": "full"}, {"use_badam": True}, {"use_adam_mini": True}, {"use_muon": True},
    {"use_galore": True, "galore_layerwise": True, "finetuning_type": "full", "gradient_accumulation_steps": 1},
    {"use_badam": True, "finetuning_type": "full", "deepspeed": zero(3)}, {"streaming": True},
    {"use_badam": True, "finetuning_type": "freeze", "badam_mode": "ratio"}, {"streaming": True, "max_steps": 50},
    {"streaming": True, "max_steps": 50, "val_size": NO}, {"streaming": True, "max_steps": 50, "val_size": 100},
    {"val_size": NO, "do_eval": True}, {"val_size": NO, "eval_strategy": "steps"}, {"do_eval": True},
    {"val_size": NO, "eval_dataset": "identity", "eval_strategy": "epoch"}, {"eval_dataset": "identity"},
    {"eval_on_start": True}, {"freeze_trainable_layers": -2, "finetuning_type": "freeze"},
    {"freeze_trainable_modules": "mlp", "finetuning_type": "freeze"}, {"freeze_trainable_modules": "mlp"},
    {"freeze_extra_modules": "lm_head", "finetuning_type": "freeze"}, {"freeze_extra_modules": "lm_head"},
    {"freeze_trainable_layers": 3, "use_llama_pro": True, "finetuning_type": "freeze"},
    {"freeze_trainable_layers": 4, "use_llama_pro": True, "finetuning_type": "freeze"}, {"use_llama_pro": True},
    {"freeze_trainable_layers": 0}, {"freeze_trainable_layers": 0, "finetuning_type": "freeze"},
    {"freeze_trainable_layers": 1000, "finetuning_type": "freeze"}, {"dpo_label_smoothing": 0.1},
    {"use_asft_loss": True}, {"use_asft_loss": True, "stage": "sft", "finetuning_type": "full"},
    {"use_dft_loss": True}, {"neftune_noise_alpha": 5}, {"load_best_model_at_end": True},
    {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 500, "save_steps": 500},
    {"save_strategy": "epoch"}, {"train_on_prompt": True}, {"mask_history": True}, {"resize_vocab": True},
    {"fp8": True}, {"pref_ftx": 0.5}, {"stage": "ppo"}, {"stage": "ppo", "reward_model": "a"},
    {"stage": "rm", "load_best_model_at_end": True}, {"auto_find_batch_size": True},
    {"loraplus_lr_ratio": 16.0}, {"loraplus_lr_ratio": 16.0, "finetuning_type": "lora"}, {"lora_alpha": 0},
    {"ref_model": "Qwen/Qwen2.5-0.5B", "stage": "dpo"}, {"torch_compile": True}, {"bf16_full_eval": True},
    {"quantization_device_map": "auto"}, {"fsdp": "full_shard auto_wrap"}, {"infer_dtype": "float32"},
    {"fsdp": "full_shard auto_wrap", "fsdp_transformer_layer_cls_to_wrap": "Qwen2DecoderLayer"},
    {"fsdp": "full_shard", "deepspeed": zero(2)}, {"gradient_checkpointing_kwargs": {"use_reentrant": False}},
)  # fmt: skip
MISTAKES: tuple[Values, ...] = (
    {"stage": "grpo"}, {"finetuning_type": "qlora"}, {"per_device_train_batch_size": "two"},
    {"per_device_train_batch_size": 0}, {"gradient_accumulation_steps": 0}, 
    {"lora_rank": 0}, {"lora_rank": -1}, {"lora_rank": "8"}, {"lora_rank": 7.5}, {"lora_alpha": 0}, {"lora_alpha": 8.0},
    {"lora_dropout": 2}, {"lora_dropout": "a"}, {"cutoff_len": "2k"}, {"cutoff_len": 1e3},
    {"bf16": 1}, {"bf16": True, "fp16": True}, 
    {"quantization_bit": 3}, {"quantization_bit": "4"}, {"quantization_bit": True},
    {"quantization_type": "int4"}, {"optim": "adamw"}, {"optim": "lion"}, 
    {"max_steps": "all"}, {"num_train_epochs": "three"}, {"eval_strategy": "always"}, {"eval_strategy": False},
    {"save_strategy": False},
    {"pref_loss": "dpo"}, {"pref_beta": "a"}, {"use_dora": "maybe"}, {"packing": "neat"}, {"lora_targets": "all"},
    {"load_in_4bit": True}, {"quantization_method": "bitsandbytes"}, {"freeze_trainable_layers": 0},
    {"freeze_trainable_layers": 1000}, {"val_size": 1.5}, {"val_size": "a"}, {"val_size": 100},
    {"deepspeed": "missing.json"}, {"deepspeed": zero(4)}, {"deepspeed": zero(2, train_micro_batch_size_per_gpu=64)},
    {"deepspeed": zero(2, gradient_accumulation_steps=3)}, 
    {"warmup_steps": 0.1}, {"lr_scheduler_type": "cosine"}, {"lr_scheduler_type": "cos"}, {"use_galore": "yes"},
    {"load_best_model_at_end": True}, {"lora_target": ["q_proj"]}, {"additional_target": ["embed_tokens"]},
    {"dataset": None}, {"eval_dataset": "identity"}, {"do_train": "true"}, {"max_samples": "a"}, {"report_to": "none"},
    {"overwrite_output_dir": True}, {"ddp_timeout": 180000000}, {"torch_dtype": "bfloat16"}, {"seed": "a"},
    {"do_train": False}, {"model_name_or_path": None}, {"adam_beta1": 2},
    {"dataloader_num_workers": 4}, {"rope_scaling": "linear"}, {"rope_scaling": "dynamic2"},
    {"gradient_checkpointing_kwargs": {"use_reentrant": False}}, {"neftune_noise_alpha": "a"},
    {"predict_with_generate": True}, {"mixture_of_depths": "convert"}, {"mixture_of_depths": "yes"},
    {"fp8": True}, {"loraplus_lr_ratio": 16.0}, {"badam_mode": "ratio"},
    {"galore_layerwise": True, "use_galore": True}, {"save_strategy": "never"}, {"export_dir": "x"},
    {"ref_model_quantization_bit": 3}, {"create_new_adapter": True, "adapter_name_or_path": "a"},
    {"adapter_name_or_path": "a"}, {"adapter_name_or_path": "a,b"}, {"mask_history": True, "train_on_prompt": True},
)  # fmt: skip


def own_reading(folder: Path) -> Callable[[Path, int | None], Facts]:
    """LLaMA-Factory's own reading: its arguments, and a tiny model with its adapter."""
    os.environ |= {"DISABLE_VERSION_CHECK": "1", "LLAMAFACTORY_VERBOSITY": "ERROR"}
    sys.path.insert(0, str(folder / "src"))
    from llamafactory.hparams import parser
    from llamafactory.model import adapter
    from llamafactory.model.model_utils import checkpointing, quantization

    on_a_card()
    vars(parser).update(is_torch_bf16_gpu_available=lambda: True, check_version=lambda *_, **__: None)
    vars(quantization).update(check_version=lambda *_, **__: None)

    def own(path: Path, ranks: int | None) -> Facts:
        values, small = yaml.safe_load(path.read_text()), tiny()
        with group(ranks or 1) if ranks != 1 or values.get("deepspeed") else contextlib.nullcontext():
            sys.argv = ["train", str(path), "use_cpu=true"]
            model_args, data, training, tuning, _ = parser.get_train_args()
            from transformers.integrations import is_deepspeed_zero3_enabled

            if not training.do_train:
                raise ValueError("it does not train")
            compute = model_args.compute_dtype or torch.bfloat16
            model = small.to(compute)
            if model_args.quantization_bit is not None:
                given: Values = {}
                quantization.configure_quantization(model.config, None, model_args, True, given)
                model.quantization_method = "bitsandbytes"
            checkpointing.prepare_model_for_training(model, model_args)
            model = adapter.init_adapter(model.config, model, model_args, tuning, True)
            zero3 = is_deepspeed_zero3_enabled()
            plugin = training.deepspeed_plugin
        weights = dtypes(model)
        peft = next(iter(getattr(model, "peft_config", {}).values()), None)
        bits, dropout = model_args.quantization_bit, getattr(peft, "lora_dropout", None)
        stage = tuning.stage
        preferring = stage == "dpo"
        given_kwargs = (training.gradient_checkpointing and values.get("gradient_checkpointing_kwargs")) or {}
        packed = bool(data.packing) and stage in ("pt", "sft")
        others = tuning.use_muon or tuning.use_adam_mini  # optimizers that do not read optim
        spread = ranks != 1 and not (plugin and plugin.zero_stage) and not training.fsdp
        return {
            "micro": training.per_device_train_batch_size, "accumulation": training.gradient_accumulation_steps,
            "ranks": training.world_size, "bf16": training.bf16, "fp16": training.fp16,
            "trained": None if zero3 else weights["trained"], "frozen": None if zero3 else weights["frozen"],
            "layers": weights["layers"], "zero": 0 if plugin is None else plugin.zero_stage,
            "checkpoints": not model_args.disable_gradient_checkpointing or training.gradient_checkpointing,
            "reentrant": given_kwargs.get("use_reentrant", model_args.use_reentrant_gc),
            "optim": "adamw_torch_fused" if others else str(training.optim.value),
            "peft": None if peft is None else str(peft.peft_type.value),
            "r": getattr(peft, "r", None), "alpha": getattr(peft, "lora_alpha", None),
            "dropout": 0.0 if tuning.finetuning_type == "lora" and stage in ("dpo", "kto") else dropout,
            "rslora": bool(getattr(peft, "use_rslora", False)), "dora": bool(getattr(peft, "use_dora", False)),
            "saved": None if peft is None or not peft.modules_to_save else sorted(peft.modules_to_save),
            "target": None if peft is None else tuning.lora_target,
            "bits": bits, "kind": model_args.quantization_type if bits == 4 else None,
            "nested": model_args.double_quantization if bits == 4 else None,
            "length": data.cutoff_len + (packed and stage == "sft"), "packing": packed,
            "apart": data.neat_packing,
            "attention": str(getattr(model_args.flash_attn, "value", model_args.flash_attn)),
            "stage": tuning.pref_loss if preferring and tuning.pref_loss in ("orpo", "simpo") else
            "asft" if tuning.use_asft_loss and stage == "sft" else {"rm": "reward", "pt": "sft"}.get(stage, stage),
            "beta": tuning.pref_beta if stage in ("dpo", "kto") else None,
            "gamma": tuning.simpo_gamma if preferring and tuning.pref_loss == "simpo" else None,
            "evaluates": training.per_device_eval_batch_size if training.do_eval else None,
            "unused": training.ddp_find_unused_parameters if spread else None, "steps": training.max_steps,
            "liger": model_args.enable_liger_kernel,
        }  # fmt: skip

    return own


def our_reading(found: Foreign) -> Facts:
    """The same facts as autofit reads them."""
    values, own = found.values, found.launch.get("deepspeed_config")
    zero_stage = own.get("zero_stage", 0) if isinstance(own, Mapping) else 0
    peft, kwargs = values.get("use_peft"), values.get("gradient_checkpointing_kwargs")
    other = values.get("peft_adapter")
    lora = peft and not other
    dtype, adapters = values.get("dtype"), values.get("adapter_dtype")
    part = values.get("trainable_layers")
    target = values.get("lora_target_modules")
    length = values["max_length"]
    objective = values["objective"]
    quant = values.get("load_in_4bit")
    steps = {"spread": values.get("spread_layers")}
    assert isinstance(length, int)
    return {
        "micro": values["per_device_train_batch_size"], "accumulation": values["gradient_accumulation_steps"],
        "ranks": found.ranks, "bf16": bool(values.get("bf16")), "fp16": bool(values.get("fp16")),
        "trained": None if zero_stage == 3 else adapters or dtype,
        "frozen": None if zero_stage == 3 or not (peft or part) else dtype,
        "layers": _layers(part, bool(steps["spread"])), "zero": zero_stage,
        "checkpoints": values["gradient_checkpointing"],
        "reentrant": kwargs.get("use_reentrant") if isinstance(kwargs, Mapping) else None, "optim": values["optim"],
        "peft": "LORA" if lora else other.get("peft_type") if isinstance(other, Mapping) else None,
        "r": values.get("lora_r") if lora else other.get("r") if isinstance(other, Mapping) else None,
        "alpha": values.get("lora_alpha") if lora else None, "dropout": values.get("lora_dropout") if lora else None,
        "rslora": bool(values.get("use_rslora")), "dora": bool(values.get("use_dora")),
        "saved": in_order(values.get("lora_modules_to_save")),
        "target": ["all"] if target == ["all-linear"] else target,
        "bits": 4 if quant else 8 if values.get("load_in_8bit") else None,
        "kind": values.get("bnb_4bit_quant_type"), "nested": values.get("use_bnb_nested_quant"),
        "length": length, "packing": bool(values.get("packing")), "apart": bool(values.get("block_diagonal")),
        "attention": {"eager": "disabled", "flash_attention_2": "fa2"}.get(
            str(values.get("attn_implementation")), values.get("attn_implementation", "auto")),
        "stage": objective, "beta": values.get("beta") if objective != "asft" else None,
        "gamma": values.get("simpo_gamma"),
        "evaluates": values.get("per_device_eval_batch_size"), 
        "unused": values.get("ddp_find_unused_parameters") 
        if found.ranks != 1 and not found.launch else None,
        "steps": values.get("max_steps", -1), "liger": bool(values.get("use_liger_kernel")),
    }  # fmt: skip


def _layers(part: object, spread: bool) -> tuple[int, ...]:
    """The trained ones of 8 layers."""
    if not isinstance(part, int):
        return tuple(range(8))
    return tuple(range(8 // part - 1, 8, 8 // part)) if spread else tuple(range(max(0, 8 - part), 8))


TOOL = Drawn(axes=AXES, rare=RARE, mistakes=MISTAKES, own=own_reading, ours=our_reading)
