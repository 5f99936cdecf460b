"""autofit: the fastest GRPO configuration that fits a VRAM budget, at exactly the same effective batch."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autofit.fakegpu import fake_gpu

__all__ = ["fake_gpu"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name == "fake_gpu":
        from autofit.fakegpu import fake_gpu

        return fake_gpu
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
