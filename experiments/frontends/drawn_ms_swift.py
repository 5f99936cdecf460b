"""ms-swift's commands as `chance` draws them, its own reading of one, and autofit's in the same facts.

Its own reading is of SftArguments, PretrainArguments or RLHFArguments with the training arguments that they make, and
of its `prepare_model` on a Qwen2 of 8 small layers (ms-swift 3602360a). The ranks are those of the script's variables.
"""

import contextlib
import importlib.metadata
import json
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from autofit.frontends.draft import Foreign
from autofit.frontends.ms_swift import EMBEDDINGS
from experiments.frontends.chance import NO, Drawn, Facts, Values, dtypes, group, in_order, on_a_card, tiny

MODEL = "Qwen/Qwen2.5-0.5B"
AS_IS = "as_is"  # a drawn value: keys of another command stay in
_ONE, _TWO = {"CUDA_VISIBLE_DEVICES": "0"}, {"NPROC_PER_NODE": 2, "CUDA_VISIBLE_DEVICES": "0,1"}
_FOUR = {"NPROC_PER_NODE": 4, "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
AXES: dict[str, tuple[object, ...]] = {
    "command": ("sft", "sft", "sft", "pt", "rlhf", "rlhf", "rlhf", "rlhf"), "model": (MODEL,),
    "ENV": (NO, _ONE, _ONE, _TWO, _FOUR, {"NPROC_PER_NODE": 8}, {"NPROC_PER_NODE": 1},
            {"NPROC_PER_NODE": 8, "NNODES": 2}),
    "dataset": ("AI-ModelScope/alpaca-gpt4-data-zh#500",), "tuner_type": (NO, NO, "lora", "lora", "full", "full"),
    "rlhf_type": ("dpo", "dpo", "grpo", "grpo", "grpo", "kto", "orpo", "simpo", "cpo", "rm", "gkd", NO),
    "torch_dtype": (NO, "bfloat16", "bfloat16", "float16", "float32"),
    "per_device_train_batch_size": (NO, 1, 2, 3, 8), "gradient_accumulation_steps": (NO, NO, 1, 2, 5, 16),
    "per_device_eval_batch_size": (NO, 1, 4, 8), "lora_rank": (NO, 4, 16, 64), "lora_alpha": (NO, NO, 16, 32),
    "lora_dropout": (NO, NO, 0.0, 0.1), "target_modules": (NO, "all-linear", "all-linear", ["q_proj", "v_proj"]),
    "max_length": (NO, 1024, 2048, 1000), "packing": (NO, NO, NO, NO, NO, NO, NO, NO, True, False),
    "attn_impl": (NO, "flash_attn", "flash_attn", "flash_attn", "flash_attention_2", "sdpa", "eager"),
    "padding_free": (NO, NO, NO, NO, NO, NO, NO, NO, NO, True), "use_liger_kernel": (NO, NO, NO, True),
    "gradient_checkpointing": (NO, NO, True, False), "deepspeed": (NO, NO, NO, NO, "zero0", "zero1", "zero2", "zero3",
                                                                   "zero2_offload", "zero3_offload"),
    "optim": (NO, NO, NO, "adamw_torch", "adafactor", "paged_adamw_8bit", "sgd"), "learning_rate": (NO, "1e-4", "1e-5"),
    "num_train_epochs": (NO, 1, 3), "max_steps": (NO, NO, 100), "split_dataset_ratio": (NO, NO, 0.01, 0),
    "eval_strategy": (NO, NO, NO, "steps", "epoch", "no"), "eval_steps": (NO, 50), "save_steps": (NO, 50, 100),
    "save_strategy": (NO, NO, NO, "epoch", "no"), "warmup_ratio": (NO, 0.05), "lr_scheduler_type": (NO, NO, "cosine"),
    "dataloader_num_workers": (NO, 4), "output_dir": (NO, "output"), "logging_steps": (NO, 5),
    "beta": (NO, NO, 0.1, 0.001, 0.0), "num_generations": (NO, 4, 8, 8), "reward_funcs": (["accuracy", "format"],),
    "max_completion_length": (NO, 256, 1024), "use_vllm": (NO, True, True, False),
    "vllm_mode": (NO, "colocate", "colocate"), "vllm_gpu_memory_utilization": (NO, 0.4),
    "vllm_tensor_parallel_size": (NO, NO, 1, 2), "sleep_level": (NO, 0, 1), "num_iterations": (NO, NO, 1, 2),
    "use_logits_to_keep": (NO, NO, False, True), "ddp_find_unused_parameters": (NO, NO, NO, False, True),
}  # fmt: skip
_INLINE = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}, "train_batch_size": "auto",
           "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}  # fmt: skip
RARE: tuple[Values, ...] = (
    {"quant_method": "bnb", "quant_bits": 4}, {"quant_method": "bnb", "quant_bits": 4, "tuner_type": "lora"},
    {"quant_method": "bnb", "quant_bits": 4, "bnb_4bit_use_double_quant": False}, {"quant_bits": 4},
    {"quant_method": "bnb", "quant_bits": 4, "bnb_4bit_quant_type": "fp4"}, {"quant_method": "bnb"},
    {"quant_method": "bnb", "quant_bits": 8, "tuner_type": "lora"}, {"quant_method": "hqq", "quant_bits": 4},
    {"quant_method": "bnb", "quant_bits": 4, "bnb_4bit_quant_storage": "bfloat16", "deepspeed": "zero3"},
    {"quant_method": "bnb", "quant_bits": 4, "bnb_4bit_compute_dtype": "bfloat16"}, {"use_rslora": True},
    {"use_dora": True}, {"use_dora": True, "tuner_type": "lora"}, {"lora_dtype": "bfloat16"}, {"lora_dtype": "float16"},
    {"lora_dtype": "float32", "tuner_type": "lora"}, {"modules_to_save": ["embed_tokens", "lm_head"]},
    {"modules_to_save": "all-embedding"}, {"modules_to_save": ["all-embedding", "all-norm"]}, {"lora_bias": "all"},
    {"target_modules": ["all-linear", "all-embedding"]}, {"target_modules": "all-embedding"},
    {"target_regex": r".*\.(q|v)_proj"}, {"tuner_type": "adalora"}, {"tuner_type": "adalora", "adalora_init_r": 24},
    {"tuner_type": "llamapro"}, {"tuner_type": "llamapro", "llamapro_num_new_blocks": 2}, {"tuner_type": "adapter"},
    {"tuner_type": "adapter", "adapter_length": 64}, {"tuner_type": "longlora"}, {"tuner_type": "vera"},
    {"tuner_type": "bone"}, {"tuner_type": "boft"}, {"tuner_type": "ia3"}, {"freeze_parameters_ratio": 0.5},
    {"tuner_type": "full", "freeze_parameters": ["model.embed_tokens"]}, {"freeze_llm": True}, {"freeze_vit": False},
    {"tuner_type": "full", "freeze_parameters_ratio": 1, "trainable_parameters": "lm_head"}, {"fsdp": "fsdp2"},
    {"fsdp": "fsdp2", "deepspeed": NO}, {"fsdp": "fsdp2", "deepspeed": NO, "gradient_checkpointing": False},
    {"fsdp": "full_shard auto_wrap", "deepspeed": NO}, {"gradient_checkpointing_kwargs": {"use_reentrant": False}},
    {"gradient_checkpointing_kwargs": {"use_reentrant": True}}, {"bf16": True}, {"fp16": True}, {"bf16": False},
    {"fp16": True, "torch_dtype": "float16"}, {"bf16": True, "torch_dtype": "float32"}, {"fp16": False},
    {"bf16": True, "torch_dtype": "float16"}, {"packing": True, "attn_impl": "flash_attn", "padding_free": NO},
    {"packing": True, "attn_impl": "flash_attn", "packing_length": 8192}, {"packing": True, "attn_impl": "sdpa"},
    {"packing": True, "max_length": NO, "attn_impl": "flash_attn"}, {"padding_free": True, "attn_impl": "flash_attn"},
    {"packing": True, "lazy_tokenize": True}, {"streaming": True}, {"streaming": True, "max_steps": 100},
    {"streaming": True, "max_steps": 100, "split_dataset_ratio": 0.1}, {"sequence_parallel_size": 2},
    {"sequence_parallel_size": 2, "ENV": _FOUR, "attn_impl": "flash_attn"}, {"val_dataset": "a"},
    {"val_dataset": "a", "split_dataset_ratio": 0.1}, {"val_dataset": "a", "eval_strategy": "epoch"},
    {"cached_dataset": "a", "dataset": NO}, {"cached_val_dataset": "a"}, {"load_best_model_at_end": True},
    {"load_best_model_at_end": True, "split_dataset_ratio": 0.1}, {"use_galore": True, "tuner_type": "full"},
    {"lisa_activated_layers": 2, "tuner_type": "full"}, {"lisa_activated_layers": 2}, {"neftune_noise_alpha": 5},
    {"enable_dft_loss": True}, {"task_type": "seq_cls", "num_labels": 2}, {"task_type": "seq_cls"}, {"num_labels": 2},
    {"task_type": "embedding", "loss_type": "infonce"}, {"task_type": "embedding"},
    {"task_type": "reranker", "loss_type": "pointwise_reranker"}, {"loss_type": "infonce"}, {"deepspeed": _INLINE},
    {"deepspeed": json.dumps({**_INLINE, "zero_optimization": {"stage": 3}})}, {"zero_hpz_partition_size": 2},
    {"deepspeed": "zero3", "zero_hpz_partition_size": 2}, {"deepspeed_autotp_size": 2, "deepspeed": "zero2"},
    {"ref_model": MODEL}, {"ref_model": MODEL, "tuner_type": "full"}, {"rpo_alpha": 0.1}, {"ld_alpha": 0.5},
    {"teacher_model": "Qwen/Qwen2.5-1.5B"}, {"teacher_model": "Qwen/Qwen2.5-1.5B", "rlhf_type": "gkd", "lmbda": 0},
    {"teacher_model": MODEL, "rlhf_type": "gkd"}, {"rlhf_type": "gkd", "gkd_logits_topk": 64}, {"sft_alpha": 0.1},
    {"rlhf_type": "gkd", "teacher_model": "Qwen/Qwen2.5-1.5B", "teacher_deepspeed": "zero3"}, {"seq_kd": True},
    {"cpo_alpha": 0.5}, {"simpo_gamma": 1.2, "rlhf_type": "simpo"}, {"rlhf_type": "cpo", "loss_type": "simpo"},
    {"rlhf_type": "dpo", "loss_type": "ipo"}, {"rlhf_type": "dpo", "loss_type": ["sigmoid", "bco_pair"]},
    {"rlhf_type": "dpo", "loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
    {"rlhf_type": "kto", "loss_type": "apo_zero_unpaired"}, {"rlhf_type": "grpo", "loss_type": "dr_grpo"},
    {"rlhf_type": "grpo", "loss_type": "cispo"}, {"rlhf_type": "grpo", "loss_type": "dapo", "dynamic_sample": True},
    {"rlhf_type": "grpo", "steps_per_generation": 4}, {"rlhf_type": "grpo", "generation_batch_size": 64},
    {"rlhf_type": "grpo", "steps_per_generation": 4, "generation_batch_size": 64},
    {"rlhf_type": "grpo", "num_generations": 8, "per_device_train_batch_size": 8, "per_device_eval_batch_size": 8},
    {"rlhf_type": "grpo", "num_generations": 8, "per_device_train_batch_size": 8, "eval_strategy": "no"},
    {"rlhf_type": "grpo", "advantage_estimator": "rloo"}, {"rlhf_type": "grpo", "async_generate": True},
    {"rlhf_type": "grpo", "importance_sampling_level": "sequence"}, {"rlhf_type": "grpo", "log_entropy": True},
    {"rlhf_type": "grpo", "use_vllm": True, "vllm_mode": "colocate", "offload_model": True, "offload_optimizer": True},
    {"rlhf_type": "grpo", "use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_len": 4096},
    {"rlhf_type": "grpo", "reward_model": "Qwen/Qwen2.5-1.5B"}, {"rlhf_type": "grpo", "reward_funcs": NO},
    {"rlhf_type": "grpo", "max_new_tokens": 700}, {"rlhf_type": "grpo", "truncation_strategy": "right"},
    {"truncation_strategy": "left"}, {"truncation_strategy": "split"}, {"system": "You are a helpful assistant."},
    {"group_by_length": True}, {"max_grad_norm": 0.5}, {"adam_beta2": 0.999}, {"report_to": "wandb"},
    {"rope_scaling": "yarn", "max_model_len": 65536},
    {"auto_find_batch_size": True}, {"torch_compile": True}, {"optimizer": "muon"}, {"lorap_lr_ratio": 16.0},
    {"init_weights": "pissa", "tuner_type": "lora"}, 
    {"early_stop_interval": 3}, {"metric_for_best_model": "loss"}, {"use_hf": True}, {"add_version": False},
    {"experts_impl": "grouped_mm"}, {"acc_strategy": "seq"}, {"save_only_model": True}, {"save_total_limit": 2},
    {"deepspeed": "zero2", "ENV": {"NPROC_PER_NODE": 1}}, {"deepspeed": "zero0", "ENV": _TWO},
    {"ENV": {"CUDA_VISIBLE_DEVICES": "0,1"}}, {"ENV": {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "NPROC_PER_NODE": 2}},
    {"ENV": {"CUDA_VISIBLE_DEVICES": "0,1", "NPROC_PER_NODE": 4}}, {"ENV": {"NNODES": 2, "NPROC_PER_NODE": 1}},
    {"ENV": {"CUDA_VISIBLE_DEVICES": "0,1,2", "NPROC_PER_NODE": 2}}, {"ENV": {"NNODES": 2}},
)  # fmt: skip
MISTAKES: tuple[Values, ...] = (
    {"lora_r": 8}, {"lora_rank": "eight"}, {"lora_rank": 0}, {"lora_rank": -1}, {"lora_rank": 7.5}, {"lora_alpha": 0},
    {"lora_alpha": 8.5}, {"lora_dropout": 2}, {"lora_dropout": "a"}, {"torch_dtype": "bf16"}, {"torch_dtype": "auto"},
    {"torch_dtype": "int8"}, {"tuner_type": "qlora"}, {"tuner_type": "freeze"}, {"tuner_type": "LoRA"},
    {"per_device_train_batch_size": 0}, {"per_device_train_batch_size": "two"}, {"per_device_train_batch_size": 1.5},
    {"gradient_accumulation_steps": 0}, {"gradient_accumulation_steps": "auto"}, {"max_length": "2k"},
    {"max_length": 1e3}, {"learning_rate": "fast"}, {"quant_bits": 3, "quant_method": "bnb"}, {"load_in_4bit": True},
    {"quant_bits": "four", "quant_method": "bnb"}, {"quant_method": "bitsandbytes", "quant_bits": 4},
    {"quant_method": "awq"}, {"bnb_4bit_quant_type": "int4"}, {"packing": "yes"}, {"packing": "neat"},
    {"gradient_checkpointing": "maybe"}, {"deepspeed": "zero4"}, {"deepspeed": "default-zero3"},
    {"deepspeed": "missing.json"}, {"deepspeed": "ds_z2_config.json"}, {"fsdp": "fsdp3", "deepspeed": NO},
    {"rlhf_type": "ipo"}, {"rlhf_type": "ppo"}, {"rlhf_type": "reward"}, {"rlhf_type": "dpo", "loss_type": "kto_pair"},
    {"rlhf_type": "dpo", "loss_type": "dpo"}, {"rlhf_type": "grpo", "loss_type": "ppo"}, {"beta": "a"},
    {"rlhf_type": "kto", "loss_type": "sigmoid"}, {"rlhf_type": "kto", "loss_type": ["kto", "sigmoid"]},
    {"rlhf_type": "dpo", "loss_weights": [1.0, 2.0]}, {"rlhf_type": "orpo", "ref_model": MODEL},
    {"rlhf_type": "kto", "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "ENV": _ONE},
    {"rlhf_type": "grpo", "num_generations": 1}, {"rlhf_type": "grpo", "num_generations": 7},
    {"rlhf_type": "grpo", "reward_funcs": "my_reward"}, {"rlhf_type": "grpo", "use_vllm": True, "vllm_mode": "remote"},
    {"rlhf_type": "grpo", "use_vllm": True, "vllm_tensor_parallel_size": 3}, {"attn_impl": "fa2"},
    {"rlhf_type": "grpo", "use_vllm": True, "vllm_mode": "server"}, {"attn_impl": "flash-attn"}, {"optim": "adamw"},
    {"rlhf_type": "grpo", "vllm_gpu_memory_utilization": 1.4}, {"optim": "lion"}, {"optim": "adamw_8bit"},
    {"eval_strategy": "always"}, {"save_strategy": "never"}, {"lr_scheduler_type": "cos"}, {"warmup_ratio": 2},
    {"warmup_ratio": 0.1, "warmup_steps": 10}, {"num_train_epochs": "three"}, {"max_steps": "all"}, {"dataset": NO},
    {"model": NO}, {"model_name_or_path": MODEL, "model": NO}, {"model_type": "qwen2"},
    {"template": "qwen"}, {"template": "chatgpt"}, {"task_type": "classification"}, {"task_type": "sft"},
    {"gradient_checkpointing_kwargs": "{use_reentrant: false}"}, {"seed": "a"}, {"split_dataset_ratio": 1.5},
    {"target_modules": "q_proj,v_proj"}, {"target_modules": "ALL"}, {"modules_to_save": "embed"}, {"bf16": "yes"},
    {"sequence_parallel_size": 3}, {"padding_side": "center"}, {"truncation_strategy": "truncate"}, {"num_labels": "a"},
    {"sft_type": "lora"}, {"batch_size": 4}, {"use_flash_attn": True}, {"lora_target_modules": "ALL"},
    {AS_IS: True, "command": "sft", "rlhf_type": "dpo"}, {AS_IS: True, "command": "sft", "beta": 0.1},
    {AS_IS: True, "command": "pt", "use_vllm": True}, {"ENV": {"NPROC_PER_NODE": "two"}}, {"save_steps": 0.1},
    {"rlhf_type": "grpo", "truncation_strategy": "split"}, {"tuner_backend": "swift"}, {"tuner_backend": "unsloth"},
    {"lisa_activated_layers": 2, "tuner_type": "lora"}, {"warmup_steps": 0.1}, {"load_best_model_at_end": True},
)  # fmt: skip
_OF_RLHF = (
    "rlhf_type", "beta", "num_generations", "reward_funcs", "max_completion_length", "use_vllm", "vllm_mode",
    "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "sleep_level", "num_iterations", "ref_model",
    "cpo_alpha", "rpo_alpha", "ld_alpha", "teacher_model", "sft_alpha", "lmbda", "simpo_gamma", "loss_weights",
    "seq_kd", "async_generate", "gkd_logits_topk", "teacher_deepspeed", "steps_per_generation",
    "generation_batch_size", "advantage_estimator", "importance_sampling_level", "log_entropy", "offload_model",
    "offload_optimizer", "vllm_max_model_len", "reward_model", "dynamic_sample",
)  # fmt: skip
_OF_ANSWERS = ("use_vllm", "vllm_mode", "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "sleep_level")


def script(values: Values) -> str:
    """A shell script that starts the training; keys that the drawn command has not are left out."""
    values = dict(values)
    command, environment = values.pop("command"), values.pop("ENV", {})
    as_is = values.pop(AS_IS, False)
    left_out: tuple[str, ...] = () if as_is else _OF_RLHF if command != "rlhf" else ()
    if not as_is and values.get("rlhf_type") not in ("grpo", "gkd"):
        left_out += _OF_ANSWERS
    if not as_is and values.get("rlhf_type") != "grpo":
        left_out += ("reward_funcs", "num_generations", "num_iterations")
    if command == "rlhf" and not values.get("use_vllm") and not as_is:
        left_out += _OF_ANSWERS[1:]
    parts = [f"--{key} {_word(value)}" for key, value in values.items() if key not in left_out]
    lines = [" \\\n    ".join([f"swift {command}", *parts])]
    return "".join(f"export {key}={value}\n" for key, value in environment.items()) + "\n".join(lines) + "\n"


def _word(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(_word, value))
    if isinstance(value, dict):
        return shlex.quote(json.dumps(value))
    return str(value).lower() if isinstance(value, bool) else shlex.quote(str(value))


def _parts(path: Path) -> tuple[dict[str, str], str, list[str]]:
    """(variables, command, arguments) of a drawn script."""
    words = [word for word in shlex.split(path.read_text()) if word != "\n"]
    start = words.index("swift")
    variables = dict(word.split("=", 1) for word in words[:start] if word != "export")
    return variables, words[start + 1], words[start + 2 :]


@contextlib.contextmanager
def _ranks(variables: Mapping[str, str], *, dist: bool) -> Iterator[int]:
    """The ranks that `swift` would start by these variables, as a fake group where there is one (`dist`)."""
    each, nodes = int(variables.get("NPROC_PER_NODE", 1)), int(variables.get("NNODES", 1))
    with group(each * nodes) if dist else contextlib.nullcontext():
        if dist:
            os.environ["LOCAL_WORLD_SIZE"] = str(each)
        kept = dict(os.environ)
        try:
            yield each * nodes
        finally:  # GRPO with vLLM sets some
            os.environ.clear()
            os.environ.update(kept)


def own_reading(folder: Path) -> Callable[[Path, int | None], Facts]:
    """ms-swift's own reading: its arguments, those of its trainer, and a tiny model with what is trained."""
    os.environ["LOG_LEVEL"] = "ERROR"
    sys.path.insert(0, str(folder))
    import swift.arguments.base_args.base_args as base
    import swift.arguments.rlhf_args as rlhf_args
    import swift.arguments.sft_args as sft_args
    import swift.utils
    from swift.arguments import PretrainArguments, RLHFArguments, SftArguments
    from swift.model import model_meta
    from swift.pipelines.train.tuner import TunerMixin
    from swift.trainers import arguments as swift_arguments
    from swift.utils import env, parse_args, torch_utils

    on_a_card()
    model_folder = tempfile.mkdtemp()
    _write_config(Path(model_folder))
    cards = [1]
    for module in (swift.utils, torch_utils, env, sft_args):
        vars(module)["get_device_count"] = lambda: cards[0]
    vars(base)["set_device"] = lambda: None
    vars(model_meta)["safe_snapshot_download"] = lambda *_, **__: model_folder
    vars(swift_arguments)["is_liger_available"] = lambda: True
    real = importlib.metadata.version
    vars(importlib.metadata)["version"] = lambda name: "0.7.0" if name == "liger-kernel" else real(name)
    vars(rlhf_args)["is_master"] = lambda: False
    classes = {"sft": SftArguments, "pt": PretrainArguments, "rlhf": RLHFArguments}

    def own(path: Path, ranks: int | None) -> Facts:
        variables, command, words = _parts(path)
        visible = variables.get("CUDA_VISIBLE_DEVICES")
        cards[0] = len(visible.split(",")) if visible else int(variables.get("NPROC_PER_NODE", 1))
        small, by_torchrun = tiny(), "NPROC_PER_NODE" in variables or "NNODES" in variables
        dist = by_torchrun or "--deepspeed" in words
        with tempfile.TemporaryDirectory() as place, contextlib.chdir(place), _ranks(variables, dist=dist) as ranks:
            args, left = parse_args(classes[command], [*words, "--use_cpu", "true"])
            if left and not args.ignore_args_error:
                raise ValueError(f"remaining_argv: {left}")
            if env.is_mp():
                raise ValueError("the model is split over cards (device_map)")
            args.training_args.training_steps = 100
            model = small.to(args.torch_dtype)
            model.model_meta, model.model_info = args.model_meta, args.model_info
            model = TunerMixin.prepare_model(args, model, train_dataset=range(1000))
            return _facts(args, args.training_args, model, ranks)

    return own


def _write_config(folder: Path) -> None:
    """The config of Qwen/Qwen2.5-0.5B."""
    config = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864,
        "max_position_embeddings": 32768, "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16", "vocab_size": 151936,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def _facts(args: Any, training: Any, model: Any, ranks: int) -> Facts:
    from swift.utils import is_dist

    weights = dtypes(model)
    peft: Any = next(iter(getattr(model, "peft_config", {}).values()), None)
    if peft is not None and not hasattr(peft, "peft_type"):
        peft = None
    plugin: Any = training.deepspeed_plugin if training.deepspeed else None
    kind = getattr(args, "rlhf_type", None) or ("sft" if args.task_type == "causal_lm" else args.task_type)
    kwargs = training.gradient_checkpointing_kwargs or {}
    reentrant = kwargs.get("use_reentrant")
    if reentrant is None:  # mixin.py, _fix_gradient_checkpointing
        reentrant = not (is_dist() and plugin is None and not training.fsdp)
    answers = kind == "grpo"
    length = args.packing_length if args.packing else args.max_length
    if kind == "gkd" and args.lmbda and length != _LIMIT:
        length += args.max_completion_length
    vllm = answers and args.use_vllm
    quant = args.get_quantization_config()
    bits = None if quant is None else 4 if quant.load_in_4bit else 8
    evaluates = (
        args._val_dataset_exists and str(getattr(training.eval_strategy, "value", training.eval_strategy)) != "no"
    )
    no_dropout = getattr(training, "disable_dropout", False) or kind == "kto"
    zero = 0 if plugin is None else plugin.zero_stage
    lora = peft is not None and peft.peft_type.value == "LORA"
    return {
        "kind": kind,
        "micro": training.per_device_train_batch_size,
        "accumulation": training.gradient_accumulation_steps,
        "ranks": ranks,
        "bf16": bool(training.bf16),
        "fp16": bool(training.fp16),
        "trained": weights["trained"],
        "frozen": weights["frozen"] if args.tuner_type != "full" else None,
        "zero": zero,
        "fsdp": bool(training.fsdp),
        "checkpoints": bool(training.gradient_checkpointing),
        "reentrant": reentrant if training.gradient_checkpointing else None,
        "optim": str(training.optim.value),
        "peft": None if peft is None else peft.peft_type.value,
        "r": peft.r if lora else None,
        "alpha": peft.lora_alpha if lora else None,
        "dropout": None if not lora else 0.0 if no_dropout else peft.lora_dropout,
        "rslora": bool(lora and peft.use_rslora),
        "dora": bool(lora and peft.use_dora),
        "target": in_order(sorted(_named(model))) if lora else None,
        "saved": sorted(set(peft.modules_to_save or ()) - _HEADS) or None if lora else None,
        "bits": bits,
        "quant": quant.bnb_4bit_quant_type if bits == 4 else None,
        "nested": quant.bnb_4bit_use_double_quant if bits == 4 else None,
        "length": None if answers or length == _LIMIT else length,
        "packing": bool(args.packing),
        "attention": {"flash_attn": "flash_attention_2"}.get(args.attn_impl, args.attn_impl),
        "beta": getattr(training, "beta", None),
        "evaluates": training.per_device_eval_batch_size if evaluates and not answers else None,
        "liger": bool(training.use_liger_kernel),
        "steps": training.max_steps,
        "generations": training.num_generations if answers else None,
        "steps_per_generation": training.steps_per_generation if answers else None,
        "completion": training.max_completion_length if answers else None,
        "iterations": training.num_iterations if answers else None,
        "vllm": args.vllm_mode if vllm else None,
        "share": args.vllm_gpu_memory_utilization if vllm and args.vllm_mode == "colocate" else None,
        "tensor_parallel": args.vllm_tensor_parallel_size if vllm and args.vllm_mode == "colocate" else None,
        "sleeps": args.sleep_level > 0 if vllm and args.vllm_mode == "colocate" else None,
        "loss": args.loss_type if answers else None,
        "nll": {"orpo": 1.0, "cpo": getattr(training, "cpo_alpha", None)}.get(kind),
        "seq": args.sequence_parallel_size,
        "unused": training.ddp_find_unused_parameters if ranks > 1 and plugin is None and not training.fsdp else None,
        "offloads": None if zero == 0 else _offloads(plugin.deepspeed_config["zero_optimization"], "{}", "device"),
        "engine_length": args.vllm_max_model_len if vllm else None,
        "teacher": args.teacher_model is not None if kind == "gkd" else False,
        "labels": args.num_labels if kind == "seq_cls" else None,
    }


def _offloads(zero: Mapping[str, Any], key: str, *inner: str) -> list[str]:
    """What is held on the host, `optimizer` or `param`; a device is under `key` with its part in it, and `inner`."""
    found = {part: zero.get(key.format(f"offload_{part}")) for part in ("optimizer", "param")}
    devices = {part: value.get(inner[0]) if inner and value else value for part, value in found.items()}
    return [part for part, device in devices.items() if str(device or "none") != "none"]


_HEADS = {"v_head", "classifier", "score"}  # of a model for scores, which PEFT saves by itself
_LIMIT = 32768  # tokens that the model takes


def _named(model: Any) -> set[str]:
    """The last names of the modules with a LoRA."""
    return {name.rpartition(".")[2] for name, module in model.named_modules() if hasattr(module, "lora_A")}


_LINEAR = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
_MODULES = ("model.embed_tokens", *(f"model.layers.0.self_attn.{each}" for each in _LINEAR), "lm_head")
_KINDS = {"reward": "rm", "classify": "seq_cls", "embed": "embedding", "rerank": "reranker", "simpo": "cpo"}


_OWN_LIMIT = "ms-swift takes the model's own limit"


def _matched(target: list[str]) -> set[str]:
    """The last names of the modules that PEFT gives adapters; TRL makes text of a list of one."""
    if target == ["all-linear"]:
        return set(_LINEAR)
    if len(target) == 1:
        found = [name for name in _MODULES if re.fullmatch(target[0], name)]
    else:
        found = [name for name in _MODULES if name.endswith(tuple(f".{each}" for each in target)) or name in target]
    return {name.rpartition(".")[2] for name in found}


def our_reading(found: Foreign) -> Facts:
    """The same facts as autofit reads them."""
    values, zero = found.values, found.launch.get("deepspeed_config")
    answers = found.trainer == "grpo"
    kind = "grpo" if answers else str(values["objective"])
    peft, other = bool(values.get("use_peft")), values.get("peft_adapter")
    lora = peft and not other
    trains_part = peft or bool(values.get("bottleneck") or values.get("reft_rank") or values.get("added_layers"))
    dtype = values.get("dtype")
    own = values.get("adapter_dtype") or "float32"
    target = values.get("lora_target_modules")
    names = _matched(target) if isinstance(target, list) else None
    kwargs = values.get("gradient_checkpointing_kwargs")
    vllm = values.get("use_vllm")
    micro, accumulation = values["per_device_train_batch_size"], values["gradient_accumulation_steps"]
    ranks = found.ranks or 1
    assert isinstance(micro, int)
    per_generation = values.get("steps_per_generation")
    if per_generation is None and (batch := values.get("generation_batch_size")):
        assert isinstance(batch, int)
        per_generation = batch // (micro * ranks)
    colocate = vllm and values.get("vllm_mode") == "colocate"
    saved = values.get("lora_modules_to_save")
    if isinstance(saved, list) and set(EMBEDDINGS) <= set(saved):
        saved = sorted({*saved, "embed_tokens"} - {*EMBEDDINGS[1:]})
    pairs = any("simulated as one pair" in note for note in found.notes)
    seq = values.get("sequence_parallel_size", 1)
    if any(note.startswith("sequence_parallel_size: a rank computes") for note in found.notes):
        seq, micro = 2, 2 * micro
    length = values.get("max_length", 0)
    assert isinstance(length, int)
    known = not answers and not any(_OWN_LIMIT in note for note in found.notes)
    return {
        "kind": _KINDS.get(kind, kind),
        "micro": micro,
        "accumulation": accumulation,
        "ranks": ranks,
        "bf16": bool(values.get("bf16")),
        "fp16": bool(values.get("fp16")),
        "trained": values.get("adapter_dtype", dtype) if values.get("added_layers") else own if trains_part else dtype,
        "frozen": dtype if trains_part else None,
        "zero": zero.get("zero_stage", 0) if isinstance(zero, Mapping) else 0,
        "fsdp": "fsdp_config" in found.launch,
        "checkpoints": values["gradient_checkpointing"],
        "reentrant": kwargs.get("use_reentrant")
        if isinstance(kwargs, Mapping) and values["gradient_checkpointing"]
        else None,
        "optim": values["optim"],
        "peft": "LORA" if lora else other.get("peft_type") if isinstance(other, Mapping) else None,
        "r": values.get("lora_r") if lora else None,
        "alpha": values.get("lora_alpha") if lora else None,
        "dropout": values.get("lora_dropout") if lora else None,
        "rslora": bool(values.get("use_rslora")),
        "dora": bool(values.get("use_dora")),
        "target": sorted(names) if lora and names else None,
        "saved": in_order(saved) if lora else None,
        "bits": 4 if values.get("load_in_4bit") else 8 if values.get("load_in_8bit") else None,
        "quant": values.get("bnb_4bit_quant_type"),
        "nested": values.get("use_bnb_nested_quant"),
        "length": (2 * length if pairs else length) if known else None,
        "packing": bool(values.get("packing")) or pairs,
        "attention": values.get("attn_implementation"),
        "beta": values.get("beta"),
        "evaluates": values.get("per_device_eval_batch_size"),
        "liger": bool(values.get("use_liger_kernel")),
        "steps": values.get("max_steps", -1),
        "generations": values.get("num_generations") if answers else None,
        "steps_per_generation": (per_generation or accumulation) if answers else None,
        "completion": values.get("max_completion_length") if answers else None,
        "iterations": values.get("num_iterations", 1) if answers else None,
        "vllm": values.get("vllm_mode") if vllm else None,
        "share": values.get("vllm_gpu_memory_utilization") if colocate else None,
        "tensor_parallel": values.get("vllm_tensor_parallel_size") if colocate else None,
        "sleeps": values.get("vllm_enable_sleep_mode") if colocate else None,
        "loss": values.get("loss_type") if answers else None,
        "nll": values.get("nll_weight"),
        "seq": seq,
        "unused": values.get("ddp_find_unused_parameters"),
        "offloads": _offloads(zero, "{}_device") if isinstance(zero, Mapping) else None,
        "engine_length": values.get("vllm_max_model_length"),
        "teacher": values.get("teacher_model_name_or_path") is not None,
        "labels": values.get("num_labels"),
    }


TOOL = Drawn(
    axes=AXES, rare=RARE, mistakes=MISTAKES, own=own_reading, ours=our_reading, text=script, ending=".sh", ranks=(None,)
)  # fmt: skip
