"""The reach of a gradient proof for each key of a recipe: compared, harmless, not on a CPU, or not in a gradient."""

from collections.abc import Collection, Mapping
from enum import StrEnum

from autofit.plugin.attention import compared_attention


class Reach(StrEnum):
    COMPARED = "compared"  # the proof trains with it
    HARMLESS = "harmless"  # by construction, cannot change a gradient
    KERNEL = "kernel"  # computes the same function, but does not run on a CPU
    OTHER = "other"  # has effects that a gradient on fixed rollouts in float32 does not show


# Changes of the recipe that can be applied to both baseline and candidate in the small trainings.
IN_BOTH = ("use_peft", "lora_task_type", "lora_r", "lora_alpha", "max_completion_length", "num_generations")
_CONSTRUCTION = "neutral by construction: it changes memory or logs, not arithmetic"
_HARMLESS = {
    "env": "neutral by construction: a setting of an allocator or library, outside the model's arithmetic",
    **dict.fromkeys((
        "torch_empty_cache_steps", "logging_steps", "logging_strategy", "logging_first_step", "report_to", "save_steps",
        "save_strategy", "save_total_limit", "save_only_model", "output_dir", "run_name", "disable_tqdm",
        "log_completions", "num_completions_to_print", "dataloader_num_workers", "dataloader_pin_memory",
        "dataloader_prefetch_factor", "dataloader_persistent_workers", "skip_memory_metrics", "eval_strategy",
        "eval_steps", "per_device_eval_batch_size", "vllm_gpu_memory_utilization", "vllm_enable_sleep_mode",
        "vllm_max_model_length", "transformers_continuous_batching_config.max_memory_percent",
    ), _CONSTRUCTION),
    "vllm_tensor_parallel_size": "neutral by construction: the same weights sample, each matrix divided over ranks",
}  # fmt: skip
_KERNELS = dict.fromkeys(
    ("activation_offloading", "torch_compile", "torch_compile_backend", "torch_compile_mode", "use_liger_kernel",
     "liger_kernel_config", "fsdp", "fsdp_config", "deepspeed", "ddp_bucket_cap_mb", "ddp_find_unused_parameters",
     "activation_checkpointing_kwargs.offload", "gradient_checkpointing_kwargs.offload",
     "model_init_kwargs.use_kernels"),
    "the same function with other kernels or on other devices, which the proof cannot run on one CPU",
)  # fmt: skip
_BOUNDS = ("epsilon", "epsilon_high", "delta", "off_policy_mask_threshold")


def reach(compared: Collection[str], key: str, value: object, own: object) -> tuple[Reach, str]:
    """(reach of a proof for `key` changed from `own` to `value`, reason why it is not compared or "").

    `compared` has the keys that the trainer's small trainings use unchanged.
    """
    if key == "attn_implementation":
        absent = [v for v in (own, value) if not compared_attention(v)]
        if not absent:
            return Reach.COMPARED, ""
        return Reach.KERNEL, f"the kernel {absent[0]!r} does not run on a CPU; the model's default replaces it"
    if key in compared or (key.partition(".")[0] in compared and key not in _KERNELS):
        return Reach.COMPARED, ""
    if key in _HARMLESS:
        return Reach.HARMLESS, _HARMLESS[key]
    if key in _KERNELS:
        return Reach.KERNEL, _KERNELS[key]
    if key in _BOUNDS:
        return Reach.OTHER, "it is a bound, and the proof's samples may never reach it"
    if key.startswith("optim"):
        return Reach.OTHER, "it changes the update, not the gradient"
    return Reach.OTHER, (
        "it has effects that a gradient on fixed samples in float32 does not show, or the trainer's `compared` lacks it"
    )


def unlike(resolved: Mapping[str, object]) -> tuple[str, ...]:
    """The differences between the recipe and the small trainings, one phrase each."""
    found = ["whole optimizer steps only, without a partial step at the end of an epoch"]
    dtype = resolved.get("dtype")
    if resolved.get("bf16") or resolved.get("fp16") or dtype not in (None, "float32", "auto"):
        found.append("float32, not the recipe's 16-bit arithmetic, which has larger rounding errors")
    if resolved.get("load_in_4bit") or resolved.get("load_in_8bit"):
        found.append("no quantised weights")
    if resolved.get("use_vllm"):
        found.append("no vLLM: its importance weights, one per token or sequence, are not compared")
    if not compared_attention(resolved.get("attn_implementation")):
        found.append(f"the model's attention kernel for CPUs, not {resolved['attn_implementation']}")
    if resolved.get("torch_compile") or resolved.get("use_liger_kernel"):
        found.append("neither torch.compile nor Liger's kernels")
    if (resolved.get("use_peft") and resolved.get("lora_dropout")) or resolved.get("neftune_noise_alpha"):
        found.append("no dropout and no noise: their random numbers differ in every split")
    return tuple(found)
