"""The probes that run at this moment, found by the files in their folders, whoever started them."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from autofit.errors import AutofitError
from autofit.files import read_json
from autofit.hardware.health import ProcessUse, tree_use
from autofit.probing.launch import is_listed
from autofit.probing.result import ProbeRequest
from autofit.probing.supervise import lives

_NAMES = {"trial": "trial", "confirm": "confirmation of trial", "repeat": "second probe of trial"}


@dataclass(frozen=True, slots=True, kw_only=True)
class AtWork:
    """One running probe."""

    study: str
    trial: int
    name: str  # in words: trial 3, confirmation of trial 3
    folder: Path
    request: ProbeRequest
    phase: str | None  # None while it waits for its turn on the device, or starts

    @property
    def began_s(self) -> float:
        """When it was asked for, in seconds since 1970."""
        return self.request.request_path.stat().st_mtime

    def use(self) -> ProcessUse | None:
        """What its processes use: those of its job, and the worker, which a fork server may have started."""
        job = pid_of_job(self.folder)
        found = None if job is None else tree_use(job)
        for path in [self.request.pid_path, *sorted(self.folder.glob("rank-*.pid"))]:
            worker = _worker(path)
            used = None if worker is None or (found is not None and worker in found.pids) else tree_use(worker)
            found = found if used is None else used if found is None else found | used
        return found


def probes_at_work(folder: Path) -> list[AtWork]:
    """The running probes of all studies in `folder`, by study and name."""
    found = (_at_work(study, probe) for study in _folders(folder / "probes") for probe in _folders(study))
    return [probe for probe in found if probe is not None]


def _folders(folder: Path) -> Iterator[Path]:
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    except OSError:  # there is none, or it was deleted a moment ago
        return
    yield from (folder / name for name in names)


def _at_work(study: Path, folder: Path) -> AtWork | None:
    kind, _, rest = folder.name.partition("-")
    number = rest.partition("-")[0]
    if kind not in _NAMES or not number.isdigit() or (folder / "answer.json").exists():
        return None
    try:
        if not is_listed(folder):
            return None
        request = ProbeRequest.read(folder / "request.json")
        first = request.phase_path if request.phase_path.exists() else replace(request, rank=0).phase_path
        phase = first.read_text(encoding="utf-8").strip() if first.exists() else None
    except (OSError, ValueError, KeyError, TypeError, AssertionError, AutofitError):  # not ours, or just deleted
        return None
    return AtWork(
        study=study.name, trial=int(number), name=f"{_NAMES[kind]} {int(number)}", folder=folder, request=request,
        phase=phase or None,
    )  # fmt: skip


def pid_of_job(folder: Path) -> int | None:
    """The pid of the living job in `folder`, a probe's or a full run's; None before it has started."""
    try:
        note = read_json(folder / "started.json")
        return int(str(note["pid"])) if note is not None and lives(note) else None
    except (ValueError, KeyError):
        return None


def _worker(path: Path) -> int | None:
    """The pid in `path`, unless another process has it by now."""
    try:
        pid, written = int(path.read_text(encoding="ascii")), path.stat().st_mtime
        return pid if psutil.Process(pid).create_time() <= written + 1 else None
    except (OSError, ValueError, psutil.NoSuchProcess):
        return None
