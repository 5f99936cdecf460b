"""Arguments of ms-swift (swift/arguments, swift/trainers/arguments.py at 3602360a) by their effect. No torch here."""

UNLIKE = {
    "deepspeed_autotp_size": "tensor parallelism is not simulated",
    "chord_sft_dataset": "CHORD, whose steps have a batch of SFT beside, is not simulated",
    "teacher_model": "a teacher beside the trained model is not simulated",
    "teacher_model_server": "a teacher beside the trained model is not simulated",
    "optimizer": "an optimizer of a plugin is not simulated",
    "vit_lr": "training on images, video or sound is not read, only on text",
    "aligner_lr": "training on images, video or sound is not read, only on text",
    "use_swift_lora": "swift's own LoRA is not simulated; PEFT's is",
    "trainable_parameters": "training of some of the weights is not simulated",
    "trainable_parameters_regex": "training of some of the weights is not simulated",
}
EFFECTS = {
    "use_galore": "GaLore's states, of projected gradients, are simulated as AdamW's of all weights: an upper bound",
    "freeze_parameters": "all weights are trained here, not only those that it leaves: an upper bound",
    "freeze_parameters_regex": "all weights are trained here, not only those that it leaves: an upper bound",
    "freeze_parameters_ratio": "all weights are trained here, not only those that it leaves: an upper bound",
    "enable_dft_loss": "the DFT loss is simulated as the usual loss on the same logits",
    "enable_channel_loss": "a loss for each channel is simulated as the usual loss on the same logits",
    "new_special_tokens": "the new rows of the embedding are not simulated",
    "adapters": "the adapters have the rank that their own files say; new ones of lora_rank are simulated",
    "use_flash_ckpt": "checkpoints are not simulated",
    "device_map": "the model is on one card here",
    "rope_scaling": "the positions are those of the model as it is",
    "model_kwargs": "the model is simulated as it is",
    "experts_impl": "experts are those of transformers' default here",
    "zero_hpz_partition_size": "ZeRO++'s second copy of the weights in a node is not simulated",
    "rpo_alpha": "its loss on the chosen samples is on the same logits, and is not simulated",
    "ld_alpha": "its term of the loss is not simulated",
    "ref_model": "the reference is simulated as a second copy of the trained model",
    "offload_model": "weights that leave the card for the rollout are not simulated: its memory is an upper bound",
    "offload_optimizer": "states that leave the card for the rollout are not simulated: its memory is an upper bound",
    "multi_turn_scheduler": "one turn of max_completion_length tokens is simulated, not several",
    "reward_model": "a reward model on the card is not simulated, which needs its memory too",
    "async_generate": "generating while the last batch trains is not simulated",
    "dynamic_sample": "a second generation in place of groups with equal rewards is not simulated",
    "padding_free": "rows are padded here, not joined: an upper bound",
    "vllm_enable_lora": "adapters in vLLM are not simulated",
}
# Types of tuners that are not PEFT's LoRA; `full` and `lora` are simulated.
TUNERS = ("lora", "full", "longlora", "adalora", "llamapro", "adapter", "vera", "boft", "fourierft", "reft", "bone",
          "ia3", "lora_llm", "swift")  # fmt: skip
_NAMES = """
add_version create_checkpoint_symlink tuner_backend model_type task_type custom_register_path external_plugins
enable_npu_model_patch load_args load_data_args packing_num_proc packing_strategy lazy_tokenize use_hf hub_token
ignore_args_error dataset val_dataset cached_dataset cached_val_dataset split_dataset_ratio data_seed dataset_num_proc
load_from_cache_file dataset_shuffle val_dataset_shuffle streaming interleave_prob stopping_strategy
shuffle_buffer_size download_mode columns strict disable_auto_column_mapping model_name model_author
custom_dataset_info max_new_tokens temperature top_k top_p repetition_penalty num_beams stream stop_words logprobs
top_logprobs structured_outputs_regex num_labels problem_type max_memory max_model_len local_repo_path init_strategy
hqq_axis bnb_4bit_compute_dtype template system truncation_strategy max_pixels agent_template norm_bbox
use_chat_template padding_side loss_scale is_binary_loss_scale template_backend response_prefix enable_thinking
preserve_thinking add_non_thinking_prefix disable_ignore_empty_think freeze_llm freeze_vit freeze_aligner lora_bias
lorap_lr_ratio lora_ga_batch_size lora_ga_iters lora_ga_max_length lora_ga_direction lora_ga_scale
lora_ga_stable_gamma init_weights fourier_n_frequency fourier_scaling boft_block_size boft_block_num
boft_n_butterfly_factor boft_dropout vera_rank vera_projection_prng_key vera_dropout vera_d_initial adapter_act
adapter_length adalora_target_r adalora_init_r adalora_tinit adalora_tfinal adalora_deltaT adalora_beta1 adalora_beta2
adalora_orth_reg_weight llamapro_num_new_blocks llamapro_num_groups reft_layer_key reft_layers reft_rank
reft_intervention_type reft_args swanlab_token swanlab_project swanlab_workspace swanlab_exp_name
swanlab_notification_method swanlab_webhook_url swanlab_secret swanlab_sender_email swanlab_receiver_email
swanlab_smtp_server swanlab_smtp_port swanlab_email_language swanlab_mode reward_adapters reward_model_type
reward_model_revision reward_template teacher_adapters teacher_model_type teacher_model_revision teacher_deepspeed
offload_teacher_model num_ppo_epochs whiten_rewards kl_coef cliprange vf_coef cliprange_value gamma lam
num_mini_batches local_rollout_forward_batch_size num_sample_generations response_length missing_eos_penalty
reward_funcs reward_weights log_completions ref_adapters ref_model_type ref_model_revision label_smoothing
discopop_tau loss_weights cpo_alpha simpo_gamma desirable_weight undesirable_weight center_rewards_coefficient
sft_alpha lmbda seq_kd gkd_logits_topk vit_gradient_checkpointing logging_steps router_aux_loss_coef
safe_serialization max_shard_size report_to dataloader_persistent_workers check_model acc_strategy
train_dataloader_shuffle max_epochs ds3_gather_for_generation resume_only_model mrl_dims eval_metric callbacks
early_stop_interval eval_use_evalscope eval_dataset eval_dataset_args eval_limit eval_generation_config
extra_eval_args galore_target_modules galore_rank galore_update_proj_gap galore_scale galore_proj_type
galore_optim_per_parameter galore_with_embedding galore_quantization galore_proj_quant galore_proj_bits
galore_proj_group_size galore_cos_threshold galore_gamma_proj galore_queue_size lisa_step_interval ref_adapter_name
reference_free vllm_pipeline_parallel_size vllm_enable_expert_parallel vllm_max_num_seqs
vllm_disable_custom_all_reduce vllm_enforce_eager vllm_limit_mm_per_prompt vllm_max_lora_rank
vllm_enable_prefix_caching vllm_use_async_engine vllm_quantization vllm_reasoning_parser vllm_disable_cascade_attn
vllm_mm_processor_cache_gb vllm_speculative_config vllm_engine_kwargs vllm_data_parallel_size min_p
vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_server_group_port
enable_flattened_weight_sync move_model_batches wandb_log_unique_prompts teacher_tag_key epsilon epsilon_high delta
cosine_min_len_value_wrong cosine_max_len_value_wrong cosine_min_len_value_correct cosine_max_len_value_correct
cosine_max_len repetition_n_grams repetition_max_penalty reward_model_plugin chord_sft_per_device_train_batch_size
chord_enable_phi_function chord_mu_warmup_steps chord_mu_decay_steps chord_mu_peak chord_mu_valley
ref_model_sync_steps ref_model_mixup_alpha max_turns completion_length_limit_scope vllm_server_pass_dataset
use_gym_env gym_env max_resample_times overlong_filter soft_max_length soft_cache_length scale_rewards log_entropy
top_entropy_quantile importance_sampling_level tau_pos tau_neg advantage_estimator kl_in_reward teacher_kl_coef
advantage_reweight rlsd_lambda rlsd_reweight_clip_range rlsd_lambda_warmup_steps rlsd_lambda_decay_steps
rlsd_negative_only sdar_loss_coef sdar_gate_beta real_tau fipo_decay_rate fipo_clip_range fipo_clip_high_only
fipo_safety_threshold num_generations_eval rollout_importance_sampling_mode rollout_importance_sampling_threshold
log_rollout_offpolicy_metrics off_policy_sequence_mask_delta ray_exp_name device_groups sync_ref_model target_regex
target_parameters
"""
NO_EFFECT = frozenset(_NAMES.split())
