"""`autofit.jobs`: the jobs of a folder of studies, on this machine and in Slurm's queue, with what each one does."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import psutil
from rich.markup import escape
from rich.table import Table

from autofit.api.arguments import FOLDER, named_as_arguments, studies_folder
from autofit.api.tables import Shown
from autofit.cluster.scheduler import JobState, Kind, cluster_of
from autofit.errors import ConfigError, EnvironmentFault, option, quoted
from autofit.files import end_bytes, read_json
from autofit.folding import Folding
from autofit.probing.cluster_launch import Pool, job_name
from autofit.probing.job import cancel as cancel_probe
from autofit.probing.job import waiting_path
from autofit.probing.launch import AtWork, cluster_job, is_alive, probes_at_work
from autofit.promotion.run_folder import ask_to_end
from autofit.units import format_seconds

_TAIL_BYTES = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job that runs or waits. An empty text is "unknown", or "none"."""

    id: str  # Slurm's, or that of a process of this machine
    kind: Literal["probe", "full run"]
    where: Kind  # of the executor
    study: str
    what: str  # trial-0003-1, full run of trial 3
    state: str  # running, waiting; of Slurm its own words in lower case
    node: str = ""
    reason: str = ""  # why it waits
    since_s: float | None = None  # when it was asked for, or when Slurm started it: seconds since 1970
    folder: Path  # of the full run, or of the probe that it runs; else of its logs
    logs: tuple[Path, ...] = ()  # the one that says most first; not all exist

    def to_dict(self) -> dict[str, object]:
        """Plain values only."""
        told = asdict(self) | {"folder": str(self.folder)}
        del told["logs"]
        return told

    def cancel(self) -> str:
        """Cancel it; a sentence that says what becomes of it.

        A full run that trains saves a checkpoint first; asked a second time, it is ended at once.
        """
        if self.kind == "full run":
            if self.state == "running" and not (self.folder / "stop").exists():
                ask_to_end(self.folder)
                return "saves a checkpoint after the step at work and ends; cancel it again to end it at once"
            self._end()
            return "is cancelled; `autofit promote` goes on from its last checkpoint"
        if self.where != "local":
            self._end()
        else:
            cancel_probe(self.folder)
        return "is cancelled; a search that is at work repeats its probe: end that search with Ctrl-C"

    def _end(self) -> None:
        if self.where != "local":
            cluster_of(self.where).cancel([self.id])
        elif is_alive(self.folder):
            with suppress(psutil.NoSuchProcess):
                psutil.Process(int(self.id)).kill()

    @property
    def log(self) -> Path | None:
        """The file with its output, once it has printed anything."""
        return next((path for path in self.logs if path.is_file() and path.stat().st_size), None)

    def tail(self, lines: int = 40) -> list[str]:
        """The last lines of its log."""
        path = self.log
        if path is None:
            return []
        return end_bytes(path, _TAIL_BYTES).decode("utf-8", errors="replace").splitlines()[-lines:]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Jobs(Shown):
    """The jobs of a folder: full runs first, then probes by study."""

    folder: Path
    jobs: tuple[Job, ...]
    problem: str = ""  # why jobs of Slurm are missing

    def __iter__(self) -> Iterator[Job]:
        return iter(self.jobs)

    def to_dict(self) -> dict[str, object]:
        """The object that `autofit jobs --json` prints: plain values only."""
        return {"jobs": [job.to_dict() for job in self.jobs], "problem": self.problem}

    def find(self, ids: Sequence[str]) -> tuple[Job, ...]:
        """The jobs with these ids; that of an array stands for all its jobs. Raises ConfigError for an unknown one."""
        found: dict[str, Job] = {}
        for one in ids:
            these = [job for job in self.jobs if job.id == one or job.id.startswith(f"{one}_")]
            if not these:
                known = ", ".join(job.id for job in self.jobs[:10]) or "none"
                raise ConfigError(f"no job {quoted(one)} runs or waits in {self.folder}; there are: {known}")
            found |= {job.id: job for job in these}
        return tuple(found.values())

    def parts(self) -> list[Table | str]:
        """A table with a job a row."""
        shown: list[Table | str] = []
        if self.jobs:
            table = Folding(title=f"Jobs of {escape(str(self.folder))}")
            for name in ("id", "what", "study", "state", "where", "since"):
                table.add_column(name, overflow="fold", no_wrap=name == "id")
            for job in self.jobs:
                state = job.state + (f": {job.reason}" if job.reason else "")
                where = job.node or ("this machine" if job.where == "local" else "-")
                table.add_row(*map(escape, (job.id, job.what, job.study, state, where, _since(job.since_s))))
            shown.append(table)
        elif not self.problem:
            shown.append(f"no job of {self.folder} runs or waits")
        return [*shown, self.problem] if self.problem else shown


def jobs(folder: str | Path = FOLDER) -> Jobs:
    """The jobs of `folder` that run or wait: probes and full runs, of this machine and, by one `squeue`, of Slurm.

    Each has `cancel()`, `tail()`, and `find` finds them by id. Raises ConfigError for a folder that has no studies.
    """
    with named_as_arguments():
        home = studies_folder(folder)
        if not any((home / name).exists() for name in ("studies.db", "probes", "promoted")):
            raise ConfigError(
                f"there are no studies in {home}; run `autofit search` first, or point {option('dir')} at its folder"
            )
        runs = sorted(path.parent for path in (home / "promoted").glob("*/job.json"))
        pools = [Pool(path) for path in sorted((home / "probes").glob("*/jobs")) if path.is_dir()]
        noted = (cluster_job(_json(run / "job.json")) for run in runs)
        kinds = {pool.kind for pool in pools} | {job.kind for job in noted if job is not None}
        states: dict[Kind, Mapping[str, JobState]] = {}
        problems = list[str]()
        for kind in sorted(kinds):
            states[kind], problem = _states(kind)
            problems += [problem] if problem else []
        found = [job for run in runs if (job := _full_run(run, states)) is not None]
        taken: set[Path] = set()
        for pool in pools:
            running = {job: name for name, job in pool.running().items()}
            taken |= {pool.folder(name) for name in running.values()}
            found += _of_pool(pool, running, states[pool.kind])
        found += [_local_probe(probe) for probe in probes_at_work(home) if probe.folder not in taken]
    return Jobs(folder=home, jobs=tuple(found), problem="; ".join(problems))


def _states(kind: Kind) -> tuple[Mapping[str, JobState], str]:
    """(the jobs of a scheduler by their ids, why they are missing)."""
    cluster = cluster_of(kind)
    queue, missing = cluster.queue(), f"jobs of {cluster.title} are missing"
    try:
        return queue.states(), "" if queue.calls else f"{missing}: {queue.command} does not answer"
    except EnvironmentFault as error:
        return {}, f"{missing}: {error}"


def _full_run(folder: Path, states: Mapping[Kind, Mapping[str, JobState]]) -> Job | None:
    """The job of the full run in `folder`, if it is alive."""
    note, request = _json(folder / "job.json"), _json(folder / "request.json")
    submitted, at = cluster_job(note), note.get("submitted")
    number = note.get("job_id") if submitted is None else submitted.id
    state, node, reason = "running", "", ""
    if submitted is not None:
        told = states[submitted.kind].get(submitted.id)
        if told is None or not told.is_alive:
            return None
        state, node, reason = told.state.lower(), told.nodes, told.reason if told.waits else ""
    elif not is_alive(folder):
        return None
    elif not _json(folder / "started.json"):
        state = "starting"
    return Job(
        id=str(number), kind="full run", where="local" if submitted is None else submitted.kind,
        study=str(request.get("study", "")), what=f"full run of trial {request.get('trial', '?')}", state=state,
        node=node, reason=reason, since_s=float(at) if isinstance(at, int | float) else None, folder=folder,
        logs=(folder / "run.log", *sorted((folder / "job").glob("*.out"))),
    )  # fmt: skip


def _of_pool(pool: Pool, running: Mapping[str, str], states: Mapping[str, JobState]) -> list[Job]:
    """The jobs of Slurm that run the probes of one study; `running`: {job: the probe that it has}."""
    name, found = job_name(pool.home), []
    for number, told in states.items():
        if told.name != name or not told.is_alive:
            continue
        probe, log = running.get(number), pool.log_of(number)
        folder = pool.home / "logs" if probe is None else pool.folder(probe)
        noted = pool.home / "begun" / number if not told.waits else log.with_name(f"{number}_submitted.pkl")
        job = Job(
            id=number, kind="probe", where=pool.kind, study=pool.home.parent.name, what=probe or "probes",
            state=told.state.lower(), node=told.nodes, reason=told.reason if told.waits else "",
            since_s=_written_s(noted), folder=folder, logs=(folder / "probe.log", log),
        )  # fmt: skip
        found.append(job)
    return found


def _local_probe(probe: AtWork) -> Job:
    folder = probe.folder
    number = _json(folder / "job.json").get("job_id", _json(folder / "started.json").get("pid", "?"))
    reason = ""
    with suppress(OSError):
        reason = waiting_path(folder).read_text(encoding="utf-8")
    return Job(
        id=str(number), kind="probe", where="local", study=probe.study, what=folder.name,
        state="waiting" if reason else "running", reason=reason, since_s=_written_s(folder / "request.json"),
        folder=folder, logs=(folder / "probe.log", *sorted((folder / "job").glob("*.out"))),
    )  # fmt: skip


def _json(path: Path) -> dict[str, object]:
    """The object in `path`; {} if it is missing or another program's file."""
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _written_s(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _since(at_s: float | None) -> str:
    return "-" if at_s is None else f"{format_seconds(max(0.0, time.time() - at_s))} ago"
