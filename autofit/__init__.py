"""autofit: the fastest GRPO configuration that fits a VRAM budget, at exactly the same effective batch."""

import warnings
from importlib import import_module
from os import path as _path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autofit.api import (
        advise,
        check,
        estimate,
        explain,
        jobs,
        monitor,
        promote,
        report,
        run,
        search,
        studies,
        verify,
    )
    from autofit.api.callback import AutofitCallback
    from autofit.cluster.scheduler import Executor
    from autofit.fakegpu import fake_gpu
    from autofit.fitcheck import FitCheck, fit_check

__all__ = [
    "AutofitCallback", "Executor", "FitCheck", "advise", "check", "estimate", "explain", "fake_gpu", "fit_check",
    "jobs", "monitor", "promote", "report", "run", "search", "studies", "verify",
]  # fmt: skip
__version__ = "0.1.0"

_HERE = __path__[0]
_CLONE = _path.dirname(_HERE)
if _path.isfile(_path.join(_CLONE, "search_spaces", "knobs.yaml")) and not _path.isdir(_path.join(_HERE, "trainers")):
    # Python in a clone's folder finds this one before what pip has installed, where these two folders lie within it
    __path__.append(_CLONE)

_FOUND_IN = {  # loaded when first asked for: `import autofit` itself loads nothing heavy
    **dict.fromkeys(__all__, "autofit.api"), "AutofitCallback": "autofit.api.callback",
    "Executor": "autofit.cluster.scheduler", "FitCheck": "autofit.fitcheck", "fake_gpu": "autofit.fakegpu",
    "fit_check": "autofit.fitcheck",
}  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in _FOUND_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with warnings.catch_warnings():  # of tqdm, which Optuna imports, in a notebook without ipywidgets
        warnings.filterwarnings("ignore", message="IProgress not found")
        return getattr(import_module(_FOUND_IN[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
