"""DDP's C++ reducer in Python: the same buckets, filled and reduced at the same moments of backward.

Sizes and moments are those of torch/csrc/distributed/c10d/reducer.cpp.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as distributed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from autofit.fakegpu.depth.layers import LayerRecorder


class _Reduction:
    """Gradients that are reduced together: a bucket's, or those of a layer that stands for several."""

    def __init__(self, parts: Sequence[torch.Tensor], count: int) -> None:
        self.parts = parts  # one reduction each
        self.count = self.pending = count  # of gradients, of those that have not come yet


class BucketReducer:
    """DDP's Reducer. With `gradient_as_bucket_view`, gradients are views of the buckets; else they are copied there.

    Where few layers stand for many, the buckets are those of all layers, and each layer's gradients are reduced by
    themselves, so that the reductions repeat with the layers.
    """

    layers: LayerRecorder | None = None  # of the card, as `mark`: set by a subclass
    mark: Callable[[torch.Tensor, str], None]

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], bucket_indices: Sequence[Sequence[int]],
        bucket_size_limits: Sequence[int], process_group: ProcessGroup, expect_sparse_gradients: Sequence[bool],
        bucket_bytes_cap: int, find_unused_parameters: bool, gradient_as_bucket_view: bool = False,
        names: object = None, first_bucket_bytes_cap: int = 1 << 20, *rest: object, **options: object,
    ) -> None:  # fmt: skip
        self._parameters = parameters
        self._group = process_group
        self._limits = [first_bucket_bytes_cap, bucket_bytes_cap]
        self._as_view = gradient_as_bucket_view
        self._expects = False  # whether this backward reduces: under no_sync it does not
        self._works: list[distributed.Work] = []  # the reductions under way
        self._arrived: list[int] = []  # parameters in the order of their gradients in the first backward
        self._rebuilds = not find_unused_parameters
        if find_unused_parameters:
            self._used = torch.empty(len(parameters), dtype=torch.int32, device=parameters[0].device)
        self._flat: list[torch.Tensor] = []  # the buckets
        self._place: dict[int, tuple[_Reduction, torch.Tensor]] = {}
        if self._followed is not None:
            places = self._at_full_depth(range(len(parameters)))
            in_one = max(bucket_size_limits) > bucket_bytes_cap  # until they are made anew
            found, _ = _buckets([parameters[i] for i in places], [sys.maxsize] if in_one else self._limits)
            bucket_indices = [[places[i] for i in members] for members in reversed(found)]
        self._make(bucket_indices)
        for index, parameter in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(partial(self._ready, index))

    @property
    def _followed(self) -> LayerRecorder | None:
        """The layers, where few of them stand for many."""
        return self.layers if self.layers is not None and self.layers.stacks else None

    def _at_full_depth(self, indices: Sequence[int]) -> list[int]:
        """The parameters `indices` in their order; one of a layer that stands for several is there several times."""
        if (layers := self._followed) is None:
            return list(indices)
        return [indices[place] for place in layers.at_full_depth([self._parameters[i] for i in indices])]

    def _make(self, buckets: Sequence[Sequence[int]]) -> None:
        self._place.clear()
        self._flat.clear()
        largest: dict[torch.dtype, torch.Tensor] = {}
        views: dict[int, torch.Tensor] = {}
        for members in buckets:
            parameters = [self._parameters[i] for i in members]
            counts = [p.numel() for p in parameters]
            flat = torch.empty(sum(counts), dtype=parameters[0].dtype, device=parameters[0].device)
            self._flat.append(flat)
            self.mark(flat, "gradients")
            largest[flat.dtype] = max(flat, largest.get(flat.dtype, flat), key=torch.numel)
            views |= {i: part.view(self._parameters[i].shape)
                      for i, part in zip(members, flat.split(counts), strict=True) if i not in views}  # fmt: skip
            if self._followed is None:
                reduction = _Reduction([flat], len(members))
                self._place |= {i: (reduction, views[i]) for i in members}
        if (layers := self._followed) is not None:
            self._reduce_by_layer(layers, views, largest)

    def _reduce_by_layer(
        self, layers: LayerRecorder, views: Mapping[int, torch.Tensor], largest: Mapping[torch.dtype, torch.Tensor]
    ) -> None:
        """Reduce as many bytes as each layer's gradients have, a part of the largest bucket at a time."""
        by_layer: dict[tuple[int, torch.dtype], list[int]] = {}
        for index, parameter in enumerate(self._parameters):
            code = layers.of(parameter)
            layers.lend(views[index], code)
            by_layer.setdefault((code, parameter.dtype), []).append(index)
        for (_, dtype), members in by_layer.items():
            most, left = largest[dtype], sum(views[i].numel() for i in members)
            parts = [most] * (left // most.numel()) + ([most[:rest]] if (rest := left % most.numel()) else [])
            reduction = _Reduction(parts, len(members))
            self._place |= {i: (reduction, views[i]) for i in members}

    # ------------------------------------------------------------------ one backward
    def prepare_for_backward(self, outputs: object) -> None:
        self._expects = True
        self._arrived = []
        for reduction, _ in self._place.values():
            reduction.pending = reduction.count

    def _ready(self, index: int, parameter: torch.Tensor) -> None:
        """A gradient has been accumulated: fill its place, and reduce the bucket, or the layer, that is now full."""
        if not self._expects:
            return
        reduction, view = self._place[index]
        gradient = cast("torch.Tensor", parameter.grad)
        if gradient is not view:
            view.copy_(gradient)
            if self._as_view:
                parameter.grad = view
        self._arrived.append(index)
        reduction.pending -= 1
        if not reduction.pending:
            for part in reduction.parts:
                self._works.append(distributed.all_reduce(part, group=self._group, async_op=True))
        if len(self._arrived) == len(self._parameters):
            self._finish()

    def _finish(self) -> None:
        self._expects = False
        for work in self._works:
            work.wait()
        self._works.clear()
        if self._as_view:
            return
        for index, (_, view) in self._place.items():
            cast("torch.Tensor", self._parameters[index].grad).copy_(view)

    def _rebuild_buckets(self) -> bool:
        """After the first backward, buckets of 25 MiB (the first: 1 MiB) in the order in which gradients came."""
        if not self._rebuilds or len(self._arrived) != len(self._parameters):
            return False
        self._rebuilds = False
        order = self._at_full_depth(self._arrived)
        found, _ = _buckets([self._parameters[i] for i in order], self._limits, [], list(range(len(order))))
        self._make([[order[place] for place in members] for members in found])
        return True

    def __getattr__(self, name: str) -> Callable[..., bool]:
        return lambda *args, **kwargs: False


def _buckets(tensors: list[torch.Tensor], limits: list[int], *more: list[int]) -> tuple[list[list[int]], list[int]]:
    """(places of the tensors of each bucket, limit in bytes of each): a bucket is full once it exceeds its limit."""
    from torch._C._distributed_c10d import _compute_bucket_assignment_by_size as assign  # not in every build of torch

    return assign(tensors, limits, *more)  # type: ignore[arg-type]


def broadcast_in_flat_buffers(
    layers: LayerRecorder | None, original: Callable[..., None], group: object, tensors: list[torch.Tensor],
    buffer_bytes: int, rank: int = 0,
) -> None:  # fmt: skip
    """DDP's first broadcast of the model, through two flat buffers at a time (torch/csrc/distributed/c10d/comm.cpp).

    Where few layers stand for many, the buffers are those of all layers.
    """
    if layers is None or not layers.stacks:
        original(group, tensors, buffer_bytes, rank)
        return
    whole, flat = [tensors[place] for place in layers.at_full_depth(tensors)], list[torch.Tensor]()
    for members in _buckets(whole, [buffer_bytes])[0]:
        first, total = whole[members[0]], sum(whole[i].numel() for i in members)
        del flat[:-1]
        if len(members) > 1:
            flat.append(torch.empty(total, dtype=first.dtype, device=first.device))


class SilentLogger:
    """Replaces DDP's C++ logger, which reads the C++ reducer; logs nothing."""

    def __init__(self, *args: object) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None
