"""What several commands need: talking to the user, options, and reading a recipe."""

import argparse
import contextlib
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from autofit.errors import AutofitError, ConfigError
from autofit.recipe.baseline import PROMPT_TOKENS, baseline_path
from autofit.units import format_bytes

if TYPE_CHECKING:
    from autofit.probing.fork_server import ForkServer
    from autofit.recipe.recipe import Recipe, TrainerName

T = TypeVar("T")
DONE, NOTHING_FITS, WRONG_USAGE, INTERRUPTED = 0, 1, 2, 130


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def at_least_one(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ConfigError(f"{name} must be 1 or more; got {value}")


def given(option: str, text: str | None, parse: Callable[[str], T]) -> T | None:
    """The value of an option, or None when it was not given; an error names the option."""
    try:
        return None if text is None else parse(text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from error


def dir_option(folder: Path) -> str:
    """What a command that is proposed needs to find `folder`."""
    return "" if folder == Path("autofit-studies") else f" --dir {folder}"


def fork_server(folder: Path) -> "ForkServer":
    from autofit.probing.fork_server import ForkServer

    try:
        return ForkServer(folder)
    except FileExistsError as error:
        raise ConfigError(f"--dir {folder} must be a folder, and is a file") from error


def describe(device: str, target_bytes: int) -> str:
    """Where probes run and how much of it they may use, in words."""
    from autofit.fakegpu.specs import gpu_spec

    target = format_bytes(target_bytes)
    if not device.startswith("sim:"):
        return f"{device}, {target}: measured"
    spec = gpu_spec(device.removeprefix("sim:"))
    return f"{spec.name} ({spec.full_name}, {format_bytes(spec.capacity_bytes)}) simulated, {target} of it: predicted"


def settings(given: Sequence[str]) -> dict[str, object]:
    """{key: value} of `--set key=value` options, each value read as YAML; of a key given twice the last one counts."""
    import yaml

    changes: dict[str, object] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set takes key=value, for example --set lora_r=8; got {text!r}")
        try:
            changes[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {key.strip()}: the value is not valid YAML; got {value!r}") from error
    return changes


def check_prompt_tokens(options: argparse.Namespace, device: str) -> None:
    """Refuse made-up prompts on a device that trains on real ones."""
    if options.prompt_tokens is not None and not device.startswith("sim:"):
        raise ConfigError(f"--prompt-tokens makes prompts up for a simulated card, and the device is {device}")


def prepared(path: Path, options: argparse.Namespace, device: str, scratch: Path, server: "ForkServer") -> "Recipe":
    """The recipe in `path` as the options change it; its worst case in `scratch`, which is dropped on an error."""
    from autofit.probing.prepare import prepare

    prompt_tokens = getattr(options, "prompt_tokens", None)
    if prompt_tokens is None and path == baseline_path():
        prompt_tokens = PROMPT_TOKENS
    name = trainer(options, path)
    scratch.mkdir(parents=True, exist_ok=True)
    try:
        recipe = prepare(
            path, trainer=name, device=device, folder=scratch, server=server,
            world_size=options.world_size, changes=settings(getattr(options, "set", ())), prompt_tokens=prompt_tokens,
        )  # fmt: skip
    except AutofitError:
        remove(scratch)
        raise
    return recipe


def remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()


def trainer(options: argparse.Namespace, path: Path) -> "TrainerName":
    """The trainer that was asked for, or the one whose keys the recipe has."""
    from autofit.plugin.registry import trainer_for
    from autofit.recipe.recipe import read_yaml_mapping

    values = read_yaml_mapping(path, what="recipe") | settings(getattr(options, "set", ()))
    return trainer_for(values, options.trainer)


def terminate_like_interrupt() -> None:
    """SIGTERM ends a search the way Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    say("stopping the probe at work; its trial waits for the next run")
