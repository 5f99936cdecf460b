"""autofit: the fastest GRPO configuration that fits a VRAM budget, at exactly the same effective batch."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autofit.fakegpu import fake_gpu
    from autofit.fitcheck import FitCheck, fit_check

__all__ = ["FitCheck", "fake_gpu", "fit_check"]
__version__ = "0.1.0"

_LAZY = {"FitCheck": "autofit.fitcheck", "fake_gpu": "autofit.fakegpu", "fit_check": "autofit.fitcheck"}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
