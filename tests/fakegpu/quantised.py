"""A model whose layers are quantised on the simulated card, as if loaded so: there are no weights to load."""

from __future__ import annotations

from typing import Any, cast

import torch
from transformers.integrations.bitsandbytes import replace_with_bnb_linear
from transformers.quantizers.auto import AutoHfQuantizer


def quantize_model(model: Any, quantization_config: Any) -> Any:
    """Move the model to the card with its linear layers quantised one by one, as if loaded with that config."""
    originals = {name: module for name, module in model.named_modules() if type(module) is torch.nn.Linear}
    quantizer = AutoHfQuantizer.from_config(quantization_config, pre_quantized=False)
    skipped = quantizer.get_modules_to_not_convert(model, quantization_config.llm_int8_skip_modules)
    replace_with_bnb_linear(model, modules_to_not_convert=skipped, quantization_config=quantization_config)
    replaced = [name for name in originals if type(model.get_submodule(name)) is not torch.nn.Linear]
    for name in replaced:
        _fill(model.get_submodule(name), originals.pop(name))
    originals.clear()
    model.to("cuda")
    four = bool(quantization_config.load_in_4bit)
    model.config.quantization_config = quantization_config
    for flag, value in {
        "hf_quantizer": quantizer, "is_loaded_in_4bit": four, "is_loaded_in_8bit": not four, "is_quantized": True,
        "quantization_method": quantization_config.quant_method,
    }.items():  # fmt: skip
        setattr(model, flag, value)
    return model


def _fill(layer: torch.nn.Module, original: torch.nn.Linear) -> None:
    """Give a bitsandbytes layer, made on meta, the values of the replaced layer; moving it to the card quantises it."""
    old = layer._parameters["weight"]
    kept = {key: value for key, value in vars(old).items() if key in _PARAMETER_OPTIONS}
    weight = cast("torch.nn.Parameter", type(old)(original.weight.data, requires_grad=False, **kept))  # type: ignore[misc]
    if hasattr(weight, "quant_type"):
        weight.module = layer  # type: ignore[attr-defined]
    layer._parameters["weight"] = weight
    if original.bias is not None:
        layer._parameters["bias"] = torch.nn.Parameter(original.bias.data, requires_grad=False)


_PARAMETER_OPTIONS = {
    "blocksize", "compress_statistics", "quant_type", "quant_storage", "has_fp16_weights",
}  # fmt: skip
