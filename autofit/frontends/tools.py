"""LLaMA-Factory's, Axolotl's and ms-swift's YAML: the trainer and the effective batch, by each tool's own defaults.

Read at LLaMA-Factory ff6d4d12, Axolotl 067b021c and ms-swift 3602360a. No torch here.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from autofit.frontends.foreign import Explanation, Line

# Which tool a YAML of training settings is of, told by keys that no other has. No torch here.
#
# The keys are those of the tools' own dataclasses and schemas, read at LLaMA-Factory ff6d4d12
# (src/llamafactory/hparams), Axolotl 067b021c (src/axolotl/utils/schemas), ms-swift 3602360a (swift/arguments) and verl
# 1dda039b (verl/trainer/config); TRL 1.16 and the other tools have none of them.

_LEAST = 2  # own keys, so that one misspelt key of a recipe does not make it another tool's


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool: the keys of which a file of it has one at least, and more that are its own."""

    name: str
    needs: tuple[str, ...]
    own: tuple[str, ...]

    def keys_in(self, values: Mapping[str, object]) -> tuple[str, ...]:
        """The tool's own keys in a file, those that it needs first; () if it has none of these."""
        needed = [key for key in self.needs if key in values]
        return (*needed, *(key for key in self.own if key in values)) if needed else ()


VERL = Tool(name="verl", needs=("actor_rollout_ref",), own=("critic", "algorithm", "trainer", "reward_model"))
LLAMA_FACTORY = Tool(
    name="LLaMA-Factory", needs=("stage", "finetuning_type", "cutoff_len"),
    own=("template", "lora_target", "dataset_dir", "neat_packing", "pref_beta", "pref_loss", "quantization_bit",
         "quantization_method", "preprocessing_num_workers", "overwrite_cache", "plot_loss", "val_size", "flash_attn",
         "enable_liger_kernel", "max_samples", "freeze_vision_tower", "adapter_name_or_path", "pure_bf16",
         "disable_gradient_checkpointing", "use_unsloth", "image_max_pixels", "video_max_pixels", "model_class",
         "dist_config", "kernel_config", "sample_backend", "quant_config"),
)  # fmt: skip
AXOLOTL = Tool(
    name="Axolotl", needs=("base_model",),
    own=("micro_batch_size", "sequence_len", "adapter", "sample_packing", "pad_to_sequence_len", "val_set_size",
         "num_epochs", "optimizer", "lora_target_linear", "dataset_prepared_path", "train_on_inputs", "lr_scheduler",
         "flash_attention", "saves_per_epoch", "evals_per_epoch", "rl", "special_tokens", "lora_model_dir",
         "pretraining_dataset"),
)  # fmt: skip
MS_SWIFT = Tool(
    name="ms-swift", needs=("model",),
    own=("tuner_type", "train_type", "rlhf_type", "split_dataset_ratio", "torch_dtype", "target_modules", "attn_impl",
         "quant_bits", "quant_method", "freeze_vit", "freeze_aligner", "model_author", "truncation_strategy",
         "load_from_cache_file", "external_plugins", "lazy_tokenize", "loss_scale", "val_dataset", "system"),
)  # fmt: skip
TOOLS = (VERL, LLAMA_FACTORY, AXOLOTL, MS_SWIFT)


def tool_of(values: Mapping[str, object]) -> Tool | None:
    """The tool whose file has these `values`; None where no tool has two own keys in it, or more than one has."""
    found = tools_of(values)
    return found[0] if len(found) == 1 else None


def tools_of(values: Mapping[str, object]) -> tuple[Tool, ...]:
    """The tools of which two own keys or more are in these `values`."""
    if "actor_rollout_ref" in values:
        return (VERL,)
    return tuple(tool for tool in TOOLS if len(tool.keys_in(values)) >= _LEAST)


_ACCUMULATION, _MICRO = "gradient_accumulation_steps", "per_device_train_batch_size"
# Micro-batch key and its default. LLaMA-Factory: transformers' TrainingArguments; Axolotl: schemas/training.py;
# ms-swift: swift/trainers/arguments.py, line 129.
_MICRO_BATCH = {LLAMA_FACTORY.name: (_MICRO, 8), AXOLOTL.name: ("micro_batch_size", 1), MS_SWIFT.name: (_MICRO, 1)}
# The key that names the trainer, and its default (finetuning_args.py; schemas/config.py; rlhf_args.py).
_TRAINER = {
    LLAMA_FACTORY.name: ("stage", "sft"),
    AXOLOTL.name: ("rl", "sft"),
    MS_SWIFT.name: ("rlhf_type", "sft or pt"),
}
# Engines of LLaMA-Factory with batches of their own, and keys of its new trainer, which has another batch.
_OTHER_BATCH = ("use_mca", "use_megatron_bridge", "use_hyper_parallel", "model_class", "dist_config")


def explain(tool: Tool, values: Mapping[str, object], *, ranks: int | None = None) -> Explanation:
    """The trainer and the batch of a file of `tool`, on `ranks` data-parallel ranks where these are known."""
    lines = [
        Line("tool", f"{tool.name}, by its keys {', '.join(tool.keys_in(values)[:4])}"),
        Line("trainer", _trainer(tool, values)),
        Line("effective batch", _effective(tool, values, ranks)),
    ]
    return Explanation(tool=tool.name, lines=tuple(lines))


def batch_sentence(tool: Tool, values: Mapping[str, object]) -> str:
    """The trainer and the effective batch in half a sentence."""
    return f"{_trainer(tool, values)}; the effective batch is {_effective(tool, values, None)}"


def _trainer(tool: Tool, values: Mapping[str, object]) -> str:
    key, usual = _TRAINER[tool.name]
    given = values.get(key)
    return f"{key} {given}" if given is not None else f"{usual} (no {key} in it)"


def _effective(tool: Tool, values: Mapping[str, object], ranks: int | None) -> str:
    if tool is LLAMA_FACTORY and (values.get("stage") == "ppo" or any(values.get(key) for key in _OTHER_BATCH)):
        return "not known: PPO, Megatron and the new trainer (v1) have batches of their own"
    key, usual = _MICRO_BATCH[tool.name]
    micro = _whole(values.get(key, usual))
    if micro is None:
        return f"not known: {key} must be a whole number"
    accumulation, said = _accumulation(tool, values, micro, ranks)
    if accumulation is None:
        return f"{key} {micro}{'' if key in values else ' (the default)'} x {said}"
    each = f"{key} {micro}{'' if key in values else ' (the default)'} x {said} = {micro * accumulation} samples"
    return (
        f"{each} on each data-parallel rank"
        if ranks is None
        else f"{each} x {ranks} ranks = {micro * accumulation * ranks}"
    )


def _accumulation(
    tool: Tool, values: Mapping[str, object], micro: int, ranks: int | None
) -> tuple[int | None, str]:  # fmt: skip
    """(the accumulation, how it comes about); None where it depends on what is not in the file."""
    given = values.get(_ACCUMULATION)
    if given is not None:
        return _whole(given), f"{_ACCUMULATION} {given}"
    total = _whole(values.get("batch_size"))
    if tool is AXOLOTL and total is not None:  # utils/config/__init__.py, normalize_config
        return total // micro, f"{total // micro}, from batch_size {total}"
    if tool is MS_SWIFT and values.get("rlhf_type") != "grpo":  # swift/trainers/arguments.py, line 283
        if ranks is None:
            return None, f"as many as make 16 samples or more over all ranks ({_ACCUMULATION} is not set)"
        steps = max(1, math.ceil(16 / micro / ranks))
        return steps, f"{steps}, with which ms-swift makes 16 samples or more"
    return 1, f"{_ACCUMULATION} 1 (the default)"


def _whole(given: object) -> int | None:
    return given if isinstance(given, int) and not isinstance(given, bool) and given > 0 else None
