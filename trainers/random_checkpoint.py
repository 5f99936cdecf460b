"""Random weights that are made one at a time, where they are needed: for a quantised model, on the card itself.

A whole model in full precision on the CPU first takes minutes and, for 8 billion parameters, 16 GB of the host; on the
card it would raise the peak above what quantising a checkpoint needs. Older transformers import it too (--libraries).
"""

from contextlib import nullcontext
from typing import Any

import torch
import transformers
import transformers.modeling_utils as modeling
from torch.utils._python_dispatch import _disable_current_modes

READS_SLICES = hasattr(transformers, "PreTrainedConfig")  # transformers 5 does; older ones read tensors
_AS_SAVED = getattr(modeling, "revert_weight_conversion", None)  # of transformers 5, which joins experts as it loads
_SAFETENSORS_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


class RandomSlice:
    """One weight of a checkpoint that does not exist, read as transformers reads a slice of a safetensors file."""

    def __init__(self, name: str, weight: torch.Tensor, device: str, spread: float) -> None:
        self._shape, self._dtype, self._device, self._spread = weight.shape, weight.dtype, device, spread
        self._vector = torch.zeros if name.endswith("bias") else torch.ones  # most are scales of a normalisation

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def get_dtype(self) -> str:
        return _SAFETENSORS_NAMES[self._dtype]

    def __getitem__(self, _: object) -> torch.Tensor:
        """Matrices as transformers initialises them; zeros in biases and ones in other vectors."""
        made = self._vector(self._shape, dtype=self._dtype, device=self._device)
        return made.normal_(std=self._spread) if made.is_floating_point() and made.dim() > 1 else made


def _without_values(weight: torch.Tensor) -> torch.Tensor:
    return torch.empty(weight.shape, dtype=weight.dtype, device="meta")


def random_checkpoint(architecture: Any, config: Any, *, device: str, **options: Any) -> dict[str, Any]:
    """A state dict for `from_pretrained` of the model that `architecture` makes from `config`, without its values.

    Tied weights have one entry, as in a checkpoint on disk: transformers unties a pair that has two. Names and shapes
    are those of a checkpoint too, such as one weight for each expert.
    """
    whole = getattr(modeling, "set_quantized_state", nullcontext)  # ZeRO-3 would divide any other model's parameters
    with torch.device("meta"), whole():
        model = architecture._from_config(config, **options)
    spread = float(getattr(config, "initializer_range", None) or 0.02)  # transformers' default
    tied = getattr(model, "all_tied_weights_keys", {})  # {name: the weight that it shares}; empty where config unties
    weights = {name: weight for name, weight in model.state_dict().items() if name not in tied}
    if _AS_SAVED is not None:
        with _disable_current_modes():  # thousands of experts are soon taken apart where nothing is simulated
            weights = _AS_SAVED(model, {name: _without_values(weight) for name, weight in weights.items()})
    made = {name: RandomSlice(name, weight, device, spread) for name, weight in weights.items()}
    return made if READS_SLICES else {name: weight[...] for name, weight in made.items()}
