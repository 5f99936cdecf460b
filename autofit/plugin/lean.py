"""Lazy imports of the parts of libraries that a training seldom uses.

Libraries import other libraries for a function that a training of a language model never calls. Such an import is put
off until the call; nothing is left out. The seconds are of CPU time, as `python -X importtime` shares them out
(2 cores, torch 2.13.0, transformers 5.23.0, TRL 1.16.0, 2026-11-22).
"""

import functools
import gc
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

# 0.8 s: imported by the profiler of TRL where it is installed, and used by it if a run reports to it
_LOADED_ON_USE = ("mlflow",)


@contextmanager
def lean_imports() -> Iterator[None]:
    """Context in which imported libraries put off such imports; imports torch.

    A trainer of TRL takes 4.0 s of CPU time in it, and 6.9 s without (2026-11-26).
    """
    with ExitStack() as kept:
        if gc.isenabled():  # repeated collections of the imported modules would take a quarter of the time
            gc.disable()
            kept.callback(gc.enable)
            kept.callback(gc.freeze)
        kept.enter_context(without_source())
        import torch

        kept.enter_context(_loaded_on_use())
        # 0.3 s: transformers and TRL each read the metadata of every installed package
        once = functools.cache(importlib.metadata.packages_distributions)
        kept.enter_context(mock.patch.object(importlib.metadata, "packages_distributions", once))
        kept.enter_context(mock.patch.object(torch, "compile", _compiled_on_use(torch.compile)))
        kept.enter_context(_read_once())
        yield


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
