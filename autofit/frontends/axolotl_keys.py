"""Keys of Axolotl's schema (src/axolotl/utils/schemas, integrations/*/args.py at 067b021c) by their effect. No torch.

What is neither here nor taken by `axolotl.py` is unknown to Axolotl, which ignores it.
"""

from autofit.frontends.transformers_keys import FP8_EFFECT

UNLIKE = {
    "processor_type": "training on images, video or sound is not read, only on text",
    "image_size": "training on images, video or sound is not read, only on text",
    "trainer_cls": "a trainer of your own is not simulated",
    "diffusion": "training by diffusion is not simulated",
    "ebft": "energy-based fine-tuning is not simulated",
    "llmcompressor": "training with LLM Compressor is not simulated",
    "kd_trainer": "distillation is not simulated",
    "use_mora": "MoRA is not simulated",
    "mora": "MoRA is not simulated",
    "hatchery": "training on a remote service is not simulated",
    "nemo_gym_enabled": "environments of NeMo Gym are not simulated",
    "spectrum_top_fraction": "Spectrum, which trains some layers by their signal, is not simulated",
    "use_onebitllms": "1.58-bit training is not simulated",
    "use_pose": "positional skip-wise training is not simulated",
    "use_dsv4_kernels": "weights in FP4 or FP8 (DeepSeek's kernels) are not simulated",
    "nonexpert_quantization": "weights in FP4 or FP8 are not simulated",
    "dsv4_fp8_nonexpert_mode": "weights in FP4 or FP8 are not simulated",
    "gemma4_fp8_nonexpert": "weights in FP4 or FP8 are not simulated",
    "gemma4_nf4_nonexpert": "weights in FP4 or FP8 are not simulated",
    "nvfp4_merge_aware": "weights in FP4 or FP8 are not simulated",
    "deepcompile": "DeepSpeed's DeepCompile is not simulated",
    "layer_offloading": "layers that live in host memory are not simulated",
}  # fmt: skip
EFFECTS = {
    "fp8": FP8_EFFECT,
    "relora": "its restarts, which merge one matrix at a time between two steps, are not simulated",
    "lisa_n_layers": "LISA, which trains changing layers, is simulated as training of all: an upper bound",
    "quantize_moe_experts": "experts in 4 bits are not simulated; they are held in 16 bits here: an upper bound",
    "unfrozen_parameters": "all weights are trained here, not only those that it names: an upper bound",
    "chunked_cross_entropy": "the loss in chunks is not simulated; all logits are made here: an upper bound",
    "tiled_mlp": "MLPs in tiles are not simulated; whole ones are: an upper bound",
    "torch_compile": "compiled code is not simulated; the layers run one operator after another",
    "selective_checkpointing": "whole layers are recomputed here, so the memory may be higher there",
    "batch_flattening": "rows are padded here, not flattened: an upper bound",
    "lora_mlp_kernel": "Axolotl's own LoRA kernels are not simulated",
    "lora_qkv_kernel": "Axolotl's own LoRA kernels are not simulated",
    "lora_o_kernel": "Axolotl's own LoRA kernels are not simulated",
    "lora_embedding_kernel": "Axolotl's own LoRA kernels are not simulated",
    "use_kernels": "kernels of the Hub are not simulated",
    "use_scattermoe": "ScatterMoE's kernels are not simulated",
    "use_sonicmoe": "SonicMoE's kernels are not simulated",
    "use_glm_dsa_kernels": "its kernels are not simulated",
    "fused_attn_kernel": "its kernel is not simulated",
    "flash_attn_fuse_mlp": "its kernel is not simulated",
    "flash_optimum": "BetterTransformer is not simulated",
    "use_eaft": "the EAFT loss is simulated as the usual loss on the same logits",
    "lora_model_dir": "the adapter has the rank that its own files say; a new one of lora_r is simulated",
    "auto_find_batch_size": "the batch as written is taken; after an out-of-memory error this key would change it",
    "model_quantization_config": "the weights are taken as dequantised to 16 bits",
    "resize_token_embeddings_to_32x": "the new rows of the embedding are not simulated",
    "lora_rank_pattern": "every module has the rank lora_r here",
    "peft_layers_to_transform": "every layer has an adapter here: an upper bound",
    "peft_trainable_token_indices": "single trained tokens are not simulated",
    "lora_on_cpu": "it only loads the adapter in host memory",
    "fp32_norms": "norms in float32 are not simulated, which take 2 bytes more for each of their weights",
    "optim_target_modules": "it belongs to optimizers that are not simulated",
    "optim_args": "arguments of the optimizer are not simulated",
    "llama4_linearized_experts": "the experts are those of the model as it is",
    "rope_scaling": "the positions are those of the model as it is",
    "overrides_of_model_config": "the model is simulated as it is on the Hub",
    "model_config": "the model is simulated as it is on the Hub",
}  # fmt: skip
# By the last part of a plugin's path: what it does, "" for nothing to memory. Others are refused.
PLUGINS = {
    "CutCrossEntropyPlugin": "",
    "LigerPlugin": "Of Liger's kernels only the fused linear loss is simulated; the layers run without the others: an "
    "upper bound",
    "KernelsPlugin": "",
    "SwanLabPlugin": "",
    "GrokfastPlugin": "Grokfast's average of the gradients, one value more for each trained weight, is not simulated",
    "LMEvalPlugin": "",
    "DenseMixerPlugin": "",
}  # fmt: skip
_NAMES = """
strict tf32 resume_from_checkpoint auto_resume_from_checkpoints mean_resizing_embeddings shrink_embeddings
embeddings_skip_upcast reinit_weights quantization center_rewards_coefficient num_labels dpo_use_weighting
dpo_label_smoothing precompute_ref_log_probs dpo_use_liger_kernel dpo_padding_free dpo_loss_type dpo_loss_weights
datasets test_datasets shuffle_merged_datasets shuffle_before_merging_datasets dataset_prepared_path dataset_shard_num
dataset_shard_idx skip_prepare_dataset num_dataset_shards_to_save pretraining_dataset dataset_processes
dataset_num_proc dataset_exact_deduplication dataset_keep_in_memory dataloader_pin_memory dataloader_num_workers
dataloader_prefetch_factor dataloader_drop_last accelerator_config remove_unused_columns push_dataset_to_hub
hf_use_auth_token device device_map world_size local_rank ddp ddp_timeout ddp_bucket_cap_mb ddp_broadcast_buffers
ddp_find_unused_parameters do_causal_lm_eval eval_causal_lm_metrics do_bench_eval bench_dataset bench_split
metric_for_best_model greater_is_better loss_watchdog_threshold loss_watchdog_patience gc_steps gc_collect_steps
fp8_enable_fsdp_float8_all_gather freeze_mm_modules excess_length_strategy eval_sequence_len min_sample_len
max_prompt_len sample_packing_group_size sample_packing_bin_size sample_packing_sequentially
sample_packing_mp_start_method eval_sample_packing curriculum_sampling multipack_real_batches pose_split_on_token_ids
pose_max_context_len pose_num_chunks pretrain_multipack_buffer_size pretrain_multipack_attn
pretraining_sample_concatenation streaming streaming_multipack_buffer_size flex_attn_compile_kwargs
flash_attn_cross_entropy flash_attn_rms_norm gemma4_hybrid_attn_impl large_head_attention flash_attn_d512 sdpa_varlen
experts_implementation scaling_softmax scaling_softmax_factor scaling_softmax_bias chunked_cross_entropy_num_chunks
eaft_alpha eaft_k tiled_mlp_num_shards tiled_mlp_use_original_mlp fp32_norm_classes fsdp_final_state_dict_type
val_set_size heads_k_stride ring_attn_func special_tokens tokens added_tokens_overrides torch_compile_backend
torch_compile_mode torch_compile_options warmup_steps warmup_ratio eval_steps evals_per_epoch eval_strategy
evaluation_strategy save_steps saves_per_epoch save_strategy save_total_limit save_first_step logging_steps
early_stopping_patience load_best_model_at_end save_only_model use_tensorboard profiler_steps profiler_steps_start
include_tokens_per_second include_tkps orpo_alpha simpo_gamma cpo_alpha kto_desirable_weight kto_undesirable_weight
rl_beta max_memory gpu_memory_limit low_cpu_mem_usage chat_template chat_template_jinja chat_template_kwargs
eot_tokens default_system_message fix_untrained_tokens is_preprocess preprocess_iterable total_num_tokens
total_supervised_tokens sample_packing_eff_est axolotl_config_path is_falcon_derived_model is_llama_derived_model
is_mistral_derived_model is_qwen_derived_model generate_samples num_generation_samples generation_max_new_tokens
generation_temperature generation_top_p generation_top_k generation_prompt_ratio generation_do_sample
base_model_config cls_model_config tokenizer_config tokenizer_use_fast tokenizer_legacy tokenizer_use_mistral_common
tokenizer_type processor_kwargs tokenizer_save_jinja_files experimental_skip_move_to_device
model_quantization_config_kwargs output_dir hub_model_id hub_strategy hub_revision save_safetensors
image_resize_algorithm role_boundaries lora_fan_in_fan_out lora_alpha_pattern peft_layers_pattern peft
peft_layer_replication peft_init_lora_weights peft_ensure_weight_tying qlora_sharded_model_loading loraplus_lr_ratio
loraplus_lr_embedding merge_lora merge_method relora_prune_ratio relora_prune_method relora_cpu_offload
eval_batch_size train_on_inputs group_by_length embedding_lr embedding_lr_scale torchdistx_path lr_scheduler_kwargs
lr_quadratic_warmup cosine_min_lr_ratio cosine_constant_lr_ratio lr_div_factor lr_groups adam_epsilon2 adam_beta3
dion_lr dion_momentum dion_rank_fraction dion_rank_multiple_of qgalore_rank jagged_restart_steps
jagged_restart_warmup_steps jagged_restart_anneal_steps use_mlflow mlflow_tracking_uri mlflow_experiment_name
mlflow_run_name hf_mlflow_log_artifacts lisa_step_interval lisa_layers_attribute use_wandb wandb_name wandb_run_id
wandb_mode wandb_project wandb_entity wandb_watch wandb_log_model use_comet comet_api_key comet_workspace
comet_project_name comet_experiment_key comet_mode comet_online comet_experiment_config gradio_title gradio_share
gradio_server_name gradio_server_port gradio_max_new_tokens gradio_temperature ray_run_name resources_per_worker
use_otel_metrics otel_metrics_host otel_metrics_port use_trackio trackio_project_name trackio_run_name
trackio_space_id max_packed_sequence_len noisy_embedding_alpha dpo_beta eval_table_size eval_max_new_tokens
dpo_use_logits_to_keep dpo_generate_during_eval dpo_norm_loss rpo_alpha s2_attention overrides_of_model_kwargs
type_of_model model_kwargs model_type generation_interval liger_rope liger_rms_norm liger_rms_norm_gated
liger_layer_norm liger_swiglu liger_glu_activation liger_cross_entropy liger_use_token_scaling cut_cross_entropy
moe_grouped_backend moe_dequant_chunk_size moe_bnb_fast expert_backend dsv4_fp8_lora_kernel
dsv4_shared_mlp_lora_kernel dsv4_bf16_all dsv4_fp4_grouped_mode nvfp4_merge_aware_start_step dense_mixer lm_eval_tasks
lm_eval_batch_size lm_eval_post_train lm_eval_model grokfast_alpha grokfast_lamb use_swanlab swanlab_project
swanlab_experiment_name swanlab_description swanlab_mode swanlab_workspace swanlab_api_key swanlab_log_model
swanlab_web_host swanlab_api_host swanlab_lark_webhook_url swanlab_lark_secret swanlab_log_completions
swanlab_completion_log_interval swanlab_completion_max_buffer trl vllm dynamic_checkpoint context_parallel_size
tensor_parallel_size sequence_parallel_degree expert_parallel_size lora_r lora_alpha lora_dropout lora_target_modules
lora_target_linear
"""
NO_EFFECT = frozenset(_NAMES.split())
