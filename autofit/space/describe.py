"""The changes of a candidate, in words as options of the command line, and what each does to memory and time."""

import json
import shlex
from collections.abc import Mapping

import yaml

from autofit.recipe.recipe import inner_value

_REASONS = {
    "per_device_train_batch_size": "Samples in one forward and backward. More are faster by the sample, as the card is "
    "better filled; each holds its own activations and logits.",
    "gradient_accumulation_steps": "Follows from the micro-batch, so that an optimizer step trains on as many samples "
    "as before.",
    "steps_per_generation": "Micro-batches whose completions are generated at once. More are faster by the completion; "
    "each keeps its own cache while it is generated.",
    "generation_batch_size": "Completions that are generated at once. More are faster by the completion; each keeps "
    "its own cache while it is generated.",
    "gradient_checkpointing": "On, activations are dropped and computed again in the backward: less memory, more time. "
    "Off, they are kept.",
    "env.PYTORCH_CUDA_ALLOC_CONF": "Expandable segments let the allocator grow a block in place of reserving another, "
    "so that less memory lies unused between blocks.",
    "attn_implementation": "Which kernel computes attention: they differ in time, and in whether the scores of all "
    "pairs of tokens are held.",
    "torch_empty_cache_steps": "Giving cached blocks back takes time, and a later allocation takes them again.",
    "dtype": "How weights are stored: bfloat16 takes half the bytes of float32, and its kernels are faster.",
    "quantization": "Frozen weights in 4 or 8 bits: far fewer bytes, and time to unpack them.",
    "bnb_4bit_quant_storage": "FSDP shards 4-bit weights that are stored as a float; stored as integers, every card "
    "holds all of them. The bits are the same.",
    "use_peft": "LoRA trains small matrices beside frozen weights: no gradients or moments of the large ones are held.",
    "lora_r": "The rank of the trained matrices: fewer weights, gradients and moments.",
    "optim": "How the optimizer keeps its moments: in 8 bits they take a quarter of the bytes; paged ones may go to "
    "the host.",
    "use_vllm": "vLLM generates: faster, with a share of the card of its own.",
    "vllm_gpu_memory_utilization": "The share of the card for vLLM: more of it decodes more completions at once.",
    "vllm_enable_sleep_mode": "vLLM gives its memory back while weights are updated, and takes time to wake up.",
    "use_liger_kernel": "Fused kernels: the loss is computed in parts, without the logits of all tokens at once.",
    "use_liger_loss": "The loss is computed in parts, without the logits of all tokens at once.",
    "max_completion_length": "Shorter completions: less to generate, and fewer activations and logits.",
    "max_length": "Shorter samples: fewer activations and logits.",
    "num_generations": "Fewer completions of a prompt in an optimizer step.",
    "packing": "Several samples in one row: no time is spent on padding.",
    "padding_free": "Samples of a micro-batch in one row: no time or memory is spent on padding.",
    "precompute_ref_log_probs": "The reference model is asked once, before training, and then needs no memory.",
}
_SAME = {
    "activation_checkpointing": "gradient_checkpointing", "load_in_4bit": "quantization",
    "load_in_8bit": "quantization", "lora_alpha": "lora_r", "PYTORCH_CUDA_ALLOC_CONF": "env.PYTORCH_CUDA_ALLOC_CONF",
}  # fmt: skip


def reason_for(key: str) -> str:
    """What the setting `key` does to memory and time; "" for one that is not known here."""
    return _REASONS.get(_SAME.get(key, key), "")


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
