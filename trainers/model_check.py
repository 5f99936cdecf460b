"""Checks, before any probe, that the model supports the recipe. Uses a model built on the `meta` device."""

from importlib.util import find_spec
from typing import Any

from autofit.errors import ConfigError, nearest
from autofit.units import format_bytes

from .trl_config import TrlConfig

_ATTENTION_PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
_SHOWN = 12  # names of modules in one error


def check_model(model: Any, config: TrlConfig, *, simulated: bool = False) -> None:
    """Raise ConfigError if `model` does not support the recipe.

    The causes: an attention package that is not installed, LoRA targets that match no module, or a quantisation without
    weights to quantise.
    """
    _check_attention(config, simulated=simulated)
    _check_quantization(model, config)
    if config.model.use_peft:
        _check_targets(model, config)


def _check_attention(config: TrlConfig, *, simulated: bool) -> None:
    asked = config.model.attn_implementation
    if simulated and asked == "flash_attention_2":
        return  # by torch's copy of its kernels
    package = _ATTENTION_PACKAGES.get(asked)
    if package is not None and find_spec(package) is None:
        raise ConfigError(
            f"attn_implementation {asked} needs the package {package}, which is not installed here; sdpa needs none "
            "and uses torch's own flash kernels"
        )


def _check_quantization(model: Any, config: TrlConfig) -> None:
    key = "load_in_4bit" if config.model.load_in_4bit else "load_in_8bit" if config.model.load_in_8bit else None
    if key is None:
        return
    if not config.model.use_peft:
        raise ConfigError(f"{key} needs LoRA, because quantised weights get no gradient; set use_peft: true")
    head = model.get_output_embeddings()
    if not any(_is_linear(module) and module is not head for module in model.modules()):
        raise ConfigError(
            f"{key} quantises linear layers, but {type(model).__name__} has none besides its output head; "
            f"set {key}: false"
        )


def _check_targets(model: Any, config: TrlConfig) -> None:
    from peft.tuners.tuners_utils import check_target_module_exists
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULTS
    from trl import get_peft_config

    lora = get_peft_config(config.model)
    kind = model.config.model_type
    if lora.target_parameters:
        return
    if lora.target_modules is None:
        if kind not in DEFAULTS:
            raise ConfigError(
                f"PEFT has no default lora_target_modules for model_type {kind!r}; name some: {_linear_names(model)}"
            )
        lora.target_modules = DEFAULTS[kind]
    if lora.target_modules == "all-linear":
        return
    if not any(check_target_module_exists(lora, name) for name, _ in model.named_modules()):
        given = lora.target_modules
        shown = ", ".join(sorted(given)) if not isinstance(given, str) else given
        own = _names(model)
        alone = isinstance(given, str) and given in own
        hint = f"; a single name is a pattern for the whole path of a module: write '.*{given}'" if alone else ""
        near = "" if alone else nearest(shown.split(", ")[0], own)
        raise ConfigError(
            f"lora_target_modules must match modules of the model; {shown} matches none{hint}{near}; it has "
            f"{_linear_names(model)}"
        )


def quantised_parameters(model: Any) -> int:
    """Parameters that bitsandbytes packs: the matrices of linear layers, without the output head."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return sum(module.weight.numel() for module in model.modules() if _is_linear(module) and module is not head)


def note_of_experts(model: Any, key: str, itemsize: int) -> tuple[str, ...]:
    """A note on stacks of matrices that are parameters and no linear layers: the experts of a mixture.

    transformers 5.23 quantises linear layers only (integrations/bitsandbytes.py, replace_with_bnb_linear).
    """
    stacks: dict[str, int] = {}
    for module in model.modules():
        kind, own = type(module), module.parameters(recurse=False)
        if not kind.__module__.startswith("torch.nn.") and (count := sum(p.numel() for p in own if p.dim() > 2)):
            stacks[kind.__name__] = stacks.get(kind.__name__, 0) + count
    if not stacks:
        return ()
    return (
        f"{key} leaves {format_bytes(sum(stacks.values()) * itemsize)} of weights as they are: bitsandbytes quantises "
        f"linear layers, and {', '.join(stacks)} holds its matrices as parameters",
    )


def _is_linear(module: Any) -> bool:
    """Whether bitsandbytes' integration replaces `module`: a linear layer, also GPT-2's transposed kind."""
    import torch
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, Conv1D) or type(module) is torch.nn.Linear


def _names(model: Any) -> list[str]:
    """The last parts of the linear layers' names, in the model's order, each once."""
    head = model.get_output_embeddings()
    linear = (name for name, module in model.named_modules() if _is_linear(module) and module is not head)
    return list(dict.fromkeys(name.rsplit(".", 1)[-1] for name in linear))


def _linear_names(model: Any) -> str:
    names = [name for name in _names(model) if not name.isdigit()]
    return ", ".join(names[:_SHOWN]) if names else "no linear layers"
