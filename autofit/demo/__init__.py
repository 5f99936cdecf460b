"""The demo on real input: a small model with real weights, a task whose answers can be checked, a recipe."""

from autofit.demo.errors import DemoError
from autofit.demo.smollm2 import prepare_smollm2
from autofit.demo.tiny import prepare_tiny

__all__ = ["DemoError", "prepare_smollm2", "prepare_tiny"]
