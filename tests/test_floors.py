"""The floors of the house: a module imports only from floors below its own, or from its own floor without a circle."""

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Lowest first. A folder stands for everything in it; fakegpu has floors of its own (tests/fakegpu/test_floors.py).
FLOORS: tuple[tuple[str, ...], ...] = (
    ("autofit.errors",),
    ("autofit.units", "autofit.files", "autofit.lines"),
    ("autofit.folding", "autofit.picture"),
    ("autofit.fakegpu",),
    ("autofit.recipe", "autofit.hardware"),
    ("autofit.frontends",),
    ("autofit.fitcheck", "autofit.demo", "autofit.plugin", "autofit.space"),
    ("autofit.trainers", "autofit.search_spaces"),
    ("autofit.scripts",),
    ("autofit.cluster",),
    ("autofit.probing",),
    ("autofit.forecast",),
    ("autofit.tuning",),
    ("autofit.proof",),
    ("autofit.watching",),
    ("autofit.promotion",),
    ("autofit.tracking",),
    ("autofit.api",),
    ("autofit.web",),
    ("autofit.commands",),
    ("autofit.cli", "autofit.start", "autofit.__main__"),
)
# `import autofit` offers what higher floors have, and imports it when it is asked for.
FREE = {"autofit"}


def modules() -> dict[str, Path]:
    """{dotted name: file} of everything that is installed."""
    found = {}
    for folder, package in (("autofit", "autofit"), ("trainers", "autofit.trainers")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join((package, *parts)).removesuffix(".__init__")
            if "examples" not in parts:
                found[name] = path
    return found


MODULES = modules()


def imported(name: str, text: str) -> set[str]:
    """The modules of ours that `text`, the module `name`, imports anywhere: also in functions and for types."""
    package = name if MODULES.get(name, Path()).name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            found |= {f"{base}.{a.name}" if f"{base}.{a.name}" in MODULES else base for a in node.names}
    return {module for module in found if module.split(".")[0] == "autofit"}


def floor(name: str) -> int:
    """The number of the floor on which the module `name` is."""
    for number, places in enumerate(FLOORS):
        if any(name == place or name.startswith(f"{place}.") for place in places):
            return number
    raise AssertionError(f"{name} is on no floor: add it to FLOORS")


@functools.cache
def imports() -> dict[str, set[str]]:
    """What each module imports of ours. Not at import: every worker would parse all files to collect its tests."""
    return {name: imported(name, path.read_text()) - {name} for name, path in MODULES.items()}


@pytest.mark.parametrize("name", sorted(set(MODULES) - FREE))
def test_a_module_imports_nothing_from_a_floor_above(name: str) -> None:
    upward = {other for other in imports()[name] - FREE if floor(other) > floor(name)}
    assert not upward


def test_no_two_folders_import_each_other_and_no_modules_in_a_circle() -> None:
    waiting = {
        name: {o for o in others if o in MODULES} - FREE for name, others in imports().items() if name not in FREE
    }
    while free := {name for name, others in waiting.items() if not others & set(waiting)}:
        waiting = {name: others for name, others in waiting.items() if name not in free}
    assert not waiting, "these are in a circle, or above one"
    folders = {name: ".".join(name.split(".")[:2]) for name in MODULES}
    pairs = {(folders[a], folders[b]) for a, found in imports().items() for b in found & set(MODULES)}
    assert not {(a, b) for a, b in pairs if a < b and (b, a) in pairs and "autofit" not in (a, b)}


def test_a_wrong_import_is_seen_wherever_it_stands() -> None:
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from autofit.tuning.search import Plan\n"
    assert imported("autofit.recipe.recipe", text) == {"autofit.tuning.search"}
    assert floor("autofit.tuning.search") > floor("autofit.recipe.recipe")
    assert imported("autofit.trainers.grpo", "def f():\n    from .common import made\n") == {"autofit.trainers.common"}
    assert imported("autofit.trainers.proofs.grpo", "from ..trl_config import parse") == {"autofit.trainers.trl_config"}


def test_the_core_knows_no_trainer_by_its_module() -> None:
    for name, others in imports().items():
        may = name.startswith(("autofit.trainers", "autofit.scripts"))  # the latter's models have the same stand-ins
        assert may or not any(o.startswith("autofit.trainers") for o in others), name


def test_every_class_has_a_name_of_its_own() -> None:
    """31 names stood for two or more. The examples of trainers are programs of strangers."""
    found: dict[str, list[str]] = {}
    for file in sorted([*(ROOT / "autofit").rglob("*.py"), *(ROOT / "trainers").glob("*.py")]):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(str(file.relative_to(ROOT)))
    assert len(found) > 500
    assert {name: files for name, files in found.items() if len(files) > 1} == {}
