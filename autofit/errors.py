"""The errors a user can cause. Each message names the requirement, the given value and the change that helps."""

import difflib
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple, Self

MOST_OF_A_LINE = 600  # characters of an error: what autofit says itself is shorter
_MARKED = re.compile("\x02([a-z_-]+)=(.*?)\x03")  # an option in the text of an error


class AutofitError(Exception):
    """Base of all errors that autofit reports in one line with exit code 2, in place of a traceback.

    Its text names options by `option(...)`, and its reader chooses the words for them.
    """

    named: "Callable[[Option], str] | None" = None  # an option in `str`; None: as the command line has it

    def __str__(self) -> str:
        return self.told(self.named or Option.__str__)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def _render_traceback_(self) -> list[str]:
        """Text in IPython and notebooks, the same as on the command line."""
        return [f"{type(self).__name__}: {self}"]

    @property
    def marked(self) -> str:
        """The text with its options marked, for another error, or the answer of another process, to take it up."""
        return super().__str__()

    @property
    def options(self) -> "tuple[Option, ...]":
        """The options that the text names, each with the value that it proposes or refuses."""
        return tuple(Option(*found.groups()) for found in _MARKED.finditer(self.marked))

    def told(self, named: "Callable[[Option], str]") -> str:
        """The text, with each option as `named` says it."""
        return told(self.marked, named)


class Option(NamedTuple):
    """An option of the command line in the text of an error or a result: `--gpu NAME`; TRIAL has no dashes."""

    name: str
    value: str

    def __str__(self) -> str:
        return "TRIAL" if self.name == "trial" else f"--{self.name} {self.value}".rstrip()


def option(name: str, value: str = "") -> str:
    """An option, with a value or the word for one, for the text of an error or a result: marked for who reads it."""
    return f"\x02{name}={value}\x03"


def told(text: str, named: Callable[[Option], str]) -> str:
    """`text`, with each of its marked options as `named` says it."""
    return _MARKED.sub(lambda found: named(Option(*found.groups())), text)


class ConfigError(AutofitError, ValueError):
    """The user's input (recipe, space, option, path) is unusable as it is."""

    def put(self, text: str) -> Self:
        """The same error in other words."""
        return type(self)(text)

    def within(self, what: str) -> Self:
        """The same error of `what`, as a recipe's file."""
        return self.put(f"{what}: {self.marked}")


class UnknownKeyError(ConfigError):
    """A key is unknown there. `keys` are those of a file, if the raiser knows them."""

    keys: tuple[str, ...] = ()

    def put(self, text: str) -> Self:
        named = super().put(text)
        named.keys = self.keys
        return named


class Cancelled(AutofitError):
    """The request was cancelled before its answer."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C before there was a result. A notebook shows one line, as for an error."""

    def _render_traceback_(self) -> list[str]:
        return ["interrupted before there was a result; the same call goes on with what is kept"]


class EnvironmentFault(AutofitError):
    """A fault of the machine: a full disk, an unreadable database, a process that died."""


def at_least_one(name: str, value: object) -> None:
    """Raise ConfigError unless the option `name` is left out or a whole number from 1."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigError(f"{option(name)} must be 1 or more; got {quoted(value)}")


def nearest(given: str, known: Iterable[str]) -> str:
    """`"; the nearest valid one is 'x'"` if one of `known` is close to `given`, else an empty string."""
    names = list(known)
    parts = sorted(name for name in names if len(given) > 3 and given in name)  # reshard: fsdp_reshard_after_forward
    close = difflib.get_close_matches(given, names, n=8) or parts
    # A name that contains the given one, or is contained in it, comes first: lora_r for lora_rank.
    close.sort(key=lambda name: not (given.startswith(name) or name.startswith(given)))
    return f"; the nearest valid one is {close[0]!r}" if close and close[0] != given else ""


def printable(text: str, most: int) -> str:
    """`text` for one line of an error: control characters as escapes, about `most` characters at most."""
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text[: 2 * most])
    if len(text) <= most and len(line) <= most:
        return line
    return f"{line[: most - 20]}... ({len(text):,} characters)"


def visible(text: str) -> str:
    """`text` with its control characters, but for white space, as escapes, so that a terminal's cursor stays put."""
    return "".join(c if c.isprintable() or c.isspace() else f"\\x{ord(c):02x}" for c in text)


def one_line(text: str, most: int = MOST_OF_A_LINE) -> str:
    """`text` as one line of at most `most` printable characters: the middle of a longer one is left out.

    The beginning says what must hold, and the end what to change.
    """
    line = " ".join(visible(text).split())
    if len(line) <= most:
        return line
    tail = most // 3
    return f"{line[: most - tail - 5]} ... {line[-tail:]}"


def quoted(given: object, most: int = 60) -> str:
    """A value that the user gave, as Python writes it, in about `most` printable characters."""
    return printable(repr(given), most)
