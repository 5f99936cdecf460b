"""The errors a user can cause. Each message says what must hold, what was given and what to change."""

import difflib
from collections.abc import Iterable


class AutofitError(Exception):
    """Anything that autofit reports in one line and exit code 2, without a traceback."""

    as_options: str | None = None  # the text with the command line's options in it, where it names arguments instead


class ConfigError(AutofitError, ValueError):
    """The user's input (recipe, space, option, path) cannot be used as it is."""


class EnvironmentFault(AutofitError):
    """The machine is at fault: no space left, a database that cannot be read, a process that died."""


def nearest(given: str, known: Iterable[str]) -> str:
    """`"; the nearest valid key is 'x'"` when one of `known` is close to `given`, else an empty string."""
    close = difflib.get_close_matches(given, list(known), n=8, cutoff=0.5)
    close.sort(key=lambda name: not (given.startswith(name) or name.startswith(given)))  # lora_rank means lora_r
    return f"; the nearest valid one is {close[0]!r}" if close else ""
