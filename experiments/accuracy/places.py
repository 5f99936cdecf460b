"""Other people's code and its versions of packages, kept in a folder outside the repository."""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
from functools import cache
from pathlib import Path

from experiments.accuracy.rows import MeasuredSet

REPOSITORY = Path(__file__).parents[2]
DECIDING = ("torch", "transformers", "bitsandbytes", "lightning")  # packages whose versions decide bytes


def store() -> Path:
    """$AUTOFIT_CACHE, or a folder in the user's cache."""
    return Path(os.environ.get("AUTOFIT_CACHE", Path.home() / ".cache" / "autofit")) / "accuracy"


def checkout(measured: MeasuredSet, commit: str, source: Path | None) -> Path:
    """The project's files at a commit: a worktree of its clone, which is made once, or of a clone at `source`."""
    if not measured.repository:
        return store()  # the program is in the set's environment
    clone = source or store() / "clones" / measured.repository.replace("/", "--")
    if not clone.exists():
        clone.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["git", "clone", "-q", f"https://github.com/{measured.repository}", str(clone)], check=True)
    tree = store() / "trees" / measured.name / commit
    if not tree.exists():
        subprocess.run(["git", "-C", str(clone), "worktree", "prune"], check=True)
        subprocess.run(["git", "-C", str(clone), "worktree", "add", "-q", "-f", str(tree), commit], check=True)
    return tree


def python(measured: MeasuredSet) -> Path:
    """The interpreter of the set's environment: the packages of the current one, and its own versions before them."""
    if not measured.requirements:
        return Path(sys.executable)
    home = store() / "environments" / measured.name
    interpreter = home / "bin" / "python"
    if not (home / "made").exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
        packages = next((home / "lib").glob("python*/site-packages"))
        parents = [path for path in (*site.getsitepackages(), *sys.path) if path.endswith("site-packages")]
        (packages / "zz_parents.pth").write_text("\n".join(dict.fromkeys(parents)) + "\n", encoding="utf-8")
        install = [sys.executable, "-m", "pip", "--python", str(interpreter), "install", "-q", *measured.requirements]
        subprocess.run(install, check=True)
        (home / "made").touch()
    return interpreter


@cache
def versions(interpreter: Path) -> dict[str, str]:
    """Versions of the `DECIDING` packages in that environment; its own come before its parents'."""
    program = (
        "import importlib.metadata as m, json\n"
        f"here = {{d.name.lower(): d.version for d in reversed(list(m.distributions()))}}\n"
        f"print(json.dumps({{n: here[n] for n in {DECIDING} if n in here}}))"
    )
    found = subprocess.run([str(interpreter), "-c", program], check=True, capture_output=True, text=True)
    return dict(json.loads(found.stdout))
