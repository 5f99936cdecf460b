"""What the fork server imports before its first fork."""

import functools
import importlib
import importlib.metadata
import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

from autofit.errors import AutofitError
from autofit.plugin import registry

_MODULES = (
    "torch", "numpy", "transformers", "datasets", "peft", "accelerate", "transformers.models.auto.modeling_auto",
    "transformers.trainer", "autofit.plugin.transformers_run", "autofit.probing.worker", "autofit.probing.prepare",
    "autofit.probing.simulated", "autofit.forecast.worker",
)  # fmt: skip


def preload() -> None:
    """Import what probes, inspections and forecasts need; within `lean_imports`."""
    # 0.1 s: every trainer is looked up twice among the entry points of every installed package
    looked_up = functools.cache(importlib.metadata.entry_points)
    with mock.patch("autofit.plugin.registry.entry_points", looked_up):
        _import_object_detection()
        for name in _MODULES:
            importlib.import_module(name)
        _leave_out_scipy()
        for name in registry.names():
            try:
                registry.load(name)
            except AutofitError as error:  # raised when that trainer is requested
                print(f"trainer {name}: {error}", file=sys.stderr, flush=True)


def _import_object_detection() -> None:
    """Import transformers' losses with a stand-in for scipy's `linear_sum_assignment`.

    Those of object detection call it; all of `scipy.optimize` (0.3 s) would be imported for it.
    """
    name = "scipy.optimize"
    if name in sys.modules:
        return

    def linear_sum_assignment(*args: Any, **kwargs: Any) -> Any:
        return importlib.import_module(name).linear_sum_assignment(*args, **kwargs)

    stand_in = ModuleType(name)
    vars(stand_in)["linear_sum_assignment"] = linear_sum_assignment
    sys.modules[name] = stand_in
    try:
        importlib.import_module("transformers.loss.loss_utils")
    finally:
        del sys.modules[name]


def _leave_out_scipy() -> None:
    """Let datasets replace functions of scipy in the module that reads a file only where scipy was imported.

    It imports scipy.io (0.2 s) for that in each process that reads a dataset; what was not imported has no name there.
    """
    streaming = importlib.import_module("datasets.streaming")
    replaced = getattr(streaming, "patch_submodule", None)
    if replaced is None:  # a version that does otherwise
        return

    def patch_submodule(module: ModuleType, target: str, *args: Any, **options: Any) -> Any:
        if target.partition(".")[0] in sys.modules:
            return replaced(module, target, *args, **options)
        return SimpleNamespace(start=lambda: None)

    vars(streaming)["patch_submodule"] = patch_submodule
