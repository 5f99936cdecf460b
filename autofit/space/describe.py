"""The changes of a candidate, in words as options of the command line, and what each does to memory and time."""

import json
import shlex
from collections.abc import Mapping

import yaml

from autofit.recipe.recipe import inner_value
from autofit.space.traits import traits_of


def reason_for(key: str, stated: Mapping[str, object] | None = None) -> str:
    """What the setting `key` does to memory and time; "" where neither `stated` nor the table of knobs says it."""
    return traits_of(key, stated).what


def samples_word(original: Mapping[str, object]) -> str:
    """The name of the samples that the trainer of the recipe `original` counts: "completions" (GRPO) or "samples"."""
    return "completions" if "num_generations" in original else "samples"


def describe_changes(changes: Mapping[str, object], original: Mapping[str, object]) -> str:
    """`per_device_train_batch_size 2 -> 8, gradient_checkpointing True -> False`, or `the recipe as it is`."""
    parts = []
    for key, value in changes.items():
        own = inner_value(original, key) if "." in key else original.get(key)
        name = key.rpartition(".")[2] if key.count(".") > 1 else key  # far inside: long, and known by its last part
        if key == "env" and isinstance(value, Mapping):
            parts += [f"{variable}={setting}" for variable, setting in value.items()]
        elif own == value or (own is None and "." in key):  # it had no effect before, or is a default by another name
            parts.append(f"{name} {value}")
        else:
            parts.append(f"{name} {own} -> {value}")
    return ", ".join(parts) or "the recipe as it is"


def describe_left_out(left_out: Mapping[str, str]) -> str:
    """`use_vllm: vllm is not installed (pip install vllm); dtype, optim: it needs a GPU`, one part for each reason."""
    by_reason: dict[str, list[str]] = {}
    for knob, reason in left_out.items():
        by_reason.setdefault(reason, []).append(knob)
    return "; ".join(f"{', '.join(knobs)}: {reason}" for reason, knobs in by_reason.items())


def set_options(changes: Mapping[str, object]) -> str:
    """The changes as a shell takes them: `--set lora_r=8 --set dtype=bfloat16`; None removes a key (`null`)."""
    return " ".join(f"--set {shlex.quote(f'{key}={_as_yaml(value)}')}" for key, value in changes.items())


def _as_yaml(value: object) -> str:
    if isinstance(value, Mapping | list | tuple):
        return json.dumps(value if isinstance(value, list | tuple) else dict(value))  # JSON is YAML
    return yaml.safe_dump(value, width=10**6).removesuffix("...\n").strip()
