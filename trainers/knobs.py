"""Knobs that a recipe of TRL cannot change with the installed versions, and why; found by looking at these."""

import inspect
from collections.abc import Mapping

from .scripts import is_trls

OPTIONS = "activation_checkpointing_kwargs"


def left_out(trainer: str, resolved: Mapping[str, object], *, half: bool = False) -> dict[str, str]:
    """{knob: why this recipe cannot change it}. `half`: its `dtype: auto` already loads weights of 16 bits."""
    found = _unknown_options()
    if half and resolved.get("dtype") == "auto":
        found["dtype"] = "dtype: auto loads this model in 16 bits"
    if is_trls(trainer) and not _takes_model_kwargs(trainer):
        found["model_init_kwargs.use_kernels"] = f"`trl {trainer}` of this version does not use model_init_kwargs"
    if trainer == "sft":
        found |= _of_rows(resolved)
    return found


def _of_rows(resolved: Mapping[str, object]) -> dict[str, str]:
    """What TRL 1.16 refuses of SFT's ways to make rows."""
    limited, packed = resolved.get("max_length") is not None, bool(resolved.get("packing"))
    found = {}
    if packed and str(resolved.get("packing_strategy")).startswith("bfd"):
        found["padding_free"] = "packed rows have no padding"
    elif limited:
        found["padding_free"] = "without packing TRL takes it only with max_length: null"
    if not limited:
        found["packing"] = "it needs a max_length, the length of the packed rows"
    return found


def _unknown_options() -> dict[str, str]:
    """The options of checkpointing that the installed transformers and TRL lack: they came after the key."""
    import trl.models
    from transformers import PreTrainedModel

    enable = getattr(PreTrainedModel, "activation_checkpointing_enable", PreTrainedModel.gradient_checkpointing_enable)
    taken = inspect.signature(enable).parameters
    found = {
        f"{OPTIONS}.{name}": "the installed transformers does not know it"
        for name in ("every_n_layers", "offload")
        if name not in taken
    }
    if not hasattr(trl.models, "enable_selective_activation_checkpointing"):
        found[f"{OPTIONS}.selective"] = "the installed TRL does not know it"
    return found


def _takes_model_kwargs(trainer: str) -> bool:
    from .model_kwargs import used_by_script

    return used_by_script(trainer)
