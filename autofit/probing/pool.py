"""The folder that a search shares with its Slurm jobs: probes that wait, probes that run, and what the jobs say.

A job takes a probe by a rename, so no two jobs run the same one. Two listings tell the states of all probes.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from autofit.cluster.executor import SLURM, Kind
from autofit.cluster.scheduler import own_node
from autofit.files import cannot_write, read_json, write_json

_AT = "@"
_KIND = "executor.json"


@dataclass(frozen=True, slots=True)
class Pool:
    """The shared folder `home`, beside the folders of the probes. A probe is named by its folder, a job by its id."""

    home: Path

    @property
    def kind(self) -> Kind:
        """The executor whose jobs take the probes."""
        return str((read_json(self.home / _KIND) or {}).get("kind", SLURM))

    def make(self, kind: Kind = SLURM) -> None:
        """Make the folders, for jobs of the executor `kind`. What was said of nodes is forgotten: they may be well."""
        try:
            for folder in ("queue", "taken", "begun", "closed", "faults", "logs"):
                (self.home / folder).mkdir(parents=True, exist_ok=True)
            write_json(self.home / _KIND, {"kind": kind})
        except OSError as error:
            raise cannot_write(self.home, error) from error
        for node in _names(self.home / "faults"):
            (self.home / "faults" / node).unlink(missing_ok=True)

    # -- probes -----------------------------------------------------------------------------------------------------

    def folder(self, name: str) -> Path:
        """The folder of a probe."""
        return self.home.parent / name

    def put(self, name: str) -> None:
        """Let a job take the probe."""
        try:
            (self.home / "queue" / name).touch()
        except OSError as error:
            raise cannot_write(self.home, error) from error

    def waiting(self) -> set[str]:
        """The probes that no job has taken."""
        return set(_names(self.home / "queue"))

    def running(self) -> dict[str, str]:
        """{probe: the job that took it and has not ended it}."""
        taken = (entry.split(_AT, 1) for entry in _names(self.home / "taken"))
        return {name: job for job, name in taken}

    def take(self, job: str) -> str | None:
        """The first probe that waits, now the job's; None where none waits."""
        for name in sorted(self.waiting()):
            mine = self._taken(job, name)
            with suppress(FileNotFoundError):
                os.rename(self.home / "queue" / name, mine)
                return name
            if mine.exists():  # a network file system repeated a rename that had succeeded
                return name
        return None

    def withdraw(self, name: str) -> None:
        """No job shall take the probe."""
        (self.home / "queue" / name).unlink(missing_ok=True)

    def end(self, job: str, name: str) -> bool:
        """The job has ended the probe, or must not go on with it. False if it was not the job's any more."""
        try:
            self._taken(job, name).unlink()
        except FileNotFoundError:
            return False
        return True

    def _taken(self, job: str, name: str) -> Path:
        return self.home / "taken" / f"{job}{_AT}{name}"

    # -- jobs -------------------------------------------------------------------------------------------------------

    def begin(self, job: str) -> None:
        """The job runs, on this node."""
        (self.home / "closed" / job).unlink(missing_ok=True)  # Slurm has started it again
        write_json(self.home / "begun" / job, {"node": own_node(), "pid": os.getpid()})

    def close(self, job: str) -> None:
        """The job takes no further probe."""
        (self.home / "closed" / job).touch()

    def closed(self) -> set[str]:
        """The jobs that take no further probe."""
        return set(_names(self.home / "closed"))

    def node_of(self, job: str) -> str:
        """The node on which the job began; empty where it has not."""
        return str((read_json(self.home / "begun" / job) or {}).get("node", ""))

    def log_of(self, job: str) -> Path:
        """What the job printed."""
        return self.home / "logs" / f"{job}_0_log.out"

    def forget(self, job: str) -> None:
        """Delete what is kept of a job that has ended, but what it printed."""
        for path in (f"begun/{job}", f"closed/{job}", f"logs/{job}_submitted.pkl", f"logs/{job}_0_result.pkl"):
            (self.home / path).unlink(missing_ok=True)

    # -- nodes ------------------------------------------------------------------------------------------------------

    def set_aside(self, reason: str, *, node: str = "") -> None:
        """The node, this one without a name, must not take probes, for this reason."""
        write_json(self.home / "faults" / (node or own_node()), {"reason": reason})

    def faulty(self) -> set[str]:
        """The nodes that must not take probes."""
        return set(_names(self.home / "faults"))

    def fault_of(self, node: str) -> str:
        """Why the node must not take probes."""
        return str((read_json(self.home / "faults" / node) or {}).get("reason", ""))


def _names(folder: Path) -> list[str]:
    """The names in `folder`, but those of files that are being written."""
    try:
        return [entry.name for entry in os.scandir(folder) if not entry.name.startswith(".")]
    except FileNotFoundError:
        return []
