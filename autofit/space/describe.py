"""The changes of a candidate, in words."""

from collections.abc import Mapping


def samples_word(original: Mapping[str, object]) -> str:
    """The name of the samples that the trainer of the recipe `original` counts: "completions" (GRPO) or "samples"."""
    return "completions" if "num_generations" in original else "samples"


def describe_changes(changes: Mapping[str, object], original: Mapping[str, object]) -> str:
    """`per_device_train_batch_size 2 -> 8, gradient_checkpointing True -> False`, or `the recipe as it is`."""
    parts = []
    for key, value in changes.items():
        if key == "env" and isinstance(value, Mapping):
            parts += [f"{name}={setting}" for name, setting in value.items()]
        else:
            parts.append(f"{key} {original.get(key)} -> {value}")
    return ", ".join(parts) or "the recipe as it is"
