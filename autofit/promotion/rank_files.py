"""What each rank of a full run leaves in the run's folder: its log, its place, and why it failed. No torch here."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path

from autofit.files import read_json, write_json
from autofit.plugin.protocol import LOAD

ADDRESS = "MASTER_ADDR"  # environment variable: where the ranks meet
LOOPBACK = "127.0.0.1"
_PLACE_BYTES = 64
_UNLOADABLE = "unloadable.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a rank failed, as it said itself, and when: what another rank's end leads to comes later."""

    rank: int
    reason: str
    time: float


class Place:
    """The step and the phase of a rank, kept in a file for the case that it is killed; some microseconds a change."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = _place_path(folder, rank).open("wb", buffering=0)

    def keep(self, step: int, phase: str) -> None:
        """`step` optimizer steps are finished, and the rank is in `phase`."""
        self._file.seek(0)
        self._file.write(f"{step} {phase}".ljust(_PLACE_BYTES - 1).encode()[: _PLACE_BYTES - 1] + b"\n")


def place_of(folder: Path, rank: int) -> tuple[int, str]:
    """(finished optimizer steps, phase) in which `rank` was last seen."""
    try:
        step, _, phase = _place_path(folder, rank).read_text(encoding="utf-8").strip().partition(" ")
        return int(step), phase
    except (OSError, ValueError):
        return 0, LOAD


def log_of(folder: Path, rank: int) -> Path:
    """The log of a rank: rank 0 writes into that of the run."""
    return folder / (f"rank-{rank}.log" if rank else "run.log")


def tell_failure(folder: Path, rank: int, reason: str) -> None:
    """Keep why `rank` failed."""
    write_json(_failure_path(folder, rank), asdict(Failure(rank=rank, reason=reason, time=time.time())))


def first_failure(folder: Path, ranks: int) -> Failure | None:
    """What the rank that failed first said; None where none said anything."""
    found = (read_json(_failure_path(folder, rank)) for rank in range(ranks))
    failures = [Failure(**content) for content in found if content is not None]  # type: ignore[arg-type]
    return min(failures, key=lambda failure: failure.time, default=None)


def forget_ranks(folder: Path, ranks: int) -> None:
    """Called before the ranks start."""
    for rank in range(ranks):
        _failure_path(folder, rank).unlink(missing_ok=True)
        _place_path(folder, rank).unlink(missing_ok=True)


def tell_unloadable(folder: Path, checkpoint: Path, reason: str) -> None:
    """Keep that no rank is to start from `checkpoint` again; the ranks cannot try another one in this process."""
    write_json(folder / _UNLOADABLE, {"checkpoints": {**unloadable(folder), str(checkpoint): reason}})


def unloadable(folder: Path) -> dict[str, str]:
    """{checkpoint that could not be loaded: why, as a predicate}."""
    content = read_json(folder / _UNLOADABLE) or {}
    found = content.get("checkpoints")
    return {str(name): str(reason) for name, reason in found.items()} if isinstance(found, dict) else {}


def forget_unloadable(folder: Path) -> None:
    """A checkpoint was loaded, or all is to begin anew."""
    (folder / _UNLOADABLE).unlink(missing_ok=True)


def _failure_path(folder: Path, rank: int) -> Path:
    return folder / f"failed-{rank}.json"


def _place_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.at"
