"""Routed experts that compute in host memory, as KTransformers has them under LLaMA-Factory. Imports torch.

Read in kt-kernel 0.7.2: kt_kernel/sft/layer.py and autograd.py. The card holds everything but the routed experts and
their adapters; hidden states go to the host and back, of several ranks by way of the first one.
"""

from typing import Any

import torch
from torch import distributed

from autofit.errors import ConfigError


class HostExperts(torch.nn.Module):
    """What stands on the card for the routed experts of a layer, which nothing moves out of host memory."""

    def __init__(self, experts: torch.nn.Module) -> None:
        super().__init__()
        self._held = [parameter.detach() for parameter in experts.parameters()]

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """(tokens, H) from the host. The values are not those of experts: nothing is trained with them."""
        found: torch.Tensor = _ByHost.apply(hidden, weights)  # type: ignore[no-untyped-call]
        return found


class _ByHost(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ctx.shape, ctx.kind = weights.shape, weights.dtype
        ctx.save_for_backward(hidden.new_empty(()))  # a checkpoint computes the layer again when it is read
        return _through_host(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert ctx.saved_tensors
        return _through_host(grads[0]), grads[0].new_zeros(ctx.shape, dtype=ctx.kind)


def _through_host(states: torch.Tensor) -> torch.Tensor:
    """States of the same shape from the host; the first of several ranks sends those of all, and shares them out."""
    ranks = distributed.get_world_size() if distributed.is_initialized() else 1
    if ranks > 1 and distributed.get_rank() == 0:
        gathered = [torch.empty_like(states) for _ in range(ranks)]
        torch.cat(gathered).cpu()
        del gathered
        whole = states.new_empty((ranks * len(states), *states.shape[1:]))
        parts = [part.contiguous() for part in whole.chunk(ranks)]
        found = torch.empty_like(states)
        del whole, parts
        return found
    return states.detach().cpu().to(states.device, copy=True)


def to_host(model: torch.nn.Module) -> None:
    """Replace the routed experts of each layer. Raises ConfigError where a model has none."""
    found = [
        (name, module)
        for name, module in model.named_modules()
        if type(module).__name__.endswith("Experts") and any(p.dim() == 3 for p in module.parameters(recurse=False))
    ]
    if not found:
        raise ConfigError("host_experts needs a mixture of experts; this model has none whose weights are one tensor")
    for name, module in found:
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, HostExperts(module))
