"""Axolotl's YAML as a recipe of `hf`, or of TRL's DPO, GRPO or reward trainer, to which Axolotl hands it on.

Read at 067b021c: src/axolotl/utils/schemas (keys, defaults, rules), utils/config/__init__.py (batch and dtype),
core/builders (trainers, collators), loaders/model.py and adapter.py (what is held in which dtype). What Axolotl ends
with before it trains, of combinations of its keys, is last (schemas/validation.py, config.py, peft.py). No torch here.
"""

import math
import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path

from autofit.errors import ConfigError, nearest, quoted
from autofit.frontends import sharing
from autofit.frontends.draft import GROWING_SEGMENTS, Draft, Foreign, Saying, is_set, number, said, truth
from autofit.frontends.tools import (
    AXOLOTL,
    asks_for_evaluation,
    deepspeed,
    keys_of,
    note_adapters,
    note_axolotl,
    take_evaluation,
    take_optimizer,
    take_quantised,
    targets,
)

# core/builders/rl.py. TRL 1.8's KTO, ORPO and CPO make all logits, as `hf` does
_LIKE_TRL = {"dpo": "dpo", "ipo": "dpo", "grpo": "grpo", "gdpo": "grpo", "kto": "hf", "orpo": "hf", "simpo": "hf"}
_FEATURES = "autofit.trainers.features"
_LIGER = "axolotl.integrations.liger.LigerPlugin"
_LAYERS = 3  # whose states these rewards keep, wherever they are
_OF_ANSWERS = ("adaptive_max_tokens", "gt_length_multiplier")  # keys of EBFT's structured mode alone
_MULTIPLE = 64  # of tokens, to which core/builders/causal.py pads
_FLAGS = {"xformers_attention": "xformers", "sage_attention": "sage", "flex_attention": "flex_attention",
          "flash_attention": "flash_attention_2", "sdp_attention": "sdpa", "eager_attention": "eager"}  # fmt: skip
_ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
# transformers' SchedulerType, and Axolotl's own two
_SCHEDULERS = (
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt",
    "reduce_lr_on_plateau", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay", "greedy",
    "one_cycle", "rex",
)  # fmt: skip
_SAME = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "max_steps",
         "seed", "neftune_noise_alpha", "torch_empty_cache_steps", "trust_remote_code")  # fmt: skip
_GRPO = ("max_completion_length", "use_vllm", "vllm_mode", "generation_batch_size", "num_generations",
         "importance_sampling_level", "temperature", "top_p", "top_k", "min_p", "repetition_penalty",
         "num_iterations", "epsilon", "epsilon_high", "loss_type", "mask_truncated_completions",
         "multi_objective_aggregation", "vllm_enable_sleep_mode", "scale_rewards", "sync_ref_model")  # fmt: skip
_GRPO_UNLIKE = ("use_data_producer", "async_prefetch", "streaming_partial_batch", "rollout_func", "vllm_lora_sync")


def recipe(given: Mapping[str, object], *, folder: Path, ranks: int | None = None) -> Foreign:
    """The recipe of a YAML of Axolotl in `folder`, on `ranks` ranks where they are told beside it.

    Raises ConfigError for what cannot be trained as there.
    """
    draft = Draft(AXOLOTL.name, given)
    with draft.told_together():
        return _recipe(draft, folder, ranks)


def _recipe(draft: Draft, folder: Path, ranks: int | None) -> Foreign:
    trainer = _trainer(draft)
    _check_rules(draft, ranks)
    draft.put("model_name_or_path", draft.text("base_model"), "base_model")
    objective = str(draft.given.get("rl") or "sft")
    strided = objective == "ebft" and trainer == "hf"
    if draft.is_on("process_reward_model"):  # TRL's PRMTrainer: a transformers Trainer of a token classifier
        if trainer != "hf" or objective != "sft":
            raise ConfigError("process_reward_model needs samples, without rl or reward_model")
        objective = "label_tokens"
        draft.put("num_labels", draft.whole("num_labels", 2))
    if strided:
        _strided(draft)
    if _has_plugin(draft, "DiffusionPlugin"):
        if trainer != "hf" or objective != "sft":
            raise ConfigError("the plugin DiffusionPlugin is simulated with samples, without rl")
        objective = "diffusion"
        token = draft.mapping("diffusion").get("mask_token_id")
        draft.put("mask_token", token if isinstance(token, int) else None, "diffusion.mask_token_id")
    if trainer == "hf":
        draft.put("objective", objective, "process_reward_model" if objective == "label_tokens" else "rl")
    draft.put("model_revision", draft.text("revision_of_model") or draft.text("model_revision"), "revision_of_model")
    _batch(draft)
    launch = _launch(draft, folder)
    if launch and strided:
        raise ConfigError("ebft with mode: strided is simulated on one GPU or with DDP, not with FSDP or ZeRO")
    kept = _attention(draft)
    _dtype(draft, kept=kept or bool(launch.get("fsdp_config")))
    _adapter(draft)
    if strided:  # whatever the file says (strided.py, __init__)
        draft.put("attn_implementation", "flex_attention", "ebft.mode")
        draft.fixed.add("attn_implementation")
    length = _length(draft, "dpo" if objective in _LIKE_TRL and trainer == "hf" else trainer)
    _checkpoints(draft)
    if str(draft.given.get("optimizer")) == "muon":  # core/builders/base.py
        draft.put("optim", "adamw_torch_fused", draft.text("optimizer"))
        draft.keys["optim"] = "optimizer"
        draft.note("optimizer: Muon, with one state of each matrix, is simulated as AdamW with two: an upper bound")
    else:
        take_optimizer(draft, "optimizer", "adamw_torch_fused")
    draft.same(*_SAME)
    draft.put("env", dict(GROWING_SEGMENTS))
    draft.put("average_tokens_across_devices", False, "optimizer")  # base.py, _set_base_training_args
    if not launch and not draft.given.get("rl"):  # causal.py: DDP looks for unused parameters where it is asked to
        draft.put("ddp_find_unused_parameters", draft.is_on("ddp_find_unused_parameters"))
    draft.put("num_train_epochs", draft.number("num_epochs"), "num_epochs")
    scheduler = draft.text("lr_scheduler", choices=_SCHEDULERS)
    draft.put("lr_scheduler_type", None if scheduler in ("one_cycle", "rex") else scheduler, "lr_scheduler")
    if trainer == "grpo":
        _grpo(draft)
        if objective == "ebft":
            _rewards_by_features(draft)
    elif trainer != "hf":
        _preferences(draft, trainer)
    elif objective in _LIKE_TRL:
        _full_logits(draft, objective)
    _qat(draft, trainer)
    _pruned(draft, trainer)
    _plugins(draft)
    keys_of(AXOLOTL.name).take(draft)
    if _evaluates(draft):  # without the key as many as training takes (utils/config/__init__.py)
        usual = number(draft.values.get("per_device_train_batch_size")) or 1
        take_evaluation(draft, trainer, key="eval_batch_size", usual=int(usual))
    sharers, dealt = _shared_sequence(draft, objective), _dealt_experts(draft, launch)
    ranks = _ranks(draft, sharers * dealt) if ranks is None else ranks
    if ranks is not None and ranks % sharers:
        raise ConfigError(f"context_parallel_size {sharers} must divide the ranks; got {ranks}")
    note_axolotl(draft, folder)
    note_adapters(draft, "lora_model_dir", "lora_r", folder)
    if trainer == "hf":  # utils/config/__init__.py, device_map
        draft.put("loads_on_card", True)
    inner = launch.get("fsdp_config")
    if isinstance(inner, Mapping) and str(inner.get("fsdp_version")) == "2":  # monkeypatch/accelerate/fsdp2.py
        if trainer == "hf":
            draft.put("keeps_dtype", True)
        elif not draft.values.get("use_peft"):
            draft.note(
                "Axolotl shards weights under FSDP2 in the dtype that they are loaded in; here accelerate casts those "
                "that are trained to float32: an upper bound"
            )
    return draft.foreign(trainer, launch=launch, ranks=ranks, prompt_tokens=length, strict=False)


def _evaluates(draft: Draft) -> bool:
    """True if the training evaluates: it has samples for it, and a time (_configure_save_and_eval_strategy)."""
    times = number(draft.given.get("evals_per_epoch")) or 0.0  # in the whole training they must be 2 or more
    whole = times * (number(draft.given.get("num_epochs", 1.0)) or 0.0)
    often = draft.says("eval_steps") or (draft.says("evals_per_epoch") and whole > 1) or asks_for_evaluation(draft)
    return often and (draft.says("val_set_size") or draft.says("test_datasets"))


def _trainer(draft: Draft) -> str:
    """Our trainer that trains as this file does. Raises ConfigError if there is none."""
    if draft.given.get("base_model") is None:
        draft.wrong("base_model is missing")
    draft.refuse(keys_of(AXOLOTL.name).refused)
    if (draft.whole("tensor_parallel_size") or 1) > 1:
        raise ConfigError("tensor_parallel_size: tensor parallelism is not simulated; DDP, FSDP and ZeRO are")
    draft.check_model(draft.given.get("base_model"), str(draft.given.get("chat_template") or "").replace("_", "-"))
    kind = draft.text("rl")
    if kind is not None and kind not in _LIKE_TRL and kind != "ebft":
        raise ConfigError(f"rl: {kind} is not simulated; {', '.join(_LIKE_TRL)} and ebft are")
    if kind is not None:
        trainer = _ebft(draft) if kind == "ebft" else _LIKE_TRL[kind]
        if trainer != "hf":
            draft.note("Axolotl pins TRL 1.8.0; the trainer of the TRL that is installed here is simulated")
        return trainer
    if draft.is_on("reward_model"):
        return "reward"
    if not draft.says("datasets") and not draft.says("pretraining_dataset"):
        draft.wrong("datasets is missing, and Axolotl does not train without it")
    return "hf"


def _ebft(draft: Draft) -> str:
    """core/trainers/ebft: GRPO whose rewards are features, or a trainer of its own on whole texts."""
    given = draft.mapping("ebft")
    if not given:
        raise ConfigError("rl: ebft needs ebft, with mode: structured or mode: strided, as Axolotl says")
    if given.get("mode", "structured") == "structured":
        return "grpo"
    if draft.is_on("torch_compile") and draft.says("gradient_checkpointing"):
        raise ConfigError(
            "ebft with mode: strided, torch_compile and gradient_checkpointing ends with an error in Axolotl; omit "
            "torch_compile"
        )
    return "hf"


def _strided(draft: Draft) -> None:
    """The settings of rollouts at anchors (core/trainers/ebft/strided.py)."""
    given = draft.mapping("ebft")
    ours = {key: value for key, value in given.items() if key not in ("mode", *_OF_ANSWERS) and value is not None}
    draft.put("ebft", ours)
    draft.note(
        "ebft: the anchors begin at context_length, as in texts without prompts; behind a prompt there is room for "
        "fewer: an upper bound"
    )
    if given.get("use_whitening"):
        draft.note("ebft: the seconds of its singular value decompositions, one an anchor, were not measured")


def _rewards_by_features(draft: Draft) -> None:
    """EBFT's reward function (core/trainers/ebft/trainer.py)."""
    given = draft.mapping("ebft")
    layers = given.get("feature_layers")
    if layers is not None and (not isinstance(layers, list) or len(layers) != _LAYERS):
        raise ConfigError(f"ebft is simulated with {_LAYERS} feature_layers; got {quoted(layers)}")
    name = "whitened_features" if given.get("use_whitening") else "features"
    draft.put("reward_funcs", [f"{_FEATURES}.{name}"], "ebft")
    draft.note("ebft: the true answers are taken to be as long as the completions")


def _has_plugin(draft: Draft, name: str) -> bool:
    plugins = draft.given.get("plugins")
    return isinstance(plugins, list) and any(str(plugin).rpartition(".")[2] == name for plugin in plugins)


def _batch(draft: Draft) -> None:
    """utils/config/__init__.py, normalize_config; and two of the three keys are needed (validation.py)."""
    names = ("micro_batch_size", "gradient_accumulation_steps", "batch_size")
    if sum(draft.says(name) for name in names) < 2:
        close = {key: get_close_matches(str(key), names, n=1, cutoff=0.85) for key in draft.given if key not in names}
        typos = "".join(f"; write {near[0]} for {quoted(key)}" for key, near in close.items() if near)
        draft.wrong(f"at least two of {', '.join(names)} must be set, as Axolotl says{typos}")
    micro = draft.whole("micro_batch_size", 1) or 1
    steps, total = draft.whole("gradient_accumulation_steps"), draft.whole("batch_size")
    if steps is not None and total is not None:
        draft.wrong("only one of gradient_accumulation_steps and batch_size can be set, as Axolotl says")
    if steps is None and total is not None and "gradient_accumulation_steps" not in draft.given:
        # the schema's own default is 1, and normalize_config divides only where there is none (training.py)
        draft.note(
            f"batch_size {total} has no effect: Axolotl takes its default of gradient_accumulation_steps, 1; "
            "`gradient_accumulation_steps:` with no value beside batch_size makes it count"
        )
        draft.defaults["gradient_accumulation_steps"] = 1
        total = None
    if steps is None and total is not None:
        steps = total // micro
        if steps < 1:
            draft.wrong(f"batch_size {total} must be at least micro_batch_size {micro}")
        elif steps * micro != total:
            draft.note(
                f"batch_size {total} is no multiple of micro_batch_size {micro}: Axolotl trains on {steps * micro}"
            )
    draft.put("per_device_train_batch_size", micro, "micro_batch_size")
    key = "batch_size" if total is not None else "gradient_accumulation_steps"
    draft.put("gradient_accumulation_steps", steps or 1, key)


def _launch(draft: Draft, folder: Path) -> dict[str, object]:
    config, version, wanted = draft.mapping("fsdp_config"), draft.raw("fsdp_version"), draft.raw("fsdp")
    if draft.says("deepspeed"):
        return sharing.zero(deepspeed(draft, folder), folder)
    if config or draft.says("fsdp"):
        return sharing.fsdp(wanted, config, version)
    return {}


def _shared_sequence(draft: Draft, objective: str) -> int:
    """Ranks with parts of the same samples: ring attention, by heads for packed rows (schemas/validation.py)."""
    size = max(draft.whole("context_parallel_size") or 1, draft.whole("sequence_parallel_degree") or 1)
    if size == 1:
        return 1
    if objective != "sft" or not draft.values.get("packing"):
        raise ConfigError("context_parallel_size is simulated with sample_packing: true, and without rl")
    function, stride = draft.text("ring_attn_func"), draft.whole("heads_k_stride")
    if function not in (None, "varlen_llama3") or (stride or 1) != 1:
        raise ConfigError("context_parallel_size is simulated with ring_attn_func: varlen_llama3 and heads_k_stride: 1")
    draft.put("sequence_parallel_size", size, "context_parallel_size")
    draft.put("sequence_parallel", "gathered", "context_parallel_size")
    return size


def _dealt_experts(draft: Draft, launch: Mapping[str, object]) -> int:
    """Ranks over which DeepEP deals the experts out (integrations/expert_parallel); each has samples of its own."""
    size = draft.whole("expert_parallel_size") or 1
    if size == 1 or not _has_plugin(draft, "ExpertParallelPlugin"):
        return 1
    if launch or draft.values.get("objective") != "sft" or (draft.whole("dp_shard_size") or 1) > 1:
        raise ConfigError("expert_parallel_size is simulated with DDP on samples, not with FSDP, ZeRO or rl")
    draft.put("expert_parallel_size", size)
    draft.note(
        "expert_parallel_size: tokens are taken to be spread evenly over the experts, and what DeepEP sends and holds "
        "for it, 256 MiB and copies of a layer's tokens, is not simulated: a lower bound"
    )
    return size


def _ranks(draft: Draft, sharers: int) -> int | None:
    """Ranks that the file says: those over which it shards, those that share samples, or Ray's workers."""
    sizes = [draft.whole(key) for key in ("dp_shard_size", "dp_replicate_size")]
    workers = draft.whole("ray_num_workers") if draft.is_on("use_ray") else None
    draft.ignore(("ray_num_workers",))
    product = math.prod(size or 1 for size in sizes) * sharers
    return workers or (product if product > 1 else None)


def _attention(draft: Draft) -> bool:
    """Set the attention; whether it makes Axolotl cast embeddings and norms back to 16 bits (enums.py)."""
    name = draft.text("attn_implementation")
    given = name
    for flag, meant in _FLAGS.items():
        if draft.is_on(flag) and given is not None:
            draft.wrong(f"attn_implementation and {flag} cannot both be set, as Axolotl says")
        elif draft.is_on(flag) and name is None:
            name = meant
            draft.keys["attn_implementation"] = flag
    if name is None:
        return False
    if name in _ATTENTION:
        draft.put("attn_implementation", name)
    elif "/" not in name and name not in (*_FLAGS.values(), "fp8"):
        draft.wrong(
            f"attn_implementation must be one of {', '.join((*_ATTENTION, 'xformers', 'sage', 'fp8'))}; got "
            f"{quoted(name)}{nearest(name, _ATTENTION)}"
        )
    elif "flash-attn" in name:
        draft.put("attn_implementation", "flash_attention_2")
    else:
        draft.note(f"the attention {name} is simulated as PyTorch's own (sdpa)")
    return name not in ("eager", "sdpa")


def _dtype(draft: Draft, *, kept: bool) -> None:
    """Type of the weights: bfloat16, with no float32 masters (resolve_dtype). `bf16: auto` is a card that can.

    On one that lacks bfloat16: `without_bfloat16`.
    """
    given = draft.raw("bf16", "auto")
    fp16, old = draft.is_on("fp16"), draft.is_on("bfloat16")
    half, single = draft.is_on("float16"), draft.is_on("float32")
    automatic = str(given).lower() == "auto" and not fp16
    bf16 = automatic or truth(given) is True
    if truth(given) is None and str(given).lower() != "auto":  # "full" is in its code, and its schema refuses it
        draft.wrong(f"bf16 must be true, false or auto; got {quoted(given)}")
    eight = draft.given.get("load_in_8bit") is True
    dtype = "bfloat16" if bf16 or old else "float16" if fp16 or half or eight else "float32"
    draft.put("dtype", dtype, "bf16")
    draft.put("bf16", bf16 or old, "bf16")
    if fp16 and not bf16:
        draft.put("fp16", True)
    adapted = draft.given.get("adapter") is not None
    if dtype != "float32" and not kept and not adapted and not single:
        draft.note(
            "without flash attention Axolotl holds embeddings, output layer and norms in float32, which is not "
            "simulated: 2 bytes more for each of their weights, and their gradients and states"
        )


def without_bfloat16(given: Mapping[str, object]) -> dict[str, object]:
    """{key: value} of `bf16: auto` on a card that lacks bfloat16 (resolve_dtype); {} for any other setting."""
    if str(given.get("bf16", "auto")).lower() != "auto" or truth(given.get("fp16")):
        return {}
    halves = given.get("fp16") is None and not truth(given.get("float16"))
    return {"bf16": False, **({"fp16": True} if halves else {})}


def _adapter(draft: Draft) -> None:
    kind = draft.text("adapter", choices=("lora", "qlora"))
    four, eight = draft.is_on("load_in_4bit"), draft.is_on("load_in_8bit")
    extra = draft.mapping("bnb_config_kwargs")
    rank, alpha, dropout = draft.whole("lora_r"), draft.whole("lora_alpha"), draft.number("lora_dropout")
    modules, linear = draft.raw("lora_target_modules"), draft.is_on("lora_target_linear")
    parameters, kept = draft.names("lora_target_parameters"), draft.names("lora_modules_to_save")
    dora, stable = draft.is_on("peft_use_dora"), draft.is_on("peft_use_rslora")
    cast = draft.raw("peft_autocast_adapter_dtype")
    if kind is None:
        if draft.is_on("gptq"):
            raise ConfigError("gptq needs adapter: lora, because quantised weights get no gradient")
        return
    if draft.given.get("lora_r") is None:
        draft.wrong(f"lora_r is missing, and Axolotl has no default for it with adapter: {kind}")
    if draft.given.get("lora_alpha") is None:
        draft.wrong(f"lora_alpha is missing, and Axolotl has no default for it with adapter: {kind}")
    if not (linear or modules or parameters) and draft.given.get("lora_model_dir") is None:
        draft.wrong("lora_target_linear, lora_target_modules or lora_target_parameters is missing: PEFT adapts nothing")
    if kind == "qlora" and not four:
        draft.wrong("adapter: qlora needs load_in_4bit: true, as Axolotl says")
    draft.put("use_peft", True, "adapter")
    draft.put("lora_r", rank)
    draft.put("lora_alpha", alpha)
    draft.put("lora_dropout", dropout)
    draft.put("use_dora", dora or None, "peft_use_dora")
    draft.put("use_rslora", stable or None, "peft_use_rslora")
    draft.put("lora_modules_to_save", kept)
    draft.put("lora_target_parameters", parameters)
    if linear:
        draft.put("lora_target_modules", ["all-linear"], "lora_target_linear")
    elif isinstance(modules, list | str):
        key = "lora_target_modules"
        draft.put(key, [modules] if isinstance(modules, str) else targets(draft, list(map(str, modules)), key))
    if cast is not None and truth(cast) is False:
        draft.put("adapter_dtype", "bfloat16", "peft_autocast_adapter_dtype")
    if kind == "qlora":
        draft.put("load_in_4bit", True)
        draft.put("bnb_4bit_quant_type", extra.get("bnb_4bit_quant_type", "nf4"), "bnb_config_kwargs")
        draft.put("use_bnb_nested_quant", extra.get("bnb_4bit_use_double_quant", True), "bnb_config_kwargs")
        draft.put("bnb_4bit_quant_storage", "bfloat16", "bnb_config_kwargs")
        draft.defaults |= {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    elif draft.is_on("gptq"):
        take_quantised(draft, "gptq", str(draft.values["dtype"]))
    elif eight:
        draft.put("load_in_8bit", True)
    elif four:
        draft.note("load_in_4bit has no effect with adapter: lora; qlora quantises")


def _length(draft: Draft, trainer: str) -> int:
    """Tokens of a row, and its padding (core/builders/causal.py, line 386). Packed rows are filled up."""
    length = draft.whole("sequence_len", 512) or 512
    packing = draft.is_on("sample_packing")
    filled = draft.raw("pad_to_sequence_len")
    multiple = draft.whole("pad_to_multiple_of")
    if trainer == "grpo":
        draft.note(f"prompts of sequence_len {length} tokens stand for the data; --prompt-tokens N says others")
        return length
    if trainer == "dpo":
        draft.put("max_length", length, "sequence_len")
        draft.put("pad_to_multiple_of", multiple)
        return length
    if trainer == "reward":
        draft.put("max_length", length, "sequence_len")
        return length
    if draft.values.get("objective") == "ebft":  # the transforms of its data pad each text
        draft.put("max_length", length, "sequence_len")
        draft.put("pad_to_max_length", True, "sequence_len")
        return length
    step = multiple or _MULTIPLE
    whole_rows = truth(filled) is True or (filled is None and packing)
    if filled is None and packing:
        draft.defaults["pad_to_sequence_len"] = True
    if whole_rows:
        length = step * math.ceil(length / step)
    draft.put("max_length", length, "sequence_len")
    if packing:
        draft.put("packing", True, "sample_packing")
        draft.put("block_diagonal", None if draft.values["objective"] == "diffusion" else True, "sample_packing")
    if whole_rows:
        draft.put("pad_to_max_length", True, "pad_to_sequence_len")
    elif filled is None:
        draft.put("pad_to_multiple_of", step)
    return length


def _checkpoints(draft: Draft) -> None:
    """core/builders/base.py, _configure_gradient_checkpointing."""
    given, moved = draft.raw("gradient_checkpointing"), draft.raw("activation_offloading")
    kwargs = draft.mapping("gradient_checkpointing_kwargs")
    offload = given in ("offload", "offload_disk") or (moved is not None and truth(moved) is not False)
    on = given in ("offload", "offload_disk") or truth(given) is True
    if given is not None and not on and truth(given) is not False:
        draft.wrong(f"gradient_checkpointing must be true, false, offload or offload_disk; got {quoted(given)}")
    draft.put("gradient_checkpointing", on)
    # normalize_config: re-entrant where nothing is said, but in losses over answers and beside frozen parts
    again = not (draft.given.get("rl") or draft.given.get("unfrozen_parameters") or moved == "hidden_states")
    usual = {"use_reentrant": again}
    draft.put("gradient_checkpointing_kwargs", dict(kwargs) or usual)
    if on and not kwargs:
        draft.defaults["gradient_checkpointing_kwargs"] = usual
    if offload:
        draft.note(
            "activation_offloading: activations in host memory are not simulated; gradient checkpointing is, in their "
            "place, which may need more memory or less"
        )


def _qat(draft: Draft, trainer: str) -> None:
    """Quantisation-aware training (utils/quantization.py). Raises ConfigError for what ends with an error there."""
    given = draft.mapping("qat")
    if draft.is_on("use_onebitllms"):  # loaders/model.py
        if trainer != "hf" or draft.values.get("use_peft"):
            raise ConfigError("use_onebitllms is simulated where all weights train on samples, not with adapters or rl")
        draft.put("qat", {"weight_dtype": "ternary"}, "use_onebitllms")
        draft.fixed.add("use_peft")
        return
    if not given:
        return
    if trainer != "hf" or draft.values.get("use_peft"):
        raise ConfigError("qat is simulated where all weights train on samples, not with adapters or rl")
    weight = str(given.get("weight_dtype", "int8"))
    if weight in ("nvfp4", "int8"):
        raise ConfigError(
            f"qat with weight_dtype {weight} ends with an error in Axolotl: torchao 0.17, which it pins, does not "
            "train with the config that it makes; int4, mxfp4 and fp8 are simulated"
        )
    keys = ("weight_dtype", "activation_dtype", "group_size", "quantize_embedding")
    draft.put("qat", {"group_size": 32, **{key: given[key] for key in keys if given.get(key) is not None}}, "qat")


def _pruned(draft: Draft, trainer: str) -> None:
    """Weights that LLM Compressor keeps pruned by masks. Raises ConfigError for another of its modifiers."""
    recipe = draft.mapping("llmcompressor").get("recipe")
    if not recipe:
        return
    named = re.findall(r"\b([A-Za-z]+Modifier)\b", str(recipe))
    if set(named) != {"ConstantPruningModifier"} or trainer != "hf" or draft.values.get("use_peft"):
        raise ConfigError(
            "llmcompressor is simulated with ConstantPruningModifier alone, where all weights train on samples; got "
            f"{', '.join(dict.fromkeys(named)) or 'no modifier'}"
        )
    draft.put("pruning_masks", True, "llmcompressor")
    draft.fixed.add("use_peft")


def _plugins(draft: Draft) -> None:
    """Changes by integrations. Raises ConfigError for one that is unknown or trains otherwise."""
    plugins = draft.raw("plugins")
    for plugin in plugins if isinstance(plugins, list) else []:
        name = str(plugin).rpartition(".")[2]
        effect = keys_of(AXOLOTL.name).plugins.get(name)
        if effect is None:
            raise ConfigError(f"plugins: {plugin} is not simulated")
        if effect:
            draft.note(effect)
        if name == "CutCrossEntropyPlugin" and draft.is_on("cut_cross_entropy", True):
            if draft.values["dtype"] == "float32":
                draft.wrong("cut_cross_entropy needs bf16 or fp16, as Axolotl says")
            if draft.values.get("objective") == "sft":  # it changes no loss over two answers
                draft.put("cut_cross_entropy", True, "plugins")
    _liger(draft)


def _liger(draft: Draft) -> None:
    """Liger's loss, whose keys belong to a plugin: Axolotl ignores them if that is missing."""
    on = draft.is_on("liger_fused_linear_cross_entropy")
    if on and _has_plugin(draft, "LigerPlugin"):
        draft.put("use_liger_kernel", True, "liger_fused_linear_cross_entropy")
        return
    if on:
        draft.note(f"liger_fused_linear_cross_entropy does nothing here: Axolotl reads it with plugins: [{_LIGER}]")
    if draft.raw("plugins"):
        draft.fixed.add("use_liger_kernel")  # a change would have to be written into a list of the file's own


def _preferences(draft: Draft, trainer: str) -> None:
    beta = draft.number("rl_beta")
    inner = draft.mapping("trl")
    if trainer == "reward":
        return
    draft.put("beta", inner.get("beta", beta), "rl_beta")
    loss = draft.raw("dpo_loss_type")
    draft.put("loss_type", ["ipo"] if draft.given.get("rl") == "ipo" else loss, "dpo_loss_type")
    draft.put("label_smoothing", draft.number("dpo_label_smoothing"), "dpo_label_smoothing")
    draft.put("precompute_ref_log_probs", draft.is_on("precompute_ref_log_probs") or None)
    draft.put("padding_free", draft.is_on("dpo_padding_free") or None, "dpo_padding_free")
    draft.put("use_liger_kernel", draft.is_on("dpo_use_liger_kernel") or None, "dpo_use_liger_kernel")


def _grpo(draft: Draft) -> None:
    """core/trainers/grpo/__init__.py: the keys of `trl` are GRPOConfig's; those of vLLM are under `vllm`."""
    inner, engine = draft.mapping("trl"), draft.mapping("vllm")
    unlike = [key for key in _GRPO_UNLIKE if inner.get(key)]
    if unlike:
        raise ConfigError(f"trl.{unlike[0]}: Axolotl's asynchronous GRPO is not simulated")
    for key in _GRPO:
        if inner.get(key) is not None and not (key == "vllm_mode" and not inner.get("use_vllm")):
            draft.put(key, inner[key], f"trl.{key}")
    draft.put("beta", inner.get("beta", draft.number("rl_beta")), "trl.beta")
    if inner.get("use_liger_loss"):
        draft.put("use_liger_kernel", True, "trl.use_liger_loss")
    if inner.get("use_vllm") and inner.get("vllm_mode") == "colocate":
        draft.put(
            "vllm_gpu_memory_utilization", engine.get("gpu_memory_utilization", 0.9), "vllm.gpu_memory_utilization"
        )
        draft.put("vllm_tensor_parallel_size", engine.get("tensor_parallel_size"), "vllm.tensor_parallel_size")
    draft.put("vllm_max_model_length", engine.get("max_model_len") if inner.get("use_vllm") else None,
              "vllm.max_model_len")  # fmt: skip
    if inner.get("reward_funcs"):
        draft.note("the file's reward functions are code of its own; a function of TRL stands for them")
    draft.put("reward_funcs", ["think_format_reward"], "trl.reward_funcs")


def _full_logits(draft: Draft, objective: str) -> None:
    """KTO, ORPO and SimPO by TRL 1.8's own trainers; their beta is rl_beta, else orpo_alpha (core/builders/rl.py)."""
    inner = draft.mapping("trl")
    given = (inner.get("beta"), draft.number("rl_beta"), draft.number("orpo_alpha"))
    draft.put("beta", next((value for value in given if value is not None), 0.1), "rl_beta")
    gamma, weight = draft.number("simpo_gamma"), draft.number("cpo_alpha")
    if objective == "kto":
        draft.put("keeps_logits", True, "rl")
        return
    draft.put("nll_weight", 1.0 if objective == "orpo" or weight is None else weight, "cpo_alpha")
    if objective == "simpo":
        draft.put("simpo_gamma", 0.5 if gamma is None else gamma)


# -- back in its own keys ---------------------------------------------------------------------------------------------


def say(foreign: Foreign, changes: Mapping[str, object]) -> dict[str, object]:
    """{key of Axolotl: value} of changes of a recipe. Raises ConfigError for one that it has no key for."""
    of_batch = foreign.keys.get("gradient_accumulation_steps") == "batch_size"
    micro = {**foreign.values, **changes}.get("per_device_train_batch_size")
    # evaluation takes as many as training where the file does not say: its own number stays
    kept = {"eval_batch_size": foreign.defaults["eval_batch_size"]} if "eval_batch_size" in foreign.defaults else {}
    own: dict[str, Saying] = {
        **dict.fromkeys(("objective", "dtype", "bf16", "fp16", "adapter_dtype", "packing", "block_diagonal",
                         "pad_to_max_length", "bnb_4bit_quant_storage", "average_tokens_across_devices",
                         "bnb_4bit_quant_type", "use_bnb_nested_quant", "reward_funcs",
                         "keeps_logits", "cut_cross_entropy", "sequence_parallel",
                         "mask_token", "ebft")),
        "per_device_train_batch_size": lambda value: {"micro_batch_size": value, **kept},
        "attn_implementation": lambda value: {
            foreign.keys["attn_implementation"]: None, "attn_implementation": value
        } if foreign.keys.get("attn_implementation") in _FLAGS else {"attn_implementation": value},
        "gradient_checkpointing": "gradient_checkpointing",
        "load_in_4bit": lambda value: {"load_in_4bit": True, "adapter": "qlora"} if value else None,
        "load_in_8bit": lambda value: {"load_in_8bit": True, "adapter": "lora"} if value else None,
        "use_peft": lambda value: {"adapter": "lora"} if value else None,
        "lora_r": "lora_r",
        "lora_alpha": "lora_alpha",
        "lora_dropout": "lora_dropout",
        "lora_target_modules": lambda value: {"lora_target_linear": True} if value == ["all-linear"] else {
            "lora_target_modules": value
        },
        "optim": "optimizer",
        "max_length": "sequence_len",
        "use_liger_kernel": lambda value: {
            "plugins": [_LIGER], "liger_fused_linear_cross_entropy": True
        } if value else None,
    }  # fmt: skip
    if foreign.trainer == "grpo":
        own |= {key: lambda value, key=key: {f"trl.{key}": value} for key in (*_GRPO, "beta")}  # type: ignore[misc]
    if "gradient_accumulation_steps" in foreign.defaults:  # a batch_size without effect, beside which it is refused
        own["gradient_accumulation_steps"] = lambda value: {"batch_size": None, "gradient_accumulation_steps": value}
    elif of_batch and "gradient_accumulation_steps" in changes:
        own["gradient_accumulation_steps"] = lambda value: {"batch_size": _product(value, micro)}
    elif of_batch and "per_device_train_batch_size" in changes:
        steps = foreign.values["gradient_accumulation_steps"]
        own["per_device_train_batch_size"] = lambda value: {
            "micro_batch_size": value, "batch_size": _product(value, steps), **kept
        }  # fmt: skip
    return said(foreign, changes, own)


def _product(one: object, other: object) -> int:
    if not isinstance(one, int) or not isinstance(other, int):
        raise ConfigError(f"the batch must be of whole numbers; got {quoted(one)} x {quoted(other)}")
    return one * other


# -- what Axolotl ends with before it trains --------------------------------------------------------------------------

# Pairs of keys that cannot both be set.
_NOT_BOTH = (
    ("eval_steps", "evals_per_epoch"), ("save_steps", "saves_per_epoch"), ("warmup_steps", "warmup_ratio"),
    ("deepspeed", "fsdp"), ("test_datasets", "val_set_size"), ("pretraining_dataset", "val_set_size"),
    ("streaming", "val_set_size"), ("sample_packing", "rl"), ("noisy_embedding_alpha", "neftune_noise_alpha"),
    ("max_memory", "gpu_memory_limit"), ("lr_groups", "loraplus_lr_ratio"),
)  # fmt: skip
# A key, and another one that it needs.
_NEEDS = (
    ("pretraining_dataset", "max_steps"), ("streaming", "max_steps"), ("relora", "jagged_restart_steps"),
    ("activation_offloading", "gradient_checkpointing"), ("selective_checkpointing", "gradient_checkpointing"),
    ("fsdp", "fsdp_config"), ("fp32_norms", "fsdp_config"), ("deepcompile", "deepspeed"),
    ("push_dataset_to_hub", "hf_use_auth_token"), ("peft_layers_pattern", "peft_layers_to_transform"),
)  # fmt: skip
# Keys whose validators raise (schemas/deprecated.py): where they have a value at all, and where that is not false.
_GONE = ("dpo_use_logits_to_keep", "dpo_generate_during_eval", "dpo_norm_loss", "rpo_alpha")
_GONE_IF_ON = {
    "max_packed_sequence_len": "sample_packing with sequence_len", "rope_scaling": "overrides_of_model_config",
    "s2_attention": "", "flash_attn_rms_norm": "",
}  # fmt: skip
_FALLBACK = "tokenizer_default_fallback_"  # begins a chat_template (schemas/config.py)
_CHATS = (  # schemas/enums.py, ChatTemplate
    "alpaca", "chatml", "mistral_v1", "mistral_v2v3", "mistral_v3_tekken", "mistral_v7_tekken", "gemma", "cohere",
    "llama3", "llama3_2_vision", "llama4", "phi_3", "phi_35", "deepseek_v2", "deepseek_v3", "jamba", "jinja",
    "qwen_25", "qwen3", "qwen3_5", "falcon_h1", "nemotron_h", "tokenizer_default", "exaone", "exaone4", "metharme",
    "pixtral", "llava", "qwen2_vl", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "command_a",
    "command_a_tool_use", "command_a_rag", "aya",
)  # fmt: skip
_LOSSES = ("cut_cross_entropy", "chunked_cross_entropy", "liger_cross_entropy", "liger_fused_linear_cross_entropy")
_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel")
_FUSED = ("unsloth_cross_entropy_loss", "unsloth_lora_mlp", "unsloth_lora_qkv", "unsloth_lora_o", "unsloth_rms_norm",
          "unsloth_rope")  # fmt: skip
_OF_BITSANDBYTES = ("adamw_8bit", "adamw_bnb_8bit")
_OVER_ANSWERS = ("dpo", "kto", "orpo", "ipo")


def _check_rules(draft: Draft, ranks: int | None) -> None:
    """Keep the combinations that Axolotl refuses on `ranks` ranks, if these are known, for one error with the rest."""
    on = {key: is_set(value) for key, value in draft.given.items()}
    for one, other in _NOT_BOTH:
        if on.get(one) and on.get(other):
            draft.wrong(f"{one} and {other} cannot both be set, as Axolotl says")
    for one, other in _NEEDS:
        if on.get(one) and not on.get(other):
            draft.wrong(f"{one} needs {other}, as Axolotl says")
    losses = [key for key in _LOSSES if on.get(key)]
    if len(losses) > 1:
        draft.wrong(f"{' and '.join(losses)} cannot both be set, as Axolotl says")
    if gone := [key for key in _FUSED if on.get(key)]:
        draft.wrong(f"{gone[0]} is no longer a key of Axolotl; write lora_mlp_kernel, lora_qkv_kernel or lora_o_kernel")
    noise = number(draft.given.get("neftune_noise_alpha"))
    if noise is not None and noise <= 0:
        draft.wrong(f"neftune_noise_alpha must be more than 0; got {draft.given['neftune_noise_alpha']}")
    _gone(draft.given, on, draft)
    _epochs(draft.given, on, draft)
    chat = draft.given.get("chat_template")
    if chat and str(chat) not in _CHATS and not str(chat).startswith(_FALLBACK):
        draft.wrong(
            f"chat_template {quoted(chat)} is none of Axolotl's{nearest(str(chat), _CHATS)}; jinja is a user's own"
        )
    _strategies(draft.given, on, draft)
    _adapters(draft.given, on, draft)
    _sharing(draft.given, on, draft)
    _answers(draft.given, on, draft, ranks or 1)


def _gone(given: Mapping[str, object], on: Mapping[str, bool], draft: Draft) -> None:
    for key in _GONE:
        if given.get(key) is not None:
            draft.wrong(f"{key} is no longer a key of Axolotl; leave it out")
    for key, newer in _GONE_IF_ON.items():
        if on.get(key):
            draft.wrong(f"{key} is no longer a key of Axolotl; {f'write {newer}' if newer else 'leave it out'}")


def _epochs(given: Mapping[str, object], on: Mapping[str, bool], draft: Draft) -> None:
    epochs = number(given.get("num_epochs"))
    if epochs is None or epochs > 0:
        return
    samples = on.get("test_datasets") or (number(given.get("val_set_size")) or 0) > 0
    often = [key for key in ("saves_per_epoch", *(("evals_per_epoch",) if samples else ())) if on.get(key)]
    if epochs == 0 and often:  # utils/config/__init__.py, normalize_config
        draft.wrong(f"num_epochs must be more than 0 with {often[0]}, by which Axolotl divides 1; got 0")
    elif not on.get("max_steps"):
        draft.wrong(f"num_epochs must be more than 0, or max_steps set; got {given['num_epochs']}: nothing is trained")


def _strategies(given: Mapping[str, object], on: Mapping[str, bool], draft: Draft) -> None:
    evaluates = given.get("eval_strategy") or given.get("evaluation_strategy")
    for often, what, strategy in (("eval_steps", "eval", evaluates), ("evals_per_epoch", "eval", evaluates),
                                  ("save_steps", "save", given.get("save_strategy"))):  # fmt: skip
        if on.get(often) and strategy not in (None, "", "steps"):
            draft.wrong(f"{often} needs {what}_strategy: steps, or none, as Axolotl says")
    wanted = on.get("eval_steps") or (evaluates and str(evaluates) != "no")
    if wanted and number(given.get("val_set_size")) == 0 and not on.get("test_datasets"):
        draft.wrong("eval_steps and eval_strategy need a val_set_size of more than 0, as Axolotl says")
    if given.get("save_strategy") == "best" and not on.get("metric_for_best_model"):
        draft.wrong("save_strategy: best needs metric_for_best_model, as Axolotl says")
    if on.get("do_bench_eval") and not (on.get("evals_per_epoch") or on.get("eval_steps")):
        draft.wrong("do_bench_eval needs evals_per_epoch or eval_steps, as Axolotl says")
    if on.get("early_stopping_patience") and not (on.get("save_steps") and on.get("eval_steps")):
        draft.wrong("early_stopping_patience needs save_steps and eval_steps, as Axolotl says")
    packs = on.get("sample_packing") and truth(given.get("eval_sample_packing")) is not False
    if packs and on.get("eval_table_size"):
        draft.wrong("eval_table_size with sample_packing needs eval_sample_packing: false, as Axolotl says")


def _adapters(given: Mapping[str, object], on: Mapping[str, bool], draft: Draft) -> None:
    kind = given.get("adapter")
    if not kind and (on.get("load_in_4bit") or on.get("load_in_8bit")):
        draft.wrong("load_in_4bit and load_in_8bit need adapter, as Axolotl says; all weights train without them")
    if kind == "qlora" and on.get("load_in_8bit"):
        draft.wrong("adapter: qlora cannot be loaded in 8 bits, as Axolotl says")
    kernels = [key for key in _KERNELS if on.get(key)]
    if kernels and kind == "lora" and on.get("load_in_8bit"):
        draft.wrong(f"{kernels[0]} is not for load_in_8bit, as Axolotl says")
    if kernels and on.get("trust_remote_code"):
        draft.wrong(f"{kernels[0]} is not for trust_remote_code, as Axolotl says")
    if kind in ("lora", "qlora") and on.get("flash_attn_fuse_mlp"):
        draft.wrong("flash_attn_fuse_mlp is not for LoRA, as Axolotl says")
    dropout = number(given.get("lora_dropout"))
    if kind and dropout is not None and not 0 <= dropout <= 1:
        draft.wrong(f"lora_dropout must be 0 to 1; got {given['lora_dropout']}")
    if kind and dropout and on.get("lora_target_parameters"):
        draft.wrong("lora_dropout must be 0 with lora_target_parameters, as Axolotl says")
    kwargs = given.get("gradient_checkpointing_kwargs")
    again = isinstance(kwargs, Mapping) and truth(kwargs.get("use_reentrant")) is True
    if again and on.get("unfrozen_parameters"):
        draft.wrong("unfrozen_parameters needs use_reentrant: false, as Axolotl says")
    if again and on.get("selective_checkpointing"):
        draft.wrong("selective_checkpointing needs use_reentrant: false, as Axolotl says")


def _sharing(given: Mapping[str, object], on: Mapping[str, bool], draft: Draft) -> None:
    config = given.get("fsdp_config")
    if given.get("optimizer") == "muon" and on.get("deepspeed"):
        draft.wrong("optimizer: muon is not for DeepSpeed, as Axolotl says")
    shared = max(number(given.get(key)) or 1 for key in ("context_parallel_size", "sequence_parallel_degree"))
    if shared > 1 and on.get("sample_packing") and (number(given.get("micro_batch_size")) or 1) > 1:
        draft.wrong("context_parallel_size with sample_packing needs micro_batch_size: 1, as Axolotl says")
    if not isinstance(config, Mapping) or not config:
        return
    if on.get("deepspeed") and not on.get("fsdp"):
        draft.wrong("deepspeed and fsdp_config cannot both share the model; leave one out")
    version = str(given.get("fsdp_version") or config.get("fsdp_version") or config.get("version") or 1)
    optimizer = str(given.get("optimizer") or "")
    offloads = truth(config.get("offload_params", config.get("fsdp_offload_params"))) is True
    if version == "2" and optimizer in _OF_BITSANDBYTES:
        draft.wrong(f"optimizer {optimizer} is not for FSDP2, as Axolotl says; adamw_torch_8bit is")
    if version != "2" and offloads and "8bit" in optimizer:
        draft.wrong(f"optimizer {optimizer} is not for FSDP with offload_params, as Axolotl says")
    if version == "2" and str(given.get("rl")) in _OVER_ANSWERS and (on.get("load_in_4bit") or on.get("load_in_8bit")):
        draft.wrong(f"rl: {given['rl']} with FSDP2 is not for quantised models, as Axolotl says")
    if version != "2" and on.get("fp32_norms"):
        draft.wrong("fp32_norms needs fsdp_version: 2, as Axolotl says")


def _answers(given: Mapping[str, object], on: Mapping[str, bool], draft: Draft, ranks: int) -> None:
    kind, inner = given.get("rl"), given.get("trl")
    inner = inner if isinstance(inner, Mapping) else {}
    if kind == "kto" and given.get("remove_unused_columns") is not False:
        draft.wrong("rl: kto needs remove_unused_columns: false, as Axolotl says")
    if kind == "simpo" and on.get("warmup_ratio"):
        draft.wrong("rl: simpo takes warmup_steps and no warmup_ratio, as Axolotl says")
    if kind != "dpo" and (on.get("dpo_loss_type") or on.get("dpo_loss_weights")):
        draft.wrong("dpo_loss_type and dpo_loss_weights need rl: dpo, as Axolotl says")
    group = number(inner.get("num_generations"))
    if kind != "grpo" or group is None:
        return
    if group < 2:
        draft.wrong(f"trl.num_generations must be 2 or more; got {inner['num_generations']}")
        return
    micro, steps = number(given.get("micro_batch_size")) or 1, number(given.get("gradient_accumulation_steps")) or 1
    size = number(inner.get("generation_batch_size")) or micro * steps
    if size % group:
        draft.wrong(
            f"{size:g} completions of a generation must be a multiple of trl.num_generations {group:g}, as Axolotl says"
        )
    elif ranks > 1 and size < group * ranks:  # it takes a rank's samples for those of all
        draft.wrong(
            f"micro_batch_size x gradient_accumulation_steps, or trl.generation_batch_size, must be {group * ranks:g} "
            f"or more (trl.num_generations {group:g} x {ranks} ranks), as Axolotl says; got {size:g}"
        )
