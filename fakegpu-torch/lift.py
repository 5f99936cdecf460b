"""Write the project of the distribution fakegpu-torch: `python fakegpu-torch/lift.py FOLDER`, a new folder.

The project is `autofit/fakegpu` under the name `fakegpu_torch`, with this folder's README, examples and pyproject.toml:
`pip install FOLDER` installs it and `python -m build FOLDER` makes its wheel. Needs Python alone.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
TREE = HERE.parent
SOURCE = TREE / "autofit" / "fakegpu"
RENAMED = (("autofit.fakegpu", "fakegpu_torch"), ("autofit/fakegpu", "fakegpu_torch"))


def lift(folder: Path) -> None:
    """Write the project. Raises FileExistsError where `folder` is there already."""
    folder.mkdir(parents=True)
    package = folder / "fakegpu_torch"
    shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("__pycache__", "*.md"))
    for module in package.rglob("*.py"):
        text = module.read_text()
        for name, other in RENAMED:
            text = text.replace(name, other)
        module.write_text(text)
    found = re.search(r'^__version__ = "(.+)"$', (TREE / "autofit" / "__init__.py").read_text(), re.MULTILINE)
    assert found is not None
    project = (HERE / "pyproject.toml").read_text().replace('version = "0"', f'version = "{found[1]}"')
    (folder / "pyproject.toml").write_text(project)
    shutil.copy(HERE / "README.md", folder)
    shutil.copy(TREE / "LICENSE", folder)
    shutil.copytree(HERE / "examples", folder / "examples")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python fakegpu-torch/lift.py FOLDER")
    target = Path(sys.argv[1])
    if target.exists():
        sys.exit(f"{target} must not exist yet: give a new folder")
    lift(target)
