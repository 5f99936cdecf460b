"""FSDP2 on gloo ranks of the CPU, which accelerate has for cards only. Imports torch and accelerate.

accelerate 1.15 reads FSDP's variables only where each rank has a card: on the CPU it trains with DDP without a word.
`fully_shard` itself runs on a gloo mesh, so two things are told otherwise: the ranks count as cards when accelerate
decides about FSDP, and the mesh is the CPU's.

Gloo stages an all-gather and a reduce-scatter in buffers of its own, which NCCL does not, and a thread of its own frees
them at any time. Here broadcasts and reduces in place do the same, so that a rank holds the bytes of one on a card.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.distributed.device_mesh import init_device_mesh


@contextmanager
def fsdp2_on_cpu() -> Iterator[None]:
    """Context in which accelerate shards over gloo ranks when a rank's environment asks for FSDP2."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType
    from torch.distributed import fsdp

    begin = PartialState.__init__

    def begun(state: Any, *args: Any, **kwargs: Any) -> None:
        begin(state, *args, **kwargs)
        if state.distributed_type == DistributedType.MULTI_CPU:
            state.distributed_type = DistributedType.MULTI_GPU  # what AcceleratorState turns into FSDP

    with (
        mock.patch.object(PartialState, "__init__", begun),
        mock.patch.object(fsdp, "fully_shard", partial(_on_cpu_mesh, fsdp.fully_shard)),
    ):
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)


def _on_cpu_mesh(shard: Callable[..., Any], module: Any, *, mesh: Any = None, **options: Any) -> Any:
    if mesh is None:
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    sharded = shard(module, mesh=mesh, **options)
    first = sharded[0] if isinstance(sharded, list) else sharded
    first.set_custom_all_gather(_InPlaceAllGather())
    first.set_custom_reduce_scatter(_InPlaceReduceScatter())
    return sharded


class _Buffers:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _InPlaceAllGather(_Buffers):
    """`torch.distributed.fsdp`'s AllGather: each rank broadcasts its part of the output."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> None:
        parts = output_tensor.view(-1).chunk(group.size())
        parts[group.rank()].copy_(input_tensor.view(-1))
        for rank, part in enumerate(parts):
            torch.distributed.broadcast(part, group_src=rank, group=group)


class _InPlaceReduceScatter(_Buffers):
    """`torch.distributed.fsdp`'s ReduceScatter: each rank's part of the input is reduced there, in place."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        parts = input_tensor.view(-1).chunk(group.size())
        for rank, part in enumerate(parts):
            torch.distributed.reduce(part, group_dst=rank, op=op, group=group)
        output_tensor.view(-1).copy_(parts[group.rank()])
