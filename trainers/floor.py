"""The bytes that a training surely holds on its one card, from its keys and the model's name. No torch here.

Weights are there from the load on, gradients after a backward, AdamW's moments after a step; all of them meet in each
update. What is not certain (adapters, experts that no token takes, a vision tower beside text) is left out.
"""

from collections.abc import Mapping

from autofit.plugin.protocol import Inspection
from autofit.recipe.catalogue import Architecture, architecture
from autofit.recipe.launch import is_on

from .key_table import kept_table
from .older import modern

_HF = "hf"
_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_DTYPE, _OPTIM = "float32", "adamw_torch_fused"  # of TRL and transformers where a recipe says none
_ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf")
_HOLDS_GRADIENTS = (*_ADAMW, "sgd", "adafactor", "lion_32bit", "lion_8bit", "adamw_8bit", "adamw_bnb_8bit")
# Settings with which the weights or what is trained of them are others.
_OTHERWISE = (
    "load_in_4bit", "load_in_8bit", "quantization_config", "model_init_kwargs", "deepspeed", "fsdp", "fsdp_config",
    "use_cpu", "no_cuda", "trust_remote_code",
)  # fmt: skip
# All that a recipe of `hf` may say, whose other keys change what is trained, or where it is.
_PLAIN_OF_HF = {
    "model_name_or_path", "objective", "dtype", "optim", "bf16", "fp16", "tf32", "attn_implementation",
    "max_length", "pad_to_multiple_of", "pad_to_max_length", "packing", "block_diagonal", "float32_logits",
    "cut_cross_entropy", "beta", "use_liger_kernel", "gradient_checkpointing", "gradient_checkpointing_kwargs",
    "activation_checkpointing", "activation_checkpointing_kwargs", "per_device_train_batch_size",
    "per_device_eval_batch_size", "gradient_accumulation_steps", "max_steps", "num_train_epochs", "learning_rate",
    "lr_scheduler_type", "warmup_ratio", "warmup_steps", "weight_decay", "max_grad_norm", "seed", "eval_strategy",
    "eval_steps", "save_strategy", "save_steps", "logging_steps", "output_dir", "report_to", "env", "use_peft",
    "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules",
}  # fmt: skip
_OBJECTIVES_OF_HF = ("sft", "dpo", "kto")  # that train all words of the model
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def held(trainer: str, values: Mapping[str, object], inspection: Inspection) -> dict[str, int]:
    """{what: bytes}, or {} where nothing is certain."""
    table = kept_table(trainer)
    if trainer == _HF:
        if not (set(values) <= _PLAIN_OF_HF and values.get("objective") in _OBJECTIVES_OF_HF and values.get("dtype")):
            return {}
    elif table is None:  # another TRL, whose defaults may be others
        return {}
    else:
        values = modern(values, table.keys, inspection).values
    model = architecture(str(values.get("model_name_or_path")))
    if model is None or "quantization_config" in model.config or any(map(values.get, _OTHERWISE)):
        return {}
    dtype = values.get("dtype") or _DTYPE
    each = _BYTES.get(str(model.config.get("torch_dtype") if dtype == "auto" else dtype))
    if each is None:
        return {}
    nbytes = each * _parameters(model, scores=trainer == "reward")
    optim = str(values.get("optim") or _OPTIM)
    if is_on(values.get("use_peft")) or _trains_in_part(model) or optim not in _HOLDS_GRADIENTS:
        return {"weights": nbytes}
    moments = {"AdamW's moments": 2 * nbytes} if optim in _ADAMW else {}
    return {"weights": nbytes, "gradients": nbytes} | moments


def _parameters(model: Architecture, *, scores: bool) -> int:
    """The model's parameters, without a head of its own where the trainer replaces that by one that scores."""
    config = {**model.config, **model.text_config}
    if not scores or config.get("tie_word_embeddings", True):
        return model.parameters
    return model.parameters - int(str(config["vocab_size"])) * int(str(config["hidden_size"]))


def _trains_in_part(model: Architecture) -> bool:
    return "vision_config" in model.config or any(map(model.text_config.get, _EXPERTS))
