"""Seconds of one collective operation of NCCL between the cards of a job, its ranks, and the memory that NCCL holds.

On a machine of cards that were measured, the measured seconds are interpolated: by message size and, between 2, 4 and 8
cards, by their number. All else is a formula: each of n cards sends and receives (n - 1) / n of the message (an
all-reduce twice), in steps of a ring, at the bandwidth of the slowest link: `GpuSpec.peer_bytes_per_s` within a
machine; between machines NCCL has a ring for each network adapter, so that those of all cards of a machine work at
once; the steps of an all-reduce between machines are those of NCCL's trees. An all-to-all is no ring: each card sends
what the cards of other machines are to have through its own adapter.
`nccl.npz` beside this file has the measurements; its `source` names them.

`nbytes` of a collective is its whole message: of an all-gather the gathered tensor, of a reduce-scatter the tensor
before, of an all-to-all the tensor that one card sends. Imports no torch before there are ranks.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np

from autofit.fakegpu.rates.kernels import MEASURED, STEP, RateGrid
from autofit.fakegpu.specs import CARDS_OF_A_MACHINE, MIB, GpuSpec

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "alltoall", "broadcast"]
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "alltoall")
# Cards whose machines were measured. An A100 of 40 GB has the links of that of 80 GB, and an H20 those of an H100 (an
# all-reduce of 4 KiB over 8 H20 takes 16.7 us, github deepseek-ai/DeepEP#303, and 16.0 us over 8 H100). The machine of
# L40S cards was a slow one (see experiments/rates/README.md), but it is the only one that was measured.
TABLES = {
    "a100-40gb": "a100_sxm", "a100-80gb": "a100_sxm", "l40s": "l40s", "h100": "h100_sxm", "h200": "h200_sxm",
    "b200": "b200_sxm", "h20": "h100_sxm",
}  # fmt: skip
# Seconds of one step of a ring, without bytes: an all-reduce over 2 to 8 cards has 2 (n - 1) of them and takes 8 to 28
# us on NVLink and 13 to 51 us on PCIe in the measured tables. Between machines: a tree or ring over InfiniBand; 20 us
# is what NCCL's tests show for a small all-reduce of 2 machines (github NVIDIA/nccl-tests#128: 23 us).
_STEP_S = 4e-6
_NETWORK_STEP_S = 20e-6
# What all adapters of a machine reach together of their data sheet, in busbw of nccl-tests: 75 of 8 x 12.5 GB/s (github
# NVIDIA/nccl#495), 91 and 86 of 4 x 25 (NVIDIA/nccl-tests#100, #175), 216 to 231 and 200 of 8 x 50 (NVIDIA/nccl#2409,
# called slow there, and #1218). The middle one of these five, and of nine with 96 of 100 (NVIDIA/nccl-tests#119), 190
# of 200 (NVIDIA/nccl#1368), 32 and 30 of 50 (NVIDIA/nccl#527). An all-reduce of two machines alone is beyond that in
# some reports, for a tree of two sends the message once (NVIDIA/nccl#812), and not in others: a ring counts.
NETWORK_SHARE = 0.75
# Blocks of NCCL, each of which has a multiprocessor for itself (github NVIDIA/nccl#689): 24 on an A100 (#1225) and on a
# H100 (forums.developer.nvidia.com/t/337991); where PCIe links the cards, two are enough (#689).
_BLOCKS_BY_NVLINK, _BLOCKS_BY_PCIE = 24, 2
_NVLINK_BYTES_PER_S = 100e9  # of a ring; PCIe 5.0 has 64 GB/s


@cache
def _tables() -> dict[str, RateGrid]:
    """The logarithm of seconds by (number of cards, bytes), for each "system/operation"."""
    with np.load(Path(__file__).parent / "nccl.npz") as file:
        bytes_ = np.log(file["bytes"].astype(float))
        return {
            key: RateGrid((np.log(file[f"{key.split('/')[0]}/cards"].astype(float)), bytes_), file[key] * STEP)
            for key in file.files
            if key.split("/")[-1] in KINDS
        }


@cache
def _most(system: str) -> int:
    """The largest number of cards that was measured."""
    return round(math.exp(float(_tables()[f"{system}/all_reduce"].axes[0][-1])))


@dataclass(slots=True)
class CollectiveSeconds:
    """Seconds of collectives over cards of `spec`, at most `per_machine` of them in a machine.

    All network adapters of a machine have `network_gbit` Gbit/s together; 0: one a card, of the spec's.
    """

    spec: GpuSpec
    per_machine: int = CARDS_OF_A_MACHINE
    network_gbit: int = 0
    _known: dict[tuple[str, int, int], float] = field(default_factory=dict)

    def seconds(self, kind: Collective, nbytes: float, ranks: int) -> float:
        """Seconds from the start on all of `ranks` cards to the end."""
        key = (kind, int(nbytes), ranks)
        if key not in self._known:
            self._known[key] = self._seconds(kind, max(nbytes, 1.0), ranks)
        return self._known[key]

    @property
    def left_frac(self) -> float:
        """The part of the card's multiprocessors that a collective leaves to the kernels beside it.

        Their memory traffic leaves about as much: twice the bytes of the bus (github NVIDIA/nccl#1428) are 24 % of an
        A100's bandwidth and 22 % of a H100's. Single kernels were slower by far, where their tiles need a wave more:
        1.8 times on an A100 (#1428), 1.7 times on a H100 (the forum's page).
        """
        by_nvlink = self.spec.peer_bytes_per_s > _NVLINK_BYTES_PER_S
        return 1.0 - (_BLOCKS_BY_NVLINK if by_nvlink else _BLOCKS_BY_PCIE) / self.spec.sm_count

    def is_measured(self, ranks: int) -> bool:
        """True if a table has the collectives over `ranks` cards."""
        system = TABLES.get(self.spec.name)
        return system is not None and ranks <= min(self.per_machine, _most(system))

    def _seconds(self, kind: Collective, nbytes: float, ranks: int) -> float:
        if ranks < 2:
            return 0.0
        if not self.is_measured(ranks):
            return self._formula(kind, nbytes, ranks)
        if kind == "broadcast":  # a chain through all cards, whose slowest link has the whole message
            return self._table("all_gather", nbytes, ranks) * ranks / (ranks - 1)
        return self._table(kind, nbytes, ranks)

    def _table(self, kind: str, nbytes: float, ranks: int) -> float:
        table = _tables()[f"{TABLES[self.spec.name]}/{kind}"]
        most = math.exp(float(table.axes[1][-1]))
        told = float(table.at(np.array([float(ranks)]), np.array([min(nbytes, most)]))[0])
        return math.exp(told) * max(1.0, nbytes / most)

    def _formula(self, kind: Collective, nbytes: float, ranks: int) -> float:
        inside = ranks <= self.per_machine
        rounds = 2 if kind == "all_reduce" else 1
        share = 1.0 if kind == "broadcast" else rounds * (ranks - 1) / ranks
        rate = self.spec.peer_bytes_per_s if inside else self._between_machines()
        if not inside and kind == "alltoall":
            share, rate = (ranks - self.per_machine) / ranks, NETWORK_SHARE * self._adapters() / self.per_machine
        machines = -(-ranks // self.per_machine)
        hops = math.ceil(math.log2(machines)) if kind == "all_reduce" else machines - 1  # a tree's depth, or a ring
        steps_s = rounds * (min(ranks, self.per_machine) - 1) * _STEP_S + rounds * hops * _NETWORK_STEP_S
        return steps_s + share * nbytes / rate

    def _between_machines(self) -> float:
        """Bytes/s of a ring through each card, where all adapters of a machine carry it."""
        return min(self.spec.peer_bytes_per_s, NETWORK_SHARE * self._adapters())

    def _adapters(self) -> float:
        """Bytes/s of all adapters of a machine by their data sheets, in one direction."""
        if self.network_gbit:
            return self.network_gbit / 8 * 1e9
        return self.per_machine * self.spec.network_bytes_per_s

    def notes(self, ranks: int) -> list[str]:
        """Notes on the unmeasured part of the seconds of collectives over `ranks` cards."""
        spec = self.spec
        if self.is_measured(ranks):
            measured = "h100" if spec.name == "h20" else spec.name  # the same links
            slow = "; other machines of such cards can be several times as fast" if spec.name == "l40s" else ""
            return [
                f"the seconds of collectives are those measured with NCCL on one machine of {measured} cards{slow}; "
                f"kernels beside them run at {self.left_frac:.0%} of their speed, without the multiprocessors of NCCL"
            ]
        if ranks <= self.per_machine:
            return [
                f"collectives between {ranks} {spec.name} cards were not measured: a ring's formula at "
                f"{spec.peer_bytes_per_s / 1e9:g} GB/s ({spec.peer_source})"
            ]
        told = "as given" if self.network_gbit else f"{spec.network_source}; launch.network_gbit says another"
        return [
            f"collectives of {ranks} cards cross machines of {self.per_machine}: a ring's formula at "
            f"{self._between_machines() / 1e9:g} GB/s, {NETWORK_SHARE:.0%} of all adapters of a machine "
            f"({told}), which was not measured"
        ]


# -- how far a predicted time may be off: the distances, in logarithms, within which 9 of 10 are expected -------------
# One number for each part of a step, and one for the card. A part's error is one for all of its kernels, and the errors
# are independent of each other. So a step's is the root of the sum of squares of the card's and its parts', each part
# weighted by its share of the step's seconds. Needs no torch.
#
# - card: boards of one kind differ by 22 % in the worst of five large systems (arXiv:2208.11035), and a table is of one
#   board. Of two drawn evenly from such a range, 9 of 10 pairs are within 0.684 of its width. Several cards wait for
#   the slowest: in half of all groups of n it is beyond 0.5^(1/n) of the range.
# - products: medians of two measurements of one card, with another framework, are 0.90 to 1.06 of each other; those
#   told by another card's table 0.78 to 1.30 (experiments/rates/between_cards.py).
# - attention: the forward is within 25 % at 95 % of the shapes held out (experiments/rates/held_out.py); the backward
#   is 2.5 times as long by its FLOPs, and 2.9 times as we have it.
# - others: what the cache keeps between two kernels was not measured. On the L40S, where it counts most, the others of
#   a LoRA step (3B model, 872 tokens) would take 1.41 times as long if it kept nothing.
# - collectives: measured between 2, 4 and 8 cards linked by NVLink, 19 of 20 held out are within 26 %
#   (experiments/rates/make_nccl_table.py). On PCIe machines differ by their bridges: 20 and 1.4 GB/s were seen for
#   L40S. Between machines 9 of 10 large collectives of public reports are within a factor of 2
#   (experiments/rates/nccl_tests.py).
# - host: published seconds a launch are 6 (one operator), 18 (twice) and 45 us (facebookresearch/sam2#768).


HOST = "host"
COLLECTIVES = "collectives"
_CARD = 0.15
_BOARDS = 0.22
_BY_NVLINK, _BETWEEN_MACHINES, _BY_PCIE = 0.30, 0.69, 1.0
_ERRORS = {"products": 0.10, "attention": 0.25, "others": 0.34, HOST: 0.70}
_BY_STAND_IN = {"products": 0.26, "attention": 0.35, "others": 0.34, HOST: 0.70}


def log_error(spec: GpuSpec, shares: Mapping[str, float], ranks: int = 1, *, machines: int = 1) -> float:
    """Half the width of the 90 % interval of a time, in logarithms; `shares` of its parts, 1 together.

    All `ranks`, on `machines`, wait for the slowest of their boards.
    """
    of_collectives = _BY_NVLINK if spec.name in TABLES and spec.name != "l40s" else _BY_PCIE
    if machines > 1:
        of_collectives = max(of_collectives, _BETWEEN_MACHINES)
    errors = {**(_ERRORS if spec.name in MEASURED else _BY_STAND_IN), COLLECTIVES: of_collectives}
    slowest = _BOARDS * (0.5 ** (1 / ranks) - 0.5)
    return math.hypot(_CARD, slowest, *(errors[part] * share for part, share in shares.items()))


# -- the ranks of a job, and the memory that NCCL holds for them ------------------------------------------------------

# A fake process group: this process is one rank of many; the others do not exist.

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
    """One sentence on the counted buffers of NCCL."""
    nvls = _nvls_bytes(spec, ranks)
    told = f"NCCL's buffers were counted with {(nccl_bytes(spec, ranks) - nvls) // MIB} MiB a group of ranks, observed"
    return told + (
        f", and {nvls // MIB} MiB for NVLink SHARP, the worst case; NCCL_NVLS_ENABLE=0 saves these" if nvls else ""
    )
