"""DDP's C++ reducer in Python: the same buckets, filled and reduced at the same moments of backward.

Sizes and moments are those of torch/csrc/distributed/c10d/reducer.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as distributed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from autofit.fakegpu.depth.layers import LayerRecorder


class _Bucket:
    """Gradients of some parameters, flat in one tensor that is reduced at once."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], layer: int, layers: LayerRecorder | None) -> None:
        first = parameters[0]
        total = sum(p.numel() for p in parameters)
        self.flat = torch.empty(total, dtype=first.dtype, device=first.device)
        if layer and layers is not None:
            layers.give(self.flat, layer)
        self.views = list(map(_shaped, self.flat.split([p.numel() for p in parameters]), parameters))
        self.pending = len(parameters)


def _shaped(part: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor:
    return part.view(parameter.shape)


class BucketReducer:
    """DDP's Reducer. With `gradient_as_bucket_view`, gradients are views of the buckets; else they are copied there.

    Where layers are followed, each has a bucket of its own: of the same bytes as buckets that reach over layers, and
    they repeat with the layers.
    """

    layers: LayerRecorder | None = None  # of the card, as `mark`: set by a subclass
    mark: Callable[[torch.Tensor, str], None]

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        bucket_indices: Sequence[Sequence[int]],
        bucket_size_limits: Sequence[int],
        process_group: ProcessGroup,
        expect_sparse_gradients: Sequence[bool],
        bucket_bytes_cap: int,
        find_unused_parameters: bool,
        gradient_as_bucket_view: bool = False,
        names: object = None,
        first_bucket_bytes_cap: int = 1 << 20,
        *rest: object,
        **options: object,
    ) -> None:
        self._parameters = parameters
        self._group = process_group
        self._limits = [first_bucket_bytes_cap, bucket_bytes_cap]
        self._as_view = gradient_as_bucket_view
        self._expects = False  # whether this backward reduces: under no_sync it does not
        self._works: list[distributed.Work] = []  # the reductions under way
        self._arrived: list[int] = []  # parameters in the order of their gradients in the first backward
        by_layer = self.layers is not None and bool(self.layers.stacks)
        self._rebuilds = not find_unused_parameters and not by_layer
        if find_unused_parameters:
            self._used = torch.empty(len(parameters), dtype=torch.int32, device=parameters[0].device)
        self._buckets: list[_Bucket] = []
        self._place: dict[int, tuple[_Bucket, torch.Tensor]] = {}
        self._make(self._by_layer() if by_layer else bucket_indices)
        for index, parameter in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(partial(self._ready, index))

    def _by_layer(self) -> list[list[int]]:
        found: dict[tuple[object, ...], list[int]] = {}
        for index, parameter in enumerate(self._parameters):
            found.setdefault((self._layer_of(parameter), parameter.dtype, parameter.device), []).append(index)
        return list(found.values())

    def _layer_of(self, parameter: torch.nn.Parameter) -> int:
        return 0 if self.layers is None else self.layers.of(parameter)

    def _make(self, indices: Sequence[Sequence[int]]) -> None:
        self._place.clear()
        self._buckets.clear()
        for members in indices:
            parameters = [self._parameters[i] for i in members]
            bucket = _Bucket(parameters, self._layer_of(parameters[0]), self.layers)
            self.mark(bucket.flat, "gradients")
            self._buckets.append(bucket)
            self._place |= {i: (bucket, view) for i, view in zip(members, bucket.views, strict=True)}
            bucket.views.clear()  # only `_place` keeps them

    # ------------------------------------------------------------------ one backward
    def prepare_for_backward(self, outputs: object) -> None:
        self._expects = True
        self._arrived = []
        counts = dict.fromkeys(map(id, self._buckets), 0)
        for bucket, _ in self._place.values():
            counts[id(bucket)] += 1
        for bucket in self._buckets:
            bucket.pending = counts[id(bucket)]

    def _ready(self, index: int, parameter: torch.Tensor) -> None:
        """A gradient has been accumulated: fill its place, and reduce the bucket that is now full."""
        if not self._expects:
            return
        bucket, view = self._place[index]
        gradient = cast("torch.Tensor", parameter.grad)
        if gradient is not view:
            view.copy_(gradient)
            if self._as_view:
                parameter.grad = view
        self._arrived.append(index)
        bucket.pending -= 1
        if not bucket.pending:
            self._works.append(distributed.all_reduce(bucket.flat, group=self._group, async_op=True))
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
        arrived: list[torch.Tensor] = [self._parameters[i] for i in self._arrived]
        indices, _ = _buckets(arrived, self._limits, [], self._arrived)
        self._make(indices)
        return True

    def __getattr__(self, name: str) -> Callable[..., bool]:
        return lambda *args, **kwargs: False


def _buckets(tensors: list[torch.Tensor], limits: list[int], *more: list[int]) -> tuple[list[list[int]], list[int]]:
    """(places of the tensors of each bucket, limit in bytes of each): a bucket is full once it exceeds its limit."""
    from torch._C._distributed_c10d import _compute_bucket_assignment_by_size as assign  # not in every build of torch

    return assign(tensors, limits, *more)  # type: ignore[arg-type]


def broadcast_in_flat_buffers(layers: LayerRecorder | None, original: Callable[..., None]) -> Callable[..., None]:
    """DDP's first broadcast of the model, through two flat buffers at a time (torch/csrc/distributed/c10d/comm.cpp).

    Where layers are followed, the buffers are no tensors of layers: a deep model has more of them, not larger ones.
    """

    def broadcast(group: object, tensors: list[torch.Tensor], buffer_bytes: int, rank: int = 0) -> None:
        if layers is None or not layers.stacks:
            original(group, tensors, buffer_bytes, rank)
            return
        flat: list[torch.Tensor] = []
        for members in _buckets(tensors, [buffer_bytes])[0]:
            first, total = tensors[members[0]], sum(tensors[i].numel() for i in members)
            del flat[:-1]
            if len(members) > 1:
                flat.append(torch.empty(total, dtype=first.dtype, device=first.device))

    return broadcast


class SilentLogger:
    """Replaces DDP's C++ logger, which reads the C++ reducer; logs nothing."""

    def __init__(self, *args: object) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None
