"""`torch.tensor` of a list with tensors of the simulated card: torch reads each of them from within C++."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch._subclasses.fake_tensor import FakeTensor

from autofit.fakegpu.patches.redirect import untouched


def factories() -> Iterable[tuple[object, str, object, str]]:
    """Patches of torch's constructors from Python values."""
    yield torch, "tensor", _tensor(untouched(torch.tensor)), "the values of fakes are read in Python"


def _tensor(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def tensor(data: object, *args: object, **kwargs: object) -> torch.Tensor:
        if isinstance(data, (list, tuple)) and any(isinstance(value, FakeTensor) for value in data):
            data = [value.item() if isinstance(value, FakeTensor) and not value.dim() else value for value in data]
        return original(data, *args, **kwargs)

    return tensor
