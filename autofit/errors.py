"""The errors a user can cause. Each message names the requirement, the given value and the change that helps."""

import difflib
from collections.abc import Iterable

MOST_OF_A_LINE = 300  # characters of an error


class AutofitError(Exception):
    """Base of all errors that autofit reports in one line with exit code 2, without a traceback."""

    as_options: str | None = None  # the text with the command line's options in it, where it names arguments instead


class ConfigError(AutofitError, ValueError):
    """The user's input (recipe, space, option, path) cannot be used as it is."""


class UnknownKeyError(ConfigError):
    """A key is none that is taken there."""


class Cancelled(AutofitError):
    """What was asked for was cancelled before it answered."""


class EnvironmentFault(AutofitError):
    """A fault of the machine: no space left, a database that cannot be read, a process that died."""


def nearest(given: str, known: Iterable[str]) -> str:
    """`"; the nearest valid one is 'x'"` if one of `known` is close to `given`, else an empty string."""
    names = list(known)
    close = difflib.get_close_matches(given, names, n=8, cutoff=0.6) or [
        name for name in difflib.get_close_matches(given, names, n=8, cutoff=0.5) if _akin(given, name)
    ]
    # A name that contains the given one, or is contained in it, comes first: lora_r for lora_rank.
    close.sort(key=lambda name: not (given.startswith(name) or name.startswith(given)))
    return f"; the nearest valid one is {close[0]!r}" if close and close[0] != given else ""


def _akin(given: str, name: str) -> bool:
    """Whether one name has the other in it, or both begin alike; without that, half of the letters is chance."""
    return given in name or name in given or given[:4] == name[:4]


def printable(text: str, most: int) -> str:
    """`text` for one line of an error: control characters as escapes, about `most` characters at most."""
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text[: 2 * most])
    if len(text) <= most and len(line) <= most:
        return line
    return f"{line[: most - 20]}... ({len(text):,} characters)"


def one_line(text: str, most: int = MOST_OF_A_LINE) -> str:
    """`text` as one line of at most `most` printable characters: the middle of a longer one is left out.

    The beginning says what must hold, and the end what to change.
    """
    line = " ".join("".join(c if c.isprintable() or c.isspace() else f"\\x{ord(c):02x}" for c in text).split())
    if len(line) <= most:
        return line
    tail = most // 3
    return f"{line[: most - tail - 5]} ... {line[-tail:]}"


def quoted(given: object, most: int = 60) -> str:
    """A value that the user gave, as Python writes it, in about `most` printable characters."""
    return printable(repr(given), most)
