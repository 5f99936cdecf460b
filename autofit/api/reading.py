"""From the arguments of a command to its recipe, device and fork server. Imports nothing that only a search needs."""

import contextlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

from autofit.errors import AutofitError, ConfigError
from autofit.fakegpu.specs import gpu_spec
from autofit.plugin.registry import trainer_for
from autofit.probing.fork_server import ForkServer
from autofit.probing.prepare import prepare
from autofit.recipe.launch import ONE_RANK, Launch
from autofit.recipe.recipe import Recipe
from autofit.recipe.source import Source, Stated, read_source
from autofit.units import format_bytes

Given = Stated | Callable[[], Stated]  # a function is called once the other arguments are found to be right


def fork_server(folder: Path) -> ForkServer:
    """A fork server whose log is in `folder`, which is made."""
    try:
        return ForkServer(folder)
    except FileExistsError as error:
        raise ConfigError(f"--dir {folder} must be a folder, and is a file") from error


def source_of(given: Given | None, name: str | None = None) -> Source:
    """The recipe as it was given; a function is asked for it."""
    stated = given() if callable(given) and not isinstance(given, type) else given
    return read_source(cast("Stated | None", stated), name=name)


def read_recipe(
    source: Source, *, trainer: str | None, device: str, scratch: Path, server: ForkServer,
    changes: Mapping[str, object] | None = None, prompt_tokens: int | None = None, launch: Launch = ONE_RANK,
) -> Recipe:  # fmt: skip
    """The recipe with `changes` over it; its worst case is in `scratch`, which is dropped on an error.

    Raises ConfigError for what TRL would not take.
    """
    named = trainer_for({**source.values, **(changes or {})}, trainer or source.trainer)
    scratch.mkdir(parents=True, exist_ok=True)
    try:
        return prepare(
            source, trainer=named, device=device, folder=scratch, server=server, launch=launch,
            changes=changes, prompt_tokens=source.prompt_tokens if prompt_tokens is None else prompt_tokens,
        )  # fmt: skip
    except AutofitError:
        drop(scratch)
        raise


def drop(scratch: Path) -> None:
    """Remove `scratch`, and the folder that it is in when that is empty."""
    shutil.rmtree(scratch, ignore_errors=True)
    with contextlib.suppress(OSError):
        scratch.parent.rmdir()


def describe_device(device: str, target_bytes: int) -> str:
    """Where probes run and how much of it they may use, in words."""
    target = format_bytes(target_bytes)
    if not device.startswith("sim:"):
        return f"{device}, {target}: measured"
    spec = gpu_spec(device.removeprefix("sim:"))
    return f"{spec.name} ({spec.full_name}, {format_bytes(spec.capacity_bytes)}) simulated, {target} of it: predicted"


def check_prompt_tokens(prompt_tokens: int | None, device: str) -> None:
    """Refuse synthetic prompts on a device that trains on real ones."""
    if prompt_tokens is not None and not device.startswith("sim:"):
        raise ConfigError(f"--prompt-tokens is for simulated cards only, and the device is {device}")
