"""What the simulated GPU raises for wrong input. Running out of memory is `torch.OutOfMemoryError`."""

from __future__ import annotations


class FakeGpuError(Exception):
    """Anything this package raises about its own use."""


class UnknownGpuError(FakeGpuError, ValueError):
    """The name of a GPU that has no spec."""
