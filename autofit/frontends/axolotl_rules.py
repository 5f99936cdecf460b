"""What Axolotl ends with before it trains, of combinations of its keys (schemas/validation.py, config.py, peft.py).

Read at 067b021c. No torch here.
"""

from collections.abc import Mapping

from autofit.errors import nearest, quoted
from autofit.frontends.draft import Draft, is_set, number, truth

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


def check(draft: Draft, ranks: int | None) -> None:
    """Keep what Axolotl does not take together on `ranks` ranks, where these are known, to be told with the rest."""
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
