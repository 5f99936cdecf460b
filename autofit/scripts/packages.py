"""Stand-ins for missing packages that a script imports to report, evaluate or fetch.

Nothing that they do is on the card. A package that may change the training (deepspeed, flash_attn) has none. Commands
with which a script installs packages or fetches files are not run, and noted: a simulation changes nothing on this
machine, and reaches no other.
"""

import ast
import importlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any
from unittest import mock

from autofit.errors import quoted

_IDLE = {
    "aim", "bert_score", "clearml", "codecarbon", "comet_ml", "dagshub", "dotenv", "e2b_code_interpreter",
    "evaluate", "google.colab", "gradio", "ipywidgets", "jiwer", "kaggle_secrets", "langfuse", "langsmith",
    "latex2sympy2_extended", "lighteval", "lm_eval", "math_verify", "mlflow", "morphcloud", "neptune", "nltk",
    "nvidia_smi", "openai", "plotly", "py7zr", "pynvml", "rouge", "rouge_score", "sacrebleu", "seaborn", "seqeval",
    "swanlab", "tensorboard", "tensorboardX", "trackio", "wandb", "weave",
}  # fmt: skip
UNSLOTH = ("unsloth", "unsloth_zoo")
_FETCHES = {"evaluate"}  # its metrics come over the network, so it stands in where it is installed too
_OF_REWARDS = {"math_verify", "latex2sympy2_extended"}  # which TRL's own rewards import
_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward")


class Nothing(str):
    """Value of all that a stand-in has, gives and takes: an empty text, and 0 as a number; all it does is itself.

    A text, since a token read from it is put into the environment; of a value that a type's name may have.
    """

    def __new__(cls, *_: object, **__: object) -> "Nothing":
        return super().__new__(cls, "None")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *given: Any, **named: Any) -> Any:
        is_decorator = len(given) == 1 and not named and hasattr(given[0], "__code__")
        return given[0] if is_decorator else self

    def __bool__(self) -> bool:
        return False

    def __len__(self) -> int:
        return 0

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __float__(self) -> float:
        return 0.0

    def __int__(self) -> int:
        return 0

    def __getitem__(self, _: object) -> Any:
        return self

    def __setitem__(self, *_: object) -> None:
        pass

    def __enter__(self) -> "Nothing":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __mro_entries__(self, _: object) -> tuple[type, ...]:
        return ()

    def __instancecheck__(self, _: object) -> bool:
        return False

    def _compared(self, _: object) -> bool:
        return False

    def _computed(self, _: object) -> "Nothing":
        return self

    __lt__ = __le__ = __gt__ = __ge__ = _compared
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _computed
    __truediv__ = __round__ = __or__ = __ror__ = _computed


class IdleModule(ModuleType):
    """A module that has any name, each of them idle."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()


class _StandInFinder(MetaPathFinder, Loader):
    """It finds the packages `names`, and all within them."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        mine = any(name == own or name.startswith(f"{own}.") for own in self._names)
        return ModuleSpec(name, self, is_package=True) if mine else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return IdleModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextmanager
def idle(code: str, note: Callable[[str], None]) -> Iterator[None]:
    """Context in which the packages that the Python `code` imports are idle if they are missing and may be so."""
    names = [name for name in _imported(code) if name in _FETCHES or not _installed(name)]
    if not names:
        yield
        return
    note(
        f"{', '.join(names)}: not needed on the card, so what {'it does' if len(names) == 1 else 'they do'} is left out"
    )
    finder = _StandInFinder([_outermost(name) for name in names])
    sys.meta_path.insert(0, finder)
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if finder.find_spec(name)}
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if finder.find_spec(name)]:
            del sys.modules[name]
        sys.modules.update(before)


def _imported(code: str) -> list[str]:
    """The idle packages that `code` imports, leaving out a `try` that may do without."""
    found = [*_OF_REWARDS] if any(name in code for name in _REWARDS) else []
    for name in imports(ast.parse(code)):
        found += [own for own in _IDLE if name == own or name.startswith(f"{own}.")]
    return sorted(dict.fromkeys(found))


def imports(tree: ast.AST) -> Iterator[str]:
    """The modules that a tree of Python imports, and the names from them, leaving out a `try` that does without."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (node.module, *(f"{node.module}.{each.name}" for each in node.names))
        elif not (isinstance(node, ast.Try) and _copes(node)):
            yield from imports(node)


def imports_unsloth(code: str) -> bool:
    """True if `code` imports Unsloth outside a `try` that does without."""
    return "unsloth" in code and any(name.partition(".")[0] in UNSLOTH for name in imports(ast.parse(code)))


def _copes(node: ast.Try) -> bool:
    """True if a `try` does without its imports."""
    return any(each.type is None or "Error" in ast.unparse(each.type) or "Exception" in ast.unparse(each.type)
               for each in node.handlers)  # fmt: skip


def _outermost(name: str) -> str:
    """The first missing package on the way to `name`, or `name`."""
    parts = name.split(".")
    ways = [".".join(parts[:n]) for n in range(1, len(parts))]
    return next((way for way in ways if not _installed(way)), name)


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


# -- commands that install packages, or reach other machines ----------------------------------------------------------

_INSTALLS = re.compile(
    r"\b(?:(?:pip[\d.]*|conda|mamba|micromamba|apt|apt-get|dnf|yum|brew)\s+(?:-\S+\s+)*"
    r"(?:install|uninstall|update|upgrade|remove|create)|(?:uv|poetry)\s+(?:pip\s+)?(?:(?:un)?install|add|remove|sync))\b"
)
_PIPS_OWN = re.compile(r"\bpip\.(?:main|_internal)|from\s+pip\b")
# What a notebook's `!command` and `%magic` are in a .py that Jupyter exported.
_EXPORTED = re.compile(r"\bget_ipython\(\)\s*\.\s*(?:system|magic|run_line_magic|run_cell_magic|getoutput)\(")


_REACHES = re.compile(
    r"(?:^|[;&|(]|\b(?:sudo|time))\s*(?:\S*/)?(?:git\s+(?:-[cC]\s+\S+\s+|-\S+\s+)*(?:clone|fetch|pull|push|ls-remote|submodule|lfs)"
    r"|curl|wget|aria2c|gdown|scp|rsync|gsutil|(?:hf|huggingface-cli)\s+(?:download|upload)|aws\s+s3)\s"
)
_HOST = re.compile(r"(?:\w://(?:[^/@\s]*@)?|@)([\w.-]+)")
LOCAL = ("127.", "localhost", "::1")  # how addresses of this machine begin


@contextmanager
def nothing_started(code: str, note: Callable[[str], None], asked: list[str]) -> Iterator[None]:
    """Context in which a command that installs packages is skipped and succeeds, and one that fetches fails.

    `note` hears of each once, and `asked` gets what it wanted to reach.
    """
    start, system = subprocess.Popen.__init__, os.system
    noted: set[str] = set()

    def refused(command: object) -> int | None:
        """The exit code of a skipped command; None of one that runs."""
        text = _text(command)
        installs = _INSTALLS.search(text) is not None
        host = _HOST.search(text)
        if not installs and (_REACHES.search(text) is None or (host is not None and host[1].startswith(LOCAL))):
            return None
        if text not in noted:
            noted.add(text)
            why = "fit-check installs nothing" if installs else "a script sees no network here"
            note(f"{quoted(text, 100)} was not run: {why}")
        if not installs:
            asked.append(text.split()[0] if host is None else host[1])
        return 0 if installs else 1

    def begin(self: Any, args: Any, *rest: Any, **named: Any) -> None:
        code = refused(args)
        if code is None:
            start(self, args, *rest, **named)
            return
        stands = [sys.executable, "-c", f"raise SystemExit({code})"]
        start(self, stands, *rest, **{**named, "shell": False, "executable": None})
        self.args = args  # which an error names

    def run(command: Any) -> int:
        code = refused(command)
        return system(command) if code is None else code << 8  # a status of waitpid

    def main(args: Sequence[str] | None = None) -> int:
        refused(["pip", *(args or sys.argv[1:])])
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
