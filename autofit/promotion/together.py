"""What the ranks of a full run agree on: rank 0 decides, and all hear it. Imports torch."""

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from autofit.plugin.protocol import Control

_PATIENCE = timedelta(days=2)  # the job ends all ranks once one is gone; a long evaluation or save is no fault


class Together:
    """The ranks of this run, over a gloo group of their own: no card waits for it, and NCCL's time-out does not count.

    Every rank calls the same methods in the same order.
    """

    def __init__(self) -> None:
        """After the trainer has begun the ranks' process group."""
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=_PATIENCE)

    def decided(self, decide: Callable[[], Any]) -> Any:
        """What `decide` returns on rank 0, on every rank; the others do not call it."""
        found = [decide() if self.rank == 0 else None]
        dist.broadcast_object_list(found, src=0, group=self._group)
        return found[0]

    def control(self, own: Control | None = None) -> Control:
        """The `Control` of rank 0, on every rank."""
        flags = torch.zeros(2, dtype=torch.uint8)
        if own is not None:
            flags[0], flags[1] = own.save, own.stop
        dist.broadcast(flags, src=0, group=self._group)
        return Control(save=bool(flags[0]), stop=bool(flags[1]))

    def most(self, figures: Mapping[str, int]) -> dict[str, int]:
        """The largest of each figure over all ranks, each of which has the same names."""
        if not figures:
            return {}
        values = torch.tensor(list(figures.values()), dtype=torch.int64)
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._group)
        return dict(zip(figures, values.tolist(), strict=True))

    def wait(self) -> None:
        """Return once every rank has called it."""
        dist.barrier(group=self._group)
