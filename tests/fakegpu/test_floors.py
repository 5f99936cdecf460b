"""The simulated GPU is built in floors: a module imports only from lower ones, and nothing from the rest of autofit."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import autofit.fakegpu

PACKAGE = "autofit.fakegpu"
FOLDER = Path(autofit.fakegpu.__file__).parent

# Lowest first, each module as low as its imports let it; "" is the package itself. Modules of one floor do not import
# each other.
FLOORS: tuple[tuple[str, ...], ...] = (
    (
        "allocator", "depth", "engines", "formula", "formula.polynomials", "known_values", "linear_loss",
        "patches", "patches.guard", "patches.redirect", "rates", "reductions", "specs",
    ),
    ("depth.stack", "rates.kernels", "replay", "scratch"),
    ("rates.collectives",),
    ("engines.forward", "kernels"),
    ("engines.vllm", "memory", "op_cache"),
    ("formula.kernel_log",),
    ("clock", "formula.order"),
    ("calibrate", "depth.delay", "formula.seconds", "fusion"),
    ("depth.layers", "formula.formula"),
    ("depth.expand",),
    ("tracer",),
    ("card", "patches.tensors"),
    ("patches.same_calls",),
    (
        "patches.attention", "patches.cuda_api", "patches.operators",
        "patches.rollout", "patches.vllm",
    ),
    ("patches.distributed", "patches.libraries", "patches.low_bit", "patches.windows"),
    ("patches.registry",),
    ("device",),
    ("",),
)  # fmt: skip
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}
MODULES = {
    ".".join(path.relative_to(FOLDER).with_suffix("").parts).removesuffix("__init__").rstrip("."): path
    for path in sorted(FOLDER.rglob("*.py"))
}


def imported(source: str, module: str, *, is_package: bool) -> Iterator[str]:
    """Full names of the `autofit` modules that a module's source imports, anywhere in it.

    Imports in functions and under TYPE_CHECKING count, relative ones too, and so do names in strings, which are
    imported lazily (`import_module`).
    """
    package = ".".join(filter(None, (PACKAGE, module))) if is_package else _parent(".".join((PACKAGE, module)))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "autofit")
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                start = package
                for _ in range(node.level - 1):
                    start = _parent(start)
                base = ".".join(filter(None, (start, base)))
            if base.split(".")[0] == "autofit":
                yield from (_module_named(base, alias.name) for alias in node.names)
        elif isinstance(node, ast.Constant) and re.fullmatch(r"autofit(\.\w+)+", str(node.value)):
            yield str(node.value)


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _module_named(base: str, name: str) -> str:
    """`from base import name` takes a submodule where there is one, else something in `base`."""
    inner = f"{base}.{name}".removeprefix(f"{PACKAGE}.")
    return f"{base}.{name}" if inner in MODULES or base == "autofit" else base


def wrong_imports(source: str, module: str, *, is_package: bool = False) -> list[str]:
    wrong = []
    for name in imported(source, module, is_package=is_package):
        if name != PACKAGE and not name.startswith(f"{PACKAGE}."):
            wrong.append(f"{module} imports {name}, which is not part of {PACKAGE}")
            continue
        target = name.removeprefix(PACKAGE).removeprefix(".")
        if target not in FLOOR_OF:
            wrong.append(f"{module} imports {name}, which does not exist")
        elif FLOOR_OF[target] >= FLOOR_OF[module]:
            wrong.append(f"{module} (floor {FLOOR_OF[module]}) imports {name} (floor {FLOOR_OF[target]})")
    return wrong


def test_every_module_has_one_floor() -> None:
    listed = [name for names in FLOORS for name in names]
    assert sorted(listed) == sorted(MODULES)


@pytest.mark.parametrize("module", MODULES, ids=lambda name: name or PACKAGE)
def test_a_module_imports_only_from_lower_floors_so_there_is_no_circle(module: str) -> None:
    path = MODULES[module]
    assert wrong_imports(path.read_text(), module, is_package=path.name == "__init__.py") == []


@pytest.mark.parametrize("source", [
    "from autofit.fakegpu.card import FakeGpu",
    "from autofit.fakegpu import card",
    "from autofit.fakegpu import fake_gpu",
    "import autofit.fakegpu.device",
    "import autofit",
    "from autofit import units",
    "from autofit.units import parse_bytes",
    "from . import card",
    "from .card import FakeGpu",
    "from .. import units",
    "def late():\n    from autofit.fakegpu.tracer import Tracer",
    "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from autofit.fakegpu.card import Timeline",
    "from importlib import import_module\nimport_module('autofit.fakegpu.card')",
    "from autofit.fakegpu.memory import SimulatedMemory",
    "from autofit.fakegpu.gone import something",
])  # fmt: skip
def test_a_wrong_import_is_found_wherever_it_stands(source: str) -> None:
    assert len(wrong_imports(source, "memory")) == 1


def test_a_right_import_is_not_reported() -> None:
    source = "import torch\nfrom autofit.fakegpu.allocator import Block\nfrom autofit.fakegpu import specs"
    assert wrong_imports(source, "memory") == []
