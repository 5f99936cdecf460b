"""What several commands need: talking to the user, options, and reading a recipe."""

import argparse
import contextlib
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from autofit.errors import AutofitError, ConfigError, nearest

if TYPE_CHECKING:
    from autofit.probing.warm import WarmServer
    from autofit.recipe import Recipe, TrainerName

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


def warm(folder: Path) -> "WarmServer":
    from autofit.probing.warm import WarmServer

    try:
        return WarmServer(folder)
    except FileExistsError as error:
        raise ConfigError(f"--dir {folder} must be a folder, and is a file") from error


def prepared(path: Path, options: argparse.Namespace, device: str, scratch: Path, server: "WarmServer") -> "Recipe":
    from autofit.probing.prepare import prepare

    scratch.mkdir(parents=True, exist_ok=True)
    try:
        recipe = prepare(
            path, trainer=trainer(options.trainer), device=device, folder=scratch, server=server,
            world_size=options.world_size,
        )  # fmt: skip
    except AutofitError:
        remove(scratch)
        raise
    return recipe


def remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()


def trainer(name: str) -> "TrainerName":
    from autofit.recipe import TRAINERS

    if name not in TRAINERS:
        raise ConfigError(f"--trainer must be one of {', '.join(TRAINERS)}; got {name!r}{nearest(name, TRAINERS)}")
    return name


def terminate_like_interrupt() -> None:
    """SIGTERM ends a search the way Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    say("stopping the probe at work; its trial waits for the next run")
