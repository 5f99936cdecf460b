"""Arguments of a training script in Python: TRL's trainer, and arguments of its own. Read only, it is never run."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from autofit.errors import ConfigError
from autofit.files import regular_bytes, stamp
from autofit.frontends.sharing import near
from autofit.recipe.yaml_file import MOST_BYTES, is_open

_PARSERS = ("TrlParser", "HfArgumentParser", "H4ArgumentParser")  # take the fields of TRL's configs as arguments

# What scripts call the layers with an adapter, its rank, and the longest row.
ADAPTED, RANKS = ("lora_target_modules", "lora_target", "target_modules"), ("lora_r", "lora_rank")
LENGTHS = ("model_max_length", "max_seq_length", "max_seq_len", "block_size", "cutoff_len")


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonFile:
    """A script's trainers of TRL (classes), whether it takes TRL's arguments, and the arguments that it adds."""

    trainers: tuple[str, ...]  # ("GRPOTrainer",)
    takes_trls: bool
    takes_models: bool  # those of TRL's ModelConfig too: dtype, use_peft, ...
    own: Mapping[str, object]  # {argument: default; None where it has none, or is not written there}


def python_file(program: str, folder: Path) -> PythonFile | None:
    """The script `program`, started from `folder`, if it is there and readable."""
    if not is_open() or not program.endswith(".py"):
        return None
    try:
        path = near(program, folder)
    except ConfigError:
        return None
    return _read(path, stamp(path))


@lru_cache(maxsize=8)
def _read(path: Path, _: object) -> PythonFile | None:
    """The script at `path`, which an answer asks for several times; the other argument changes when it is written."""
    try:
        nodes = list(ast.walk(ast.parse(regular_bytes(path, most=MOST_BYTES)[0])))
    except (ConfigError, OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    used = {name for node in nodes for name in _made(node)}
    known = {name for node in nodes for name in _of_trl(node)}
    trainers = {name for name in used & known if name.endswith("Trainer")}
    own = {name: default for node in nodes for name, default in _arguments(node)}
    return PythonFile(
        trainers=tuple(sorted(trainers)), takes_trls=bool(used & set(_PARSERS)), takes_models="ModelConfig" in known,
        own=own,
    )  # fmt: skip


def adapted(said: object) -> object:
    """The layers with an adapter, by a script's argument: `all`, `q_proj,v_proj`, or a list."""
    names = said.split(",") if isinstance(said, str) else said
    return ["all-linear"] if names == ["all"] else names


def as_it_is(script: str) -> str:
    """Advice for a script that was not read, behind the reason; "" for any other file than Python."""
    return f"; autofit fit-check --gpu NAME {script} ... runs it as it is" if script.endswith(".py") else ""


def _of_trl(node: ast.AST) -> Iterator[str]:
    """Names that are TRL's: imported from it, or reached through the module."""
    if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "trl":
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "trl":
        yield node.attr


def _made(node: ast.AST) -> Iterator[str]:
    """Names of called or subclassed objects."""
    found = [node.func] if isinstance(node, ast.Call) else node.bases if isinstance(node, ast.ClassDef) else []
    for each in found:
        if isinstance(each, ast.Name):
            yield each.id
        elif isinstance(each, ast.Attribute):
            yield each.attr


def _arguments(node: ast.AST) -> Iterator[tuple[str, object]]:
    """(name, default) of the fields of a dataclass, or of an argument that is added to a parser."""
    if isinstance(node, ast.ClassDef) and any("dataclass" in ast.dump(each) for each in node.decorator_list):
        for field in node.body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                yield field.target.id, _default(field.value)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
        for word in map(_constant, node.args):
            if isinstance(word, str) and word.startswith("--"):
                yield word[2:].replace("-", "_"), _default(node)


def _default(node: ast.expr | None) -> object:
    """A default that is written as a value: by itself, as `default=` of a call, or in what `default_factory=` makes."""
    if isinstance(node, ast.Call):
        named = {each.arg: each.value for each in node.keywords}
        made = named.get("default_factory")
        node = made.body if isinstance(made, ast.Lambda) else named.get("default")
    try:
        return None if node is None else ast.literal_eval(node)
    except (ValueError, TypeError):
        return None


def _constant(node: ast.expr | None) -> object:
    return node.value if isinstance(node, ast.Constant) else None
