"""Which part of a training pass runs in this thread."""

from __future__ import annotations

import torch


def in_backward() -> bool:
    """Whether autograd's engine runs a backward pass."""
    return torch._C._current_graph_task_id() != -1


def launched_by_autograd() -> bool:
    """Whether autograd's engine launches, not Python: in backward, except where a layer's forward runs once more."""
    return in_backward() and not torch.is_grad_enabled()
