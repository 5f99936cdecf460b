"""The script whose parser reads a trainer's recipes: TRL's own, or one of ours in the same form."""

import importlib
from types import ModuleType
from typing import Any

_OURS = {"hf": "hf_script"}


def is_trls(trainer: str) -> bool:
    """Whether `trl <trainer>` is a command."""
    return trainer not in _OURS


def command_of(trainer: str) -> str | None:
    """The command that trains a recipe without autofit, before its file's name; None: there is none."""
    return f"trl {trainer} --config" if is_trls(trainer) else None


def script_name(trainer: str) -> str:
    """The name of the module with the `make_parser` of `trainer`."""
    ours = _OURS.get(trainer)
    return f"trl.scripts.{trainer}" if ours is None else f"{__package__}.{ours}"


def script(trainer: str) -> ModuleType:
    """The module with the `make_parser` of `trainer`."""
    return importlib.import_module(script_name(trainer))


def parser_of(trainer: str) -> Any:
    """A parser of the recipes of `trainer`."""
    return script(trainer).make_parser()
