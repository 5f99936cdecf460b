"""The Python code of a script, or of a Jupyter notebook without its commands to a shell; and of modules beside it."""

import ast
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from autofit.errors import ConfigError, quoted
from autofit.files import regular_bytes
from autofit.scripts.packages import imports

MOST_BYTES = 1 << 25  # 32 MiB; pictures among a notebook's outputs are its largest part
SUFFIX = ".ipynb"
_YAML, _SHELL = "a YAML", "a shell script"
_OTHERS = {".yaml": _YAML, ".yml": _YAML, ".sh": _SHELL, ".bash": _SHELL}
# With the lines that a backslash joins to it.
_COMMAND = re.compile(r"^([ \t]*)(?:[!%?]|\w[\w., ]*=\s*[!%])(?:.*\\\n)*.*$", re.MULTILINE)


def code_of(path: Path) -> str:
    """The code of the file `path`. Raises ConfigError for what is no Python, or a notebook that cannot be read."""
    if path.suffix in _OTHERS:
        raise ConfigError(
            f"{quoted(str(path), 200)} is {_OTHERS[path.suffix]}, and fit-check runs scripts and notebooks of Python; "
            f"`autofit check FILE --gpu NAME` reads recipes, files of LLaMA-Factory, Axolotl, ms-swift and verl, and "
            f"shell scripts that start one of these"
        )
    try:
        content, _ = regular_bytes(path, most=MOST_BYTES, what="a script")
    except ConfigError as error:
        raise ConfigError(f"{quoted(str(path), 200)} {error}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"there is no script {quoted(str(path), 200)}") from error
    text = content.decode("utf-8", "replace")
    if path.suffix != SUFFIX:
        return _without_commands(text)
    try:
        cells = json.loads(text)["cells"]
        return "\n\n".join(_plain(cell) for cell in cells if cell["cell_type"] == "code")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path} is no notebook of Jupyter's format 4: {str(error)[:100]}") from error


def _plain(cell: dict[str, Any]) -> str:
    """A cell without `!pip install`, `%magic` and `name = !command`; one that is a whole `%%magic` is left out."""
    source = cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"])
    return "" if source.lstrip().startswith("%%") else _without_commands(source)


def _without_commands(source: str) -> str:
    try:
        ast.parse(source)  # a line of Python may begin with %, too
    except (SyntaxError, ValueError):
        return _COMMAND.sub(r"\1pass", source)
    return source


def has_commands(path: Path) -> bool:
    """Whether a .py has a notebook's commands in it, as one that Colab exports."""
    text = path.read_bytes().decode("utf-8", "replace")
    return _without_commands(text) != text


# -- the modules beside a script --------------------------------------------------------------------------------------


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
