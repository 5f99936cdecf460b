"""A fake process group: this process is one rank of many, of which the others do not exist."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

server_cards: ContextVar[int] = ContextVar("server_cards", default=1)  # that a rollout server has, each a whole copy


@contextmanager
def fake_ranks(world_size: int, rank: int = 0, *, servers: int = 0) -> Iterator[None]:
    """Be rank `rank` of `world_size` inside: collectives return at once, as if every rank held this one's values.

    A rollout server of the ranks has `servers` cards of its own; 0 is one that nothing is known of.
    """
    import torch.distributed as distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    before = server_cards.set(max(1, servers))
    try:
        yield
    finally:
        server_cards.reset(before)
        if distributed.is_initialized():
            distributed.destroy_process_group()
