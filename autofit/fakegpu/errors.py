"""Errors of the simulated GPU for wrong input. Out of memory is `torch.OutOfMemoryError`."""

from __future__ import annotations


class FakeGpuError(Exception):
    """Base class of the errors that this package raises for wrong use."""


class UnknownGpuError(FakeGpuError, ValueError):
    """No spec has this GPU name."""
