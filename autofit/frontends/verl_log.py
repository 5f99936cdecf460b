"""A log of verl: its memory and the seconds of its phases, from the console or from its jsonl file. No torch here.

verl/utils/logger/aggregate_logger.py writes a line `step:1 - perf/x:1.5 - ...` for each step, tracking.py the object
`{"step": 1, "data": {...}}`.
"""

import json
import re
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from autofit.errors import ConfigError
from autofit.files import regular_bytes

_MOST_BYTES = 1 << 30  # a step's line has about 4 KB
_GIB = 1 << 30  # verl divides bytes by it and calls them gb (engine_workers.py, line 218)
_ALLOCATED, _RESERVED = "perf/max_memory_allocated_gb", "perf/max_memory_reserved_gb"
_SECONDS = "timing_s/"
_LINE = re.compile(r"\bstep:(\d+) - (\S+:.*)")
_NUMBER = re.compile(r"(?:np\.\w+\()?(-?\d[\d.]*(?:[eE][-+]?\d+)?)\)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class VerlLog:
    """A log's steps, the largest memory of the actor's worker, and the seconds of each phase.

    Seconds are medians over the steps, the first left out where there are more: it compiles kernels.
    """

    steps: int
    allocated_bytes: int | None
    reserved_bytes: int | None
    seconds: Mapping[str, float]  # by verl's names: gen, old_log_prob, ref, update_actor, update_weights, step


def read_log(path: Path) -> VerlLog:
    """The log at `path`. Raises ConfigError for a file that has no step of verl in it."""
    try:
        text = regular_bytes(path, most=_MOST_BYTES, what="a log of verl")[0].decode("utf-8", errors="replace")
    except ConfigError as error:
        raise ConfigError(f"--verl-log: {path} {error}") from error
    except OSError as error:
        raise ConfigError(f"--verl-log: {path} cannot be read: {error.strerror}") from error
    steps = [step for line in text.splitlines() if (step := dict(_metrics(line)))]
    steps = [step for step in steps if _ALLOCATED in step or any(key.startswith(_SECONDS) for key in step)]
    if not steps:
        raise ConfigError(
            f"--verl-log: {path} has no step with {_ALLOCATED} or {_SECONDS}...; give what verl prints (trainer.logger "
            "console) or the jsonl that it writes (trainer.logger file)"
        )
    timed = [step for step in steps if f"{_SECONDS}step" in step or f"{_SECONDS}update_actor" in step]
    later = timed[1:] or timed
    names = dict.fromkeys(key for step in later for key in step if key.startswith(_SECONDS))
    return VerlLog(
        steps=len(steps), allocated_bytes=_most(steps, _ALLOCATED), reserved_bytes=_most(steps, _RESERVED),
        seconds={
            name.removeprefix(_SECONDS): statistics.median(step[name] for step in later if name in step)
            for name in names
        },
    )  # fmt: skip


def _metrics(line: str) -> Iterator[tuple[str, float]]:
    """(name, number) of a line; nothing of a line that is no step."""
    if line.lstrip().startswith("{"):
        try:
            data = json.loads(line).get("data")
        except ValueError:
            return
        for name, value in data.items() if isinstance(data, dict) else ():
            if isinstance(value, int | float):
                yield str(name), float(value)
        return
    if found := _LINE.search(line):
        for part in found[2].split(" - "):
            name, _, value = part.rpartition(":")
            if number := _NUMBER.match(value.strip()):
                yield name.strip(), float(number[1])


def _most(steps: list[dict[str, float]], name: str) -> int | None:
    found = [step[name] for step in steps if name in step]
    return round(max(found) * _GIB) if found else None
