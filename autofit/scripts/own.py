"""The code of a script together with that of the modules beside it, which it imports."""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from autofit.scripts.packages import imports

_PROJECT = ("pyproject.toml", "setup.py")
_MOST = 200  # modules that are read


def project_of(script: Path) -> list[Path]:
    """The folders of the project that a script stands in, where its packages are once it is installed."""
    roots = [folder for folder in script.resolve().parents[:4] if any((folder / name).exists() for name in _PROJECT)]
    return [part for root in roots[:1] for part in (root, root / "src") if part.is_dir()]


def whole_code(code: str, folders: Sequence[Path]) -> str:
    """`code`, and after it that of each module in `folders` that it or such a module imports."""
    texts, seen = [code], set[Path]()
    for text in texts:  # which grows
        for path in _modules(text, folders):
            if path not in seen and len(seen) < _MOST:
                seen.add(path)
                texts.append(path.read_text(encoding="utf-8", errors="replace"))
    return "\n\n".join(text for text in texts if _tree(text) is not None)


def _modules(code: str, folders: Sequence[Path]) -> Iterator[Path]:
    tree = _tree(code)
    for name in () if tree is None else imports(tree):
        for folder in folders:
            place = folder.joinpath(*name.split("."))
            yield from (path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file())


def _tree(code: str) -> ast.AST | None:
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError):
        return None
