"""torch.distributed's collectives as its operators name them: what is moved, between how many cards, and who waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch._ops import OpOverload

from autofit.fakegpu.kernels import tensors

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "alltoall", "broadcast"]
NAMESPACES = {"c10d", "_c10d_functional"}
# Operator: (kind, the argument that is the whole message; -1 is the output). A reduction to one card and a message to
# one card move as many bytes through the slowest link as a broadcast; gather and scatter as an all-gather.
_OPERATIONS: dict[str, tuple[Kind, int]] = {
    "c10d::allreduce_": ("all_reduce", 0), "c10d::allreduce_coalesced_": ("all_reduce", 0),
    "c10d::reduce_": ("broadcast", 0), "c10d::broadcast_": ("broadcast", 0),
    "c10d::send": ("broadcast", 0), "c10d::recv_": ("broadcast", 0),
    "c10d::allgather_": ("all_gather", 0), "c10d::allgather_coalesced_": ("all_gather", 0),
    "c10d::_allgather_base_": ("all_gather", 0), "c10d::allgather_into_tensor_coalesced_": ("all_gather", 0),
    "c10d::gather_": ("all_gather", 0), "c10d::scatter_": ("all_gather", 1),
    "c10d::reduce_scatter_": ("reduce_scatter", 1), "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "c10d::alltoall_base_": ("alltoall", 1), "c10d::alltoall_": ("alltoall", 1),
    "c10d::barrier": ("all_reduce", 0),
    "_c10d_functional::all_reduce": ("all_reduce", 0), "_c10d_functional::all_reduce_": ("all_reduce", 0),
    "_c10d_functional::all_reduce_coalesced": ("all_reduce", 0),
    "_c10d_functional::all_reduce_coalesced_": ("all_reduce", 0),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", -1),
    "_c10d_functional::all_gather_into_tensor_out": ("all_gather", -1),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all_gather", -1),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional::reduce_scatter_tensor_out": ("reduce_scatter", 0),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "_c10d_functional::all_to_all_single": ("alltoall", 0),
    "_c10d_functional::broadcast": ("broadcast", 0), "_c10d_functional::broadcast_": ("broadcast", 0),
}  # fmt: skip
_TO_ONE = {"c10d::send", "c10d::recv_"}


class Call(NamedTuple):
    """One collective; with `waits`, the stream that it is called on goes on after its end."""

    kind: Kind
    tensors: list[torch.Tensor]
    ranks: int
    group: str
    waits: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the whole message."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)


def collective(func: OpOverload, args: Sequence[object], out: object) -> Call | None:
    """The collective that an operator is; None for others, such as the wait for one."""
    name = func._schema.name
    if name not in _OPERATIONS:
        return None
    kind, place = _OPERATIONS[name]
    group = _group(func, args)
    ranks = min(group.size(), 2) if name in _TO_ONE else group.size()
    waits = func.namespace == "c10d" and not _is_asynchronous(func, args)
    return Call(kind, list(tensors(out if place < 0 else args[place])), ranks, group.group_name, waits)


def moved_by(
    func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], out: object
) -> tuple[Sequence[object], object]:
    """What a copy of FSDP2 into or out of a flat buffer reads and writes, as (inputs, output).

    The copy before an all-gather writes only this rank's part of the buffer, its first output.
    """
    if func._schema.name == "fsdp::all_gather_copy_in":
        return args[:1], cast("tuple[object, ...]", out)[0]
    return args, kwargs.get("out")


def _group(func: OpOverload, args: Sequence[object]) -> torch.distributed.ProcessGroup:
    from torch._C._distributed_c10d import _resolve_process_group

    if func.namespace == "c10d":
        boxed = next(value for value in args if isinstance(value, torch.ScriptObject))
        return torch.distributed.ProcessGroup.unbox(boxed)
    named = args[[argument.name for argument in func._schema.arguments].index("group_name")]
    return _resolve_process_group(cast("Any", named)) if isinstance(named, str) else cast("Any", named)


def _is_asynchronous(func: OpOverload, args: Sequence[object]) -> bool:
    """The argument `async_op`, whose default is True."""
    names = [argument.name for argument in func._schema.arguments]
    at = names.index("async_op") if "async_op" in names else len(args)
    return bool(args[at]) if at < len(args) else True
