"""The demo on real input: a small model with real weights, a task whose answers can be checked, a recipe."""

from autofit.demo.smollm2 import DemoError, prepare_smollm2

__all__ = ["DemoError", "prepare_smollm2"]
