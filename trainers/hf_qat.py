"""Quantisation-aware training by torchao, as Axolotl prepares a model for it (utils/quantization.py). Imports torchao.

Each linear layer rounds a copy of its weights, and of its inputs, to the values of a smaller type.
"""

from collections.abc import Mapping
from typing import Any

import torch

from autofit.errors import ConfigError, quoted

KEYS = ("weight_dtype", "activation_dtype", "group_size", "quantize_embedding")
_FLOAT8 = ("float8_e4m3fn", "fp8", "float8")
_MX_BLOCK = 32  # values that share a scale


def prepare(model: Any, given: Mapping[str, Any]) -> None:
    """Replace the linear layers of `model`, and its embeddings if these are asked for. Raises ConfigError."""
    try:
        from torchao.quantization import quantize_
    except ImportError as error:
        raise ConfigError("qat needs the package torchao, which is not installed here: pip install torchao") from error

    wrong = [key for key in given if key not in KEYS]
    if wrong:
        raise ConfigError(f"qat has no key {quoted(wrong[0])}; its keys are {', '.join(KEYS)}")
    weight, inputs, group = given.get("weight_dtype", "int8"), given.get("activation_dtype"), given.get("group_size")
    quantize_(model, _config(weight, inputs, group))
    if given.get("quantize_embedding"):
        quantize_(model, _config(weight, None, group), filter_fn=lambda m, _: isinstance(m, torch.nn.Embedding))


def _config(weight: str, inputs: str | None, group: int | None) -> Any:
    from torchao.quantization.qat import QATConfig
    from torchao.quantization.qat.fake_quantize_config import (
        Float8FakeQuantizeConfig,
        Int4WeightFakeQuantizeConfig,
        IntxFakeQuantizeConfig,
    )

    activation: Any = None
    if weight == "mxfp4":
        if group not in (None, _MX_BLOCK):
            raise ConfigError(f"qat: group_size must be {_MX_BLOCK} with weight_dtype mxfp4; got {group}")
        from torchao.prototype.qat import MXFakeQuantizeConfig

        both = MXFakeQuantizeConfig(dtype=torch.float4_e2m1fn_x2, block_size=_MX_BLOCK)
        return QATConfig(activation_config=both, weight_config=both)
    if inputs == "int8":
        activation = IntxFakeQuantizeConfig(dtype=torch.int8, granularity="per_token", is_symmetric=False)
    elif inputs in _FLOAT8:
        activation = Float8FakeQuantizeConfig(dtype=torch.float8_e4m3fn)
    if weight == "int4" and inputs != "int4":
        more = {"int8": {"activation_dtype": torch.bfloat16}}.get(str(inputs), {})
        more = {"activation_dtype": torch.float8_e4m3fn} if inputs in _FLOAT8 else more
        weights: Any = Int4WeightFakeQuantizeConfig(group_size=group or 128, **more)
    elif weight in _FLOAT8 and inputs in _FLOAT8:
        weights = Float8FakeQuantizeConfig(dtype=torch.float8_e4m3fn)
    else:
        raise ConfigError(
            f"qat: weight_dtype {weight} with activation_dtype {inputs} is not trained by torchao; int4 with int8, fp8 "
            "or none, fp8 with fp8 and mxfp4 are"
        )
    return QATConfig(weight_config=weights, activation_config=activation)
