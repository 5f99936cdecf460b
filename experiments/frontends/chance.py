"""Files of other tools drawn by chance, read by autofit and by the tool's own arguments; each difference is printed.

    python -m experiments.frontends.chance llama-factory DIR --count 200 --seed 0

DIR is a checkout of the tool, of which nothing is kept here. It wants a Python with autofit and what the tool's
arguments import; no card. Ranks are those of a fake process group. Each axis is drawn on its own, and every third file
has one value that may be wrong.
"""

import argparse
import contextlib
import io
import os
import random
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from autofit.errors import ConfigError
from autofit.frontends.draft import NOT_SIMULATED, Foreign
from autofit.frontends.reading import explain, read

Values = dict[str, Any]
Facts = Mapping[str, object]
_NO = object()  # a key that the file does not have
_RANKS = (1, 1, 2, 4, 8)
_AUTO = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
         "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}  # fmt: skip


def zero(stage: int, offload: tuple[str, ...] = (), **more: object) -> Values:
    """DeepSpeed's settings of a stage of ZeRO."""
    sharing = {"stage": stage, **{part: {"device": "cpu"} for part in offload}}
    return {**_AUTO, **more, "zero_optimization": sharing}


def draw(tool: "Drawn", chance: random.Random, nth: int) -> Values:
    """The values of one file: each axis, two settings that are rare, and in every third what may be wrong."""
    values = {key: chance.choice(choices) for key, choices in tool.axes.items()}
    for _ in range(chance.choice((0, 1, 2))):
        values |= chance.choice(tool.rare)
    if nth % 3 == 2:
        values |= chance.choice(tool.mistakes)
    return {key: value for key, value in values.items() if value is not _NO}


# -- LLaMA-Factory ----------------------------------------------------------------------------------------------------

LLAMA_FACTORY: dict[str, tuple[object, ...]] = {
    "model_name_or_path": ("Qwen/Qwen2.5-0.5B",), "dataset": ("identity",), "template": ("qwen",),
    "output_dir": ("out",), "do_train": (True,), "learning_rate": ("1e-4", 2e-5, 1e-5),
    "stage": ("sft", "sft", "sft", "pt", "dpo", "dpo", "kto", "rm", _NO),
    "finetuning_type": ("lora", "lora", "full", "freeze", _NO),
    "per_device_train_batch_size": (1, 2, 3, 8, _NO), "gradient_accumulation_steps": (1, 2, 5, 16, _NO),
    "bf16": (True, True, False, _NO), "lora_rank": (_NO, 4, 16, 64), "lora_alpha": (_NO, _NO, 16, 32),
    "lora_dropout": (_NO, 0.0, 0.1), "lora_target": (_NO, "all", "q_proj,v_proj"),
    "cutoff_len": (_NO, 1024, 2048, 1000), "packing": (_NO, _NO, True, False),
    "flash_attn": (_NO, "auto", "fa2", "sdpa", "disabled"), "enable_liger_kernel": (_NO, _NO, True),
    "disable_gradient_checkpointing": (_NO, _NO, True, False), "gradient_checkpointing": (_NO, _NO, _NO, True, False),
    "use_reentrant_gc": (_NO, _NO, False, True), "upcast_lmhead_output": (_NO, _NO, _NO, True),
    "deepspeed": (_NO, _NO, _NO, _NO, zero(0), zero(2), zero(3), zero(2, ("offload_optimizer",)),
                  zero(3, ("offload_optimizer", "offload_param"))),
    "optim": (_NO, _NO, "adamw_torch", "adafactor", "paged_adamw_8bit", "sgd"),
    "max_steps": (_NO, _NO, 100, -1), "num_train_epochs": (_NO, 3, 1.0), "val_size": (0.1, 0.1, 20, _NO),
    "eval_strategy": (_NO, _NO, _NO, "steps", "epoch", "no"), "do_eval": (_NO, _NO, _NO, False),
    "eval_steps": (_NO, 50), "per_device_eval_batch_size": (_NO, 1, 4), "save_steps": (_NO, 500),
    "freeze_trainable_layers": (_NO, 1, 2, 4), "pref_loss": (_NO, _NO, "sigmoid", "orpo", "simpo", "ipo"),
    "pref_beta": (_NO, 0.3), "simpo_gamma": (_NO, _NO, 1.2), "ddp_find_unused_parameters": (_NO, _NO, False, True),
}  # fmt: skip
LLAMA_FACTORY_RARE: tuple[Values, ...] = (
    {"pure_bf16": True}, {"pure_bf16": True, "finetuning_type": "full"}, {"pure_bf16": True, "bf16": False},
    {"fp16": True}, {"fp16": True, "bf16": False}, {"fp16": True, "bf16": _NO}, {"bf16": False},
    {"quantization_bit": 4}, {"quantization_bit": 4, "finetuning_type": "lora", "bf16": _NO},
    {"quantization_bit": 4, "finetuning_type": "lora", "double_quantization": False},
    {"quantization_bit": 4, "finetuning_type": "lora", "quantization_type": "fp4", "fp16": True, "bf16": _NO},
    {"quantization_bit": 8, "finetuning_type": "lora"}, {"quantization_bit": 8, "finetuning_type": "oft"},
    {"quantization_bit": 4, "finetuning_type": "lora", "pure_bf16": True, "deepspeed": _NO},
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
    {"use_galore": True, "finetuning_type": "full", "deepspeed": _NO}, {"use_galore": True},
    {"use_apollo": True, "finetuning_type": "full", "deepspeed": _NO}, {"use_apollo": True},
    {"use_badam": True, "finetuning_type": "full"}, {"use_badam": True}, {"use_adam_mini": True}, {"use_muon": True},
    {"use_galore": True, "galore_layerwise": True, "finetuning_type": "full", "gradient_accumulation_steps": 1},
    {"use_badam": True, "finetuning_type": "full", "deepspeed": zero(3)}, {"streaming": True},
    {"use_badam": True, "finetuning_type": "freeze", "badam_mode": "ratio"}, {"streaming": True, "max_steps": 50},
    {"streaming": True, "max_steps": 50, "val_size": _NO}, {"streaming": True, "max_steps": 50, "val_size": 100},
    {"val_size": _NO, "do_eval": True}, {"val_size": _NO, "eval_strategy": "steps"}, {"do_eval": True},
    {"val_size": _NO, "eval_dataset": "identity", "eval_strategy": "epoch"}, {"eval_dataset": "identity"},
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
LLAMA_FACTORY_MISTAKES: tuple[Values, ...] = (
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


@contextlib.contextmanager
def group(ranks: int) -> Iterator[None]:
    """A process group of `ranks`, as its first rank sees it."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    names = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1",
             "MASTER_PORT": 29511, "OMP_NUM_THREADS": 1}  # fmt: skip
    os.environ.update({name: str(value) for name, value in names.items()})
    torch.distributed.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
        for name in names:
            del os.environ[name]


def fresh() -> None:
    """Forget what accelerate and transformers keep of a training for the whole process."""
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers.integrations import deepspeed

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    deepspeed.unset_hf_deepspeed_config()
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[name]


def on_a_card() -> None:
    """Let transformers' arguments take the precisions of a card."""
    from transformers import training_args

    for name in ("is_torch_bf16_gpu_available", "is_torch_tf32_available"):
        if hasattr(training_args, name):
            setattr(training_args, name, lambda: True)


def tiny() -> Any:
    """A Qwen2 of 8 small layers in float32."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=8, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=128, tie_word_embeddings=False,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def dtypes(model: Any) -> Facts:
    """The dtype of most trained and of most frozen values, the layers with trained ones, and the adapter."""
    found: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    for weight in model.parameters():
        found[weight.requires_grad][str(weight.dtype).removeprefix("torch.")] += weight.numel()
    layers = {int(name.split("layers.")[1].split(".")[0]) for name, weight in model.named_parameters()
              if weight.requires_grad and "layers." in name}  # fmt: skip
    most = {kind: count.most_common(1)[0][0] if count else None for kind, count in found.items()}
    return {"trained": most[True], "frozen": most[False], "layers": tuple(sorted(layers)), "weights": dict(found[True])}


def llama_factory(folder: Path) -> Callable[[Path, int], Facts]:
    """LLaMA-Factory's own reading: its arguments, and a tiny model with its adapter."""
    os.environ |= {"DISABLE_VERSION_CHECK": "1", "LLAMAFACTORY_VERBOSITY": "ERROR"}
    sys.path.insert(0, str(folder / "src"))
    from llamafactory.hparams import parser
    from llamafactory.model import adapter
    from llamafactory.model.model_utils import checkpointing, quantization

    on_a_card()
    vars(parser).update(is_torch_bf16_gpu_available=lambda: True, check_version=lambda *_, **__: None)
    vars(quantization).update(check_version=lambda *_, **__: None)

    def own(path: Path, ranks: int) -> Facts:
        values, small = yaml.safe_load(path.read_text()), tiny()
        with group(ranks) if ranks > 1 or values.get("deepspeed") else contextlib.nullcontext():
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
        spread = ranks > 1 and not (plugin and plugin.zero_stage) and not training.fsdp
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


def of_llama_factory(found: Foreign) -> Facts:
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
        "saved": _sorted(values.get("lora_modules_to_save")),
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


def _sorted(names: object) -> object:
    return sorted(names) if isinstance(names, list) else None


# -- both -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Drawn:
    """A tool: what its files are drawn from, what makes its own reading, and our reading in the same facts."""

    axes: Mapping[str, tuple[object, ...]]
    rare: tuple[Values, ...]
    mistakes: tuple[Values, ...]
    own: Callable[[Path], Callable[[Path, int], Facts]]
    ours: Callable[[Foreign], Facts]
    ending: str = ".yaml"


TOOLS = {
    "llama-factory": Drawn(LLAMA_FACTORY, LLAMA_FACTORY_RARE, LLAMA_FACTORY_MISTAKES, llama_factory, of_llama_factory),
}  # fmt: skip


def of_own(own: Callable[[Path, int], Facts], path: Path, ranks: int) -> Facts | str:
    """The tool's own reading, or why it ends."""
    fresh()
    quiet = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
        warnings.simplefilter("ignore")
        try:
            return own(path, ranks)
        except (Exception, SystemExit) as error:  # whatever a tool ends with
            return f"{type(error).__name__}: {error}"


def of_ours(facts: Callable[[Foreign], Facts], path: Path, ranks: int) -> tuple[Facts | None, str]:
    """(our reading, "") or (None, why it is none); what is only not simulated is told apart."""
    try:
        explained = explain(path, ranks=ranks)
        if explained.wrong:
            return None, f"wrong: {'; '.join(explained.wrong)}"
        if NOT_SIMULATED in dict(explained.lines):
            return None, f"{NOT_SIMULATED}: {dict(explained.lines)[NOT_SIMULATED]}"
        found = read(path, ranks=ranks)
    except ConfigError as error:
        return None, f"wrong: {error}"
    assert found is not None, path
    return facts(found), ""


def differences(theirs: Facts, ours: Facts) -> list[str]:
    return [f"{key}: theirs {theirs.get(key)}, ours {value}" for key, value in ours.items() if theirs.get(key) != value]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tool", choices=list(TOOLS))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for the drawn files")
    args = parser.parse_args()
    tool = TOOLS[args.tool]
    own = tool.own(args.folder.resolve())
    kept = args.keep or Path(tempfile.mkdtemp())
    kept.mkdir(parents=True, exist_ok=True)
    chance, counts = random.Random(args.seed), Counter[str]()
    for nth in range(args.count):
        values, ranks = draw(tool, chance, nth), chance.choice(_RANKS)
        path = kept / f"{args.tool}-{args.seed}-{nth}{tool.ending}"
        path.write_text(text_of(values, tool.ending), encoding="utf-8")
        theirs = of_own(own, path, ranks)
        ours, why = of_ours(tool.ours, path, ranks)
        if isinstance(theirs, str):
            kind, told = ("both refuse", [f"{theirs} | {why}"]) if ours is None else ("only the tool refuses", [theirs])
        elif ours is None:
            kind, told = ("only autofit refuses", [why]) if why.startswith("wrong") else (NOT_SIMULATED, [why])
        else:
            told = differences(theirs, ours)
            kind = "differ" if told else "agree"
        counts[kind] += 1
        for line in told:
            print(f"{kind:22} {path.name} x{ranks}: {' '.join(line.split())}")
    print(dict(counts))


def text_of(values: Values, ending: str) -> str:
    return yaml.safe_dump(values, sort_keys=False)


if __name__ == "__main__":
    main()
