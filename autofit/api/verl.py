"""A study and verl: a trial in verl's keys, and a run under verl against the promise of a trial."""

import json
import re
import statistics
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from autofit.api.arguments import named_as_arguments, studies_folder
from autofit.errors import ConfigError, option
from autofit.files import regular_bytes
from autofit.frontends.tools import VERL
from autofit.frontends.verl_recipe import exported
from autofit.frontends.writing import override, own_changes
from autofit.probing.result import ProbeResult
from autofit.promotion.promotion import choose
from autofit.recipe.profile import profile, profiles
from autofit.recipe.recipe import merge
from autofit.tuning.record import StudyRecord, record_of
from autofit.tuning.study import load_study, trials_of
from autofit.units import format_bytes, format_seconds

# Its logger (verl/utils/logger/aggregate_logger.py) writes a line `step:1 - perf/x:1.5 - ...` to the console for each
# step, and tracking.py the object `{"step": 1, "data": {...}}` to a jsonl file.
_MOST_BYTES = 1 << 30  # a step's line has about 4 KB
_GIB = 1 << 30  # verl divides bytes by it and calls them gb (engine_workers.py, line 218)
_ALLOCATED, _RESERVED = "perf/max_memory_allocated_gb", "perf/max_memory_reserved_gb"
_ACTOR = "actor/"  # before what its worker says, in 0.9 (rename_dict of trainer/ppo/ray_trainer.py, line 1371)
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
    """The log at `path`. Raises ConfigError for a file that lacks any step of verl."""
    try:
        text = regular_bytes(path, most=_MOST_BYTES, what="a log of verl")[0].decode("utf-8", errors="replace")
    except ConfigError as error:
        raise ConfigError(f"{option('verl-log')}: {path} {error}") from error
    except OSError as error:
        raise ConfigError(f"{option('verl-log')}: {path} cannot be read: {error.strerror}") from error
    steps = [step for line in text.splitlines() if (step := dict(_metrics(line)))]
    named = {_ALLOCATED, _ACTOR + _ALLOCATED}
    steps = [step for step in steps if named & step.keys() or any(key.startswith(_SECONDS) for key in step)]
    if not steps:
        raise ConfigError(
            f"{option('verl-log')}: {path} has no step with {_ALLOCATED} or {_SECONDS}...; give what verl prints "
            "(trainer.logger console) or the jsonl that it writes (trainer.logger file)"
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
    """(name, number) pairs of a line; empty for a line of anything but a step."""
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
    for key in (_ACTOR + name, name):
        if found := [step[key] for step in steps if key in step]:
            return round(max(found) * _GIB)
    return None


_SERVED = "vLLM"  # the category of the bytes of verl's server process, which verl's log leaves out
# {verl's timer: the phases of a simulated step that it covers}
_PHASES: Mapping[str, tuple[str, ...]] = {
    "gen": ("rollout",), "old_log_prob": ("old log-probs",), "ref": ("reference",), "update_weights": ("sync",),
    "values": ("values",), "update_critic": ("update critic",),
}  # fmt: skip
_UPDATE = ("loading", "update", "optimizer")


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of the promise and of the run: bytes, or seconds. None if either lacks one."""

    name: str
    promised: float | None
    actual: float | None

    @property
    def off(self) -> float | None:
        """The promise over the run, less 1."""
        return self.promised / self.actual - 1 if self.promised is not None and self.actual else None

    def text(self) -> str:
        words = format_seconds if self.name.startswith("timing") else lambda value: format_bytes(round(value))
        shown = ["-" if value is None else words(value) for value in (self.promised, self.actual)]
        off = "" if self.off is None else f"{self.off:+.1%}"
        return f"{self.name:<32}{shown[0]:>12}{shown[1]:>12}{off:>10}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class VerlComparison:
    """The rows of a run's log against the promise of a trial."""

    trial: int
    steps: int  # in the log
    optimizer_steps: int  # of each
    rows: tuple[Figure, ...]

    def __str__(self) -> str:
        head = (
            f"{self.steps} steps of verl, each of {self.optimizer_steps} optimizer steps, against the promise of trial "
            f"{self.trial}; bytes are those of the actor's process, without vLLM's"
        )
        columns = f"{'':<32}{'promised':>12}{'actual':>12}{'off':>10}"
        return "\n".join([head, columns, *(row.text() for row in self.rows)])

    def to_dict(self) -> dict[str, object]:
        rows = [{"name": row.name, "promised": row.promised, "actual": row.actual, "off": row.off} for row in self.rows]
        return {"trial": self.trial, "steps": self.steps, "optimizer_steps": self.optimizer_steps, "rows": rows}


def compare_verl_log(path: Path, *, study: str | None, folder: Path, trial: str = "best") -> VerlComparison:
    """The log at `path` against a trial of a study (its number, "best" or "leanest"). Raises ConfigError."""
    with named_as_arguments():
        log = read_log(path)
        found = load_study(studies_folder(folder), study)
        record = record_of(found)
        if record.trainer != VERL.name:
            given = option("verl-log")
            raise ConfigError(f"{given} needs a study of a verl config; {found.study_name} is of {record.trainer}")
        chosen = choose(trials_of(found), trial, record.rule, fitting=False)
        if chosen.result is None or chosen.result.peak_allocated_bytes is None:
            raise ConfigError(f"trial {chosen.number} of {found.study_name} promises nothing: {chosen.status}")
        values = merge(record.resolved, chosen.yaml_changes)
        counts = [cast(int, values[key]) for key in ("steps_per_generation", "gradient_accumulation_steps")]
        steps = max(1, counts[0] // counts[1]) * cast(int, values["ppo_epochs"])
        rows = tuple(rows_of(log, chosen.result, steps))
    return VerlComparison(trial=chosen.number, steps=log.steps, optimizer_steps=steps, rows=rows)


def rows_of(log: VerlLog, promised: ProbeResult, optimizer_steps: int) -> Iterator[Figure]:
    """The memory and the phases, those that verl timed or the promise has.

    A simulated step is an optimizer step, with its share of the parts that a generation has once.
    """
    yield Figure("allocated", _allocated(promised), log.allocated_bytes)
    yield Figure("reserved", None, log.reserved_bytes)  # a simulated card caches vLLM's bytes and the actor's together
    took = promised.phase_s
    for timer, phases in _PHASES.items():
        if timer in log.seconds or any(name in took for name in phases):
            yield Figure(f"timing_s/{timer}", _sum(took, phases, optimizer_steps), log.seconds.get(timer))
    yield Figure("timing_s/update_actor", _sum(took, _UPDATE, optimizer_steps), log.seconds.get("update_actor"))


def _sum(seconds: Mapping[str, float], names: tuple[str, ...], times: int) -> float | None:
    """The seconds of `times` steps of the phases, if any is known."""
    found = [seconds[name] for name in names if name in seconds]
    return sum(found) * times if found else None


def _allocated(promised: ProbeResult) -> int | None:
    """The largest peak of a phase, less the bytes that vLLM holds in it."""
    parts = promised.categories
    return max(
        (p.peak_allocated_bytes - parts[p.name].get(_SERVED, 0) for p in promised.phases if parts.get(p.name)),
        default=None,
    )


_COMMAND = "python3 -m verl.trainer.main_ppo"
_comment = textwrap.TextWrapper(
    width=79, initial_indent="# ", subsequent_indent="#   ", break_long_words=False, break_on_hyphens=False
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A trial as verl's overrides: behind the user's own command where `whole` is False, else a command of its own."""

    trial: int
    whole: bool
    overrides: Mapping[str, object]
    changes: tuple[str, ...]  # differences in verl, a sentence each

    def __str__(self) -> str:
        comments = [line for text in self.changes for line in _comment.wrap(text)]
        words = [override(key, value) for key, value in self.overrides.items()]
        if not self.whole:
            return "\n".join([*comments, " ".join(words) or "# the trial changes nothing of the config"])
        return "\n".join([*comments, " \\\n  ".join([_COMMAND, *words])])

    def to_dict(self) -> dict[str, object]:
        return {"trial": self.trial, "overrides": dict(self.overrides), "changes": list(self.changes)}


def export_to_verl(trial: str, *, study: str | None, folder: Path) -> Export:
    """The trial (its number, or "best") of a study in verl's keys. Raises ConfigError."""
    with named_as_arguments():
        found = load_study(studies_folder(folder), study)
        record = record_of(found)
        chosen = choose(trials_of(found), trial, record.rule, fitting=False)
        return export_of(record, chosen.number, chosen.yaml_changes, found.study_name)


def export_of(record: StudyRecord, number: int, changes: Mapping[str, object], study: str) -> Export:
    """The same of a trial's `changes` of the study's recipe."""
    if record.trainer == VERL.name and record.foreign:
        overrides, others = own_changes(record.foreign, changes)
        return Export(trial=number, whole=False, overrides=overrides, changes=tuple(others))
    if not profile(record.trainer).verl:
        known = " or ".join(p.name for p in profiles().values() if p.verl)
        raise ConfigError(
            f"{option('to', 'verl')} takes a study of a verl config or a {known} recipe; {study} is of {record.trainer}"
        )
    made = exported(merge(record.resolved, changes), merge(record.values, changes))
    return Export(trial=number, whole=True, overrides=made.overrides, changes=made.changes)
