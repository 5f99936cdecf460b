"""LLaMA-Factory's YAML as a recipe of `hf`: a plain Trainer with full logits, padded to 8 or packed.

Read at ff6d4d12: src/llamafactory/hparams (keys, defaults, rules), model/adapter.py (what is held in float32),
model/model_utils, train/*/workflow.py (collators) and data/processor. No torch here.
"""

from collections.abc import Mapping
from pathlib import Path

from autofit.errors import ConfigError
from autofit.frontends.draft import GROWING_SEGMENTS, Draft, Foreign, Saying, number, said
from autofit.frontends.tools import (
    LLAMA_FACTORY,
    asks_for_evaluation,
    check_best_model,
    keys_of,
    launch_of,
    note_adapters,
    note_llama_factory,
    take,
    take_evaluation,
    take_quantised,
    targets,
)

_STAGES = ("sft", "pt", "dpo", "kto", "rm")
_ATTENTION = {"disabled": "eager", "sdpa": "sdpa", "fa2": "flash_attention_2", "fa3": "flash_attention_3"}
# train/trainer_utils.py, create_custom_optimizer: each holds less than AdamW does of a model that is trained whole
_OPTIMIZERS = {
    "use_galore": "GaLore's states, those of projected gradients, are simulated as AdamW's of all weights",
    "use_apollo": "APOLLO's states, those of projected gradients, are simulated as AdamW's of all weights",
    "use_badam": "BAdam, which trains one block of layers at a time, is simulated as AdamW on all of them",
    "use_adam_mini": "Adam-mini, whose second state is one value a block, is simulated as AdamW",
    "use_muon": "Muon, with one state of each matrix, is simulated as AdamW with two",
}
_STRATEGIES = ("no", "steps", "epoch", "best")  # transformers' words; best is of save_strategy
_BY_PARTS = ("use_galore", "use_apollo", "use_badam")
_SEEING = (
    "image_max_pixels", "image_min_pixels", "video_max_pixels", "video_min_pixels", "video_fps", "video_maxlen",
    "freeze_vision_tower", "freeze_multi_modal_projector", "freeze_language_model", "media_dir",
    "image_do_pan_and_scan", "crop_to_patches", "use_audio_in_video", "audio_sampling_rate",
)  # fmt: skip
# Names and values of 2023 and 2024: a key that went, and what it is today.
_RENAMED = {"dpo_beta": "pref_beta", "dpo_loss": "pref_loss", "dpo_ftx": "pref_ftx", "orpo_beta": "pref_beta",
            "sft_packing": "packing", "checkpoint_dir": "adapter_name_or_path"}  # fmt: skip
_VALUES = {("flash_attn", True): "fa2", ("flash_attn", False): "disabled",
           ("quantization_method", "bitsandbytes"): "bnb"}  # fmt: skip
_QUANTISED = ("gptq", "awq", "aqlm")  # in the name of a model whose weights are so on disk
_GONE = ("reserved_label_len", "resume_lora_training")
_PARTS = ("max_source_length", "max_target_length")  # which made up a sample until 2023
_V1 = ("model_class", "dist_config", "kernel_config", "train_dataset")  # of the trainer under src/llamafactory/v1


def recipe(given: Mapping[str, object], *, folder: Path, ranks: int | None = None) -> Foreign:
    """The recipe of a YAML of LLaMA-Factory in `folder`, on `ranks` ranks where they are told beside it.

    Raises ConfigError for what cannot be trained as there.
    """
    if "model_name_or_path" not in given and any(key in given for key in _V1):
        raise ConfigError("files of LLaMA-Factory's new trainer (its v1: model, dist_config, ...) are not read yet")
    draft = Draft(LLAMA_FACTORY.name, _of_today(given))
    with draft.told_together():
        return _recipe(draft, folder, ranks)


def _recipe(draft: Draft, folder: Path, ranks: int | None) -> Foreign:
    stage = _check_training(draft)
    draft.put("model_name_or_path", draft.raw("model_name_or_path"))
    draft.put("model_revision", draft.text("model_revision"))
    draft.same("trust_remote_code")
    draft.put("objective", {"dpo": "dpo", "kto": "kto", "rm": "reward"}.get(stage, "sft"), "stage")
    draft.put("per_device_train_batch_size", draft.whole("per_device_train_batch_size", 8))
    draft.put("gradient_accumulation_steps", draft.whole("gradient_accumulation_steps", 1))
    launch = launch_of(draft, folder)
    _check_rules(draft, stage, launch, ranks or 1)
    _method(draft, launch)
    if not launch:  # hparams/parser.py: LoRA under DDP looks for no parameter without a gradient
        lora = draft.given.get("finetuning_type", "lora") == "lora"
        draft.put("ddp_find_unused_parameters", draft.truth("ddp_find_unused_parameters", False if lora else None))
    length = _length(draft, stage)
    _checkpoints(draft)
    _host_experts(draft)
    attention = draft.text("flash_attn", choices=("auto", *_ATTENTION))
    draft.put("attn_implementation", _ATTENTION.get(attention or "auto"), "flash_attn")
    if draft.is_on("enable_liger_kernel"):
        draft.put("use_liger_kernel", True, "enable_liger_kernel")
    if stage == "rm":  # model/loader.py, add_valuehead
        draft.put("value_head", True, "stage")
    if stage in ("dpo", "kto"):
        _preferences(draft, stage)
        draft.without_dropout("stage")  # train/dpo/trainer.py and train/kto/trainer.py, disable_dropout
    elif stage == "sft" and draft.is_on("use_asft_loss"):  # sft/workflow.py; LoRA gets no reference there
        if draft.values.get("use_peft"):
            raise ConfigError("use_asft_loss needs finetuning_type full or freeze: LLaMA-Factory fails with adapters")
        draft.put("objective", "asft", "use_asft_loss")
        draft.put("beta", draft.number("asft_alpha", 0.1), "asft_alpha")
    elif draft.is_on("upcast_lmhead_output"):
        draft.put("float32_logits", True, "upcast_lmhead_output")
    draft.ignore(("pref_loss", "pref_beta", "simpo_gamma", "use_asft_loss", "upcast_lmhead_output"))
    own = keys_of(LLAMA_FACTORY.name)
    draft.name(own.noted)
    checkpoints = draft.values["gradient_checkpointing_kwargs"]
    take(draft)
    if not draft.says("gradient_checkpointing"):  # transformers' key is read only where its own switch is on
        draft.put("gradient_checkpointing_kwargs", checkpoints, "use_reentrant_gc")
    _evaluation(draft)
    _optimizer(draft)
    workers = draft.whole("ray_num_workers", least=1)
    draft.ignore((*own.without_effect, "use_kt"))
    if launch or (ranks or workers or 1) > 1:
        draft.put("env", dict(GROWING_SEGMENTS))
    note_llama_factory(draft, folder)
    note_adapters(draft, "adapter_name_or_path", "lora_rank", folder)
    draft.put("loads_on_card", True)  # hparams/parser.py, device_map
    return draft.foreign("hf", launch=launch, ranks=ranks or workers, prompt_tokens=length)


def _of_today(given: Mapping[str, object]) -> dict[str, object]:
    found = {key: value for key, value in given.items() if key not in _RENAMED and key not in _GONE}
    for old, new in _RENAMED.items():
        if old in given:
            found.setdefault(new, given[old])
    lengths = [number(found.get(key)) for key in _PARTS]
    if None not in lengths:
        found = {key: value for key, value in found.items() if key not in _PARTS}
        found.setdefault("cutoff_len", sum(int(length or 0) for length in lengths))
    for (key, value), today in _VALUES.items():
        if type(found.get(key)) is type(value) and found[key] == value:
            found[key] = today
    return found


def _evaluation(draft: Draft) -> None:
    """transformers' default of samples at once is 8, independent of the training's."""
    if asks_for_evaluation(draft) or draft.says("do_eval"):
        take_evaluation(draft, "hf", usual=8)


def _check_training(draft: Draft) -> str:
    """The stage. Raises ConfigError for a file of another task than training, or of an unsupported one."""
    if draft.given.get("model_name_or_path") is None:
        draft.wrong("model_name_or_path is missing")
    if draft.given.get("export_dir") and not draft.says("do_train"):
        raise ConfigError("the file exports a model and does not train")
    if not draft.says("do_train"):
        raise ConfigError("do_train is not true, so the file does not train")
    draft.check_model(draft.given.get("model_name_or_path"), str(draft.given.get("template") or "").replace("_", "-"))
    stage = draft.text("stage", "sft", choices=("pt", "sft", "rm", "ppo", "dpo", "kto")) or "sft"
    if stage not in _STAGES:
        raise ConfigError(f"stage ppo: PPO, with its four models, is not simulated; {', '.join(_STAGES)} are")
    for key in _SEEING:
        if draft.given.get(key) is not None:
            raise ConfigError(f"{key}: training on images, video or sound is not read, only on text")
    draft.refuse(keys_of(LLAMA_FACTORY.name).refused)
    return stage


def _check_rules(draft: Draft, stage: str, launch: Mapping[str, object], ranks: int) -> None:
    """Tell what the tool ends with before it loads the model: hparams/parser.py and __post_init__ of its arguments."""
    method, loss = draft.given.get("finetuning_type", "lora"), draft.given.get("pref_loss", "sigmoid")
    on = draft.says
    config = launch.get("deepspeed_config")
    zero3 = isinstance(config, Mapping) and config.get("zero_stage") == 3
    quantised, parts = on("quantization_bit"), [key for key in _BY_PARTS if on(key)]
    held_out = draft.number("val_size") or 0.0
    only_lora = [key for key in ("use_rslora", "use_dora", "pissa_init", "loraplus_lr_ratio", "adapter_name_or_path")
                 if on(key)] if method != "lora" else []  # fmt: skip
    only_sft = [key for key in ("neat_packing", "train_on_prompt", "mask_history") if on(key)] if stage != "sft" else []
    evaluates = asks_for_evaluation(draft) or on("do_eval")
    rules = (
        (on("bf16") and on("fp16"), "bf16 and fp16 cannot both be true"),
        (only_lora, f"{', '.join(only_lora)} needs finetuning_type lora; got {method}"),
        (only_sft, f"{', '.join(only_sft)} needs stage sft; got {stage}"),
        (on("train_on_prompt") and on("mask_history"), "train_on_prompt and mask_history cannot both be true"),
        (on("use_llama_pro") and method == "full", "use_llama_pro needs finetuning_type freeze or lora; got full"),
        (len(parts) > 1, f"{' and '.join(parts)} cannot both be true"),
        (on("pissa_init") and (stage == "kto" or (stage == "dpo" and loss not in ("orpo", "simpo"))),
         f"pissa_init cannot be with stage {stage}, which has a reference"),
        (on("pissa_init") and (quantised or zero3), "pissa_init needs a model that is not quantised, and no ZeRO-3"),
        (on("resize_vocab") and quantised, "resize_vocab needs a model that is not quantised"),
        (draft.given.get("quantization_device_map") == "auto",
         "quantization_device_map: auto cannot train"),
        (on("fp8") and quantised, "fp8 needs a model that is not quantised"),
        (zero3 and draft.given.get("quantization_bit") == 8, "ZeRO-3 needs quantization_bit 4; got 8"),
        (on("pure_bf16") and zero3, "pure_bf16 cannot be with ZeRO-3"),
        (on("deepspeed") and (on("use_galore") or on("use_apollo")), "GaLore and APOLLO cannot be with DeepSpeed"),
        (on("use_badam") and (ranks > 1 or on("deepspeed")) and (not zero3 or draft.given.get("badam_mode") == "ratio"),
         "use_badam on several ranks needs ZeRO-3 and badam_mode layer"),
        (((on("galore_layerwise") and on("use_galore")) or (on("apollo_layerwise") and on("use_apollo"))) and ranks > 1,
         f"an optimizer that steps layer by layer trains on one rank; got {ranks}"),
        (stage == "rm" and on("load_best_model_at_end"), "load_best_model_at_end cannot be with stage rm"),
        (stage == "dpo" and loss != "sigmoid" and on("dpo_label_smoothing"),
         f"dpo_label_smoothing needs pref_loss sigmoid; got {loss}"),
        (on("streaming") and draft.given.get("max_steps") in (None, -1), "streaming needs max_steps"),
        (on("streaming") and 0 < held_out < 1, f"val_size with streaming is a number of samples; got {held_out}"),
        (on("streaming") and on("max_samples"), "max_samples cannot be with streaming"),
        (on("eval_dataset") and held_out > 0, "eval_dataset and val_size cannot both be given"),
        (draft.given.get("ref_model_quantization_bit") not in (None, 4, 8),
         "ref_model_quantization_bit must be 4 or 8"),
        *((draft.given.get(key) not in (None, False, *_STRATEGIES),
           f"{key} must be one of {', '.join(_STRATEGIES)}; got {draft.given.get(key)}")
          for key in ("eval_strategy", "save_strategy")),
        *((draft.given.get(key) is False, f'{key}: YAML reads no as false, which is none of its words; write "no"')
          for key in ("eval_strategy", "save_strategy", "logging_strategy")),
        (evaluates and not on("eval_dataset") and held_out <= 0, "evaluation needs eval_dataset or val_size"),
    )  # fmt: skip
    for broken, text in rules:
        if broken:
            draft.wrong(text)
    check_best_model(draft, str(draft.given.get("eval_strategy") or "no"))


def _host_experts(draft: Draft) -> None:
    """KTransformers' experts in host memory, with LoRA (model/adapter.py, model_utils/checkpointing.py)."""
    if not draft.is_on("use_kt"):
        return
    if draft.given.get("finetuning_type", "lora") != "lora":
        raise ConfigError("use_kt needs finetuning_type lora, as LLaMA-Factory says")
    if draft.values["objective"] != "sft":
        raise ConfigError("use_kt is simulated with stage sft or pt")
    if draft.given.get("kt_use_lora_experts"):
        raise ConfigError("kt_use_lora_experts: experts of its own on the card are not simulated; omit it")
    draft.put("host_experts", True, "use_kt")
    draft.fixed.update(("use_peft", "load_in_4bit", "load_in_8bit"))
    kwargs = draft.values.get("gradient_checkpointing_kwargs")
    if isinstance(kwargs, Mapping):
        draft.put("gradient_checkpointing_kwargs", {**kwargs, "use_reentrant": False}, "use_kt")
        draft.defaults.pop("use_reentrant_gc", None)
    draft.note(
        "use_kt: the routed experts and their adapters are in host memory, and the seconds that they take there are "
        "not known: a lower bound of the time"
    )


def _method(draft: Draft, launch: Mapping[str, object]) -> None:
    """The trained weights, and the type of each (adapter.py, init_adapter)."""
    method = draft.text("finetuning_type", "lora", choices=("lora", "oft", "freeze", "full")) or "lora"
    # init_adapter: what BAdam trains stays in 16 bits too
    pure = draft.is_on("pure_bf16") or draft.is_on("use_badam")
    bf16, fp16 = draft.is_on("bf16"), draft.is_on("fp16")
    compute = "bfloat16" if bf16 or pure or not fp16 else "float16"
    if not (bf16 or pure or fp16):
        draft.note("neither bf16 nor fp16 is set: what is frozen is held in the model's own dtype, taken as bfloat16")
    for key, on in (("bf16", bf16), ("fp16", fp16)):
        if on:
            draft.put(key, True)
    if not bf16:
        draft.put("bf16", False)
    zero = launch.get("deepspeed_config")
    zero3 = isinstance(zero, Mapping) and zero.get("zero_stage") == 3
    quantized = _quantization(draft, compute)
    master = not pure and (quantized or not zero3)
    shards = launch.get("fsdp_config")
    fsdp2 = isinstance(shards, Mapping) and str(shards.get("fsdp_version")) == "2"
    if fsdp2 and not (pure or quantized) and (bf16 or fp16) and method != "full":
        compute = "float32"
        draft.note(
            "FSDP2: accelerate 1.11, the newest that LLaMA-Factory takes, casts frozen weights to float32 too, and so "
            "they are held here"
        )
    if method in ("lora", "oft"):
        draft.put("dtype", compute, "bf16")
        draft.put("adapter_dtype", "float32", "pure_bf16")  # PEFT's own, with pure_bf16 too
        _lora(draft)
        if method == "oft":
            _oft(draft)
    elif quantized:
        raise ConfigError(f"a quantised model needs finetuning_type lora or oft, as LLaMA-Factory says; got {method}")
    elif method == "freeze":
        draft.put("dtype", compute, "bf16")
        draft.put("adapter_dtype", "float32" if master else compute, "pure_bf16")
    else:
        draft.put("dtype", "float32" if master else compute, "pure_bf16")
    draft.ignore(
        ("lora_rank", "lora_alpha", "lora_dropout", "lora_target", "use_rslora", "use_dora", "additional_target")
    )
    if method == "freeze":
        _freeze(draft)
    elif draft.is_on("use_llama_pro"):
        raise ConfigError("use_llama_pro is simulated with finetuning_type freeze, not with adapters")
    draft.ignore(("freeze_trainable_layers", "freeze_trainable_modules", "freeze_extra_modules"))


def _quantization(draft: Draft, compute: str) -> bool:
    bits = draft.whole("quantization_bit")
    kind = draft.text("quantization_method", choices=("bnb", "gptq", "awq", "aqlm", "quanto", "eetq", "hqq", "mxfp4"))
    nested, table = draft.is_on("double_quantization", True), draft.text("quantization_type", "nf4")
    named = str(draft.given.get("model_name_or_path")).lower()
    for key in ("double_quantization", "quantization_type"):
        if bits is None or any(method in named for method in _QUANTISED):
            draft.defaults.pop(key, None)
    for method in _QUANTISED:
        if method in named:  # model_utils/quantization.py: quantization_bit has no effect on it
            take_quantised(draft, method, compute)
            return True
    if bits is None:
        return False
    if kind not in (None, "bnb"):
        raise ConfigError(f"quantization_method {kind} is not simulated; bnb is")
    if bits not in (4, 8):
        raise ConfigError(f"quantization_bit must be 4 or 8 with bitsandbytes; got {bits}")
    draft.put(f"load_in_{bits}bit", True, "quantization_bit")
    if bits == 4:
        draft.put("use_bnb_nested_quant", nested, "double_quantization")
        draft.put("bnb_4bit_quant_type", table, "quantization_type")
        draft.put("bnb_4bit_quant_storage", compute, "bf16")
    return True


def _lora(draft: Draft) -> None:
    rank = draft.whole("lora_rank", 8) or 8
    target = draft.names("lora_target", "all") or ["all"]
    draft.put("use_peft", True, "finetuning_type")
    draft.put("lora_r", rank, "lora_rank")
    draft.put("lora_alpha", draft.whole("lora_alpha", 2 * rank, least=0) or 2 * rank)
    dropout = draft.number("lora_dropout", 0.0) or 0.0
    if not 0 <= dropout <= 1:
        draft.wrong(f"lora_dropout must be 0 to 1; got {dropout}")
    draft.put("lora_dropout", dropout)
    modules = ["all-linear"] if target == ["all"] else targets(draft, target, "lora_target")
    draft.put("lora_target_modules", modules, "lora_target")
    saved = draft.names("additional_target")
    if saved is None and draft.is_on("resize_vocab"):  # adapter.py: the whole matrices are trained, not only new rows
        saved = ["embed_tokens", "lm_head"]
    draft.put("lora_modules_to_save", saved, "additional_target")
    for key in ("use_rslora", "use_dora"):
        if draft.is_on(key):
            draft.put(key, True)


def _oft(draft: Draft) -> None:
    """PEFT's OFT on the modules of lora_target (model/adapter.py). Raises ConfigError for a reference beside it."""
    if draft.values["objective"] in ("dpo", "kto"):
        raise ConfigError("finetuning_type oft with a reference, for which a second model is loaded, is not simulated")
    options: dict[str, object] = {"peft_type": "OFT", "r": draft.whole("oft_rank", 0, least=0)}
    options |= {"oft_block_size": draft.whole("oft_block_size", 32, least=0)}
    options |= {"module_dropout": draft.number("module_dropout", 0.0)}
    draft.put("peft_adapter", options, "finetuning_type")
    draft.fixed.update(("lora_r", "lora_alpha", "lora_dropout", "use_peft"))
    for key in ("lora_rank", "lora_alpha", "lora_dropout"):
        draft.defaults.pop(key, None)


def _freeze(draft: Draft) -> None:
    layers = draft.raw("freeze_trainable_layers", 2)
    if not isinstance(layers, int) or isinstance(layers, bool):
        raise ConfigError(f"freeze_trainable_layers must be a whole number; got {layers}")
    parts, extra = draft.names("freeze_trainable_modules"), draft.names("freeze_extra_modules")
    if layers == 0 and not extra:
        raise ConfigError("freeze_trainable_layers: 0 trains nothing, with which LLaMA-Factory ends; set a number of "
                          "layers or freeze_extra_modules")  # fmt: skip
    if layers < 1 and draft.is_on("use_llama_pro"):
        raise ConfigError(f"use_llama_pro needs freeze_trainable_layers of 1 or more; got {layers}")
    draft.put("trainable_layers", layers, "freeze_trainable_layers")
    draft.put("layer_modules", None if "all" in (parts or ["all"]) else parts, "freeze_trainable_modules")
    draft.put("extra_modules", extra, "freeze_extra_modules")
    if draft.is_on("use_llama_pro"):  # adapter.py: every n-th layer of the expanded model
        draft.put("spread_layers", True, "use_llama_pro")


def _optimizer(draft: Draft) -> None:
    """An optimizer of LLaMA-Factory's own, as AdamW. Raises ConfigError for what the tool refuses when it starts."""
    for key, effect in _OPTIMIZERS.items():
        if not draft.is_on(key):
            continue
        projects = key in ("use_galore", "use_apollo")
        if draft.values.get("use_peft") and key != "use_muon" and key != "use_adam_mini":
            raise ConfigError(f"{key} needs finetuning_type full or freeze, as LLaMA-Factory says; got lora")
        layerwise = f"{key.removeprefix('use_')}_layerwise"
        if projects and draft.is_on(layerwise) and draft.values["gradient_accumulation_steps"] != 1:
            raise ConfigError(f"{layerwise} needs gradient_accumulation_steps: 1, as LLaMA-Factory says")
        if projects and draft.is_on(layerwise):
            draft.fixed.add("gradient_accumulation_steps")
        optim = str(draft.values["optim"])
        if projects and not optim.startswith(("adamw", "paged_adamw")):
            raise ConfigError(f"{key} with optim {optim} is not simulated; with adamw_torch it is")
        if not projects and key != "use_badam":  # optim is not read then
            draft.put("optim", "adamw_torch_fused", key)
            draft.fixed.add("optim")
        draft.note(f"{key}: {effect}: an upper bound")


def _length(draft: Draft, stage: str) -> int:
    """Tokens of a row: data_args.py takes 1 off with packing in all stages, and supervised.py adds it again."""
    length = draft.whole("cutoff_len", 2048) or 2048
    neat = draft.is_on("neat_packing")
    packing = draft.is_on("packing", stage == "pt") or neat
    if stage != "sft" and packing and draft.given.get("packing") is not None:
        length -= 1
    draft.put("max_length", length, "cutoff_len")
    if stage != "pt":
        draft.put("pad_to_multiple_of", 8, "cutoff_len")
    if stage in ("pt", "sft") and packing:
        draft.put("packing", True)
        draft.put("block_diagonal", neat or None, "neat_packing")
    return length


def _checkpoints(draft: Draft) -> None:
    off, reentrant = draft.is_on("disable_gradient_checkpointing"), draft.is_on("use_reentrant_gc", True)
    on = not off or draft.is_on("gradient_checkpointing")
    if draft.is_on("gradient_checkpointing"):
        # transformers' Trainer turns it on again, without use_reentrant: LLaMA-Factory's own method takes True there
        # (checkpointing.py, _gradient_checkpointing_enable), and transformers 5's takes False
        if "use_reentrant_gc" in draft.given and reentrant is off:
            draft.note(
                f"use_reentrant_gc {str(reentrant).lower()} has no effect beside gradient_checkpointing: true, with "
                "which the Trainer turns checkpointing on again; leave gradient_checkpointing out"
            )
        reentrant = not off
    draft.ignore(("gradient_checkpointing",))
    draft.put("gradient_checkpointing", on, "disable_gradient_checkpointing")
    draft.put("gradient_checkpointing_kwargs", {"use_reentrant": reentrant}, "use_reentrant_gc")
    if not off:
        draft.defaults.setdefault("disable_gradient_checkpointing", False)


def _preferences(draft: Draft, stage: str) -> None:
    """DPO and KTO (train/dpo/trainer.py, train/kto/trainer.py): float32 logits of all tokens.

    Without LoRA the reference is a second model; ORPO and SimPO have none.
    """
    loss = draft.text("pref_loss", "sigmoid", choices=("sigmoid", "hinge", "ipo", "kto_pair", "orpo", "simpo"))
    if stage == "kto":
        draft.defaults.pop("pref_loss", None)  # it has no effect there
        draft.put("keeps_logits", True, "stage")
    elif loss in ("orpo", "simpo"):
        draft.put("objective", loss, "pref_loss")
    if stage == "dpo" and loss == "orpo":
        draft.put("nll_weight", 1.0, "pref_loss")
    elif stage == "dpo" and loss == "simpo":
        draft.put("simpo_gamma", draft.number("simpo_gamma", 0.5))
    draft.put("beta", draft.number("pref_beta", 0.1), "pref_beta")
    draft.put("float32_logits", True, "stage")


# -- back in its own keys ---------------------------------------------------------------------------------------------


def say(foreign: Foreign, changes: Mapping[str, object]) -> dict[str, object]:
    """{key of LLaMA-Factory: value} of changes of a recipe. Raises ConfigError for one that it has no key for."""
    names = {ours: theirs for theirs, ours in _ATTENTION.items()}
    own: dict[str, Saying] = {
        **dict.fromkeys(("objective", "bf16", "fp16", "pad_to_multiple_of", "adapter_dtype", "block_diagonal",
                         "bnb_4bit_quant_storage", "float32_logits", "packing", "keeps_logits", "nll_weight",
                         "value_head", "spread_layers", "layer_modules", "extra_modules")),
        "dtype": lambda value: _said_dtype(foreign, value),
        "max_length": lambda value: {"cutoff_len": value} if foreign.values.get("pad_to_multiple_of") else None,
        "gradient_checkpointing": lambda value: {"disable_gradient_checkpointing": not value},
        "gradient_checkpointing_kwargs": _said_kwargs,
        "attn_implementation": lambda value: {"flash_attn": names[str(value)]} if value in names else None,
        "use_liger_kernel": lambda value: {"enable_liger_kernel": bool(value)},
        "load_in_4bit": lambda value: {"quantization_bit": 4 if value else None},
        "load_in_8bit": lambda value: {"quantization_bit": 8 if value else None},
        "lora_r": "lora_rank",
        "lora_alpha": "lora_alpha",
        "lora_dropout": "lora_dropout",
        "lora_target_modules": _said_target,
        "optim": "optim",
        "use_peft": lambda value: {"finetuning_type": "lora"} if value else None,
        "peft_adapter": None,
    }  # fmt: skip
    return said(foreign, changes, own)


def _said_dtype(foreign: Foreign, value: object) -> Mapping[str, object] | None:
    whole = not foreign.values.get("use_peft") and not foreign.values.get("trainable_layers")
    return {"pure_bf16": True} if value == "bfloat16" and whole else None


def _said_kwargs(value: object) -> Mapping[str, object] | None:
    plain = isinstance(value, Mapping) and set(value) == {"use_reentrant"}
    return {"use_reentrant_gc": value["use_reentrant"]} if isinstance(value, Mapping) and plain else None


def _said_target(value: object) -> Mapping[str, object] | None:
    if value == ["all-linear"]:
        return {"lora_target": "all"}
    return {"lora_target": ",".join(map(str, value))} if isinstance(value, list) else None
