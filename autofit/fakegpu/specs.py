"""What we know of each GPU, with its source. No torch here.

`capacity_bytes` is what the driver reports to a program (torch's `total_memory`), which is less than the size on the
box. Where drivers differ, the smallest figure seen often is taken, so that a predicted fit is not an optimistic one.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from autofit.fakegpu.errors import UnknownGpuError

MIB = 1 << 20

_WHITEPAPER = "vendor data sheet (dense rates, boost clock)"
_PRINTED = "total_memory as torch prints it on this card, seen in public logs"
_REPORTED = "total capacity in torch's out-of-memory messages in public issue threads; the low end"
_UNVERIFIED = "from memory of such messages; not checked against a source, may be off by 1 %"
_CONTEXT_MEASURED = "CUDA context measured on this card (notes/trl.md)"
_CONTEXT_SCALED = "estimate: A100's measured 501 MiB scaled by SM count; not measured, may be off by 150 MiB"
_CONTEXT_SCALED_T4 = "estimate: T4's measured 135 MiB scaled by SM count; not measured, may be off by 150 MiB"
_CONTEXT_SCALED_L4 = "estimate: L4's measured 226 MiB scaled by SM count; not measured, may be off by 150 MiB"


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
    host_link_bytes_per_s: float = 20e9
    capacity_source: str = "given by the caller"
    rates_source: str = "given by the caller"
    context_source: str = "given by the caller"

    @property
    def allocatable_bytes(self) -> int:
        """Bytes left to torch's allocator on an otherwise idle card: capacity less the CUDA context."""
        return self.capacity_bytes - self.context_bytes


def _spec(
    name: str,
    full_name: str,
    *,
    capacity_mib: int,
    context_mib: int,
    gb_per_s: float,
    tflops: tuple[float, float, float],
    capability: tuple[int, int],
    sm_count: int,
    capacity_source: str = _UNVERIFIED,
    context_source: str = _CONTEXT_SCALED,
    host_gb_per_s: float = 20.0,
) -> GpuSpec:
    half, tf32, fp32 = tflops
    return GpuSpec(
        name=name,
        full_name=full_name,
        capacity_bytes=capacity_mib * MIB,
        context_bytes=context_mib * MIB,
        bandwidth_bytes_per_s=gb_per_s * 1e9,
        half_flops_per_s=half * 1e12,
        tf32_flops_per_s=tf32 * 1e12,
        fp32_flops_per_s=fp32 * 1e12,
        compute_capability=capability,
        sm_count=sm_count,
        host_link_bytes_per_s=host_gb_per_s * 1e9,
        capacity_source=capacity_source,
        rates_source=_WHITEPAPER,
        context_source=context_source,
    )


_ALL = (
    _spec("t4", "Tesla T4", capacity_mib=14910, context_mib=135, gb_per_s=320, tflops=(65, 8.1, 8.1),
          capability=(7, 5), sm_count=40, context_source=_CONTEXT_MEASURED, host_gb_per_s=10),
    _spec("v100-16gb", "Tesla V100-SXM2-16GB", capacity_mib=16151, context_mib=270, gb_per_s=900,
          tflops=(125, 15.7, 15.7), capability=(7, 0), sm_count=80, context_source=_CONTEXT_SCALED_T4,
          host_gb_per_s=10),
    _spec("v100-32gb", "Tesla V100-SXM2-32GB", capacity_mib=32501, context_mib=270, gb_per_s=900,
          tflops=(125, 15.7, 15.7), capability=(7, 0), sm_count=80, context_source=_CONTEXT_SCALED_T4,
          host_gb_per_s=10),
    _spec("a100-40gb", "NVIDIA A100-SXM4-40GB", capacity_mib=40326, context_mib=501, gb_per_s=1555,
          tflops=(312, 156, 19.5), capability=(8, 0), sm_count=108, capacity_source=_PRINTED,
          context_source=_CONTEXT_MEASURED),
    _spec("a100-80gb", "NVIDIA A100-SXM4-80GB", capacity_mib=81037, context_mib=501, gb_per_s=2039,
          tflops=(312, 156, 19.5), capability=(8, 0), sm_count=108, capacity_source=_REPORTED,
          context_source=_CONTEXT_MEASURED),
    _spec("rtx3090", "NVIDIA GeForce RTX 3090", capacity_mib=24245, context_mib=380, gb_per_s=936,
          tflops=(71, 35.6, 35.6), capacity_source=_REPORTED, capability=(8, 6), sm_count=82),
    _spec("a6000", "NVIDIA RTX A6000", capacity_mib=48539, context_mib=390, gb_per_s=768,
          tflops=(154.8, 77.4, 38.7), capability=(8, 6), sm_count=84),
    _spec("a5000", "NVIDIA RTX A5000", capacity_mib=24238, context_mib=297, gb_per_s=768,
          tflops=(111.1, 55.6, 27.8), capability=(8, 6), sm_count=64),
    _spec("a40", "NVIDIA A40", capacity_mib=45403, context_mib=390, gb_per_s=696,
          tflops=(149.7, 74.8, 37.4), capability=(8, 6), sm_count=84),
    _spec("a10", "NVIDIA A10", capacity_mib=22502, context_mib=334, gb_per_s=600,
          tflops=(125, 62.5, 31.2), capability=(8, 6), sm_count=72),
    _spec("a10g", "NVIDIA A10G", capacity_mib=22502, context_mib=371, gb_per_s=600,
          tflops=(70, 35, 31.5), capability=(8, 6), sm_count=80),
    _spec("rtx4090", "NVIDIA GeForce RTX 4090", capacity_mib=24207, context_mib=499, gb_per_s=1008,
          tflops=(165.2, 82.6, 82.6), capability=(8, 9), sm_count=128, capacity_source=_REPORTED,
          context_source=_CONTEXT_SCALED_L4),
    _spec("l4", "NVIDIA L4", capacity_mib=22478, context_mib=226, gb_per_s=300, tflops=(121, 60, 30.3),
          capability=(8, 9), sm_count=58, context_source=_CONTEXT_MEASURED),
    _spec("l40s", "NVIDIA L40S", capacity_mib=45457, context_mib=553, gb_per_s=864,
          tflops=(362, 183, 91.6), capability=(8, 9), sm_count=142, context_source=_CONTEXT_SCALED_L4),
    _spec("h100", "NVIDIA H100 80GB HBM3", capacity_mib=81004, context_mib=612, gb_per_s=3350,
          tflops=(989, 494, 66.9), capability=(9, 0), sm_count=132, host_gb_per_s=45),
    _spec("h100-pcie", "NVIDIA H100 PCIe", capacity_mib=81004, context_mib=529, gb_per_s=2000,
          tflops=(756, 378, 51), capability=(9, 0), sm_count=114, host_gb_per_s=45),
    _spec("h200", "NVIDIA H200", capacity_mib=143156, context_mib=612, gb_per_s=4800,
          tflops=(989, 494, 66.9), capability=(9, 0), sm_count=132, capacity_source=_PRINTED, host_gb_per_s=45),
    _spec("b200", "NVIDIA B200", capacity_mib=182630, context_mib=687, gb_per_s=8000,
          tflops=(2250, 1125, 75), capability=(10, 0), sm_count=148, host_gb_per_s=45),
    _spec("rtx5090", "NVIDIA GeForce RTX 5090", capacity_mib=32109, context_mib=663, gb_per_s=1792,
          tflops=(209.5, 104.8, 104.8), capability=(12, 0), sm_count=170, context_source=_CONTEXT_SCALED_L4,
          host_gb_per_s=45),
)  # fmt: skip

GPU_SPECS: dict[str, GpuSpec] = {spec.name: spec for spec in _ALL}
_ALIASES = {
    "a100": "a100-40gb", "h100-80gb": "h100", "h100-sxm": "h100", "h200-141gb": "h200", "v100": "v100-16gb",
    "3090": "rtx3090", "4090": "rtx4090", "5090": "rtx5090", "rtxa6000": "a6000",
}  # fmt: skip


def _plain(name: str) -> str:
    """A name without the vendor, spaces and capitals: "NVIDIA RTX 4090" and "rtx-4090" are "rtx4090"."""
    return re.sub(r"nvidia|geforce|tesla|[\s_\-]+", "", name.lower())


_BY_PLAIN_NAME = {_plain(key): GPU_SPECS[name] for key, name in _ALIASES.items()} | {
    _plain(key): spec for spec in _ALL for key in (spec.name, spec.full_name)
}


def gpu_spec(name: str) -> GpuSpec:
    """The spec of a GPU by name, forgiving about case, spaces and vendor; `UnknownGpuError` names the near ones."""
    found = _BY_PLAIN_NAME.get(_plain(name))
    if found is not None:
        return found
    near = difflib.get_close_matches(_plain(name), list(_BY_PLAIN_NAME), n=4, cutoff=0.4)
    names = list(dict.fromkeys(_BY_PLAIN_NAME[key].name for key in near))
    hint = f"did you mean {', '.join(names)}?" if names else f"known: {', '.join(sorted(GPU_SPECS))}"
    raise UnknownGpuError(f"unknown GPU {name!r}; {hint}")
