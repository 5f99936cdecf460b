"""The Python code of a script, or of a Jupyter notebook without its commands to the shell and to IPython."""

import ast
import json
import re
from pathlib import Path
from typing import Any

from autofit.errors import ConfigError, quoted
from autofit.files import regular_bytes

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
