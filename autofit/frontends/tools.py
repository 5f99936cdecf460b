"""Which tool a YAML of training settings is of, told by keys that no other has. No torch here.

The keys are those of the tools' own dataclasses and schemas, read at LLaMA-Factory ff6d4d12 (src/llamafactory/hparams),
Axolotl 067b021c (src/axolotl/utils/schemas), ms-swift 3602360a (swift/arguments) and verl 1dda039b
(verl/trainer/config); TRL 1.16 and the other tools have none of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

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
