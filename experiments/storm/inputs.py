"""Hostile input, made by hypothesis, for everything that reads what a user wrote; each must end in a value or one line.

The readers are called in this process, which takes about a millisecond an input; inspected.py goes through TRL.
"""

import json
import os
import resource
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from autofit.errors import MOST_OF_A_LINE, AutofitError, one_line

HANG_S = 30.0
GROWTH_BYTES = 10**9


class Hang(BaseException):
    """An input took longer than HANG_S."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """One thing that is read: `makes` draws an input, `reads` takes it and a folder of its own."""

    name: str
    makes: st.SearchStrategy[Any]
    reads: Callable[[Any, Path], object]


@dataclass(slots=True)
class Found:
    """What inputs did: how many were tried, and the smallest input of each thing that went wrong."""

    tried: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    slowest_s: float = 0.0
    wrong: dict[str, str] = field(default_factory=dict)
    times_wrong: Counter[str] = field(default_factory=Counter)

    def add_wrong(self, what: str, given: object) -> None:
        self.times_wrong[what] += 1
        text = repr(given)
        if what not in self.wrong or len(text) < len(self.wrong[what]):
            self.wrong[what] = text[:2000]

    def __iadd__(self, other: "Found") -> "Found":
        self.tried += other.tried
        self.refused += other.refused
        self.slowest_s = max(self.slowest_s, other.slowest_s)
        self.wrong |= other.wrong
        self.times_wrong += other.times_wrong
        return self


def quick_folder() -> str:
    """Where a storm writes: in memory if there is enough of it, as each input makes some thirty files."""
    memory = Path("/dev/shm")
    enough = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 2 * GROWTH_BYTES
    return str(memory) if enough else "/tmp"


def attack(reader: Reader, folder: Path, *, inputs: int, seed: int, until: float = float("inf")) -> Found:
    """What `inputs` inputs do to `reader`; ends early at the time `until` (of `time.monotonic`)."""
    found = Found()

    @seeded(seed)
    @settings(
        max_examples=inputs, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(reader.makes)
    def each(one: object) -> None:
        if time.monotonic() < until:
            attempt(reader, one, folder, found)

    each()
    return found


def attempt(reader: Reader, one: object, folder: Path, found: Found) -> None:
    """Give `one` to `reader` and note in `found` what happened."""
    found.tried[reader.name] += 1
    before, began = _most_bytes(), time.monotonic()
    try:
        with at_most(HANG_S):
            reader.reads(one, folder)
    except AutofitError as error:
        found.refused += 1
        line = one_line(str(error))
        if not line or len(line) > MOST_OF_A_LINE or not line.isprintable():
            found.add_wrong(f"{reader.name}: an error that is not one printable line", one)
    except Hang:
        found.add_wrong(f"{reader.name}: a hang at {_place()}", one)
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        ours = [f for f in traceback.extract_tb(error.__traceback__) if "autofit" in f.filename] or [last]
        where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}"
        found.add_wrong(f"{reader.name}: {type(error).__name__} at {where}: {one_line(str(error), 80)}", one)
        if isinstance(error, KeyboardInterrupt):
            raise
    found.slowest_s = max(found.slowest_s, time.monotonic() - began)
    if _most_bytes() - before > GROWTH_BYTES:
        found.add_wrong(f"{reader.name}: grew by more than 1 GB", one)
        Path("/proc/self/clear_refs").write_text("5")  # or a later growth would not be seen


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise Hang in the block after that many seconds."""

    def hang(*_: object) -> None:
        raise Hang

    old = signal.signal(signal.SIGALRM, hang)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def _place() -> str:
    trace = traceback.extract_tb(sys.exc_info()[2])
    ours = [f for f in trace if "autofit" in f.filename]
    return f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "?"


def _most_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# -- what is drawn ----------------------------------------------------------------------------------------------------

_ODD: list[object] = [
    None, True, False, 0, 1, -1, 2, 10**9, 10**12, 2**63, 10**30, -(10**30), 0.0, -0.0, 1e-9, 1e308, float("nan"),
    float("inf"), float("-inf"), "", " ", "0", "1", "1e400", "nan", "true", "null", "off", "auto", "none", "[", "{",
    "${a}", "${", "${a}${b}", "$", "~", "..", "/", "/dev/zero", "/proc/self/mem", ".", "a/b", "a.b.c", "os.system",
    "\x00", "\x1b[31mred", "\n", "a\nb", "\u202e", "é" * 200, "x" * 5000, "%s", "{0}", "{metric}", "{value:z}",
    "{a.b}", "{value:9999999999}", "*", "[a",
    "40GB", "1TB", "9" * 400, "1-00:00", "1:2:3:4", "-1-2", "4h", "999999999999h",
    [], {}, [[]],
    [None], {"a": {}},
]  # fmt: skip
ODD = st.sampled_from(_ODD)
SCALARS = st.one_of(ODD, ODD, st.integers(), st.floats(), st.text(max_size=20))
_PIECES = ["", "\t", "- ", ": ", "&a ", "*a", "!!int ", "!!binary ", "<<: ", "[", "{", "\x00", "2026-11-21", "? ",
           "|\n", "'", '"', "---\n", "%", "\ufeff"]  # fmt: skip
_TEXTS = st.one_of(st.text(max_size=8), st.sampled_from(["a", "b", "launch", "path", "min"]))
VALUES = st.recursive(
    SCALARS, lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(_TEXTS, inner, max_size=4)),
    max_leaves=8,
)  # fmt: skip


def mapping_of(known: list[str], values: st.SearchStrategy[Any] = VALUES, *, most: int = 8) -> st.SearchStrategy[Any]:
    """Mappings of known keys, and now and then of an unknown one, to hostile values."""
    return st.dictionaries(st.one_of(*[st.sampled_from(known)] * 5, _TEXTS), values, max_size=most)


def _torn(text: str, at: float, other: str) -> str:
    place = int(at * len(text))
    return text[:place] + other + text[place + len(other) :]


def yaml_text_of(mappings: st.SearchStrategy[Any]) -> st.SearchStrategy[str]:
    """The text of a YAML file with such a mapping, half of them torn at a place or with another piece put in."""
    whole = mappings.map(lambda m: yaml.safe_dump(m, allow_unicode=True))
    pieces = st.one_of(st.sampled_from(_PIECES), st.text(max_size=6))
    return st.one_of(whole, st.builds(_torn, whole, st.floats(0, 1), pieces))


def json_text_of(mappings: st.SearchStrategy[Any]) -> st.SearchStrategy[str]:
    whole = mappings.map(json.dumps)
    return st.one_of(whole, st.builds(_torn, whole, st.floats(0, 1), st.text(max_size=4)))


def written(folder: Path, name: str, text: str) -> Path:
    """The file `name` in `folder` with `text`; lone surrogates of hypothesis become what UTF-8 does not allow."""
    path = folder / name
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return path
