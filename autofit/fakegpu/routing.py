"""Which experts a mixture-of-experts layer sends its tokens to, although the router's logits are not known.

A router is told by its operation: the top k of unknown scores, in rows of at most `MOST_EXPERTS`. Its choice is taken
as balanced, as the losses and biases that train routers aim at: each token has k different experts, in turn. One expert
can be given more than its share. The top k of a vocabulary has longer rows, and stays unknown.

Eager experts read the choice from a one-hot tensor of (tokens, k, experts), too large to compute for real: `OneHot`
stands for its values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import cast

import torch
from torch._ops import OpOverload

aten = torch.ops.aten

# Published models have up to 512 experts (Qwen3-Next; Kimi K2 384, DeepSeek-V3 256); the least vocabulary of one is
# that of bytes and some hundred further tokens, and tokens to sample from are taken from values, not from places.
MOST_EXPERTS = 512

_UNCHANGED = {aten.detach.default, aten.alias.default, aten.clone.default}
_MOVES = {aten.permute.default, aten.transpose.int}
ONE_HOT_OPERATIONS = {*_UNCHANGED, *_MOVES, aten.sum.dim_IntList, aten.select.int, aten.index.Tensor}


def is_router(scores: torch.Tensor, k: int, *, last: bool) -> bool:
    """Whether the top `k` of unknown `scores` along their last dimension is a choice of experts."""
    return last and scores.dim() >= 2 and scores.is_floating_point() and 0 < k <= scores.shape[-1] <= MOST_EXPERTS


def balanced_choice(tokens: int, k: int, experts: int, imbalance: float = 1.0) -> torch.Tensor:
    """Experts of each token, (tokens, k) int64, a token's all different.

    Expert 0 gets `imbalance` times tokens * k / experts of them, at most all tokens; the others share the rest evenly.
    """
    slots = tokens * k
    if imbalance == 1.0 or k == experts:
        return (torch.arange(slots) % experts).view(tokens, k)
    hot = min(tokens, ceil(imbalance * slots / experts))
    choice = torch.empty(tokens, k, dtype=torch.int64)
    rest = torch.ones(tokens, k, dtype=torch.bool)
    rest[:hot, 0] = False
    choice[:hot, 0] = 0
    choice[rest] = 1 + torch.arange(slots - hot) % (experts - 1)
    return choice


@dataclass(frozen=True, slots=True)
class OneHot:
    """The values of a one-hot tensor of experts: `choice`, (..., k), and where each of its dimensions is now."""

    choice: torch.Tensor
    experts: int
    axes: tuple[int, ...]  # of the tensor, as numbers of the dimensions (*choice.shape, experts)

    @classmethod
    def of(cls, choice: torch.Tensor, experts: int) -> OneHot:
        return cls(choice, experts, tuple(range(choice.dim() + 1)))

    def after(self, func: OpOverload, args: Sequence[object]) -> OneHot | torch.Tensor | None:
        """The values of the output of one of `ONE_HOT_OPERATIONS`: one-hot still, as they are, or not known (None).

        An index among `args` is its values.
        """
        if func in _UNCHANGED:
            return self
        if func is aten.permute.default:
            return replace(self, axes=tuple(self.axes[d] for d in cast("Sequence[int]", args[1])))
        if func is aten.transpose.int:
            axes, (one, other) = list(self.axes), cast("tuple[int, int]", args[1:3])
            axes[one], axes[other] = axes[other], axes[one]
            return replace(self, axes=tuple(axes))
        if func is aten.sum.dim_IntList:
            return self._counts(args)
        if func is aten.select.int:
            dim, expert = cast("tuple[int, int]", args[1:3])
            return self._tokens_of(expert) if self._is_expert(dim) else None
        indices = cast("Sequence[object]", args[1])
        first = indices[0] if len(indices) == 1 else None
        if not isinstance(first, torch.Tensor) or first.shape != (1,) or not self._is_expert(0):
            return None
        return self._tokens_of(int(first)).unsqueeze(0)

    def _is_expert(self, dim: int) -> bool:
        return self.axes[dim] == self.choice.dim()

    def _counts(self, args: Sequence[object]) -> torch.Tensor | None:
        """How often each expert is chosen: the sum over all other dimensions."""
        summed = {self.axes[d] for d in cast("Sequence[int]", args[1])}
        if len(args) > 2 or summed != set(range(self.choice.dim())):
            return None
        return torch.bincount(self.choice.flatten(), minlength=self.experts)

    def _tokens_of(self, expert: int) -> torch.Tensor:
        return (self.choice == expert).long().permute([axis for axis in self.axes if axis != self.choice.dim()])
