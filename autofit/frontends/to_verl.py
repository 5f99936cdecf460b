"""A GRPO recipe of TRL as overrides of verl 0.9, and what of it changes on the way. No torch here.

Read in verl at commit 1dda039b (verl/trainer/config/_generated_ppo_trainer.yaml, verl/trainer/ppo/core_algos.py) and in
TRL 1.16 (trl/trainer/grpo_trainer.py).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from autofit.errors import ConfigError
from autofit.frontends import verl_rules
from autofit.frontends.verl import VerlConfig, batch_of
from autofit.recipe.keys import LAUNCH
from autofit.recipe.launch import Launch

_A, _R, _M = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))  # actor, rollout, model
# {key of TRL: verl's} of those with one meaning in both
_SAME: Mapping[str, str] = {
    "model_name_or_path": f"{_M}.path",
    "num_generations": f"{_R}.n",
    "num_iterations": f"{_A}.ppo_epochs",
    "max_completion_length": "data.max_response_length",
    "learning_rate": f"{_A}.optim.lr",
    "weight_decay": f"{_A}.optim.weight_decay",
    "max_grad_norm": f"{_A}.optim.clip_grad",
    "temperature": f"{_R}.temperature",
    "epsilon": f"{_A}.clip_ratio_low",
    "gradient_checkpointing": f"{_M}.enable_gradient_checkpointing",
    "activation_checkpointing": f"{_M}.enable_gradient_checkpointing",  # its name in transformers 5
    "seed": "data.seed",
}
_OF_VLLM = {
    "vllm_gpu_memory_utilization": f"{_R}.gpu_memory_utilization",
    "vllm_tensor_parallel_size": f"{_R}.tensor_model_parallel_size",
    "vllm_enable_sleep_mode": f"{_R}.free_cache_engine",
}  # fmt: skip
_OF_LORA = {
    "lora_r": f"{_M}.lora_rank", "lora_alpha": f"{_M}.lora_alpha", "lora_target_modules": f"{_M}.target_modules",
}  # fmt: skip
_LOSSES = {"dapo": "token-mean", "grpo": "seq-mean-token-mean", "dr_grpo": "seq-mean-token-sum-norm"}
_SCHEDULES = {"constant": "constant", "constant_with_warmup": "constant", "cosine": "cosine"}
_DTYPES = {"float32": "fp32", "bfloat16": "bf16"}
_READ = {
    "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "generation_batch_size",
    "beta", "epsilon_high", "loss_type", "scale_rewards", "lr_scheduler_type", "warmup_steps", "dtype", "use_peft",
    "use_vllm", "vllm_mode", "max_steps", "num_train_epochs", LAUNCH, "output_dir", "bf16", "dataset_name",
    "reward_funcs",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """Overrides behind `python -m verl.trainer.main_ppo`, and a sentence for each thing that is another in verl."""

    overrides: Mapping[str, object]
    changes: tuple[str, ...]


def exported(resolved: Mapping[str, object], given: Mapping[str, object]) -> Exported:
    """The recipe with all of TRL's keys in `resolved`, of which the user's are `given`, in verl's keys.

    Raises ConfigError for a batch that verl cannot hold exactly.
    """
    launch = Launch.of({LAUNCH: resolved[LAUNCH]} if resolved.get(LAUNCH) else {})
    found = {**_batch(resolved, launch), **dict(_settings(resolved, launch))}
    wrong = verl_rules.explain(found).wrong
    batch = batch_of(VerlConfig.of(found))
    if wrong or batch is None:
        raise ConfigError(f"verl does not train this batch: {'; '.join(wrong) or 'a number of it is not whole'}")
    return Exported(overrides=found, changes=tuple(_changes(resolved, given, launch)))


def _batch(resolved: Mapping[str, object], launch: Launch) -> dict[str, object]:
    keys = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "num_generations")
    micro, accumulation, rollout, group = (cast(int, resolved[key]) for key in keys)
    effective, generated = micro * accumulation * launch.ranks, micro * rollout * launch.ranks
    if generated % effective or effective % group:
        raise ConfigError(
            f"verl trains on a generation in whole optimizer steps of whole groups: the {generated} completions of a "
            f"generation must be a multiple of the effective batch {effective}, and that of num_generations={group}; "
            "change steps_per_generation or gradient_accumulation_steps"
        )
    return {
        "algorithm.adv_estimator": "grpo", "data.train_batch_size": generated // group,
        f"{_A}.ppo_mini_batch_size": effective // group, f"{_A}.ppo_micro_batch_size_per_gpu": micro,
        f"{_R}.log_prob_micro_batch_size_per_gpu": micro, "trainer.nnodes": launch.machines,
        "trainer.n_gpus_per_node": launch.ranks // launch.machines,
    }  # fmt: skip


def _settings(resolved: Mapping[str, object], launch: Launch) -> Iterator[tuple[str, object]]:
    """(verl's key, value) of all that is not the batch."""
    yield from ((own, resolved[key]) for key, own in _SAME.items() if resolved.get(key) is not None)
    high = resolved.get("epsilon_high")
    yield f"{_A}.clip_ratio_high", resolved.get("epsilon") if high is None else high
    beta = cast(float, resolved.get("beta") or 0.0)
    yield f"{_A}.use_kl_loss", beta != 0
    if beta:
        yield f"{_A}.kl_loss_coef", beta
        yield f"{_A}.kl_loss_type", "low_var_kl"
        yield "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu", resolved["per_device_train_batch_size"]
    loss = str(resolved.get("loss_type"))
    yield f"{_A}.loss_agg_mode", _LOSSES.get(loss, "token-mean")
    if loss == "dr_grpo":
        yield f"{_A}.loss_scale_factor", resolved["max_completion_length"]
    yield "algorithm.norm_adv_by_std_in_grpo", str(resolved.get("scale_rewards")).lower() not in ("none", "false")
    yield f"{_A}.optim.lr_scheduler_type", _SCHEDULES.get(str(resolved.get("lr_scheduler_type")), "constant")
    if isinstance(warm := resolved.get("warmup_steps"), int) and warm > 0:
        yield f"{_A}.optim.lr_warmup_steps", warm
    yield f"{_A}.fsdp_config.model_dtype", _DTYPES.get(str(resolved.get("dtype")), "fp32")
    yield f"{_A}.strategy", "fsdp2" if launch.sharding == "fsdp2" else "fsdp"
    if resolved.get("use_peft"):
        yield from ((own, resolved[key]) for key, own in _OF_LORA.items() if resolved.get(key) is not None)
    yield f"{_R}.name", "vllm"
    if resolved.get("use_vllm"):
        yield from ((own, resolved[key]) for key, own in _OF_VLLM.items() if resolved.get(key) is not None)
    else:
        yield f"{_R}.tensor_model_parallel_size", 1
    yield from _length(resolved)


def _length(resolved: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """verl's steps are generations, of which each may have several optimizer steps."""
    steps, epochs = resolved.get("max_steps"), resolved.get("num_train_epochs")
    if isinstance(steps, int) and steps > 0:
        keys = ("steps_per_generation", "gradient_accumulation_steps", "num_iterations")
        rollout, accumulation, iterations = (cast(int, resolved.get(key) or 1) for key in keys)
        yield "trainer.total_training_steps", math.ceil(steps / (rollout // accumulation * iterations))
    elif isinstance(epochs, int | float):
        yield "trainer.total_epochs", math.ceil(epochs)


def _changes(resolved: Mapping[str, object], given: Mapping[str, object], launch: Launch) -> Iterator[str]:
    """What verl does otherwise, a sentence each."""
    yield (
        "data: verl reads parquet files with a column `prompt` (data.train_files, data.val_files), and its reward from "
        "reward.custom_reward_function.path; TRL's dataset and reward functions must be written so"
    )
    yield "data.max_prompt_length: verl drops or refuses longer prompts (512 by default); set it to your longest prompt"
    yield ("samples: verl packs them without padding, makes the logits of a whole micro-batch and keeps the reference "
           "in host memory, so check the bytes: autofit estimate on what is written")  # fmt: skip
    yield ("clip_ratio_c: verl also bounds the loss of negative advantages at 3 times them"
           + (f", for TRL's delta {resolved['delta']}" if resolved.get("delta") is not None else ""))  # fmt: skip
    if not resolved.get("use_vllm"):
        yield "use_vllm false: verl always generates with vLLM, which holds rollout.gpu_memory_utilization of the card"
    loss, schedule, dtype = (str(resolved.get(key)) for key in ("loss_type", "lr_scheduler_type", "dtype"))
    if loss not in _LOSSES:
        yield f"loss_type {loss}: verl has none; loss_agg_mode token-mean is another loss"
    if str(resolved.get("scale_rewards")).lower() == "batch":
        yield "scale_rewards batch: verl divides by the deviation of the group"
    if schedule not in _SCHEDULES:
        yield f"lr_scheduler_type {schedule}: verl has constant and cosine; constant is another schedule"
    if dtype not in _DTYPES:
        yield f"dtype {dtype}: verl holds the weights in fp32 unless fsdp_config.model_dtype says bf16"
    if launch.sharding not in ("fsdp1", "fsdp2"):
        kept = "one card" if launch.ranks == 1 else str(launch.sharding)
        yield f"launch: TRL's recipe is for {kept}; verl shards weights, gradients and optimizer with FSDP"
    known = {*_SAME, *_OF_VLLM, *_OF_LORA, *_READ}
    if left := sorted(key for key in given if key not in known):
        yield f"not carried over: {', '.join(left)}"
