"""Arguments of the API: sizes, times and shares as text or numbers, and errors that name them as Python does.

The floors below, and the command line, say an argument the way the command line has it: `--target-vram`. The public
functions say it as they take it, `target_vram`; the first text stays with the error, for the command line to print.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from autofit.api.events import Event, OnEvent, silent
from autofit.cluster.executor import Executor, executor_given
from autofit.cluster.scheduler import check_commands
from autofit.errors import AutofitError, ConfigError, EnvironmentFault, nearest
from autofit.files import cannot_write, check_is_own
from autofit.units import parse_bytes, parse_frac, parse_seconds

T = TypeVar("T")
FOLDER = "autofit-studies"
_RENAMED = {"dir": "folder", "set": "changes", "write-only": "launch=False"}
_SAME = (
    "advice-time", "allow", "as-of", "deadline", "device", "goal", "gpu", "headroom", "lengths", "measured-steps",
    "min-gain", "only", "out", "parallel", "plateau", "prompt-tokens", "restart", "sampler", "seed", "space", "study",
    "target-vram", "time-budget", "storage", "trainer", "trials", "accelerate_config", "num_processes", "gpus",
    "executor",
)  # fmt: skip
_VALUE = r"local|slurm|debug|auto|cpu|cuda|sim|grpo|sft|dpo|reward|neutral|approximate|recipe|[a-z]\w*\d[\w-]*"
# An option with a URL is of the command of another program, as of Optuna's.
_OPTION = re.compile(
    rf"--({'|'.join((*_RENAMED, *_SAME))})\b(?!-| \w+://)(?: (?P<metavar>[A-Z]+)\b| (?P<value>{_VALUE})\b)?"
)


@contextlib.contextmanager
def named_as_arguments() -> Iterator[None]:
    """Let the errors within name arguments as Python has them, with the error as it was for their cause."""
    try:
        yield
    except AutofitError as error:
        text = as_arguments(str(error))
        if text == str(error):
            raise
        named = type(error)(text)
        named.as_options = str(error)
        raise named.with_traceback(error.__traceback__) from None


def as_arguments(text: str) -> str:
    """`text` with the options of the command line as arguments: `--gpu t4` is `gpu='t4'`, `--dir DIR` is `folder`."""

    def argument(match: re.Match[str]) -> str:
        name = _RENAMED.get(match[1], match[1]).replace("-", "_")
        return name if match["value"] is None else f"{name}={match['value']!r}"

    return _OPTION.sub(argument, text)


def studies_folder(given: str | Path) -> Path:
    """The folder of studies that was `given`, whole: jobs and mirrors find it from any working directory.

    Raises ConfigError where it is relative to a working directory that was deleted.
    """
    try:
        return Path(given).absolute()
    except FileNotFoundError as error:
        raise ConfigError(
            f"the working directory was deleted, so --dir {given} is nowhere; go to a folder that exists"
        ) from error


def own_folder(folder: Path, on_event: OnEvent | None) -> None:
    """Make `folder` for this user alone, before jobs that load what lies there; one that is there must be as much.

    Raises ConfigError where others may write to it, and EnvironmentFault where it cannot be made.
    """
    tell = on_event or silent
    try:
        check_is_own(folder, say=lambda text: tell(Event(label="folder", text=text)))
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(f"--dir {folder} must be a folder, and is a file") from error
    except OSError as error:
        raise EnvironmentFault(cannot_write(folder, error)) from error


def size(option: str, given: str | float | None) -> int | None:
    """Bytes of an argument such as 40GB or 40e9. Raises ConfigError for none or less."""
    if isinstance(given, str) or given is None:
        return _parsed(option, given, parse_bytes)
    if given <= 0:
        raise ConfigError(f"{option}: an amount of memory must be above zero; got {given!r}")
    if given < 1000:
        raise ConfigError(f"{option}: a number is of bytes; got {given!r}; write '{given:g}GB' for gigabytes")
    return int(given)


def seconds(option: str, given: str | float | None) -> float | None:
    """Seconds of an argument such as 10m or 600. Raises ConfigError for none or less."""
    if isinstance(given, str) or given is None:
        return _parsed(option, given, parse_seconds)
    if given <= 0:
        raise ConfigError(f"{option}: a duration must be above zero seconds; got {given!r}")
    return float(given)


def seconds_or_none(option: str, given: str | float) -> float:
    """Seconds of an argument such as 20s, where 0 is "none at all". Raises ConfigError for less."""
    text = str(given).strip()
    return 0.0 if re.fullmatch(r"0+(\.0+)?[smh]?", text) else seconds(option, given) or 0.0


def share(option: str, given: str | float) -> float:
    """The share in an argument such as 1% or 0.01: from 0 up to, not including, 1."""
    found = _parsed(option, str(given), parse_frac)
    assert found is not None
    return found


def _parsed(option: str, given: str | None, parse: Callable[[str], T]) -> T | None:
    try:
        return None if given is None else parse(given)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from error


def executor_asked(given: str | Mapping[str, object] | Executor | None, *, debugging: bool = True) -> Executor:
    """The executor of an argument, over executor.yaml of the working directory.

    Raises ConfigError, and EnvironmentFault where it is Slurm and this machine has not its commands.
    """
    found = executor_given(given, Path.cwd())
    if found.kind == "debug" and not debugging:
        raise ConfigError("the executor debug is for the probes of a search; give --executor local or slurm")
    check_commands(found)
    return found


def at_least_one(option: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ConfigError(f"{option} must be 1 or more; got {value}")


def one_of(option: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigError(f"{option} must be one of {', '.join(known)}; got {value!r}{nearest(value, known)}")
