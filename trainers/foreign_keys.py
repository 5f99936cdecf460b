"""Keys of other tools, and arguments that only Python can give: why TRL's YAML does not take them, and what instead."""

from collections.abc import Collection, Iterator, Mapping

# Key of verl 0.9 (a dotted path) -> the key of TRL that means the same.
_VERL = {
    "actor_rollout_ref.model.path": "model_name_or_path",
    "actor_rollout_ref.model.lora_rank": "lora_r",
    "actor_rollout_ref.model.lora_alpha": "lora_alpha",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "gradient_checkpointing",
    "actor_rollout_ref.actor.optim.lr": "learning_rate",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "actor_rollout_ref.actor.ppo_epochs": "num_iterations",
    "actor_rollout_ref.actor.clip_ratio": "epsilon",
    "actor_rollout_ref.actor.kl_loss_coef": "beta",
    "actor_rollout_ref.rollout.n": "num_generations",
    "actor_rollout_ref.rollout.temperature": "temperature",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "vllm_tensor_parallel_size",
    "data.train_files": "dataset_name",
    "data.max_response_length": "max_completion_length",
}

# Key of another tool's YAML -> (whose, the key of TRL).
_OTHERS = {
    "base_model": ("axolotl", "model_name_or_path"),
    "micro_batch_size": ("axolotl", "per_device_train_batch_size"),
    "sequence_len": ("axolotl", "max_length"),
    "adapter": ("axolotl", "use_peft"),
    "cutoff_len": ("LLaMA-Factory", "max_length"),
    "finetuning_type": ("LLaMA-Factory", "use_peft"),
    "stage": ("LLaMA-Factory", "--trainer"),
    "template": ("LLaMA-Factory", "chat_template_path"),
    "fast_inference": ("Unsloth", "use_vllm"),
    "gpu_memory_utilization": ("Unsloth", "vllm_gpu_memory_utilization"),
    "max_lora_rank": ("Unsloth", "lora_r"),
}
_ACCELERATE = ("compute_environment", "distributed_type", "mixed_precision", "num_machines", "num_processes")
_PYTHON = {
    "tools": "functions that the model may call",
    "rollout_func": "a function that generates the completions",
    "environment_factory": "a maker of environments",
    "callbacks": "objects", "optimizers": "objects", "train_dataset": "an object", "eval_dataset": "an object",
    "processing_class": "an object", "reward_processing_classes": "objects", "peft_config": "an object",
    "quantization_config": "an object",
}  # fmt: skip


def foreign_file(trainer: str, values: Mapping[str, object]) -> str | None:
    """What the recipe is instead, if it is another tool's file: verl's, or accelerate's."""
    if "actor_rollout_ref" in values:
        return _verl(trainer, values)
    ours = [key for key in _ACCELERATE if key in values]
    if len(ours) > 1:
        return (
            f"this is a config of accelerate ({', '.join(ours)}), not of TRL: give it to `trl {trainer} "
            f"--accelerate_config FILE --config run.yaml`, and run.yaml, with the keys of `trl {trainer}`, to autofit"
        )
    return None


def instead(key: str, known: Collection[str]) -> str | None:
    """Why `key` is not one of TRL's YAML and what takes its place, to be appended to its name; None: not known."""
    if key == "device_map":
        return (
            ": TRL places the model itself, whole on each GPU; omit it, and to split a model over GPUs launch with "
            "`trl --accelerate_config fsdp2` or zero3"
        )
    if key in _PYTHON:
        return (
            f": it takes {_PYTHON[key]}, which YAML cannot say; give a Python trainer of your own with --trainer "
            "module:object (trainers/README.md)"
        )
    whose, ours = _OTHERS.get(key, ("", ""))
    return f" is a key of {whose}; in TRL it is {ours}" if ours in known or ours.startswith("--") else None


def _verl(trainer: str, values: Mapping[str, object]) -> str:
    said = dict(_leaves(values))
    same = [f"{ours}: {said[theirs]}" for theirs, ours in _VERL.items() if said.get(theirs) is not None]
    prompts, group = said.get("data.train_batch_size"), said.get("actor_rollout_ref.rollout.n", 1)
    if isinstance(prompts, int) and isinstance(group, int):
        same.append(
            f"per_device_train_batch_size x gradient_accumulation_steps = {prompts * group} on one GPU "
            "(data.train_batch_size x rollout.n)"
        )
    keys = "; ".join(same) if same else ", ".join(f"{a} is {b}" for a, b in list(_VERL.items())[:6])
    return (
        f"this is a config of verl (actor_rollout_ref), not of TRL: autofit reads the YAML of `trl {trainer} "
        f"--config`; in TRL's keys: {keys}"
    )


def _leaves(values: Mapping[str, object], path: str = "") -> Iterator[tuple[str, object]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value
