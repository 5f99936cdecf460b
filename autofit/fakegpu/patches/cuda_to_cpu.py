"""The fallback for builds where fake CUDA tensors do not work: device `cuda` becomes `cpu`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.overrides import TorchFunctionMode


class CudaToCpu(TorchFunctionMode):
    """Rewrites device arguments of torch functions and methods; `.cuda()` returns the tensor itself."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func is torch.Tensor.cuda:
            return args[0]
        changed = {name: _on_cpu(value) for name, value in (kwargs or {}).items()}
        if func is torch.Tensor.to:
            args = [_on_cpu(a) for a in args]
        return func(*args, **changed)


def _on_cpu(value: object) -> object:
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    if isinstance(value, str) and value.split(":")[0] == "cuda":
        return torch.device("cpu")
    return value
