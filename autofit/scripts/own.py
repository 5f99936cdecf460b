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
    places: list[Path | None] = [None]  # of the texts; the script's own imports are not relative
    for text, at in zip(texts, places, strict=True):  # which grow
        for path in _modules(text, folders, at):
            if path not in seen and len(seen) < _MOST:
                seen.add(path)
                texts.append(path.read_text(encoding="utf-8", errors="replace"))
                places.append(path)
    return "\n\n".join(text for text in texts if _tree(text) is not None)


def _modules(code: str, folders: Sequence[Path], at: Path | None) -> Iterator[Path]:
    """The files of the modules that the `code` of the file `at` imports, from the `folders` or beside it."""
    tree = _tree(code)
    for name in () if tree is None else imports(tree):
        yield from (path for folder in folders for path in _files(folder.joinpath(*name.split("."))))
    if tree is None or at is None:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and 0 < node.level <= len(at.parents):
            place = at.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            yield from _files(place)
            yield from (path for each in node.names if each.name != "*" for path in _files(place / each.name))


def _files(place: Path) -> Iterator[Path]:
    yield from (path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file())


def _tree(code: str) -> ast.AST | None:
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError):
        return None
