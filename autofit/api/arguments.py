"""Arguments of the API: sizes, times and shares as text or numbers, and errors that name them as Python does.

The errors of the floors below carry the options that they name (autofit.errors.Option): the command line prints
`--target-vram`, and the public functions, which take `target_vram`, say that.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from autofit.api.events import Event, OnEvent, silent
from autofit.cluster.scheduler import Executor, check_commands, executor_given
from autofit.errors import AutofitError, ConfigError, Interrupted, Option, nearest, option
from autofit.fakegpu.specs import GPU_SPECS, GpuSpec, UnknownGpuError, gpu_spec
from autofit.files import cannot_write, check_is_own
from autofit.recipe.launch import MOST_RANKS
from autofit.units import parse_bytes, parse_frac, parse_seconds

T = TypeVar("T")
FOLDER = "autofit-studies"
USUAL = ("rtx4090", "l40s", "a100-40gb", "a100-80gb", "h100", "h200", "b200")  # that are rented most, one of each kind
COUNTS = (1, 2, 4, 8)
ALL = "all"
_MOST_COUNTS = 8
_RENAMED = {"dir": "folder", "set": "changes", "write-only": "launch=False"}


@contextlib.contextmanager
def named_as_arguments() -> Iterator[None]:
    """Let the errors within name arguments as Python has them, and Ctrl-C be one line in a notebook."""
    try:
        yield
    except AutofitError as error:
        error.named = as_argument
        raise
    except KeyboardInterrupt as error:
        raise Interrupted from error


def as_argument(option: Option) -> str:
    """An option of the command line as an argument: `--gpu t4` is `gpu='t4'`, `--dir DIR` is `folder`."""
    name = _RENAMED.get(option.name, option.name).replace("-", "_")
    metavar = option.value.isalpha() and option.value.isupper()
    return name if not option.value or metavar else f"{name}={option.value!r}"


def studies_folder(given: str | Path) -> Path:
    """The folder of studies that was `given`, whole: jobs and mirrors find it from any working directory.

    Raises ConfigError where it is relative to a working directory that was deleted.
    """
    try:
        return Path(given).absolute()
    except FileNotFoundError as error:
        raise ConfigError(
            f"the working directory was deleted, so {option('dir')} {given} is nowhere; go to a folder that exists"
        ) from error


def own_folder(folder: Path, on_event: OnEvent | None) -> None:
    """Make `folder` for this user alone, before jobs that load what lies there; one that is there must be as much.

    Raises ConfigError where others may write to it, and EnvironmentFault where it cannot be made.
    """
    tell = on_event or silent
    try:
        check_is_own(folder, say=lambda text: tell(Event(label="folder", text=text)))
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(f"{option('dir')} {folder} must be a folder, and is a file") from error
    except OSError as error:
        raise cannot_write(folder, error) from error


def size(name: str, given: str | float | None) -> int | None:
    """Bytes of an argument such as 40GB or 40e9. Raises ConfigError for zero or less."""
    if isinstance(given, str) or given is None:
        return _parsed(name, given, parse_bytes)
    if given <= 0:
        raise ConfigError(f"{option(name)}: an amount of memory must be above zero; got {given!r}")
    if given < 1000:
        raise ConfigError(f"{option(name)}: a number is of bytes; got {given!r}; write '{given:g}GB' for gigabytes")
    return int(given)


def seconds(name: str, given: str | float | None) -> float | None:
    """Seconds of an argument such as 10m or 600. Raises ConfigError for zero or less."""
    if isinstance(given, str) or given is None:
        return _parsed(name, given, parse_seconds)
    if given <= 0:
        raise ConfigError(f"{option(name)}: a duration must be above zero seconds; got {given!r}")
    return float(given)


def seconds_or_none(name: str, given: str | float) -> float:
    """Seconds of an argument such as 20s; 0 is allowed. Raises ConfigError for less."""
    text = str(given).strip()
    return 0.0 if re.fullmatch(r"0+(\.0+)?[smh]?", text) else seconds(name, given) or 0.0


def share(name: str, given: str | float) -> float:
    """The share in an argument such as 1% or 0.01: at least 0 and less than 1."""
    found = _parsed(name, str(given), parse_frac)
    assert found is not None
    return found


def _parsed(name: str, given: str | None, parse: Callable[[str], T]) -> T | None:
    try:
        return None if given is None else parse(given)
    except ConfigError as error:
        raise ConfigError(f"{option(name)}: {error.marked}") from error


def executor_asked(given: str | Mapping[str, object] | Executor | None, *, debugging: bool = True) -> Executor:
    """The executor of an argument, over executor.yaml of the working directory.

    Raises ConfigError, and EnvironmentFault where it is Slurm and this machine has not its commands.
    """
    found = executor_given(given, Path.cwd())
    if found.kind == "debug" and not debugging:
        raise ConfigError(
            f"the executor debug is for the probes of a search; give {option('executor', 'local')} or slurm"
        )
    check_commands(found)
    return found


def one_of(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigError(f"{option(name)} must be one of {', '.join(known)}; got {value!r}{nearest(value, known)}")


def cards_of(given: Sequence[str] | str | None) -> list[GpuSpec]:
    """The cards in an argument such as a100-80gb,h100; by default those that are rented most. Raises ConfigError."""
    if given == ALL:
        return sorted(GPU_SPECS.values(), key=lambda spec: (spec.capacity_bytes, spec.half_flops_per_s))
    names = USUAL if given is None else given.split(",") if isinstance(given, str) else given
    try:
        found = {spec.name: spec for name in names if name.strip() for spec in [gpu_spec(name.strip())]}
    except UnknownGpuError as error:
        raise ConfigError(f"{option('cards')}: {error}") from error
    if not found:
        raise ConfigError(f"{option('cards')} must name at least one card, for example a100-80gb,h100")
    return list(found.values())


def counts_of(given: Sequence[int]) -> tuple[int, ...]:
    """The numbers of cards in an argument. Raises ConfigError if there are 0 or too many, or one is impossible."""
    found = tuple(dict.fromkeys(given))
    wrong = [n for n in found if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MOST_RANKS]
    if wrong or not found or len(found) > _MOST_COUNTS:
        raise ConfigError(
            f"{option('counts')} must be 1 to {_MOST_COUNTS} numbers of cards from 1 to {MOST_RANKS}, for example "
            f"1,2,4,8; got {wrong[0] if wrong else len(found)}"
        )
    return found
