"""Commands with which a script installs packages: not run, and noted. A simulation changes nothing on this machine."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any
from unittest import mock

from autofit.errors import quoted
from autofit.scripts.packages import Nothing

_INSTALLS = re.compile(
    r"\b(?:(?:pip[\d.]*|conda|mamba|micromamba|apt|apt-get|dnf|yum|brew)\s+(?:-\S+\s+)*"
    r"(?:install|uninstall|update|upgrade|remove|create)|(?:uv|poetry)\s+(?:pip\s+)?(?:(?:un)?install|add|remove|sync))\b"
)
_PIPS_OWN = re.compile(r"\bpip\.(?:main|_internal)|from\s+pip\b")
# What a notebook's `!command` and `%magic` are in a .py that Jupyter exported.
_EXPORTED = re.compile(r"\bget_ipython\(\)\s*\.\s*(?:system|magic|run_line_magic|run_cell_magic|getoutput)\(")


@contextmanager
def nothing_installed(code: str, note: Callable[[str], None]) -> Iterator[None]:
    """Context in which a command that installs packages does nothing and succeeds; `note` hears of each once."""
    start, system = subprocess.Popen.__init__, os.system
    noted: set[str] = set()

    def installs(command: object) -> bool:
        text = _text(command)
        found = _INSTALLS.search(text) is not None
        if found and text not in noted:
            noted.add(text)
            note(f"{quoted(text, 100)} was not run: fit-check installs nothing")
        return found

    def begin(self: Any, args: Any, *rest: Any, **named: Any) -> None:
        if not installs(args):
            start(self, args, *rest, **named)
            return
        start(self, [sys.executable, "-c", ""], *rest, **{**named, "shell": False, "executable": None})

    def run(command: Any) -> int:
        return 0 if installs(command) else system(command)

    def main(args: Sequence[str] | None = None) -> int:
        installs(["pip", *(args or sys.argv[1:])])
        return 0

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(subprocess.Popen, "__init__", begin))
        stack.enter_context(mock.patch.object(os, "system", run))
        if _PIPS_OWN.search(code) and find_spec("pip") is not None:
            stack.enter_context(mock.patch("pip._internal.cli.main.main", main))
        yield


def of_a_notebook(code: str) -> dict[str, object]:
    """The names that a notebook has beside Python's, where the `code` of an exported one starts commands by them."""
    return {"get_ipython": Nothing} if _EXPORTED.search(code) else {}


def _text(command: object) -> str:
    if isinstance(command, Sequence) and not isinstance(command, str | bytes):
        return shlex.join(os.fsdecode(word) for word in command)
    return os.fsdecode(command) if isinstance(command, str | bytes | os.PathLike) else ""
