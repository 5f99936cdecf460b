"""Specifications of each GPU, with their sources. Free of torch.

`capacity_bytes` is the memory that the driver reports to a program (torch's `total_memory`), below the nominal size.
Drivers differ (newer ones reserve more), and the smallest figure found is used, so that a predicted fit is not
optimistic. nvidia-smi and NVML print a larger total that includes the driver's reserve: 81559 MiB for an H100 80GB,
46068 for an L40S, 24564 for an RTX 4090, where torch prints 81004 to 81090, 45481 to 45589 and 24081 to 24217. Sources
were read in November 2026.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any


class FakeGpuError(Exception):
    """Base class of the errors that this package raises for wrong use."""


class UnknownGpuError(FakeGpuError, ValueError):
    """This GPU name is unknown."""


MIB = 1 << 20
CARDS_OF_A_MACHINE = 8  # where nothing says otherwise
NETWORK_GBIT = "AUTOFIT_NETWORK_GBIT"  # variable of a simulated rank: Gbit/s of all network adapters of its machine

_WHITEPAPER = "vendor data sheet (dense rates, boost clock)"
_UNVERIFIED = "from memory of torch's messages; no source found, may be off by 1 %"
# The context and the kernels that a program of torch's own operators has loaded, outside torch's allocator. Public
# out-of-memory messages of torch tell it: bytes in use by the process, less allocated, less reserved but unallocated
# (0.01 GiB steps). The largest figure of one process without NCCL is used. Programs with kernels of their own can hold
# more: 0.84 and 1.00 GiB were seen on an A100.
_SCALED = "estimate, may be off by 150 MiB: {} MiB of an {} scaled by SM count"
_MEASURED_H100 = (
    "measured on one (driver 580.159, torch 2.11.0, CUDA 13.0, experiments/gpu, 2026-11-26): 767 MiB of 26 of 43 "
    "trainings and rollouts of torch's own operators, at most 793; 833 with bitsandbytes' 8-bit products"
)
# Bytes/s between the card and pinned memory of the host, by the generation of its PCIe slot of 16 lanes, as measured:
# 3: 12.2 to the card and 12.9 back, Tesla P100 (github mpicbg-scicomp/gearshifft#82).
# 4: 25.1 to an A100-SXM4-40GB (NVIDIA/nvbandwidth#42; 18.1 for single copies of 10 GiB), about 25 back from another
#    (NVIDIA/nvbandwidth#53), 23.9 to 27.1 on eight RTX 4090 (NVIDIA/nvbandwidth#15); 19.6 to an A10 (not nvbandwidth's,
#    drkennetz/cuda_examples#1).
# 5: 35.1 to an H100 and 52.8 back, copied by its processors (NVIDIA/nvbandwidth#24): 42 there and back.
_LINK_GB_PER_S = {3: 12.0, 4: 25.0, 5: 42.0}
_CONTEXT_SCALED = _SCALED.format(543, "A100")


@dataclass(frozen=True, slots=True)
class Links:
    """Links of the cards of one machine: bytes/s of a ring of NCCL through each card (its "bus bandwidth")."""

    bytes_per_s: float
    source: str


# NVLink: the vendor's bandwidth in one direction, of which rings reached 74 % on A100 and 74 to 75 % on H100 and H200
# (all-gather and reduce-scatter of 512 MiB over 8 cards, rates/nccl.npz), and 68 % on B200.
# PCIe: what nccl-tests' all-reduce reached over the host's bridges, without NVLink bridges.
_NVLINK_2 = Links(0.74 * 150e9, "74 % of NVLink 2's 150 GB/s in one direction (data sheet of the V100)")
_NVLINK_3 = Links(0.74 * 300e9, "74 % of NVLink 3's 300 GB/s in one direction")
_NVLINK_3_OF_A800 = Links(0.74 * 200e9, "74 % of the 200 GB/s in one direction of an A800's NVLink 3 (data sheet)")
_NVLINK_4 = Links(0.74 * 450e9, "74 % of NVLink 4's 450 GB/s in one direction")
_NVLINK_5 = Links(0.68 * 900e9, "68 % of NVLink 5's 900 GB/s in one direction")
_PCIE_3 = Links(6e9, "half of PCIe 3's 12 GB/s, for cards of one host share its bridges; estimate, machines differ")
_PCIE_4 = Links(
    20e9, "PCIe 4: 20 GB/s measured between 2 L40S (rates/nccl.npz); machines differ, 1 to 22 GB/s were seen"
)
_PCIE_4_HOST = Links(
    12e9,
    "half of PCIe 4's 25 GB/s: without peer access each byte goes through the host's memory; estimate, machines differ",
)
_PCIE_5 = Links(24e9, "PCIe 5: 24 GB/s measured between 4 and 8 RTX PRO 6000 (rates/nccl.npz); machines differ")
_PCIE_5_HOST = Links(28e9, "RTX 5090, all-reduce over 8 cards: github NVIDIA/nccl#1639; machines differ")


def _seen(figures: str, note: str = "") -> str:
    """The source of a context: figures of torch's out-of-memory messages, in GiB."""
    return f"torch's out-of-memory messages in public logs, GiB: {figures}{note}"


def _printed(seen: str, where: str) -> str:
    """The source of a capacity: torch's total_memory in logs, or rounded in its out-of-memory messages."""
    return f"torch's total_memory, seen: {seen}; {where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """One GPU as a program sees it. Rates are dense peaks in FLOP/s; bandwidths are bytes/s."""

    name: str
    full_name: str
    capacity_bytes: int
    context_bytes: int
    bandwidth_bytes_per_s: float
    half_flops_per_s: float
    tf32_flops_per_s: float
    fp32_flops_per_s: float
    compute_capability: tuple[int, int]
    sm_count: int
    host_link_bytes_per_s: float = 25e9
    peer_bytes_per_s: float = 12e9  # through each card of a machine while a ring of NCCL runs
    network_bytes_per_s: float = 25e9  # of the network adapter that each card of a machine has, in one direction
    capacity_source: str = "given by the caller"
    rates_source: str = "given by the caller"
    context_source: str = "given by the caller"
    peer_source: str = "given by the caller"
    network_source: str = "one network adapter of 200 Gbit/s a card, assumed"

    def __post_init__(self) -> None:
        """Raise FakeGpuError for an impossible card, with all bad fields in one message."""
        amounts = (
            "capacity_bytes", "bandwidth_bytes_per_s", "half_flops_per_s", "tf32_flops_per_s", "fp32_flops_per_s",
            "sm_count", "host_link_bytes_per_s", "peer_bytes_per_s", "network_bytes_per_s",
        )  # fmt: skip
        wrong = [
            f"{name} must be a number above 0; got {getattr(self, name)!r}"
            for name in amounts
            if not _is_number(getattr(self, name)) or not 0 < getattr(self, name) < math.inf
        ]
        if not wrong and not (_is_number(self.context_bytes) and 0 <= self.context_bytes < self.capacity_bytes):
            wrong.append(f"context_bytes must be from 0 to below capacity_bytes={self.capacity_bytes}; got "
                         f"{self.context_bytes!r}")  # fmt: skip
        capability = self.compute_capability
        if not (isinstance(capability, tuple) and [type(part) for part in capability] == [int, int]):
            wrong.append(f"compute_capability must be two whole numbers such as (8, 0); got {capability!r}")
        elif capability < (5, 0):
            wrong.append(f"compute_capability must be (5, 0) or later, which torch still runs on; got {capability}")
        if wrong:
            raise FakeGpuError(f"the GPU {self.name!r} cannot be: {'; '.join(wrong)}")

    @classmethod
    def from_json(cls, kept: Mapping[str, Any]) -> GpuSpec:
        """The card whose fields `kept` has, as JSON keeps them (`dataclasses.asdict`)."""
        return cls(**{**kept, "compute_capability": tuple(kept["compute_capability"])})

    @property
    def threads_per_sm(self) -> int:
        """Threads that fit on a multiprocessor (CUDA programming guide, "Technical Specifications")."""
        major, minor = self.compute_capability
        if (major, minor) == (7, 5):
            return 1024
        return 1536 if major == 12 or (major == 8 and minor > 0) else 2048

    @property
    def allocatable_bytes(self) -> int:
        """Bytes available to torch's allocator on an otherwise idle card: capacity less the CUDA context."""
        return self.capacity_bytes - self.context_bytes


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _spec(
    name: str, full_name: str, *, capacity_mib: int, context_mib: int, gb_per_s: float,
    tflops: tuple[float, float, float], capability: tuple[int, int], sm_count: int, capacity_source: str = _UNVERIFIED,
    context_source: str = _CONTEXT_SCALED, rates_source: str = _WHITEPAPER, pcie: int = 4, links: Links = _PCIE_4,
    network_gbit_per_s: int = 200,
) -> GpuSpec:  # fmt: skip
    half, tf32, fp32 = tflops
    return GpuSpec(
        name=name, full_name=full_name, capacity_bytes=capacity_mib * MIB, context_bytes=context_mib * MIB,
        bandwidth_bytes_per_s=gb_per_s * 1e9, half_flops_per_s=half * 1e12, tf32_flops_per_s=tf32 * 1e12,
        fp32_flops_per_s=fp32 * 1e12, compute_capability=capability, sm_count=sm_count,
        host_link_bytes_per_s=_LINK_GB_PER_S[pcie] * 1e9, peer_bytes_per_s=links.bytes_per_s,
        network_bytes_per_s=network_gbit_per_s / 8 * 1e9, capacity_source=capacity_source, rates_source=rates_source,
        context_source=context_source, peer_source=links.source,
        network_source=f"one network adapter of {network_gbit_per_s} Gbit/s a card, assumed",
    )  # fmt: skip


_ALL = (
    _spec("t4", "Tesla T4", capacity_mib=14912, context_mib=164, gb_per_s=320, tflops=(65, 8.1, 8.1),
          context_source=_seen("0.11, 0.16"), capability=(7, 5), links=_PCIE_3, sm_count=40, pcie=3,
          capacity_source=_printed("14912 to 15110 MiB", "lowest with torch 2.2 in a public Ultralytics log")),
    _spec("rtx2080ti", "NVIDIA GeForce RTX 2080 Ti", capacity_mib=10825, context_mib=279, gb_per_s=616,
          context_source=_SCALED.format(164, "T4"),
          tflops=(53.8, 13.4, 13.4), capability=(7, 5), links=_PCIE_3, sm_count=68, pcie=3,
          capacity_source=_printed("10825 (torch 2.6, CUDA 12.4) to 11020 MiB", "public Ultralytics logs")),
    _spec("rtx8000", "Quadro RTX 8000", capacity_mib=48593, context_mib=295, gb_per_s=672,
          context_source=_SCALED.format(164, "T4"),
          tflops=(130.5, 16.3, 16.3), capability=(7, 5), links=_PCIE_3, sm_count=72, pcie=3,
          capacity_source=_printed("47.46 GiB", "Victarry/stable-dreambooth#8")),
    _spec("v100-16gb", "Tesla V100-SXM2-16GB", capacity_mib=16130, context_mib=512, gb_per_s=900,
          context_source=_seen("0.38, 0.50", " (32 GB)"),
          tflops=(125, 15.7, 15.7), capability=(7, 0), links=_NVLINK_2, network_gbit_per_s=100, sm_count=80, pcie=3,
          capacity_source=_printed("16130 to 16160 MiB", "public Ultralytics and torch logs, torch 1.7")),
    _spec("v100-32gb", "Tesla V100-SXM2-32GB", capacity_mib=32494, context_mib=512, gb_per_s=900,
          context_source=_seen("0.38, 0.50"),
          tflops=(125, 15.7, 15.7), capability=(7, 0), links=_NVLINK_2, network_gbit_per_s=100, sm_count=80, pcie=3,
          capacity_source=_printed("32494 MiB (torch 2.6, Ultralytics log); 31.74 GiB", "haotian-liu/LLaVA#812")),
    _spec("a100-40gb", "NVIDIA A100-SXM4-40GB", capacity_mib=40326, context_mib=543, gb_per_s=1555,
          context_source=_seen("0.48, 0.49, 0.53"),
          tflops=(312, 156, 19.5), capability=(8, 0), links=_NVLINK_3, sm_count=108,
          capacity_source=_printed("39.38 GiB (nine public logs), 40339 MiB, 39.50 GiB",
                                   "bottlerocket-os/bottlerocket#3873, TianheWu/CoSeR#10")),
    _spec("a100-80gb", "NVIDIA A100-SXM4-80GB", capacity_mib=81037, context_mib=543, gb_per_s=2039,
          context_source=_seen("0.49 twice, 0.50, 0.51 twice"),
          tflops=(312, 156, 19.5), capability=(8, 0), links=_NVLINK_3, sm_count=108,
          capacity_source=_printed("79.14 GiB, 81051 MiB", "lianqi1008/Control-GIC#6, ultralytics/ultralytics#22877")),
    _spec("a100-pcie-40gb", "NVIDIA A100-PCIE-40GB", capacity_mib=40326, context_mib=543, gb_per_s=1555,
          context_source=_seen("0.48 to 0.53", " (A100-SXM4, the same chip)"),
          tflops=(312, 156, 19.5), capability=(8, 0), sm_count=108,
          capacity_source="40326 MiB as an A100-SXM4-40GB; 40377 seen in a public Ultralytics log"),
    _spec("a100-pcie-80gb", "NVIDIA A100 80GB PCIe", capacity_mib=81037, context_mib=543, gb_per_s=1935,
          context_source=_seen("0.49 to 0.51", " (A100-SXM4, the same chip)"),
          tflops=(312, 156, 19.5), capability=(8, 0), sm_count=108,
          capacity_source="81037 MiB as an A100-SXM4-80GB; 81154 seen in a public Ultralytics log (torch 2.6)"),
    _spec("a30", "NVIDIA A30", capacity_mib=24164, context_mib=282, gb_per_s=933,
          tflops=(165, 82, 10.3), capability=(8, 0), sm_count=56,
          capacity_source=_printed("24164 MiB (torch 2.8, CUDA 12.8)", "a public log of YOLO")),
    _spec("a800", "NVIDIA A800-SXM4-80GB", capacity_mib=81229, context_mib=543, gb_per_s=2039,
          context_source=_seen("0.49 to 0.51", " (A100, the same chip)"),
          tflops=(312, 156, 19.5), capability=(8, 0), links=_NVLINK_3_OF_A800, sm_count=108,
          capacity_source=_printed("79.33 GiB twice", "hahnyuan/PB-LLM#3, MoonshotAI/Kimi-VL#51")),
    _spec("rtx3090", "NVIDIA GeForce RTX 3090", capacity_mib=24124, context_mib=482, gb_per_s=936,
          context_source=_seen("0.25 to 0.33, 0.47 with cuDNN"),
          tflops=(71, 35.6, 35.6), capability=(8, 6), links=_PCIE_4_HOST, sm_count=82,
          capacity_source=_printed("24124 (torch 2.13, CUDA 13.0) to 24268 MiB", "public Ultralytics logs")),
    _spec("rtx3060", "NVIDIA GeForce RTX 3060", capacity_mib=12032, context_mib=165, gb_per_s=360,
          context_source=_SCALED.format(482, "RTX 3090"),
          tflops=(25.5, 12.7, 12.7), capability=(8, 6), links=_PCIE_4_HOST, sm_count=28,
          capacity_source=_printed("11.75 GiB (12 GB; a board of 8 GB has the same name)",
                                   "smy20011/dreambooth-gui#78")),
    _spec("rtx3080", "NVIDIA GeForce RTX 3080", capacity_mib=10002, context_mib=400, gb_per_s=760,
          context_source=_SCALED.format(482, "RTX 3090"),
          tflops=(59.5, 29.8, 29.8), capability=(8, 6), links=_PCIE_4_HOST, sm_count=68,
          capacity_source=_printed("10002 MiB (10 GB; torch 2.6), 9.78 GiB; a board of 12 GB has the same name",
                                   "public Ultralytics logs, zai-org/CogVideo#34")),
    _spec("a6000", "NVIDIA RTX A6000", capacity_mib=48538, context_mib=423, gb_per_s=768,
          tflops=(154.8, 77.4, 38.7), capability=(8, 6), sm_count=84,
          capacity_source=_printed("47.40 GiB (a public report), 48670 MiB; with ECC on 44.55 GiB",
                                   "ultralytics/ultralytics#19084")),
    _spec("a4000", "NVIDIA RTX A4000", capacity_mib=15984, context_mib=215, gb_per_s=448, context_source=_seen("0.21"),
          tflops=(76.7, 38.3, 19.2), capability=(8, 6), sm_count=48,
          capacity_source=_printed("15.61 GiB", "DengKaiCQ/VGGT-Long#6")),
    _spec("a5000", "NVIDIA RTX A5000", capacity_mib=24114, context_mib=322, gb_per_s=768,
          tflops=(111.1, 55.6, 27.8), capability=(8, 6), sm_count=64,
          capacity_source=_printed("24114 to 24248 MiB; with ECC on 22721", "public torch and Ultralytics logs")),
    _spec("a40", "NVIDIA A40", capacity_mib=45416, context_mib=423, gb_per_s=696,
          tflops=(149.7, 74.8, 37.4), capability=(8, 6), sm_count=84,
          capacity_source=_printed("45416 MiB, 44.42 GiB; with ECC off 48688", "public torch logs")),
    _spec("a10", "NVIDIA A10", capacity_mib=22502, context_mib=362, gb_per_s=600,
          tflops=(125, 62.5, 31.2), capability=(8, 6), sm_count=72),
    _spec("a10g", "NVIDIA A10G", capacity_mib=22587, context_mib=403, gb_per_s=600,
          tflops=(70, 35, 31.5), capability=(8, 6), sm_count=80,
          capacity_source=_printed("22587 and 22723 MiB", "public torch logs")),
    _spec("rtx4090", "NVIDIA GeForce RTX 4090", capacity_mib=24081, context_mib=579, gb_per_s=1008,
          context_source=_seen("0.47, 0.48, 0.51, 0.565"),
          tflops=(165.2, 82.6, 82.6), capability=(8, 9), links=_PCIE_4_HOST, sm_count=128,
          capacity_source=_printed("23.52 GiB, 24081 to 24217 MiB on Linux",
                                   "Soul-AILab/SoulX-FlashTalk#5 and Ultralytics logs")),
    _spec("rtx4080", "NVIDIA GeForce RTX 4080", capacity_mib=16054, context_mib=382, gb_per_s=716.8,
          tflops=(97.5, 48.7, 48.7), capability=(8, 9), links=_PCIE_4_HOST, sm_count=76,
          capacity_source="estimate: 16376 MiB on Windows (ultralytics/ultralytics#4215), less what Linux takes of an "
                          "RTX 4090 (24081 of 24564 MiB)"),
    _spec("rtx4070tisuper", "NVIDIA GeForce RTX 4070 Ti SUPER", capacity_mib=16054, context_mib=332, gb_per_s=672,
          context_source=_SCALED.format(382, "RTX 4080"),
          tflops=(88.2, 44.1, 44.1), capability=(8, 9), links=_PCIE_4_HOST, sm_count=66,
          capacity_source="16054 MiB as an RTX 4080; 16069 seen in a public Ultralytics log (torch 2.0)"),
    _spec("rtx4070ti", "NVIDIA GeForce RTX 4070 Ti", capacity_mib=11976, context_mib=302, gb_per_s=504,
          context_source=_SCALED.format(382, "RTX 4080"),
          tflops=(80.2, 40.1, 40.1), capability=(8, 9), links=_PCIE_4_HOST, sm_count=60,
          capacity_source=_printed("11.70 GiB, 12007 MiB", "Kwai-Kolors/Kolors#11, a public YOLOv5 log")),
    _spec("rtx4070", "NVIDIA GeForce RTX 4070", capacity_mib=11976, context_mib=231, gb_per_s=504,
          context_source=_SCALED.format(382, "RTX 4080"),
          tflops=(58.3, 29.1, 29.1), capability=(8, 9), links=_PCIE_4_HOST, sm_count=46,
          capacity_source="11976 MiB as an RTX 4070 Ti; 11994 and 12002 seen in public Ultralytics logs"),
    _spec("rtx4060ti", "NVIDIA GeForce RTX 4060 Ti", capacity_mib=7806, context_mib=171, gb_per_s=288,
          context_source=_SCALED.format(382, "RTX 4080"),
          tflops=(44.1, 22.1, 22.1), capability=(8, 9), links=_PCIE_4_HOST, sm_count=34,
          capacity_source=_printed("7806 MiB (8 GB; torch 2.12, CUDA 13.0)", "a public Ultralytics log")),
    _spec("rtx4060ti-16gb", "NVIDIA GeForce RTX 4060 Ti 16GB", capacity_mib=15998, context_mib=171, gb_per_s=288,
          context_source=_SCALED.format(382, "RTX 4080"),
          tflops=(44.1, 22.1, 22.1), capability=(8, 9), links=_PCIE_4_HOST, sm_count=34,
          capacity_source="estimate: nvidia-smi's 16380 MiB, less what Linux takes of that of 8 GB (7806 of 8188)"),
    _spec("l4", "NVIDIA L4", capacity_mib=22563, context_mib=323, gb_per_s=300, tflops=(121, 60, 30.3),
          context_source=_seen("0.21, 0.315"), capability=(8, 9), sm_count=58,
          capacity_source=_printed("22563 (torch 2.11) and 22693 MiB", "public Ultralytics logs")),
    _spec("l40s", "NVIDIA L40S", capacity_mib=45481, context_mib=530, gb_per_s=864,
          context_source=_seen("0.51 three times"), tflops=(362, 183, 91.6), capability=(8, 9), sm_count=142,
          capacity_source=_printed("44.42 GiB, 45495 and 45589 MiB", "stepfun-ai/Step-Video-T2V#8")),
    _spec("l40", "NVIDIA L40", capacity_mib=45481, context_mib=530, gb_per_s=864,
          context_source=_seen("0.51 of an L40S, the same chip"), tflops=(181, 90.5, 90.5), capability=(8, 9),
          sm_count=142, capacity_source="45481 MiB as an L40S; 44.4 GiB seen in a public report"),
    _spec("rtx6000ada", "NVIDIA RTX 6000 Ada Generation", capacity_mib=45496, context_mib=530, gb_per_s=960,
          context_source=_seen("0.42; 0.51 of an L40S, the same chip"),
          tflops=(364.2, 182.1, 91.1), capability=(8, 9), sm_count=142,
          capacity_source=_printed("44.43 GiB with ECC on (nvidia-smi 46068 MiB); with ECC off nvidia-smi has 49140",
                                   "DINGYANB/MTVCrafter#21, sirselim/guppy_parameter_optimiser#5")),
    _spec("h100", "NVIDIA H100 80GB HBM3", capacity_mib=81004, context_mib=793, gb_per_s=3350,
          context_source=_MEASURED_H100,
          tflops=(989, 494, 66.9), capability=(9, 0), links=_NVLINK_4, network_gbit_per_s=400, sm_count=132, pcie=5,
          capacity_source=_printed("79.11 GiB, 81082 to 81090 MiB", "vllm-project/vllm#27508")),
    _spec("h100-pcie", "NVIDIA H100 PCIe", capacity_mib=81008, context_mib=685, gb_per_s=2000,
          context_source=_SCALED.format(793, "H100"),
          tflops=(756, 378, 51), capability=(9, 0), links=_PCIE_5, network_gbit_per_s=400, sm_count=114, pcie=5,
          capacity_source=_printed("81008 MiB", "a public torch log")),
    _spec("h100-nvl", "NVIDIA H100 NVL", capacity_mib=95227, context_mib=793, gb_per_s=3900,
          context_source=f"{_MEASURED_H100} (H100, the same chip)",
          tflops=(835, 417, 60), capability=(9, 0), links=_PCIE_5, network_gbit_per_s=400, sm_count=132, pcie=5,
          capacity_source=_printed("93.00 GiB, 95320 MiB (torch 2.13, CUDA 13.0)",
                                   "ali-vilab/VACE#56, a public Ultralytics log")),
    _spec("h20", "NVIDIA H20", capacity_mib=97280, context_mib=793, gb_per_s=4000,
          context_source=_SCALED.format(793, "H100"),
          tflops=(148, 74, 44), capability=(9, 0), links=_NVLINK_4, network_gbit_per_s=400, sm_count=78, pcie=5,
          rates_source="resellers' tables, as there is no public data sheet; 78 SMs and 4,000 GB/s also in github "
                       "RightNow-AI/AutoMegaKernel#3, which measured 3,712 GB/s",
          capacity_source=_printed("about 95.1 GiB", "RightNow-AI/AutoMegaKernel#3")),
    _spec("h200", "NVIDIA H200", capacity_mib=143156, context_mib=793, gb_per_s=4800,
          context_source=f"{_MEASURED_H100} (H100, the same chip)",
          tflops=(989, 494, 66.9), capability=(9, 0), links=_NVLINK_4, network_gbit_per_s=400, sm_count=132, pcie=5,
          capacity_source=_printed("143156 MiB", "public Ultralytics logs, torch 2.11")),
    _spec("b200", "NVIDIA B200", capacity_mib=182630, context_mib=712, gb_per_s=8000, context_source=_seen("0.695"),
          tflops=(2250, 1125, 75), capability=(10, 0), links=_NVLINK_5, network_gbit_per_s=400, sm_count=148, pcie=5,
          capacity_source=_printed("178.35 GiB, 182631 and 182642 MiB", "public torch logs")),
    _spec("rtx5090", "NVIDIA GeForce RTX 5090", capacity_mib=32102, context_mib=620, gb_per_s=1792,
          context_source=_seen("0.30, 0.49, 0.60"),
          tflops=(209.5, 104.8, 104.8), capability=(12, 0), links=_PCIE_5_HOST, sm_count=170, pcie=5,
          capacity_source=_printed("32102 (torch 2.12, CUDA 13.0) and 32120 MiB on Linux", "public Ultralytics logs")),
    _spec("rtx5080", "NVIDIA GeForce RTX 5080", capacity_mib=15840, context_mib=306, gb_per_s=960,
          context_source=_SCALED.format(620, "RTX 5090"),
          tflops=(112.6, 56.3, 56.3), capability=(12, 0), links=_PCIE_5_HOST, sm_count=84, pcie=5,
          capacity_source=_printed("15840 MiB", "a public report of training")),
    _spec("rtx5070ti", "NVIDIA GeForce RTX 5070 Ti", capacity_mib=15840, context_mib=255, gb_per_s=896,
          context_source=_SCALED.format(620, "RTX 5090"),
          tflops=(87.9, 43.9, 43.9), capability=(12, 0), links=_PCIE_5_HOST, sm_count=70, pcie=5,
          capacity_source="15840 MiB as an RTX 5080, of which nvidia-smi has the same 16303 MiB"),
    _spec("rtxpro6000", "NVIDIA RTX PRO 6000 Blackwell Server Edition", capacity_mib=97249, context_mib=686,
          context_source=_SCALED.format(620, "RTX 5090"), gb_per_s=1792,
          tflops=(467.8, 233.9, 117), capability=(12, 0), links=_PCIE_5, network_gbit_per_s=400, sm_count=188, pcie=5,
          rates_source="vendor data sheet of the server edition, as aiconfigurator-core 0.12.0 has it",
          capacity_source=_printed("94.97 GiB of a workstation edition (nvidia-smi 97887 MiB)", "antirez/ds4#431")),
)  # fmt: skip

GPU_SPECS: dict[str, GpuSpec] = {spec.name: spec for spec in _ALL}
_ALIASES = {
    "a100": "a100-40gb", "h100-80gb": "h100", "h100-sxm": "h100", "h200-141gb": "h200", "v100": "v100-16gb",
    "3090": "rtx3090", "4080": "rtx4080", "4090": "rtx4090", "5090": "rtx5090", "rtxa6000": "a6000",
    "2080ti": "rtx2080ti", "3080": "rtx3080", "4060ti": "rtx4060ti", "4060ti-16gb": "rtx4060ti-16gb", "4070": "rtx4070",
    "4070ti": "rtx4070ti", "4070tisuper": "rtx4070tisuper", "5070ti": "rtx5070ti", "5080": "rtx5080",
    "a100-pcie": "a100-pcie-40gb", "h100-94gb": "h100-nvl", "quadro-rtx-8000": "rtx8000",
    "a800-80gb": "a800", "h20-96gb": "h20", "3060": "rtx3060", "rtxa4000": "a4000",
    "rtx-pro-6000-blackwell": "rtxpro6000",
    "rtx-pro-6000-blackwell-workstation-edition": "rtxpro6000",
}  # fmt: skip


# Bytes of all kernels of libtorch_cuda, cuBLAS and cuBLASLt (torch 2.4.1, CUDA 12.1), by compute capability:
# experiments/context/kernel_bytes.py. Other libraries (flash-attn, cuDNN) have more.
_ALL_KERNELS_BYTES = {
    (7, 0): 693_000_000, (7, 5): 768_000_000, (8, 0): 1_065_000_000, (8, 6): 1_066_000_000, (8, 9): 1_091_000_000,
    (9, 0): 1_407_000_000,
}  # fmt: skip


def with_every_kernel_loaded(spec: GpuSpec) -> GpuSpec:
    """The card under a driver that loads kernels eagerly: before CUDA 12.2, and with CUDA_MODULE_LOADING=EAGER.

    Its context holds every kernel of torch's libraries; of a capability without a figure, the largest figure counts.
    """
    extra = _ALL_KERNELS_BYTES.get(spec.compute_capability, max(_ALL_KERNELS_BYTES.values()))
    return replace(spec, context_bytes=spec.context_bytes + extra)


def _plain(name: str) -> str:
    """A name less vendor, separators and capitals: "NVIDIA RTX 4090" and "rtx-4090" become "rtx4090"."""
    return re.sub(r"nvidia|geforce|tesla|[\s_\-]+", "", name.lower())


_BY_PLAIN_NAME = {_plain(key): GPU_SPECS[name] for key, name in _ALIASES.items()} | {
    _plain(key): spec for spec in _ALL for key in (spec.name, spec.full_name)
}


def gpu_spec(name: str) -> GpuSpec:
    """The spec of a GPU by name; case, separators and vendor are ignored. UnknownGpuError lists similar names."""
    found = _BY_PLAIN_NAME.get(_plain(name))
    if found is not None:
        return found
    if re.match(r"(amd)?(radeon)?(instinct)?mi\d{2,3}", _plain(name)):
        raise UnknownGpuError(
            f"the GPU {name!r} is AMD's and not simulated, for kernels and their times are CUDA's; name one of NVIDIA's"
        )
    counted = re.fullmatch(r"(.+?)\s*[x*:]\s*(\d{1,3})", name)
    if counted is not None and _plain(counted[1]) in _BY_PLAIN_NAME:
        raise UnknownGpuError(f"unknown GPU {name!r}; several cards are written {counted[2]}x{counted[1]}")
    counted = re.fullmatch(r"(\d{1,3})\s+(.+)", name)
    if counted is not None and _plain(counted[2]) in _BY_PLAIN_NAME:
        raise UnknownGpuError(f"unknown GPU {name!r}; several cards are written {counted[1]}x{counted[2]}")
    near = difflib.get_close_matches(_plain(name), list(_BY_PLAIN_NAME), n=4, cutoff=0.4)
    chip = re.match(r"[a-z]*\d+[a-z]*", name.lower().strip())  # "h100" of "h100-96gb"
    same = [spec.name for spec in _ALL if chip is not None and spec.name.partition("-")[0] == chip[0]]
    names = same or list(dict.fromkeys(_BY_PLAIN_NAME[key].name for key in near))
    hint = f"did you mean {', '.join(names)}?" if names else f"known: {', '.join(sorted(GPU_SPECS))}"
    raise UnknownGpuError(f"unknown GPU {name!r}; {hint}")


class LaunchOrigin(IntEnum):
    """Origin of a kernel's launch: Python with gradients off, Python with gradients recorded, or autograd."""

    PLAIN = 0
    RECORDED = 1
    AUTOGRAD = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCosts:
    """Host costs of eager PyTorch, and the slowdown of the card's kernels against the measured ones.

    `launch_s` is a kernel that Python code launches, with its share of the modules' Python. Source: PyTorch's blog
    "Accelerating Generative AI with PyTorch II: GPT, Fast" (November 2023, A100 80GB) measured 25.5 tokens/s for the
    eager Llama-2-7B, whose step launches 1972 kernels and makes 2089 views on the simulated card (experiments/rates).
    Transformers' own `generate` agrees: 35.71 ms a token for 40 layers of Llama-13B (github
    foundation-model-stack/foundation-model-stack#69) are 18 us for each of the 49 kernels of a layer.
    `recorded_launch_s` is one whose gradient is recorded, and `backward_launch_s` one that autograd launches, with its
    share of nodes that launch none. Hosts differ: the same program took two hosts of H100s 11 and 22 us a kernel
    (experiments/gpu, 2026-11-27), so `autofit doctor --calibrate`, and a search on a card, measure the one at hand. The
    defaults are 18.3 us each, as three LoRA trainings of PEFT on an L40S were told within 12 % with them (2026-11-26,
    experiments/accuracy), and most other rows that were measured elsewhere are of such hosts.
    `view_s` is what `autofit doctor --calibrate` measures on servers, 1 to 2 us.
    """

    launch_s: float = 18.3e-6
    recorded_launch_s: float = 18.3e-6
    backward_launch_s: float = 18.3e-6
    view_s: float = 1.5e-6
    gpu_slowdown: float = 1.0

    def of(self, launch: LaunchOrigin) -> float:
        """Host seconds of one launch."""
        return (self.launch_s, self.recorded_launch_s, self.backward_launch_s)[launch]
