"""What the fork server imports before its first fork, without what hardly any run needs.

Libraries import other libraries for a function that a probe of a language model never calls. Such an import is put
off until the call; nothing is left out. The seconds are of CPU time, as `python -X importtime` shares them out
(2 cores, torch 2.13.0, transformers 5.23.0, TRL 1.16.0, 2026-11-22).
"""

import functools
import importlib
import importlib.metadata
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import LazyLoader
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from autofit.errors import AutofitError
from autofit.plugin import registry

_MODULES = (
    "torch", "numpy", "transformers", "datasets", "peft", "accelerate", "transformers.models.auto.modeling_auto",
    "transformers.trainer", "autofit.plugin.transformers_run", "autofit.probing.worker", "autofit.probing.inspection",
)  # fmt: skip
# 0.8 s: imported by the profiler of TRL where it is installed, and used by it if a run reports to it
_LOADED_ON_USE = ("mlflow",)


def preload() -> None:
    """Import what probes, inspections and forecasts need."""
    import torch

    with ExitStack() as kept:
        kept.enter_context(without_source())
        kept.enter_context(_loaded_on_use())
        # 0.3 s: transformers and TRL each read the metadata of every installed package
        once = functools.cache(importlib.metadata.packages_distributions)
        kept.enter_context(mock.patch.object(importlib.metadata, "packages_distributions", once))
        # 0.1 s: every trainer is looked up twice among the entry points of every installed package
        looked_up = functools.cache(importlib.metadata.entry_points)
        kept.enter_context(mock.patch("autofit.plugin.registry.entry_points", looked_up))
        kept.enter_context(mock.patch.object(torch, "compile", _compiled_on_use(torch.compile)))
        kept.enter_context(_read_once())
        _import_object_detection()
        for name in _MODULES:
            importlib.import_module(name)
        _import_trainers()


def _import_trainers() -> None:
    """Import the installed trainers. A failed import is logged here and raised only when that trainer is requested."""
    for name in registry.names():
        try:
            registry.load(name)
        except AutofitError as error:
            print(f"trainer {name}: {error}", file=sys.stderr, flush=True)


@contextmanager
def without_source() -> Iterator[None]:
    """Context in which `inspect.getframeinfo` reads lines of the source only for those who say how many.

    torch notes the file and line of each operator that is registered, in 154 calls; the lines are not used (0.15 s).
    """
    whole = inspect.getframeinfo

    def told(frame: Any, context: int = 0) -> inspect.Traceback:
        return whole(frame, context)

    with mock.patch.object(inspect, "getframeinfo", told):
        yield


@contextmanager
def _read_once() -> Iterator[None]:
    """Context in which transformers takes what its first import read of its 1,650 source files for the second one.

    It caches them by the path as it was given: a `Path` of the folder first, then the text of a file in it (0.25 s).
    """
    import transformers.utils.import_utils as imports

    read = getattr(imports, "create_import_structure_from_path", None)
    if read is None:  # a version that does otherwise
        yield
        return

    def of_folder(path: str | Path) -> object:
        return read(Path(path).parent if os.path.isfile(path) else Path(path))

    with mock.patch.object(imports, "create_import_structure_from_path", of_folder):
        yield


class _Finder:
    """Finds the modules `_LOADED_ON_USE` with a loader that runs them when an attribute is first asked for."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name in _LOADED_ON_USE else None
        if spec is not None and spec.loader is not None:
            spec.loader = LazyLoader(spec.loader)
        return spec


@contextmanager
def _loaded_on_use() -> Iterator[None]:
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def _compiled_on_use(compile_now: Any) -> Any:
    """`torch.compile`, but a function is compiled when it is first called.

    bitsandbytes compiles functions of its CPU backend while it is imported, which imports torch's compiler (0.8 s).
    """

    def compiled(function: Callable[..., Any] | None = None, **options: Any) -> Any:
        if function is None:
            return lambda given: compiled(given, **options)

        @functools.cache
        def now() -> Any:
            return compile_now(function, **options)

        return functools.wraps(function)(lambda *args, **kwargs: now()(*args, **kwargs))

    return compiled


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
