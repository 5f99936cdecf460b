"""Keys of other tools, and arguments that only Python can give: why TRL's YAML does not take them, and what instead."""

from collections.abc import Collection, Mapping

from autofit.frontends.reading import refusal

# Key of another tool's YAML -> (whose, the key of TRL).
_OTHERS = {
    "base_model": ("Axolotl", "model_name_or_path"),
    "micro_batch_size": ("Axolotl", "per_device_train_batch_size"),
    "sequence_len": ("Axolotl", "max_length"),
    "adapter": ("Axolotl", "use_peft"),
    "cutoff_len": ("LLaMA-Factory", "max_length"),
    "finetuning_type": ("LLaMA-Factory", "use_peft"),
    "stage": ("LLaMA-Factory", "--trainer"),
    "fast_inference": ("Unsloth", "use_vllm"),
    "gpu_memory_utilization": ("Unsloth", "vllm_gpu_memory_utilization"),
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
    """What the recipe is instead, if it is another tool's file, or accelerate's."""
    if (other := refusal(values)) is not None:
        return other
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
