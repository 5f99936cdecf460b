"""Axolotl's YAMLs drawn by chance, and its own reading: its schema, its training arguments, a tiny model's adapter.

What Axolotl imports and a reading does not use (kernels, loggers) is stood in for while it is imported.
"""

import contextlib
import importlib.abc
import importlib.machinery
import math
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import yaml

from autofit.frontends.draft import Foreign
from experiments.frontends.chance import (
    NO,
    Drawn,
    Facts,
    Values,
    dtypes,
    group,
    in_order,
    on_a_card,
    tiny,
    zero,
)

_LIGER = "axolotl.integrations.liger.LigerPlugin"
_CCE = "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"
_ABSENT = ("triton", "posthog", "evaluate", "fastcore", "numba", "colorama", "wandb", "torchao", "schedulefree",
           "trl.experimental.prm")  # fmt: skip


def fsdp(version: int, **more: object) -> Values:
    """Settings of FSDP as Axolotl's examples write them, or old ones with `fsdp`."""
    config = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": "Qwen2DecoderLayer",
              "state_dict_type": "FULL_STATE_DICT"}  # fmt: skip
    return {"fsdp_version": version, "fsdp_config": {**config, **more}, "deepspeed": NO}


_SETS: list[Values] = [{"path": "tatsu-lab/alpaca", "type": "alpaca"}]
_DPO: list[Values] = [{"path": "Intel/orca_dpo_pairs", "type": "chatml.intel", "split": "train"}]
_LORA: Values = {"adapter": "lora", "lora_r": 16, "lora_alpha": 32, "lora_target_linear": True, "load_in_4bit": NO}
_QLORA: Values = {**_LORA, "adapter": "qlora", "load_in_4bit": True, "load_in_8bit": NO}
_FULL: Values = {"adapter": NO, "load_in_4bit": NO, "load_in_8bit": NO}
_RL: Values = {"sample_packing": NO, "datasets": _DPO, "remove_unused_columns": False}
_GRPO: Values = {**_RL, "rl": "grpo", "datasets": _SETS, "micro_batch_size": 8,
                 "trl": {"num_generations": 4, "max_completion_length": 256,
                  "reward_funcs": ["rewards.one"]}}  # fmt: skip

AXES: dict[str, tuple[object, ...]] = {
    "base_model": ("Qwen/Qwen2.5-0.5B",), "datasets": (_SETS,), "output_dir": ("out",),
    "learning_rate": (2e-4, "2e-5", 1e-5), "micro_batch_size": (1, 2, 4, 8),
    "gradient_accumulation_steps": (1, 2, 4, 16), "num_epochs": (1, 3, NO),
    "adapter": (NO, "lora", "lora"), "lora_r": (8, 16, 64), "lora_alpha": (16, 32),
    "lora_dropout": (NO, 0, 0.05), "lora_target_linear": (True, True, NO),
    "lora_target_modules": (["q_proj", "v_proj"], ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj"], NO),
    "load_in_4bit": (NO, NO, False), "load_in_8bit": (NO, NO, False),
    "sequence_len": (1024, 2048, 1000, NO), "sample_packing": (NO, True, True, False),
    "pad_to_sequence_len": (NO, NO, True, False), "eval_sample_packing": (NO, NO, False),
    "bf16": ("auto", True, True, NO, False), "tf32": (NO, False, True), "fp16": (NO, NO, NO, False),
    "gradient_checkpointing": (True, True, NO, False, "offload"),
    "gradient_checkpointing_kwargs": (NO, NO, NO, {"use_reentrant": True}, {"use_reentrant": False}),
    "attn_implementation": (NO, NO, "flash_attention_2", "sdpa", "eager"),
    "flash_attention": (NO, NO, NO, False), "val_set_size": (NO, 0.05, 0.05, 0.1),
    "evals_per_epoch": (NO, NO, 4, 1), "eval_steps": (NO, NO, NO, NO, NO, 50), "saves_per_epoch": (NO, 1, 4),
    "optimizer": ("adamw_torch_fused", "adamw_torch_fused", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_8bit", NO),
    "lr_scheduler": ("cosine", "linear", NO), "warmup_ratio": (NO, 0.1), "weight_decay": (0.0, 0.01, NO),
    "deepspeed": (NO, NO, NO, NO, zero(1), zero(2), zero(3), zero(3, ("offload_optimizer", "offload_param"))),
    "max_steps": (NO, NO, NO, 100), "eval_batch_size": (NO, NO, 1, 4), "special_tokens": (NO, {"pad_token": "<pad>"}),
    "ddp_find_unused_parameters": (NO, NO, NO, True, False),
}  # fmt: skip
RARE: tuple[Values, ...] = (
    fsdp(2), fsdp(2, offload_params=True), fsdp(2, reshard_after_forward=True), fsdp(1), fsdp(1, offload_params=True),
    {**fsdp(2), **_QLORA}, {**fsdp(1), **_QLORA}, {**fsdp(2), **_LORA}, {**fsdp(2), "optimizer": "adamw_torch_8bit"},
    {**fsdp(2, activation_checkpointing=True), "gradient_checkpointing": NO}, {**fsdp(2), "bf16": True, **_FULL},
    {**fsdp(1), "fsdp": ["full_shard", "auto_wrap"], "fsdp_version": NO}, {"fsdp": ["full_shard"], "deepspeed": NO},
    {"fsdp_config": {"fsdp_offload_params": True, "fsdp_version": 2,
                     "fsdp_transformer_layer_cls_to_wrap": "Qwen2DecoderLayer"}, "deepspeed": NO},
    {"load_in_4bit": True}, {"load_in_8bit": True}, {"load_in_4bit": True, "load_in_8bit": True}, {"val_set_size": 0},
    _QLORA, _QLORA, _QLORA, _QLORA, {**_QLORA, "fp16": True, "bf16": NO}, {**_QLORA,
     "bnb_config_kwargs": {"bnb_4bit_use_double_quant": False}}, {**_QLORA, "deepspeed": zero(3)},
    {**_QLORA, "bf16": False, "fp16": True}, {**_LORA, "load_in_8bit": True}, _LORA, _FULL, {**_LORA, "lora_r": NO},
    {**_LORA, "peft_use_dora": True}, {**_LORA, "peft_use_rslora": True}, {**_LORA,
     "lora_modules_to_save": ["lm_head"]},
    {**_LORA, "lora_modules_to_save": ["embed_tokens", "lm_head"]}, {**_LORA, "load_in_4bit": True},
    {**_LORA, "lora_target_linear": NO, "lora_target_modules": "all-linear"}, {**_LORA, "lora_on_cpu": True},
    {**_LORA, "lora_target_linear": NO, "lora_target_modules": NO}, {**_LORA, "lora_alpha": NO},
    {**_LORA, "lora_mlp_kernel": True, "lora_qkv_kernel": True, "lora_o_kernel": True}, {"lora_mlp_kernel": True},
    {**_LORA, "lora_mlp_kernel": True, "load_in_8bit": True}, {**_LORA, "peft_autocast_adapter_dtype": False},
    {**_LORA, "peft_layers_to_transform": [0, 1, 2]}, {**_LORA, "loraplus_lr_ratio": 16}, {**_LORA, "relora": True},
    {"batch_size": 16, "gradient_accumulation_steps": NO}, {"batch_size": 12, "gradient_accumulation_steps": NO},
    {"batch_size": 2, "gradient_accumulation_steps": NO}, {"micro_batch_size": NO}, {"gradient_accumulation_steps": NO},
    {"batch_size": 16}, {"batch_size": 16, "micro_batch_size": NO, "gradient_accumulation_steps": NO},
    {"pad_to_multiple_of": 128}, {"pad_to_multiple_of": 16, "sample_packing": True}, {"sequence_len": 8192},
    {"plugins": [_CCE]}, {"plugins": [_CCE], "cut_cross_entropy": True}, {"cut_cross_entropy": True},
    {"plugins": [_LIGER], "liger_fused_linear_cross_entropy": True, "liger_rms_norm": True},
    {"plugins": [_LIGER, _CCE], "liger_fused_linear_cross_entropy": True, "cut_cross_entropy": True},
    {"liger_fused_linear_cross_entropy": True}, {"chunked_cross_entropy": True},
    {"plugins": [_LIGER], "liger_cross_entropy": True, "liger_fused_linear_cross_entropy": True},
    {"bf16": "full"}, {"bf16": NO, "fp16": True}, {"bf16": False, "fp16": True}, {"bf16": True, "fp16": True},
    {"bf16": False, "float16": True}, {"bf16": False, "bfloat16": True}, {"float32": True}, {"bf16": False, **_FULL},
    {"activation_offloading": True}, {"activation_offloading": True, "gradient_checkpointing": True},
    {"activation_offloading": "legacy", "gradient_checkpointing": True}, {"layer_offloading": True},
    {"activation_offloading": "hidden_states", "gradient_checkpointing": True}, {"selective_checkpointing": True},
    {"unfrozen_parameters": ["lm_head"], **_FULL},
    {"unfrozen_parameters": ["layers.7"], **_FULL, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    {"neftune_noise_alpha": 5}, {"group_by_length": True}, {"torch_compile": True}, {"auto_find_batch_size": True},
    {"optimizer": "muon"}, {"optimizer": "adafactor"}, {"optimizer": "sgd"}, {"optimizer": "ao_adamw_4bit"},
    {"optimizer": "muon", "deepspeed": zero(2)}, {"optimizer": "lion_8bit"}, {"optimizer": "galore_adamw"},
    {"optimizer": "adamw_torch_4bit"}, {"optimizer": "adamw_torch_8bit"}, {"optimizer": "adopt_adamw"},
    {"eval_strategy": "epoch", "eval_steps": NO, "evals_per_epoch": NO, "val_set_size": 0.1},
    {"evaluation_strategy": "steps", "eval_steps": 20, "evals_per_epoch": NO, "val_set_size": 0.1},
    {"test_datasets": _SETS, "val_set_size": 0, "evals_per_epoch": 2, "eval_steps": NO}, {"test_datasets": _SETS},
    {"pretraining_dataset": _SETS, "datasets": NO}, {"pretraining_dataset": _SETS, "datasets": NO, "max_steps": 100},
    {"streaming": True, "max_steps": 100, "val_set_size": NO}, {"streaming": True}, {"eval_table_size": 5},
    {"rl": "dpo", **_RL}, {"rl": "dpo", **_RL, **_LORA}, {"rl": "dpo", **_RL, **_FULL}, {"rl": "dpo"},
    {"rl": "dpo", **_RL, "dpo_loss_type": ["sigmoid", "sft"], "dpo_loss_weights": [1.0, 0.5]},
    {"rl": "dpo", **_RL, "rl_beta": 0.3, **_LORA}, {"rl": "ipo", **_RL, **_LORA}, {"rl": "orpo", **_RL, **_LORA},
    {"rl": "orpo", **_RL, "orpo_alpha": 0.2}, {"rl": "kto", **_RL, **_LORA}, {"rl": "kto", **_RL, **_QLORA},
    {"rl": "kto", **_RL, "remove_unused_columns": NO}, {"rl": "simpo", **_RL, "warmup_ratio": NO},
    {"rl": "simpo", **_RL}, {"rl": "simpo", **_RL, "simpo_gamma": 0.9, "cpo_alpha": 0.1, "warmup_ratio": NO, **_LORA},
    {"rl": "dpo", **_RL, **_QLORA, "deepspeed": zero(2)}, {"rl": "dpo", **_RL, **_QLORA, **fsdp(2)},
    {"rl": "dpo", **_RL, "pad_to_multiple_of": 64}, {"rl": "dpo", **_RL, "precompute_ref_log_probs": True},
    _GRPO, {**_GRPO, **_LORA}, {**_GRPO, "micro_batch_size": 1, "gradient_accumulation_steps": 1}, {"rl": "grpo"},
    {**_GRPO, "trl": {"num_generations": 1, "reward_funcs": ["rewards.one"]}}, {**_GRPO, "trl": {"beta": 0.1}},
    {**_GRPO, "trl": {"num_generations": 4, "beta": 0.04, "loss_type": "dr_grpo", "reward_funcs": ["rewards.one"]}},
    {**_GRPO, "trl": {"num_generations": 3, "reward_funcs": ["rewards.one"]}}, {**_GRPO, "rl": "gdpo"},
    {**_GRPO, "trl": {"num_generations": 4, "generation_batch_size": 24, "reward_funcs": ["rewards.one"]}},
    {"reward_model": True, "sample_packing": NO}, {"reward_model": True, "sample_packing": NO, "num_labels": 1},
    {"reward_model": True, "rl": "dpo"}, {"context_parallel_size": 2}, {"tensor_parallel_size": 2},
    {"flash_attention": True, "attn_implementation": "flash_attention_2"}, {"sdp_attention": True},
    {"flash_attention": True, "attn_implementation": NO}, {"flash_attention": True, "attn_implementation": NO, **_FULL},
    {"sdp_attention": True, "attn_implementation": NO}, {"eager_attention": True, "attn_implementation": NO},
    {"xformers_attention": True, "attn_implementation": NO}, {"flex_attention": True, "attn_implementation": NO},
    {"lora_target_parameters": ["mlp.experts.gate_up_proj"], **_LORA}, {"trust_remote_code": True},
    {"qat": {"weight_dtype": "int4", "activation_dtype": "int8"}, **_FULL},
    {"lora_model_dir": "out"}, {"early_stopping_patience": 3}, {"save_strategy": "best"}, {"save_steps": 100},
    {"load_best_model_at_end": True}, {"lisa_n_layers": 2, "lisa_step_interval": 20},
    {"embeddings_skip_upcast": True}, {"multipack_real_batches": True, "sample_packing": True},
)  # fmt: skip
MISTAKES: tuple[Values, ...] = (
    {"adapter": "dora"}, {"adapter": "loras"}, {"adapter": "full"}, {"adapter": ""}, {"adapter": True},
    {"micro_batch_size": "two"}, {"micro_batch_size": 0}, {"micro_batch_size": 1.5}, {"micro_batch_size": "4"},
    {"micro_batch_size": 2.0}, {"gradient_accumulation_steps": 0}, {"gradient_accumulation_steps": "auto"},
    {"gradient_accumulation_steps": -1}, {"micro_batch_size": -2}, {"micro_batch_size": True},
    {"lora_r": 0, **{k: v for k, v in _LORA.items() if k != "lora_r"}}, {**_LORA, "lora_r": -8}, {**_LORA,
     "lora_r": "16"},
    {**_LORA, "lora_r": 7.5}, {**_LORA, "lora_alpha": 0}, {**_LORA, "lora_alpha": 8.5}, {**_LORA, "lora_dropout": 2},
    {**_LORA, "lora_dropout": "a"}, {**_LORA, "lora_target_modules": "q_proj,v_proj", "lora_target_linear": NO},
    {**_LORA, "lora_target_modules": ["no_such"], "lora_target_linear": NO}, {**_LORA, "lora_target_linear": "all"},
    {**_LORA, "lora_modules_to_save": "lm_head"}, {**_LORA, "peft_use_dora": "maybe"},
    {"sequence_len": "2k"}, {"sequence_len": 0}, {"sequence_len": 1e3}, {"sequence_len": "2048"}, {"sequence_len": 1.5},
    {"sequence_len": -1}, {"bf16": 1}, {"bf16": "true"}, {"bf16": "yes"}, {"bf16": "bfloat16"}, {"fp16": "auto"},
    {"load_in_4bit": "true"}, {"load_in_4bit": "maybe"}, {"load_in_8bit": True, "load_in_4bit": True},
    {**_QLORA, "load_in_4bit": False}, {**_QLORA, "load_in_8bit": True, "load_in_4bit": True},
    {**_QLORA, "load_in_4bit": NO},
    {"gradient_checkpointing": "unsloth"}, {"gradient_checkpointing": "true"}, {"gradient_checkpointing": 1},
    {"gradient_checkpointing_kwargs": "no"}, {"gradient_checkpointing": "disk"},
    {"gradient_checkpointing": "offload_disk"},
    {"activation_offloading": "yes"}, {"activation_offloading": "cpu"}, {"activation_offloading": True,
     "gradient_checkpointing": False},
    {"attn_implementation": "flash", "flash_attention": NO}, {"attn_implementation": "fa2", "flash_attention": NO},
    {"attn_implementation": True, "flash_attention": NO}, {"flash_attention": "yes", "attn_implementation": NO},
    {"attn_implementation": "flash_attention_4", "flash_attention": NO}, {"attention": "flash"},
    {"optimizer": "adamw"}, {"optimizer": "adam"}, {"optimizer": "adamw_hf"}, {"optimizer": "Lion"},
    {"optimizer": ["a"]},
    {"learning_rate": "a"}, {"learning_rate": NO}, {"learning_rate": -1}, {"weight_decay": "a"}, {"max_grad_norm": "a"},
    {"num_epochs": "three"}, {"num_epochs": 0}, {"max_steps": "all"}, {"max_steps": 0}, {"lr_scheduler": "cos"},
    {"val_set_size": 1.5}, {"val_set_size": "a"}, {"val_set_size": 100}, {"val_set_size": -1}, {"eval_steps": "a"},
    {"evals_per_epoch": 4, "eval_steps": 50}, {"evals_per_epoch": 4, "eval_strategy": "epoch"},
    {"eval_strategy": "always"},
    {"eval_strategy": "epoch", "val_set_size": 0}, {"eval_steps": 10, "val_set_size": 0}, {"eval_batch_size": 0},
    {"eval_batch_size": "a"}, {"saves_per_epoch": 1, "save_steps": 10}, {"save_strategy": "epoch", "save_steps": 10},
    {"sample_packing": "maybe"}, {"sample_packing": "true"}, {"pad_to_sequence_len": "max"}, {"pad_to_multiple_of": 0},
    {"deepspeed": "missing.json"}, {"deepspeed": zero(4)}, {"deepspeed": zero(2), "fsdp": ["full_shard"]},
    {"deepspeed": zero(2), "fsdp_config": {"offload_params": True}},
    {"deepspeed": zero(2, train_micro_batch_size_per_gpu=64)}, {"deepspeed": zero(2, gradient_accumulation_steps=3)},
    fsdp(3), {**fsdp(2), "optimizer": "adamw_bnb_8bit"}, {**fsdp(2), "optimizer": "adamw_8bit"},
    {**fsdp(1, offload_params=True), "optimizer": "adamw_bnb_8bit"}, {**fsdp(2), "fsdp_version": "2"},
    fsdp(2, auto_wrap_policy="LAYERS"), fsdp(2, state_dict_type="ALL"), {"fsdp": "full_shard auto_wrap",
     "deepspeed": NO},
    {**fsdp(1), "fp32_norms": True}, {**fsdp(2), "fp32_norms": True}, {"fp32_norms": True},
    {"rl": "ppo"}, {"rl": "DPO"}, {"rl": True}, {"rl": "dpo", **_RL, "sample_packing": True}, {"rl": "rloo"},
    {**_RL, "rl": "dpo", "dpo_loss_weights": [1.0]}, {"dpo_loss_type": ["sigmoid"]}, {**_RL, "rl": "dpo",
     "rl_beta": "a"},
    {"datasets": NO}, {"datasets": []}, {"datasets": "alpaca"}, {"datasets": _SETS[0]}, {"base_model": NO},
    {"datasets": [{"path": "a", "type": "sharegpt"}]}, {"datasets": [{"type": "alpaca"}]}, {"base_model": 7},
    {"warmup_steps": 10, "warmup_ratio": 0.1}, {"warmup_steps": "a"}, {"warmup_ratio": 2}, {"seed": "a"},
    {"neftune_noise_alpha": 0}, {"neftune_noise_alpha": -1}, {"noisy_embedding_alpha": 5},
    {"max_packed_sequence_len": 10},
    {"lora_targets": ["q_proj"]}, {"microbatch_size": 2}, {"num_train_epochs": 3}, {"per_device_train_batch_size": 2},
    {"output_dir": NO}, {"chat_template": "llama"}, {"chat_template": "jinja"}, {"unsloth_lora_mlp": True},
    {"plugins": "liger"}, {"plugins": ["liger"]}, {"plugins": ["axolotl.integrations.no.Plugin"]},
    {"early_stopping_patience": 3},
    {"do_bench_eval": True}, {"flash_attn_fuse_mlp": True}, {"relora": True}, {"relora_steps": 100}, {"gc_steps": 10},
    {"s2_attention": True}, {"type_of_model": "NoSuchModel"}, {"model_type": "LlamaForCausalLM"},
    {"tokenizer_type": "X"},
    {"context_parallel_size": 3}, {"sequence_parallel_degree": 2}, {"load_best_model_at_end": True},
    {"use_wandb": "yes"},
)  # fmt: skip


class _Taken(Exception):
    """The training arguments of Axolotl's builder and those of its collator."""


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Colours(name, (), {}) if name[0].isupper() else MagicMock(name=name)


class _Colours(type):
    """A class whose attributes are empty texts, as those of colorama's colours may be."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("_"):
            raise AttributeError(name)
        return ""


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules that are not here, as names without effect."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if any(name == absent or name.startswith(f"{absent}.") for absent in _ABSENT):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def own_reading(folder: Path) -> Callable[[Path, int | None], Facts]:
    """Axolotl's own reading: its schema, its training arguments, and a tiny model with its adapter."""
    import peft
    import transformers
    import trl  # noqa: F401  (before the stand-ins, which it would look for)

    sys.path.insert(0, str(folder / "src"))
    finder = _Finder()
    sys.meta_path.append(finder)
    from axolotl.core.builders import HFCausalTrainerBuilder, HFRLTrainerBuilder, causal
    from axolotl.integrations.base import PluginManager
    from axolotl.loaders import model as loader
    from axolotl.utils import config as configs
    from axolotl.utils import distributed
    from axolotl.utils import trainer as trainers
    from axolotl.utils.dict import DictDefault

    sys.meta_path.remove(finder)
    on_a_card()
    small = tiny().config
    transformers.AutoConfig.from_pretrained = classmethod(lambda *_, **__: small)
    vars(configs).update(is_torch_bf16_gpu_available=lambda: True)
    vars(trainers).update(check_cuda_p2p_ib_support=lambda: True)
    vars(causal).update(get_chat_template_from_config=lambda **_: "")
    from axolotl.loaders.patch_manager import PatchManager

    PatchManager.apply_pre_config_load_patches = staticmethod(lambda cfg: None)

    def arguments(cfg: Any, model: Any) -> tuple[Any, Values]:
        made = HFRLTrainerBuilder if cfg.rl else HFCausalTrainerBuilder
        builder = object.__new__(made)
        evaluates = bool(cfg.val_set_size or cfg.test_datasets)
        based = builder._set_base_training_args

        def on_the_cpu(total_num_steps: int) -> tuple[Values, Values]:
            kwargs, others = based(total_num_steps)
            return {**kwargs, "use_cpu": True}, others

        vars(builder).update(
            _set_base_training_args=on_the_cpu,
            cfg=cfg,
            model=model,
            tokenizer=MagicMock(),
            processor=None,
            _eval_dataset=evaluates,
        )
        if cfg.rl:
            return builder._build_training_arguments(1000)[0], {}

        def collator(args: Any, is_eval: bool = False, **kwargs: Any) -> None:
            raise _Taken(args, kwargs)

        builder.build_collator = collator
        try:
            builder.build(1000)
        except _Taken as taken:
            return taken.args
        raise AssertionError("no collator")

    def own(path: Path, ranks: int | None) -> Facts:
        assert ranks is not None
        PluginManager.get_instance().plugins.clear()
        vars(distributed).update(distributed_state=None)
        cfg = DictDefault(yaml.safe_load(path.read_text()))
        cfg.axolotl_config_path = str(path)
        with group(ranks) if ranks > 1 or cfg.deepspeed else contextlib.nullcontext():
            configs.prepare_plugins(cfg)
            card = {"bf16": True, "fp8": True, "tf32": True, "n_gpu": ranks, "compute_capability": "sm_90"}
            cfg = configs.validate_config(cfg, capabilities=card, env_capabilities={"torch_version": "2.11.0"})
            trainers.prepare_optim_env(cfg)
            configs.normalize_config(cfg)
            configs.normalize_cfg_datasets(cfg)
            model = tiny().to(cfg.torch_dtype)
            args, collated = arguments(cfg, model)
            stage = args.deepspeed_plugin.zero_stage if getattr(args, "deepspeed_plugin", None) else 0
            held = object.__new__(loader.ModelLoader)
            vars(held).update(cfg=cfg, model=model, model_config=model.config, model_kwargs={}, inference=False,
                              reference_model=False)  # fmt: skip
            held._set_quantization_config()
            held._set_attention_config()
            held._prepare_model_for_quantization = lambda: None
            held._set_z3_leaf_modules = lambda: None
            held._configure_embedding_dtypes()
            wanted = held._load_adapters() if cfg.adapter else None
            model = held.model
            if wanted is not None and not isinstance(model, peft.PeftModel):
                model = peft.get_peft_model(model, wanted)
        if cfg.unfrozen_parameters:
            from axolotl.utils.freeze import freeze_layers_except

            freeze_layers_except(model, cfg.unfrozen_parameters)
        weights = dtypes(model)
        config = next(iter(getattr(model, "peft_config", {}).values()), None)
        quantised = held.model_kwargs.get("quantization_config")
        bits = None if quantised is None else 4 if quantised.load_in_4bit else 8
        kind = str(getattr(cfg.rl, "value", cfg.rl) or "")
        trl_given = kind in ("grpo", "gdpo")
        multiple = collated.get("pad_to_multiple_of")
        offloads = bool(cfg.activation_offloading)
        checkpoints = bool(args.gradient_checkpointing) or offloads
        filled = bool(cfg.pad_to_sequence_len) and not kind and not cfg.reward_model
        evaluates = args.eval_strategy != "no" and bool(cfg.val_set_size or cfg.test_datasets)
        return {
            "micro": args.per_device_train_batch_size, "accumulation": args.gradient_accumulation_steps,
            "ranks": args.world_size, "bf16": bool(args.bf16), "fp16": bool(args.fp16),
            "dtype": str(cfg.torch_dtype).removeprefix("torch."),
            "trained": weights["trained"], "layers": weights["layers"],
            "zero": stage, "fsdp": str(cfg.fsdp_version) if cfg.fsdp or cfg.fsdp_config else None,
            "offload": bool(cfg.fsdp_config and cfg.fsdp_config.offload_params),
            "checkpoints": checkpoints,
            "reentrant": bool((args.gradient_checkpointing_kwargs or {}).get("use_reentrant"))
            if checkpoints and not offloads else None,
            "optim": str(getattr(args.optim, "value", args.optim)) if cfg.optimizer != "muon" else "muon",
            "peft": None if config is None else "LORA", "r": getattr(config, "r", None),
            "alpha": getattr(config, "lora_alpha", None), "dropout": getattr(config, "lora_dropout", None),
            "rslora": bool(getattr(config, "use_rslora", False)), "dora": bool(getattr(config, "use_dora", False)),
            "saved": None if config is None or not config.modules_to_save else sorted(config.modules_to_save),
            "adapted": _adapted(config), "bits": bits,
            "kind": quantised.bnb_4bit_quant_type if bits == 4 else None,
            "nested": quantised.bnb_4bit_use_double_quant if bits == 4 else None,
            "length": multiple if filled else cfg.sequence_len if kind or cfg.reward_model else args.max_seq_length,
            "filled": filled, "multiple": None if filled or kind or cfg.reward_model else multiple,
            "packing": bool(getattr(args, "sample_packing", False)),
            "attention": held.model_kwargs.get("attn_implementation"),
            "stage": "grpo" if kind == "gdpo" else kind or ("reward" if cfg.reward_model else "sft"),
            "beta": args.beta if kind else None,
            "evaluates": args.per_device_eval_batch_size if evaluates and not trl_given else None,
            "steps": cfg.max_steps or -1, "liger": bool(cfg.plugins and cfg.liger_fused_linear_cross_entropy),
            "generations": args.num_generations if trl_given else None,
            "generated": args.generation_batch_size if trl_given else None,
            "completion": args.max_completion_length if trl_given else None,
            "unused": args.ddp_find_unused_parameters if ranks > 1 and not kind and not stage and not cfg.fsdp_config
            else None,
        }  # fmt: skip

    return own


_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def _adapted(config: Any) -> object:
    """The matrices that an adapter is put beside."""
    if config is None or not config.target_modules:
        return None
    given = config.target_modules
    return sorted(_LINEAR) if given == "all-linear" else [given] if isinstance(given, str) else sorted(given)


def _passed(found: Foreign, begin: str) -> str | None:
    """The first word behind `begin` of a note that begins so: what is told and not simulated."""
    rest = next((note.removeprefix(begin) for note in found.notes if note.startswith(begin)), None)
    return None if rest is None else rest.split()[0]


def our_reading(found: Foreign) -> Facts:
    """The same facts as autofit reads them."""
    values = found.values
    own, sharded = found.launch.get("deepspeed_config"), found.launch.get("fsdp_config")
    own = own if isinstance(own, Mapping) else {}
    sharded = sharded if isinstance(sharded, Mapping) else {}
    kwargs = values.get("gradient_checkpointing_kwargs")
    peft = values.get("use_peft")
    target = values.get("lora_target_modules")
    offloads = any(note.startswith("activation_offloading") for note in found.notes)
    objective = str(values.get("objective") or found.trainer)
    checkpoints = bool(values.get("gradient_checkpointing"))
    quantised = values.get("load_in_4bit")
    plain = found.trainer == "hf" and objective == "sft"
    sizes = (values["per_device_train_batch_size"], values["gradient_accumulation_steps"], found.ranks or 1)
    completions = math.prod(size for size in sizes if isinstance(size, int))
    return {
        "micro": values["per_device_train_batch_size"], "accumulation": values["gradient_accumulation_steps"],
        "ranks": found.ranks, "bf16": bool(values.get("bf16")), "fp16": bool(values.get("fp16")),
        "dtype": values["dtype"],
        "trained": (values.get("adapter_dtype") or "float32") if peft else values["dtype"],
        "layers": (0, 1, 2) if _passed(found, "peft_layers_to_transform") else tuple(range(8)),
        "zero": own.get("zero_stage", 0), "fsdp": str(sharded["fsdp_version"]) if sharded else None,
        "offload": bool(sharded.get("fsdp_offload_params")),
        "checkpoints": checkpoints,
        "reentrant": bool(kwargs.get("use_reentrant")) if checkpoints and not offloads and isinstance(kwargs, Mapping)
        else None,
        "optim": "muon" if any(note.startswith("optimizer: Muon") for note in found.notes) else values["optim"],
        "peft": "LORA" if peft else None, "r": values.get("lora_r"), "alpha": values.get("lora_alpha"),
        "dropout": values.get("lora_dropout", 0.0) if peft else None, "rslora": bool(values.get("use_rslora")),
        "dora": bool(values.get("use_dora")), "saved": in_order(values.get("lora_modules_to_save")),
        "adapted": None if target is None else sorted(_LINEAR) if target == ["all-linear"] else in_order(target),
        "bits": 4 if quantised else 8 if values.get("load_in_8bit") else None,
        "kind": values.get("bnb_4bit_quant_type"), "nested": values.get("use_bnb_nested_quant"),
        "length": values.get("max_length", found.prompt_tokens), "filled": bool(values.get("pad_to_max_length")),
        "multiple": values.get("pad_to_multiple_of") if plain else None, "packing": bool(values.get("packing")),
        "attention": values.get("attn_implementation") or _passed(found, "the attention "),
        "stage": "ipo" if values.get("loss_type") == ["ipo"] else objective,
        "beta": values.get("beta", {"dpo": 0.1, "grpo": 0.0}.get(objective)),
        "evaluates": values.get("per_device_eval_batch_size"), "steps": values.get("max_steps", -1),
        "liger": bool(values.get("use_liger_kernel")), "generations": values.get("num_generations"),
        "generated": values.get("generation_batch_size", completions) if found.trainer == "grpo" else None,
         "completion": values.get("max_completion_length"),
        "unused": values.get("ddp_find_unused_parameters") if found.ranks != 1 and not found.launch else None,
    }  # fmt: skip


TOOL = Drawn(axes=AXES, rare=RARE, mistakes=MISTAKES, own=own_reading, ours=our_reading)
