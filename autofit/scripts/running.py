"""A training script of one's own, run unchanged on a simulated card for a few steps.

The script's own process ends after its last step by an exception that only `except BaseException` would hold up.
Importing this loads no torch.
"""

import ast
import json
import logging
import os
import re
import runpy
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from autofit.errors import ConfigError, option, printable, quoted
from autofit.files import ScratchFolder, regular_bytes
from autofit.fitcheck import CheckedLoop, FitCheck, checked_card
from autofit.plugin.protocol import MOST_PROMPT_TOKENS
from autofit.scripts.changes import Fewer
from autofit.scripts.data import Columns, MadeUp, stood_in
from autofit.scripts.packages import LOCAL, idle, imports, imports_unsloth, nothing_started, of_a_notebook

if TYPE_CHECKING:
    import torch

    from autofit.fakegpu import FakeGpu

_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "WANDB_MODE": "disabled"}
_LIBRARIES = ("transformers", "trl", "peft", "unsloth")  # they load models by name, and train with TrainingArguments
_AUTOFIT = Path(__file__).resolve().parents[1]
_DATA = ("datasets", "trl", "transformers", "pandas")
_MOST_COLUMNS = 8  # that are found by running the script again


class _Enough(BaseException):
    """The steps that were asked for are done."""


class _NeedsColumn(Exception):
    """The script reads a column that made-up rows lack; its name."""


class _NeedsLauncher(Exception):
    """The script asks for variables that torchrun sets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A script or notebook with its arguments, and the settings that replace missing parts of this machine.

    `prompt_tokens` is the length of made-up samples where data are missing. `changes` are laid over every
    TrainingArguments that the script makes. `of_libraries`: it is the recipe's own for the libraries at hand, also old
    ones, and its samples are made up.
    """

    path: Path
    module: str | None = None  # as `python -m` names it, from the current folder
    arguments: Sequence[str] = ()
    prompt_tokens: int | None = None
    changes: Mapping[str, object] = field(default_factory=dict)
    of_libraries: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptCheck:
    """Memory of a script on a card, and the values of its TrainingArguments, if any, that advice may change."""

    found: FitCheck
    arguments: Mapping[str, Any]
    longest_tokens: int = 0  # of the sequences of made-up samples that a model was given


def fit_script(
    script: Script, *, gpu: str, steps: int = 2, target_vram: str | int | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> ScriptCheck:  # fmt: skip
    """Peak memory by step, and step time, of a script on the simulated card `gpu`; it ends after `steps` steps.

    A step is one of a torch.optim optimizer. The script sees no network; weights that are not on this machine are
    random ones of the same shape. Raises ConfigError where the script fails, or puts nothing on the card.
    """
    alone = code_of(script.path)
    folders = [script.path.resolve().parent, Path.cwd(), *project_of(script.path)]
    code = alone if script.of_libraries else whole_code(alone, folders)
    if steps < 1:
        raise ConfigError(f"{option('steps')} must be 1 or more; got {steps}")
    if script.prompt_tokens is not None and not 1 <= script.prompt_tokens <= MOST_PROMPT_TOKENS:
        raise ConfigError(
            f"{option('prompt-tokens')} must be from 1 to {MOST_PROMPT_TOKENS:,}; got {script.prompt_tokens}"
        )
    spec, target_bytes = checked_card(gpu, target_vram)
    count = f"{steps} step{'s' if steps > 1 else ''}"
    tell(f"{script.path} runs on a simulated {spec.name}, {count}; its own output follows")
    with mock.patch.dict(os.environ, _OFFLINE), _hub_offline(), ScratchFolder("script-") as folder:
        from autofit.fakegpu import fake_gpu
        from autofit.hardware.calibration import host_costs

        costs, _ = host_costs(f"sim:{spec.name}")
        if any(name in code for name in _LIBRARIES):  # before what stands beside the script under one of their names
            import autofit.scripts.stand_ins  # noqa: F401
        more: list[str] = []
        launched: dict[str, str] = {}
        while True:
            try:
                with (
                    _only_rank(launched), fake_gpu(spec, host_costs=costs, enforce_capacity=False) as card,
                ):  # fmt: skip
                    loop = CheckedLoop(card)
                    own = folder / str(len(more))
                    own.mkdir(exist_ok=True)
                    if launched:
                        card.note("the script asks for torchrun's variables: it runs as its only rank")
                    note = _unsaid if script.of_libraries else card.note
                    made = MadeUp(Columns(alone, tuple(more)), script.prompt_tokens, own, note)
                    seen = _run(script, code, card, loop, steps=steps, made=made)
                    result = loop.result(target_bytes)
                    return ScriptCheck(found=result, arguments=seen, longest_tokens=made.longest)
            except _NeedsColumn as needed:
                more.append(str(needed))
            except _NeedsLauncher:
                launched = _of_torchrun()


_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _of_torchrun() -> dict[str, str]:
    """The variables that torchrun gives to the only rank of a run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return dict(zip(_RANKS, ("0", "0", "1", "1", "127.0.0.1", str(free.getsockname()[1])), strict=True))


@contextmanager
def _only_rank(variables: Mapping[str, str]) -> Iterator[None]:
    """Context with the `variables` of the only rank of a job, and its process group; without any, nothing."""
    if not variables:
        yield
        return
    from torch import distributed

    from autofit.fakegpu.rates.collectives import fake_ranks

    with (
        mock.patch.dict(os.environ, variables), fake_ranks(1),
        mock.patch.object(distributed, "init_process_group", return_value=None),
    ):  # fmt: skip
        yield


def _unsaid(_: str) -> None:
    """A note on made-up samples that their requester can do without."""


def _run(script: Script, code: str, card: "FakeGpu", loop: CheckedLoop, *, steps: int, made: MadeUp) -> dict[str, Any]:
    """Run the script; returns what was seen of its TrainingArguments. `code` is its own and that beside it."""
    import torch

    asked, seen = list[str](), dict[str, Any]()  # hosts that the script wanted to reach, and its arguments
    path = file = script.path
    if path.suffix == NOTEBOOK or has_commands(path):
        file = made.folder / "notebook.py"
        file.write_text(made.columns.code, encoding="utf-8")
    home = path.resolve().parent
    within = module_of(script, made.columns.code)
    project = [str(folder) for folder in project_of(path)]
    if within is not None:
        project.insert(0, str(within.folder))
    fewer = Fewer(lambda: bool(made.names), lambda: card.elapsed_s, card.note)

    def own(name: str) -> bool:
        where = Path(name).resolve()
        if not name or name.startswith("<") or where.is_relative_to(_AUTOFIT):
            return False
        return where == file.resolve() or (
            any(where.is_relative_to(folder) for folder in (str(home), *project)) and "site-packages" not in where.parts
        )

    try:
        with (
            mock.patch.object(sys, "argv", [str(path), *script.arguments]),
            mock.patch.object(sys, "path", [str(home), *sys.path, *project]), _without_own_modules(own),
            _without_network(asked), _stood_in(script, code, card, seen, made, own, fewer),
            _counted(card, loop, steps, fewer), nothing_started(code, card.note, asked),
        ):  # fmt: skip
            if within is not None:
                runpy.run_module(within.name, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(str(file), init_globals=of_a_notebook(made.columns.code), run_name="__main__")
    except _Enough:
        pass
    except torch.OutOfMemoryError as error:
        loop.out_of_memory = str(error)
    except SystemExit as error:
        if error.code not in (None, 0) and not loop.steps:
            raise ConfigError(f"{path} ended with the exit code {error.code} before its first step") from error
    except ConfigError:
        raise
    except Exception as error:  # whatever a stranger's code raises
        column = made.unknown_column(error)
        if column is not None and len(made.columns.more) < _MOST_COLUMNS:
            raise _NeedsColumn(column) from error
        if "RANK" not in os.environ and re.search(rf"\b(?:{'|'.join(_RANKS)}|torchrun)\b", str(error)):
            raise _NeedsLauncher from error
        frames = traceback.extract_tb(error.__traceback__)
        place = ([frame for frame in frames if own(frame.filename)] or frames)[-1]
        shown = path if place.filename == str(file) else place.filename
        failed = _failed(path, error, f"{shown}:{place.lineno}", loop.steps, asked, line=place.line or "")
        raise ConfigError(failed) from error
    if not card.peak_allocated_bytes:
        raise ConfigError(f'{path} put nothing on the card; a script trains on it with device "cuda"')
    if not loop.steps:
        card.note("no step of a torch.optim optimizer was seen, so the peak is that of the whole script")
    elif loop.steps < 2:
        card.note("one step only: optimizer state made at its end is not yet there at the peak; --steps 2 shows it")
    return seen


def _failed(path: Path, error: Exception, place: str, steps: int, asked: list[str], line: str) -> str:
    """Missing part of a script, in a line, by the `error` that it raised at a place, whose code is `line`."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        if package in sys.modules and package != error.name:
            version = getattr(sys.modules[package], "__version__", "")
            return (f"{path} imports {error.name}, which the {f'{package} {version}'.strip()} that is installed here "
                    f"does not have ({place}); install the version that the script was written for")  # fmt: skip
        if package in _OF_PROJECTS:
            return f"{path} imports {error.name}, which is not beside it ({place}); put the project's own module there"
        return (f"{path} imports {error.name}, which is not installed here ({place}); install it, such as by "
                f"pip install {package}")  # fmt: skip
    if isinstance(error, FileNotFoundError) and error.filename is not None:
        return f"{path} reads {quoted(str(error.filename), 200)}, which is not there ({place}); make it first"
    wanted = f"; it wanted to reach {', '.join(dict.fromkeys(asked))}, and sees no network here" if asked else ""
    after = f" after {steps} steps" if steps else " before its first step"
    text = _plain(str(error)) or f"`{_plain(line)}`"  # an assertion may have no words
    if "unscale FP16" in text:  # torch.amp.GradScaler
        text += "; transformers 5 loads float16 weights as they are, and 4 took float32: say dtype=torch.float32"
    return f"{path} failed{after}: {type(error).__name__}: {text} ({place}){wanted}"


def _plain(text: str) -> str:
    """The words of an error in a line."""
    return printable(" ".join(text.split()), 300)


@contextmanager
def _without_own_modules(own: Callable[[str], bool]) -> Iterator[None]:
    """Context after which the modules of the script are forgotten, so that it runs again as at first."""
    before = set(sys.modules)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name not in before]:
            if own(getattr(sys.modules[name], "__file__", None) or ""):
                del sys.modules[name]


@contextmanager
def _stood_in(
    script: Script, code: str, card: "FakeGpu", seen: dict[str, Any], made: MadeUp, own: Callable[[str], bool],
    fewer: Fewer,
) -> Iterator[None]:  # fmt: skip
    """Context with stand-ins for missing models and data, and the changes, as far as the code may need them."""
    with ExitStack() as stack:
        log = logging.getLogger("bitsandbytes")  # it warns of slow kernels of the CPU, which are not used here
        stack.callback(log.setLevel, log.level)
        log.setLevel(logging.ERROR)
        stack.enter_context(idle(code, card.note))
        if any(name in code for name in _LIBRARIES):
            from autofit.scripts.changes import laid_over
            from autofit.scripts.stand_ins import StandIns

            models = StandIns(made.folder, _unsaid if script.of_libraries else card.note)
            stack.callback(lambda: made.tell(models.longest))
            stack.enter_context(models.in_place())
            if imports_unsloth(code):
                from autofit.scripts.stand_ins import unsloth_stood_in

                stack.enter_context(unsloth_stood_in(code, card.note))
            if not script.of_libraries:
                from autofit.scripts.stand_ins import options_understood, understood

                stack.enter_context(understood(code, card.note))
                stack.enter_context(options_understood(card.note))
            stack.enter_context(laid_over(script.changes, seen))
            stack.enter_context(fewer.in_place())
        if any(name in code for name in _DATA):
            stack.enter_context(stood_in(made, own))
        yield


@contextmanager
def _counted(card: "FakeGpu", loop: CheckedLoop, steps: int, fewer: Fewer) -> Iterator[None]:
    """Count the optimizer's steps, each a phase of the card, and end the script after the last."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    with ExitStack() as phases:
        phases.enter_context(card.phase("step 1 and before"))
        began_s = card.elapsed_s
        taken: dict[
            int, int
        ] = {}  # steps of each optimizer; there may be one for each weight, within the backward pass

        def after_step(optimizer: "torch.optim.Optimizer", args: object, kwargs: object) -> None:
            nonlocal began_s
            is_new = id(optimizer) not in taken
            taken[id(optimizer)] = taken.get(id(optimizer), 0) + 1
            if is_new and loop.steps == 1:
                began_s = card.elapsed_s  # the first step has gone on
            if min(taken.values()) <= loop.steps and max(taken.values()) <= loop.steps + 1:
                return
            loop.steps += 1
            loop.step_s, began_s = card.elapsed_s - began_s + fewer.end_step(), card.elapsed_s
            if loop.steps >= steps:
                raise _Enough
            phases.close()
            phases.enter_context(card.phase(f"step {loop.steps + 1}"))

        handle = register_optimizer_step_post_hook(after_step)
        try:
            yield
        finally:
            handle.remove()


@contextmanager
def _hub_offline() -> Iterator[None]:
    """The hub's library read the environment when it was imported, and would try again for a minute."""
    constants = sys.modules.get("huggingface_hub.constants")
    if constants is None:
        yield
        return
    with mock.patch.object(constants, "HF_HUB_OFFLINE", True):
        yield


@contextmanager
def _without_network(asked: list[str]) -> Iterator[None]:
    """Refuse connections to other machines with a word, and write their names into `asked`."""
    connect, lookup = socket.socket.connect, socket.getaddrinfo

    def refuse(host: object) -> None:
        if isinstance(host, str) and not host.startswith(LOCAL) and host != socket.gethostname():
            asked.append(host)
            raise ConnectionRefusedError(f"autofit fit-check runs a script without the network; it wanted {host}")

    def refused(self: socket.socket, address: Any) -> None:
        if isinstance(address, tuple):
            refuse(address[0])
        connect(self, address)

    def not_found(host: Any, *rest: Any, **named: Any) -> Any:
        refuse(host)
        return lookup(host, *rest, **named)

    with mock.patch.object(socket.socket, "connect", refused), mock.patch.object(socket, "getaddrinfo", not_found):
        yield


# -- the Python code of a script --------------------------------------------------------------------------------------

MOST_BYTES = 1 << 25  # 32 MiB; pictures among a notebook's outputs are its largest part
NOTEBOOK = ".ipynb"
_YAML, _SHELL = "a YAML", "a shell script"
_OTHERS = {".yaml": _YAML, ".yml": _YAML, ".sh": _SHELL, ".bash": _SHELL}
# With the lines that a backslash joins to it.
_COMMAND = re.compile(r"^([ \t]*)(?:[!%?]|\w[\w., ]*=\s*[!%])(?:.*\\\n)*.*$", re.MULTILINE)


def code_of(path: Path) -> str:
    """The code of the file `path`. Raises ConfigError for anything but Python, or an unreadable notebook."""
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
    if path.suffix != NOTEBOOK:
        return _without_commands(text)
    try:
        cells = json.loads(text)["cells"]
        return "\n\n".join(_code_of(cell) for cell in cells if cell["cell_type"] == "code")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path} is no notebook of Jupyter's format 4: {str(error)[:100]}") from error


def _code_of(cell: dict[str, Any]) -> str:
    """A cell less `!pip install`, `%magic` and `name = !command`; one that is a whole `%%magic` is left out."""
    source = cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"])
    return "" if source.lstrip().startswith("%%") else _without_commands(source)


def _without_commands(source: str) -> str:
    try:
        ast.parse(source)  # a line of Python may begin with %, too
    except (SyntaxError, ValueError):
        return _COMMAND.sub(r"\1pass", source)
    return source


def has_commands(path: Path) -> bool:
    """True if a .py has a notebook's commands in it, as one that Colab exports."""
    text = path.read_bytes().decode("utf-8", "replace")
    return _without_commands(text) != text


# -- the modules beside a script --------------------------------------------------------------------------------------

_OF_PROJECTS = {"utils", "util", "common", "config", "configs", "data", "dataset", "models", "model", "helpers", "src"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A script within a package: its name, as `python -m` has it, and the folder that this begins in."""

    name: str
    folder: Path


def module_of(script: Script, code: str) -> Module | None:
    """The script as a module, where it was named as one or imports from its own package; None for others."""
    if script.module is not None:
        return Module(name=script.module, folder=Path.cwd())
    tree, path = _tree(code), script.path.resolve()
    nodes = () if tree is None else ast.walk(tree)
    depth = max((node.level for node in nodes if isinstance(node, ast.ImportFrom)), default=0)  # of `from .. import`
    if not 0 < depth < len(path.parents) or path.suffix != ".py" or has_commands(path):
        return None
    folder = Path.cwd() if Path.cwd() in path.parents[depth:] else path.parents[depth]
    return Module(name=".".join(path.relative_to(folder).with_suffix("").parts), folder=folder)


def path_of_module(name: str) -> Path:
    """The file of a module, as `python -m` finds it from the current folder. Raises ConfigError where there is none."""
    place = Path(*name.split("."))
    if found := next((path for path in (place.with_suffix(".py"), place / "__main__.py") if path.is_file()), None):
        return found
    try:
        spec = find_spec(name)  # of one that is installed, such as trl.scripts.kto
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise ConfigError(f"there is no module {quoted(name, 200)} in the current folder, and none is installed")
    return Path(spec.origin)


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
