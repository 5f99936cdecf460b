"""A simulated GPU: ordinary PyTorch code runs inside it, allocates nothing, and sees a working `torch.cuda`.

Importing this package loads no torch and changes nothing; the simulation starts at `with fake_gpu("a100-80gb")`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from autofit.fakegpu.specs import GPU_SPECS, FakeGpuError, GpuSpec, HostCosts, UnknownGpuError, gpu_spec

if TYPE_CHECKING:
    from autofit.fakegpu.allocator import AllocatorSettings
    from autofit.fakegpu.card import FakeGpu
    from autofit.fakegpu.device import fake_gpu

__all__ = [
    "GPU_SPECS", "AllocatorSettings", "FakeGpu", "FakeGpuError", "GpuSpec", "HostCosts", "UnknownGpuError", "fake_gpu",
    "gpu_spec",
]  # fmt: skip

_LAZY = {
    "AllocatorSettings": "autofit.fakegpu.allocator",
    "FakeGpu": "autofit.fakegpu.card",
    "fake_gpu": "autofit.fakegpu.device",
}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
