"""Knobs that a recipe of TRL cannot change with the installed versions, and why; found by looking at these."""

import inspect
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import cache

from .names import installed, is_trls, script
from .trl_config import TrlConfig, parse, plain

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
    """Settings of SFT's rows without padding that TRL 1.16 refuses."""
    limited, packed = resolved.get("max_length") is not None, bool(resolved.get("packing"))
    found = {}
    if packed and str(resolved.get("packing_strategy")).startswith("bfd"):
        found["padding_free"] = "packed rows have no padding"
    elif limited:
        found["padding_free"] = "without packing TRL takes it only with max_length: null"
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
    from .knobs import used_by_script

    return used_by_script(trainer)


# Settings of the model that a recipe may also give inside `model_init_kwargs`, where they win over top-level keys.

_KEY = "model_init_kwargs"
_TOP_LEVEL = {"attn_implementation": "attn_implementation", "dtype": "dtype", "revision": "model_revision"}
_OLDER = "torch_dtype"  # from_pretrained takes it where it is given no dtype


def at_top_level(
    trainer: str, values: Mapping[str, object], config: TrlConfig, changed: Collection[str]
) -> tuple[dict[str, object], tuple[str, ...]]:
    """(`values` with these settings as top-level keys, a sentence for each that moved).

    The `changed` keys are given besides the recipe, so its `model_init_kwargs` do not win over them.
    Without `model_init_kwargs` altogether where the installed `trl <trainer>` does not use them (TRL 1.14).
    """
    inner = dict(getattr(config.training, _KEY, None) or {})
    kept = {key: value for key, value in values.items() if key != _KEY}
    if not inner:
        return kept, ()
    if not used_by_script(trainer):
        return kept, (f"{_KEY} is left out: `trl {trainer}` of {installed()} does not use it",)
    moved = {top: plain(inner.pop(name)) for name, top in _TOP_LEVEL.items() if name in inner}
    if _OLDER in inner:
        older = plain(inner.pop(_OLDER))
        known = moved.get("dtype", config.model.dtype)
        moved["dtype"] = older if known is None else known
    moved = {top: value for top, value in moved.items() if top not in changed}
    notes = tuple(f"{_KEY} sets {top} too; {installed()} uses {value}, kept as {top}" for top, value in moved.items())
    return {**kept, **moved, **({_KEY: plain(inner)} if inner else {})}, notes


@cache
def used_by_script(trainer: str) -> bool:
    """True if TRL's own script passes a recipe's `model_init_kwargs` on; it does so before it asks for a dataset."""
    if not is_trls(trainer):
        return False
    own = script(trainer)
    config = parse(trainer, {"use_cpu": True, "bf16": False, _KEY: {"revision": "asked"}}, overrides={})
    with suppress(ValueError):  # neither `datasets` nor `dataset_name`
        own.main(config.script, config.training, config.model, config.datasets)
    return bool(config.training.model_init_kwargs["revision"] == "asked")
