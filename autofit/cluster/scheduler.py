"""Executor of jobs, and requests to a cluster, in Slurm's own words; and its scheduler as a protocol.

Slurm is `autofit/cluster/slurm.py`, another is one file of the same functions: `executor: slurm` names the first,
`executor: my_scheduler:CLUSTER` an object, or a module, of your own.
"""

import importlib
import os
import platform
import re
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Protocol, cast

from autofit.errors import ConfigError, nearest, option, printable, quoted
from autofit.files import other_writers
from autofit.recipe.yaml_file import read_yaml_mapping
from autofit.units import parse_seconds

Kind = str  # one of KINDS, or module:object of another scheduler
SLURM = "slurm"
KINDS: tuple[Kind, ...] = ("local", SLURM, "debug")
_OWN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
FILE = "executor.yaml"  # beside the project: what the options leave out
_TEXTS = ("partition", "account", "qos", "constraint", "mem", "gpus_per_node")
_COUNTS = ("nodes", "cpus_per_task", "probes_per_job")
# Options of sbatch that autofit sets itself: a job with others is not found again, or not restarted.
_OURS = frozenset(
    ["array", "error", "input", "job-name", "ntasks", "ntasks-per-node", "open-mode", "output", "parsable", "signal",
     "test-only", "wait", "wrap"]
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Executor:
    """Executor of jobs. All but `kind` and `probes_per_job` are sbatch options of the same name; None: its default."""

    kind: Kind = "local"
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    mem: str | None = None  # of a node: "64G"
    gpus_per_node: str | None = None  # a count, or "a100:2"
    cpus_per_task: int | None = None
    nodes: int | None = None  # of a full run
    time: str | None = None  # longest time of a job: Slurm's "2-00:00:00", or "4h"
    setup: tuple[str, ...] = ()  # lines of shell in front of every job: modules, the environment, a container
    slurm: Mapping[str, object] = field(default_factory=dict)  # any other option of sbatch; True: one without a value
    probes_per_job: int = 1  # one after the other in one allocation

    @property
    def is_cluster(self) -> bool:
        """True if jobs go to a scheduler, rather than to this machine."""
        return self.kind not in ("local", "debug")

    @property
    def is_requeued(self) -> bool:
        """True if Slurm may put its jobs back into the queue."""
        return "no-requeue" not in self.slurm

    @property
    def time_s(self) -> float | None:
        """The longest time of a job in seconds."""
        return None if self.time is None else time_s(self.time)


LOCAL = Executor()
_LONGEST_TIME = 40  # characters: no time limit needs as many


def time_s(text: str) -> float:
    """Seconds of a time limit: "4h", or as Slurm writes it: minutes, hours:minutes:seconds, days-hours:minutes:seconds.

    Raises ConfigError.
    """
    days, dash, rest = text.strip().rpartition("-")
    try:
        parts = [int(part) for part in rest.split(":")]
        if min(parts) < 0 or len(parts) > 3 or (dash and int(days) < 0) or len(text) > _LONGEST_TIME:
            raise ValueError(text)
    except ValueError:
        return parse_seconds(text)
    if dash:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    else:
        hours, minutes, seconds = {1: (0, parts[0], 0), 2: (0, *parts), 3: tuple(parts)}[len(parts)]
    found = 86400.0 * int(days or 0) + 3600 * hours + 60 * minutes + seconds
    if not found:
        raise ConfigError(f"a time limit must be longer than 0; got {text!r}")
    return found


def read_executor(kind: str | None, options: Mapping[str, object], folder: Path) -> Executor:
    """The executor that is asked for: the `options` that are set, over executor.yaml in `folder` if there is one.

    Options of Slurm ask for Slurm, where neither `kind` nor the file names another executor. Raises ConfigError for an
    unknown key, a value of the wrong kind, or an option of Slurm beside another executor.
    """
    path = folder / FILE
    of_file, found = {}, LOCAL
    if os.path.lexists(path):
        _check_mine(path)
        of_file = _as_fields(read_yaml_mapping(path, what="executor file"))
        try:
            if not isinstance(time := of_file.get("time", ""), str):  # YAML reads 4:00:00 as a number of base 60
                raise ConfigError(f'time must be text, such as 4h or, in quotes, "4:00:00"; got {quoted(time)}')
            found = executor_of(of_file)
        except ConfigError as error:
            raise ConfigError(f"the executor file {printable(str(path), 120)}: {error}") from error
    given = {key: value for key, value in _as_fields(options).items() if value is not None}
    named = kind or given.pop("kind", None) or of_file.get("kind") or ("slurm" if {**of_file, **given} else "local")
    asked = executor_of({**given, "kind": named})
    if given and not asked.is_cluster:
        flag = "--" + next(iter(given)).replace("_", "-")
        said = f"{option('executor')} is" if kind else f"{printable(str(path), 120)} has executor:"
        raise ConfigError(
            f"{flag} is an option of Slurm, and {said} {asked.kind}; leave {flag} out, or give "
            f"{option('executor', 'slurm')}"
        )
    if not asked.is_cluster:
        return asked
    both = {key: getattr(asked if key in given else found, key) for key in {**of_file, **given}}
    return executor_of({**both, "kind": named, "slurm": {**found.slurm, **asked.slurm}})


def _check_mine(path: Path) -> None:
    """Raise ConfigError for an executor file that another user may have written: it was found unasked, and runs code.

    Root takes that of the folder's owner: in a container the files are often another user's.
    """
    try:
        found, folder = path.stat(), path.parent.stat()
        who = other_writers(path)
    except OSError:  # told where it is read
        return
    owners = os.geteuid() == 0 and 0 != found.st_uid == folder.st_uid and not found.st_mode & stat.S_IWOTH
    if not who or owners:
        return
    fix = f"run `chmod go-w {path}`" if found.st_uid == os.geteuid() else "put a copy of your own in its place"
    raise ConfigError(
        f"the executor file {printable(str(path), 120)} {who}, and its setup runs as you; {fix}, or work in another "
        "folder"
    )


def executor_given(given: str | Mapping[str, object] | Executor | None, folder: Path) -> Executor:
    """The executor of an argument: a name, a mapping as executor.yaml has it, or an `Executor`, which is complete.

    A name or a mapping is laid over executor.yaml in `folder`. Raises ConfigError.
    """
    if isinstance(given, Executor):
        return executor_of({f.name: value for f in fields(given) if (value := getattr(given, f.name)) is not None})
    if given is None or isinstance(given, str):
        return read_executor(given, {}, folder)
    if not isinstance(given, Mapping):
        raise ConfigError(f"executor must be a name, a mapping or an Executor; got {quoted(given)}")
    options = _as_fields(given)
    kind = options.pop("kind", None)
    return read_executor(None if kind is None else _kind(kind), options, folder)


def executor_of(given: Mapping[str, object]) -> Executor:
    """The executor with these values, checked. Raises ConfigError."""
    known = [f.name for f in fields(Executor)]
    for key in given:
        if key not in known:
            names = ["executor" if name == "kind" else name for name in known]
            raise ConfigError(f"{quoted(key)} is no key of an executor{nearest(key, names)}; one of {', '.join(names)}")
    return Executor(**cast(dict[str, Any], {key: _checked(key, value) for key, value in given.items()}))


def _as_fields(given: Mapping[str, object]) -> dict[str, object]:
    """`given` with the names of our fields: sbatch writes a dash where they have a line, and `kind` is its executor."""
    found: dict[str, object] = {}
    for key, value in given.items():
        name = str(key).replace("-", "_")
        name = "kind" if name == "executor" else name
        if name in found:
            raise ConfigError(f"{quoted(key)} is given twice, with a dash and with a line; leave one out")
        found[name] = value
    return found


def _checked(key: str, value: object) -> object:
    """The value of `key` in its own type. Raises ConfigError."""
    if key == "kind":
        return _kind(value)
    if key in (*_TEXTS, "time"):
        if isinstance(value, bool) or not isinstance(value, (str, int)) or not _is_one_line(str(value)):
            raise ConfigError(f"{key} must be one line of text; got {quoted(value)}")
        if key == "time":
            time_s(str(value))
        return str(value)
    if key in _COUNTS:
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 10**6:
            raise ConfigError(f"{key} must be a whole number from 1 to 1,000,000; got {quoted(value)}")
    elif key == "setup":
        return _checked_setup(value)
    elif key == "slurm":
        return _checked_rest(value)
    return value


def _kind(value: object) -> Kind:
    if isinstance(value, str) and (value in KINDS or _OWN.fullmatch(value)):
        return value
    hint = nearest(value, KINDS) if isinstance(value, str) else ""
    raise ConfigError(f"executor must be one of {', '.join(KINDS)}; got {quoted(value)}{hint}")


def _checked_setup(value: object) -> tuple[str, ...]:
    lines = value.splitlines() if isinstance(value, str) else value
    if not isinstance(lines, (list, tuple)):
        raise ConfigError(f"setup must be lines of shell; got {quoted(value)}")
    for line in lines:
        if not isinstance(line, str) or not line.replace("\t", " ").isprintable():
            raise ConfigError(f"setup must be lines of shell; got {quoted(line)}")
    return tuple(lines)


def _checked_rest(value: object) -> dict[str, object]:
    """Other options of sbatch, in its spelling; one that is false is left out."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"slurm must be a mapping of sbatch's options; got {quoted(value)}")
    found = {}
    for given, one in value.items():
        name = str(given).replace("_", "-")
        right = isinstance(one, (str, int, float)) and _is_one_line(str(one))
        if not right or not isinstance(given, str) or not re.fullmatch(r"[a-z][a-z0-9-]*", name):
            raise ConfigError(f"slurm: an option of sbatch has a long name and one value; got {quoted({given: one})}")
        if name.replace("-", "_") in (*_TEXTS, *_COUNTS, "time"):
            raise ConfigError(f"slurm: {name} is an option of its own; give --{name}, or {name} beside slurm")
        if name in _OURS:
            raise ConfigError(f"slurm: autofit sets {name} itself, to find and restart its jobs; leave it out")
        if name == "requeue":  # which jobs have unless it is forbidden
            name, one = ("requeue", True) if one is not False else ("no-requeue", True)
        if one is not False:
            found[name] = one
    return found


def _is_one_line(text: str) -> bool:
    return bool(text.strip()) and text.isprintable()


# -- the scheduler of a cluster as a protocol -------------------------------------------------------------------------

IN = "AUTOFIT_CLUSTER"  # the kind of the executor, in the environment of a job; without it: Slurm
_ALIVE = frozenset((
    "PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESIZING",
    "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED", "SPECIAL_EXIT",
))  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """A scheduler's report on a job: its state in Slurm's words, its nodes, the reason why it waits, its name."""

    state: str
    nodes: str = ""
    reason: str = ""
    name: str = ""

    @property
    def is_alive(self) -> bool:
        return self.state in _ALIVE

    @property
    def waits(self) -> bool:
        return self.state in ("PENDING", "CONFIGURING", "REQUEUED")


class Queue(Protocol):
    """The states of all jobs of this user. It asks the scheduler seldom, however often it is asked."""

    command: str  # the command that it asks
    calls: int  # answers of the scheduler so far
    asked_at: float  # time.monotonic() before the call that told the states

    def state(self, job_id: str) -> JobState | None:
        """The state of a job; one that the scheduler has forgotten is ENDED. None: unknown yet, ask again later."""
        ...

    def waits(self, job_id: str) -> bool:
        """True if the job waits, by the scheduler's last answer."""
        ...

    def states(self) -> Mapping[str, JobState]:
        """All jobs of this user that the scheduler knows, by id."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnJob:
    """The job that this process belongs to, with one process on each node."""

    job: str
    id: str  # as the queue tells it: of an array, with this job's number in it
    attempt: str  # new each time that the scheduler starts the job
    node: int  # the number of this node, from 0
    nodes: int
    name: str  # of this node

    @property
    def is_first(self) -> bool:
        """True if this is the node that decides for all."""
        return self.node == 0

    def first_address(self) -> str:
        """The address under which the other nodes reach the first one. Raises EnvironmentFault."""
        return self.addresses()[0]

    def own_address(self) -> str:
        """The address under which the other nodes reach this one. Raises EnvironmentFault."""
        return self.addresses()[self.node]

    def addresses(self) -> Sequence[str]:
        """The addresses of the job's nodes, in their order. Raises EnvironmentFault."""
        raise NotImplementedError

    def is_running(self) -> bool:
        """True if the job is to go on; False once it is cancelled or put back into the queue."""
        raise NotImplementedError

    def requeue(self) -> None:
        """Put the job back into the queue, which ends this process soon. Raises EnvironmentFault if that fails."""
        raise NotImplementedError


class Cluster(Protocol):
    """A scheduler: a module with these functions, or an object with these methods."""

    title: str  # its name, for people

    def check_commands(self) -> None:
        """Raise EnvironmentFault if this machine lacks the scheduler's commands."""
        ...

    def submit(
        self, executor: Executor, folder: Path, function: Callable[[str], None], arguments: Sequence[str], *, name: str,
        nodes: int = 1, exclude: Sequence[str] = (), signal_s: int = 60,
    ) -> list[str]:  # fmt: skip
        """Submit a job that calls `function` with each of `arguments` (several are one array); returns their ids.

        With `nodes` > 1 the function is called once on each node, with `AUTOFIT_CLUSTER` set to the executor's kind.
        USR2 comes `signal_s` seconds before the time limit. What the job prints is in FOLDER/ID_0_log.out. Raises
        EnvironmentFault where the scheduler refuses.
        """
        ...

    def queue(self) -> Queue:
        """The one queue of this process."""
        ...

    def cancel(self, ids: Sequence[str]) -> None:
        """Cancel the jobs; those that have ended are left as they are."""
        ...

    def exclude(self, ids: Sequence[str], nodes: Sequence[str]) -> None:
        """Keep the jobs, which wait, off the nodes."""
        ...

    def limit_of_job_s(self, executor: Executor) -> float:
        """The time limit of a job in seconds."""
        ...

    def nodes_of(self, partition: str | None) -> frozenset[str]:
        """The names of the nodes of the partition (None: the default one); empty if unknown."""
        ...

    def is_out_of_memory(self, said: str) -> bool:
        """True if the end of a job's log shows that the scheduler ended the job for its memory."""
        ...

    def own_job(self) -> OwnJob | None:
        """The job of this process, if it is in one."""
        ...


@cache
def cluster_of(kind: Kind) -> Cluster:
    """The scheduler of the executor `kind`: slurm, or module:object. Raises ConfigError if its import fails."""
    module, colon, target = ("autofit.cluster.slurm", "", "") if kind == SLURM else kind.partition(":")
    if colon and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        found: object = importlib.import_module(module)
        found = getattr(found, target) if colon else found
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"the executor {kind!r} must be importable, as module:object; {error}") from error
    needed = ("title", *(name for name, of in vars(Cluster).items() if callable(of) and not name.startswith("_")))
    lacking = [name for name in needed if not hasattr(found, name)]
    if lacking:
        raise ConfigError(f"the executor {kind!r} must have the functions of a cluster; it lacks {', '.join(lacking)}")
    return cast(Cluster, found)


def check_commands(executor: Executor) -> None:
    """Raise EnvironmentFault if jobs go to a scheduler and this machine lacks its commands."""
    if executor.is_cluster:
        cluster_of(executor.kind).check_commands()


def own_job() -> OwnJob | None:
    """The job that this process is part of, if it is in one."""
    return cluster_of(os.environ.get(IN, SLURM)).own_job()


def own_node() -> str:
    """The name of this node, as the scheduler has it where this process is in a job."""
    job = own_job()
    return platform.node() if job is None else job.name
