"""Imported first inside a simulated block by tests: keeps names of torch, as many libraries do."""

import torch
from torch import Generator, Tensor, compile, load, save
from torch.cuda import (
    Event,
    Stream,
    current_device,
    empty_cache,
    get_device_name,
    is_available,
    memory_allocated,
    synchronize,
)
from torch.nn.functional import scaled_dot_product_attention

to_list, to_numpy = Tensor.tolist, Tensor.numpy
clear_workspaces = torch._C._cuda_clearCublasWorkspaces

__all__ = [
    "Event", "Generator", "Stream", "clear_workspaces", "current_device", "empty_cache", "get_device_name",
    "is_available", "load", "memory_allocated", "save", "scaled_dot_product_attention", "synchronize", "to_list",
    "to_numpy",
]  # fmt: skip


class Seeded(Generator):
    """A subclass of what torch's name meant inside the block."""


@compile(backend="eager")
def doubled(x: Tensor) -> Tensor:
    return x * 2
