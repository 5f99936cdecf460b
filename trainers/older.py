"""Keys that older releases of TRL and transformers took, said in those of the installed ones.

The fields of TRL 0.9 to 1.10 and of transformers 4.38 to 5.10 were compared with those of TRL 1.16 and transformers
5.23. A key counts as older only where the installed libraries do not take it.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from autofit.errors import ConfigError
from autofit.plugin.protocol import MOST_PROMPT_TOKENS, Inspection
from autofit.recipe.as_of import PROPOSAL

from .names import installed, renamed

_NAMES = """
save_safetensors overwrite_output_dir logging_dir fp16_backend half_precision_backend fp16_opt_level ray_scope
include_inputs_for_metrics include_tokens_per_second jit_mode_eval past_index mp_parameters push_to_hub_organization
tpu_metrics_debug tpu_num_cores use_ipex use_legacy_prediction_loop use_mps_device dispatch_batches split_batches
chars_per_token dataset_batch_size num_of_sequences sanity_check log_with generate_during_eval is_encoder_decoder
label_pad_token_id padding_value model_adapter_name ref_adapter_name base_model_attribute_name vllm_device vllm_dtype
vllm_enable_prefix_caching
"""
_LEFT_OUT = frozenset(_NAMES.split())  # what a training holds, its batch and its gradient do not depend on them
_ONCE = {  # {key: the other key and its value where it is true}; where it is false it says nothing
    "adafactor": ("optim", "adafactor"),
    "group_by_length": ("train_sampling_strategy", "group_by_length"),
}
_VALUES = {("packing_strategy", "ffd"): "bfd", ("optim", "adamw_hf"): "adamw_torch"}  # what a value is called now
_PROMPT, _COMPLETION = "max_prompt_length", "max_completion_length"
OLDER = frozenset({*_LEFT_OUT, *_ONCE, _PROMPT})  # beside those of another name now


@dataclass(frozen=True, slots=True, kw_only=True)
class Modern:
    """A recipe in the keys of the installed libraries."""

    values: dict[str, object]
    inspection: Inspection
    notes: tuple[str, ...] = ()
    renamed: tuple[str, ...] = ()  # "max_seq_length as max_length", which the first note says
    left_out: tuple[str, ...] = ()  # keys of the recipe that have no name now

    @property
    def spelling(self) -> str:
        """The recipe in today's keys, in words for a user of an older TRL; "" of a recipe of today."""
        if not self.renamed and not self.left_out:
            return ""
        said = [f"with your {', '.join(self.renamed)}"] if self.renamed else []
        said += [f"without your {', '.join(self.left_out)}"] if self.left_out else []
        return f"in the keys of {installed()}, {' and '.join(said)}"


def modern(values: Mapping[str, object], known: Collection[str], inspection: Inspection) -> Modern:
    """`values` without the keys that only older libraries took, for the installed ones, which take the `known` keys.

    Keys that were not taken then either, and those whose meaning is gone, are left for the check of the keys.
    Raises ConfigError for a length of prompts that cannot be.
    """
    found, names, dropped = dict(values), dict[str, object](), list[str]()
    notes: list[str] = []
    changed, asked = list(inspection.changed), inspection
    for key, value in values.items():
        if key in known:
            if isinstance(value, str) and (key, value) in _VALUES:
                found[key] = _VALUES[key, value]
                names[f"{key} {value}"] = found[key]
            continue
        if (new := renamed(key, known)) is not None:
            del found[key]
            if value is None:
                continue
            if new not in values or key in inspection.changed:
                found[new], names[key] = value, new
                changed = [new if each == key else each for each in changed]
            else:
                dropped.append(key)
        elif key in _ONCE and isinstance(value, bool):
            del found[key]
            new, instead = _ONCE[key]
            if value and new in known:
                found[new], names[key] = instead, f"{new}: {instead}"
        elif key in _LEFT_OUT or (value is None and key in (_PROMPT, _COMPLETION)):
            del found[key]
            dropped.append(key)
        elif key in (_PROMPT, _COMPLETION) and isinstance(value, int) and not isinstance(value, bool):
            if not 1 <= value <= MOST_PROMPT_TOKENS:
                raise ConfigError(f"{key} must be from 1 to {MOST_PROMPT_TOKENS:,} tokens; got {value:,}")
            del found[key]
            if _COMPLETION in known and inspection.simulated and inspection.prompt_tokens is None:
                asked = replace(asked, prompt_tokens=value)
            notes.append(_of_length(key, value, cuts=_COMPLETION not in known, taken=asked is not inspection))
    said = tuple(f"{old} as {new}" for old, new in names.items())
    if said:
        old = ", ".join(said)
        notes.insert(
            0, f"keys of older libraries were read by their names in {installed()}: {old}; their defaults may differ"
            f"{PROPOSAL}",
        )  # fmt: skip
    if dropped:
        notes.append(f"keys of older libraries without an effect here were left out: {', '.join(dropped)}")
    gone = tuple(key for key in values if key not in found and key not in names and values[key] is not None)
    return Modern(
        values=found, inspection=replace(asked, changed=tuple(changed)), notes=tuple(notes), renamed=said, left_out=gone
    )


def _of_length(key: str, tokens: int, *, cuts: bool, taken: bool) -> str:
    if cuts:  # preference training: whole samples are cut
        return f"{key} {tokens} is a key of an older TRL; {installed()} cuts whole samples to max_length alone"
    then = f"an older TRL cut prompts to {key} {tokens}, and {installed()} cuts none"
    return f"{then}: prompts of {tokens} tokens are taken" if taken else f"{then}: prompts count as they are"
