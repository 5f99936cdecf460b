"""Ranks of a job, of which this process is one: a fake process group, and the memory that NCCL holds for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from autofit.fakegpu.specs import MIB, GpuSpec

# A fake process group: this process is one rank of many, of which the others do not exist.

server_cards: ContextVar[int] = ContextVar("server_cards", default=1)  # that a rollout server has, each a whole copy


@contextmanager
def fake_ranks(world_size: int, rank: int = 0, *, servers: int = 0) -> Iterator[None]:
    """Be rank `rank` of `world_size` inside: collectives return at once, as if every rank held this one's values.

    A rollout server of the ranks has `servers` cards of its own; 0 is one that nothing is known of.
    """
    import torch.distributed as distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    _forget_earlier_ranks()
    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    before = server_cards.set(max(1, servers))
    try:
        yield
    finally:
        server_cards.reset(before)
        if distributed.is_initialized():
            distributed.destroy_process_group()


def _forget_earlier_ranks() -> None:
    """Clear torch's caches of local shapes, which a rank with a larger share of a tensor has filled in this process."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()


# What NCCL holds on each card of a job outside torch's allocator, for each group of ranks. Needs no torch.
#
# A communicator has buffers for each channel and each card that it is connected with (4 MiB for large messages, 10 MiB
# with those for small ones: github NVIDIA/nccl#391, #1685), and NCCL chooses the number of channels by the links. So
# the figures here are observed ones:
#
# - 342 MiB between 2 cards, 392 MiB between 4 and 8: `nccl_mem` in aiconfigurator-core 0.12.0's descriptions of all its
#   machines, which says that these are observations. On 8 H100, 1.06 GB were in use before the first all-to-all beside
#   torch's allocator (github NVIDIA/nccl#1685), 0.36 GB more than an H100's context here.
# - NVLink SHARP, which NCCL uses between more than 2 cards that NVSwitches of the fourth generation link (H100 and
#   later): `nvlsPerRankSize 301989888` for each card of the group, in NCCL's log on 8 cards (github
#   vllm-project/vllm#9699). Newer versions may take less; the worst case counts. NCCL_NVLS_ENABLE=0 leaves it out.

_OF_TWO, _OF_MORE = 342 * MIB, 392 * MIB
_NVLS_PER_RANK = 301_989_888
_NVLS_MOST_RANKS = 8  # of one machine
_NVLINK_BYTES_PER_S = 100e9  # of a ring; PCIe is slower


def nccl_bytes(spec: GpuSpec, ranks: int) -> int:
    """Bytes of one communicator of `ranks` cards on each of them."""
    if ranks < 2:
        return 0
    return (_OF_TWO if ranks == 2 else _OF_MORE) + _nvls_bytes(spec, ranks)


def _nvls_bytes(spec: GpuSpec, ranks: int) -> int:
    linked = spec.compute_capability >= (9, 0) and spec.peer_bytes_per_s > _NVLINK_BYTES_PER_S
    if not linked or ranks < 3 or os.environ.get("NCCL_NVLS_ENABLE") == "0":
        return 0
    return _NVLS_PER_RANK * min(ranks, _NVLS_MOST_RANKS)


def nccl_note(spec: GpuSpec, ranks: int) -> str:
    """One sentence on what was counted."""
    nvls = _nvls_bytes(spec, ranks)
    told = f"NCCL's buffers were counted with {(nccl_bytes(spec, ranks) - nvls) // MIB} MiB a group of ranks, observed"
    return told + (
        f", and {nvls // MIB} MiB for NVLink SHARP, the worst case; NCCL_NVLS_ENABLE=0 saves these" if nvls else ""
    )
