"""Keys of transformers' TrainingArguments, which LLaMA-Factory and ms-swift take too, by what they do to memory.

Read in transformers 4.51 and 5.23 (training_args.py, training_args_seq2seq.py); names only. No torch here.
"""

from autofit.errors import ConfigError, nearest
from autofit.frontends.draft import Draft

# The same key in our recipe: the optimizer, its schedule, precision, and what trains how long.
SAME = (
    "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "num_train_epochs",
    "max_steps", "lr_scheduler_type", "warmup_steps", "seed", "optim_args", "neftune_noise_alpha",
    "torch_empty_cache_steps", "label_smoothing_factor", "gradient_checkpointing_kwargs",
    "average_tokens_across_devices",
)  # fmt: skip
# Without effect on the memory of a training step, or on the batch: reports, checkpoints, evaluation, the Hub, loaders.
_NAMES = """
output_dir overwrite_output_dir do_train do_eval do_predict logging_strategy logging_steps logging_first_step
logging_dir log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen include_tokens_per_second log_level
log_level_replica disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id trackio_static_space_id
eval_strategy evaluation_strategy eval_steps eval_delay prediction_loss_only eval_on_start eval_do_concat_batches
eval_use_gather_object eval_accumulation_steps include_for_metrics batch_eval_metrics include_inputs_for_metrics
save_only_model save_strategy save_steps save_on_each_node save_total_limit save_safetensors enable_jit_checkpoint
push_to_hub push_to_hub_model_id push_to_hub_organization push_to_hub_token hub_token hub_private_repo hub_model_id
hub_strategy hub_always_push hub_revision load_best_model_at_end metric_for_best_model greater_is_better
ignore_data_skip restore_callback_states_from_checkpoint full_determinism data_seed use_cpu no_cuda tf32 use_ipex
use_mps_device jit_mode_eval accelerator_config dataloader_drop_last dataloader_num_workers dataloader_pin_memory
dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order
remove_unused_columns label_names length_column_name ddp_find_unused_parameters ddp_broadcast_buffers ddp_static_graph
ddp_backend ddp_timeout debug skip_memory_metrics resume_from_checkpoint local_rank sortish_sampler
predict_with_generate generation_max_length generation_num_beams generation_config past_index use_cache
average_tokens_across_devices bf16_full_eval fp16_full_eval fp16_backend fp16_opt_level half_precision_backend
warmup_ratio lr_scheduler_kwargs group_by_length train_sampling_strategy include_effective_tokens_per_second
per_device_eval_batch_size per_gpu_eval_batch_size ray_scope tpu_metrics_debug tpu_num_cores mp_parameters torchdynamo
activation_checkpointing_kwargs
"""
NO_EFFECT = frozenset(_NAMES.split())
_NAMED = {
    "torch_compile": "compiled code is not simulated; the layers run one operator after another",
    "auto_find_batch_size": "the batch as written is taken; after an out-of-memory error this key would change it",
}  # fmt: skip
_REFUSED = {
    "parallelism_config": "tensor, context and sequence parallelism are not simulated",
    "optim_target_modules": "optimizers for some of the layers only (GaLore, APOLLO) are not simulated",
}
# torchao's Float8Linear keeps its input and weight as they are for the backward pass, and casts them in both passes.
FP8_EFFECT = (
    "linear layers compute in 16 bits here; in fp8 they copy their input and their weight for a moment, with one byte "
    "for each value, and are faster"
)
# What stands for a model that is quantised already: NF4 takes 0.5 bytes a weight and 4 bytes for each block of 64.
_LIKE_NF4 = (
    "weights (0.52 bytes each in groups of 128) are simulated as bitsandbytes' NF4 (0.5625 bytes each), and what its "
    "kernels unpack as one matrix in 16 bits"
)
QUANTISED = {
    "gptq": f"GPTQ's {_LIKE_NF4}",
    "awq": f"AWQ's {_LIKE_NF4}",
    "aqlm": "AQLM's weights of 2 bits are simulated as bitsandbytes' NF4 (4.5 bits each): an upper bound",
}
_WITHOUT = ("torch_compile_backend", "torch_compile_mode", "ddp_bucket_cap_mb")
# Optimizers by transformers' own names (training_args.py, OptimizerNames) whose states are simulated.
OPTIMIZERS = (
    "adamw_torch", "adamw_torch_fused", "adafactor", "adamw_torch_4bit", "adamw_torch_8bit", "ademamix", "sgd",
    "adagrad", "adamw_bnb_8bit", "adamw_8bit", "ademamix_8bit", "lion_8bit", "lion_32bit", "paged_adamw_32bit",
    "paged_adamw_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit", "paged_lion_32bit", "paged_lion_8bit",
    "rmsprop", "rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit", "stable_adamw", "schedule_free_adamw",
    "schedule_free_radam", "schedule_free_sgd",
)  # fmt: skip
_RENAMED = {"adamw_hf": "adamw_torch"}  # removed from transformers; the same states


def take(draft: Draft) -> None:
    """Take the keys that mean what they mean in transformers, and ignore or name the others. Not the batch's."""
    draft.refuse(_REFUSED)
    draft.same(*SAME)
    take_optimizer(draft, "optim", "adafactor" if draft.is_on("adafactor") else "adamw_torch_fused")
    draft.name(_NAMED)
    draft.ignore((*_WITHOUT, *NO_EFFECT))


def take_quantised(draft: Draft, method: str, compute: str) -> None:
    """A model that is quantised already, by `method`, as one of bitsandbytes in 4 bits."""
    draft.put("load_in_4bit", True, "quantization_bit")
    draft.put("use_bnb_nested_quant", False)
    draft.put("bnb_4bit_quant_type", "nf4")
    draft.put("bnb_4bit_quant_storage", compute)
    draft.note(QUANTISED[method])


def take_optimizer(draft: Draft, key: str, usual: str) -> None:
    """The optimizer that `key` names. Raises ConfigError for one whose states are not simulated."""
    name = draft.text(key, usual) or usual
    name = _RENAMED.get(name, name)
    if name not in OPTIMIZERS:
        raise ConfigError(f"{key}: the states of the optimizer {name} are not simulated{nearest(name, OPTIMIZERS)}")
    draft.put("optim", name, key)
